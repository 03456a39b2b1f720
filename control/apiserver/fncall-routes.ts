/**
 * FnCall of a cluster: a task goes to one of the nodes that run tasks, the less loaded of two at random; where that one takes nothing now, another one is
 * asked. A task leaves nothing behind, so nothing is reserved for it; what a node bears its pools say (429, Retry-After). Pools are of the
 * whole cluster: whoever may administer nodes makes them, on each.
 */
import type { Static } from '@sinclair/typebox';
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { DsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import { TASK_BODY_BYTES } from '../fncall/fncall-routes.ts';
import { FusionBody } from '../fncall/sandbox-fusion.ts';
import { PoolBody, RunBody } from '../fncall/task-schemas.ts';
import { ROOT } from '../iam/project-path.ts';
import { whose } from './access.ts';
import type { ApiParts } from './api-parts.ts';
import { allowHostShared, askerOf } from './host-shared.ts';
import { isOverflow } from './overflow.ts';

/** Longer than any task: its own limits end it. */
const TASK_MS = 2 * 3_600_000;
const TRIES = 3;

export function fncallRoutes(app: FastifyInstance, parts: ApiParts): void {
  const { access, edges } = parts;
  const large = { bodyLimit: TASK_BODY_BYTES };

  app.post('/v1/fncall/run', { ...large, schema: { body: RunBody } }, async (request, reply) => {
    const { project = request.identity.project, ...body } = request.body as Static<typeof RunBody>;
    await access.allow(request, 'sandbox.create', project);
    refuseStore(body);
    return anywhere(request, reply, '/v1/fncall/run', body);
  });
  app.post('/run_code', { ...large, schema: { body: FusionBody } }, async (request, reply) => {
    await access.allow(request, 'sandbox.create', request.identity.project);
    const { pool } = request.query as { pool?: string };
    const query = pool === undefined ? '' : `?pool=${encodeURIComponent(pool)}`;
    return anywhere(request, reply, `/run_code${query}`, request.body as object);
  });
  app.get('/v1/fncall/languages', async (request, reply) => anywhere(request, reply, '/v1/fncall/languages'));
  app.get('/v1/fncall/pools', async (request) => {
    await access.allow(request, 'node.read', ROOT);
    const found = await onEach((edge) => edges.ask<object[]>(edge, { method: 'GET', path: '/v1/fncall/pools' }));
    return found.flatMap(({ edge, answer }) => answer.map((pool) => ({ edge, ...pool })));
  });
  app.put('/v1/fncall/pools/:name', { schema: { body: PoolBody } }, async (request) => {
    const { name } = request.params as { name: string };
    await access.allow(request, 'node.drain', ROOT, name);
    const body = request.body as Static<typeof PoolBody>;
    // Whoever runs nodes may not share them with what runs there.
    await allowHostShared(access, askerOf(request), body, ROOT);
    refuseStore(body);
    const path = `/v1/fncall/pools/${encodeURIComponent(name)}`;
    const made = await audited(request, name, () =>
      onEach((edge) => edges.ask<object>(edge, { method: 'PUT', path, body })),
    );
    return made.map(({ edge, answer }) => ({ edge, ...answer }));
  });
  app.delete('/v1/fncall/pools/:name', async (request) => {
    const { name } = request.params as { name: string };
    await access.allow(request, 'node.drain', ROOT, name);
    const path = `/v1/fncall/pools/${encodeURIComponent(name)}`;
    await audited(request, name, () => onEach((edge) => edges.ask(edge, { method: 'DELETE', path })));
    return { removed: name };
  });

  function able(excluded: ReadonlySet<string>) {
    return edges.view.nodes.filter(
      ({ edge, report }) =>
        report.state === 'healthy' &&
        report.backends.has('fncall') &&
        !excluded.has(edge) &&
        !isOverflow(edges.view, edge, parts.overflow),
    );
  }

  /** @throws FNCALL_NO_NODE, what the last node said */
  async function anywhere(request: FastifyRequest, reply: FastifyReply, path: string, body?: object): Promise<unknown> {
    const stop = new AbortController();
    reply.raw.once('close', () => stop.abort(new Error('the caller has gone')));
    const asked = new Set<string>();
    for (let last: unknown; ; ) {
      const nodes = able(asked);
      const pick = () => nodes[Math.floor(Math.random() * nodes.length)];
      const [one, other] = [pick(), pick()];
      if (one === undefined || other === undefined || asked.size === TRIES) throw last ?? fail('FNCALL_NO_NODE');
      const { edge } = one.report.load.cpu <= other.report.load.cpu ? one : other;
      asked.add(edge);
      try {
        const method = body === undefined ? 'GET' : 'POST';
        return await edges.ask(edge, {
          method,
          path,
          body,
          signal: stop.signal,
          timeoutMs: TASK_MS,
          headers: { 'x-request-id': request.id },
        });
      } catch (error) {
        // It did nothing of it.
        if (!(error instanceof DsecError) || !ELSEWHERE.has(error.code)) throw error;
        last = error;
      }
    }
  }

  /** @throws FNCALL_NO_NODE, what all nodes say, FNCALL_NODES where some have done it */
  async function onEach<T>(ask: (edge: string) => Promise<T>): Promise<{ edge: string; answer: T }[]> {
    const nodes = able(new Set());
    if (nodes.length === 0) throw fail('FNCALL_NO_NODE');
    const answers: { edge: string; answer: T }[] = [];
    const failures: { edge: string; error: unknown }[] = [];
    const one = async (edge: string) => {
      try {
        answers.push({ edge, answer: await ask(edge) });
      } catch (error) {
        failures.push({ edge, error });
      }
    };
    await Promise.all(nodes.map(({ edge }) => one(edge)));
    const [first] = failures;
    if (first === undefined) return answers.sort((a, b) => (a.edge < b.edge ? -1 : 1));
    const codes = new Set(failures.map(({ error }) => (error as { code?: unknown }).code));
    if (answers.length === 0 && codes.size === 1) throw first.error;
    const failed = failures.map(({ edge, error }) => `${edge}: ${messageOf(error)}`).join('; ');
    const done = answers.map(({ edge }) => edge).join(', ') || 'none';
    throw fail('FNCALL_NODES', { failed, done }, first.error);
  }

  async function audited<T>(request: FastifyRequest, pool: string, work: () => Promise<T>): Promise<T> {
    const { id: requestId, method, identity } = request;
    const detail = { what: `${method} fncall pool` };
    const entry = { ...whose(identity), action: 'node.drain', project: ROOT, target: pool, requestId, detail };
    try {
      const done = await work();
      await access.audit({ ...entry, outcome: 'done' });
      return done;
    } catch (error) {
      await access.audit({ ...entry, outcome: 'failed' }).catch((problem: unknown) => parts.note(String(problem)));
      throw error;
    }
  }
}

/** @throws SANDBOX_BAD_REQUEST */
function refuseStore({ store }: { readonly store?: string }): void {
  if (store !== undefined) throw fail('SANDBOX_BAD_REQUEST', { problem: 'store: a cluster has its own' });
}

const ELSEWHERE: ReadonlySet<string> = new Set([
  'RUNTIME_FNCALL_BUSY',
  'RUNTIME_FNCALL_CONTAINER',
  'RUNTIME_FNCALL_NO_POOL',
  'RUNTIME_FNCALL_UNAVAILABLE',
  'SERVICE_DRAINING',
  'SERVICE_NOT_READY',
]);
