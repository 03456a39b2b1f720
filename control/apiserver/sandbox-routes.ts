/** Sandboxes, as clients ask for them: making, many at once, listing, and all that their edge answers. */
import { randomUUID } from 'node:crypto';
import type { ClientRequest, IncomingHttpHeaders, IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import type { HttpApp } from '#imagesvc';
import { fail } from '../errors.ts';
import type { Action } from '../iam/actions.ts';
import type { Identity } from '../iam/iam.ts';
import { PackBody } from '../pack-sandbox.ts';
import { LimitsBody } from '../runtime-service/limit-schemas.ts';
import { whose } from './access.ts';
import type { ApiParts } from './api-parts.ts';
import { type BatchAsked, batchLines, batchOf } from './batch.ts';
import type { Caller } from './create-sandbox.ts';
import { gone } from './edges.ts';
import { ForkRequest, forkSandbox } from './fork.ts';
import { packTarget } from './image-target.ts';
import { LimitChanges } from './limits.ts';
import { isOverflow } from './overflow.ts';
import { actionOf } from './pass-action.ts';
import { passOn, passUpgrade, refuseUpgrade } from './pass-through.ts';
import { BatchRequest, CreateRequest, SandboxQuery } from './request-schemas.ts';
import { parseSandboxId, type SandboxAddress } from './sandbox-id.ts';
import { listSandboxes } from './sandbox-list.ts';
import { type EdgeSandbox, viewOf } from './sandbox-view.ts';
import { takeSocketToken } from './socket-token.ts';

const ONE = '/v1/sandboxes/:id';
const BATCH_BYTES = 64 << 20;
const TARGET = /^\/v1\/sandboxes\/([^/?]+)(?:\/([^?]*))?(\?.*)?$/s;

interface Target {
  readonly id: string;
  readonly address: SandboxAddress;
  /** Behind the id: `commands/3/output`. */
  readonly rest: string;
  readonly query: string;
  readonly project: string;
  readonly reservation: string | undefined;
  readonly uid: string | undefined;
}

export async function sandboxRoutes(app: HttpApp, parts: ApiParts): Promise<void> {
  const { access, edges, owners, maker, events, connections } = parts;
  const limitChanges = new LimitChanges(parts);

  app.post('/v1/sandboxes', { schema: { body: CreateRequest }, config: { hot: true } }, async (request, reply) => {
    const view = await maker.create(callerOf(request, reply), request.body);
    return reply.code(201).send(view);
  });
  app.post(
    '/v1/sandboxes/batch',
    { schema: { body: BatchRequest }, bodyLimit: BATCH_BYTES },
    async (request, reply) => {
      const batch = batchOf(request.body as BatchAsked);
      const caller = callerOf(request, reply);
      reply.header('content-type', 'application/x-ndjson');
      return reply.send(batchLines(maker, caller, batch));
    },
  );
  app.get('/v1/sandboxes', { schema: { querystring: SandboxQuery } }, async (request, reply) => {
    const { gone: signal } = callerOf(request, reply);
    return listSandboxes(edges, access, request.identity, request.query, signal);
  });

  app.get(ONE, {}, async (request) => {
    const { address, id } = await targetOf(request, request.identity, request.id);
    return viewOf(address.edge, await askEdge<EdgeSandbox>(request, address, id, 'GET', ''));
  });
  app.post(`${ONE}/resume`, {}, async (request) => {
    const { address, id, project } = await targetOf(request, request.identity, request.id);
    const told = await askEdge<EdgeSandbox>(request, address, id, 'POST', '/resume');
    events.done('sandbox.changed', id, project);
    return viewOf(address.edge, told);
  });
  app.post(`${ONE}/fork`, { schema: { body: ForkRequest } }, async (request, reply) => {
    const target = await targetOf(request, request.identity, request.id);
    await access.allow(request, 'sandbox.create', target.project, target.id);
    const { snapshot: named } = request.body;
    const snapshot = named === undefined ? undefined : await packTarget(parts.store, target.project, named);
    const forked = await forkSandbox(parts, request, target, { ...request.body, snapshot });
    return reply.code(201).send(forked);
  });
  app.post(`${ONE}/pack-diff`, { schema: { body: PackBody } }, async (request, reply) => {
    const target = await targetOf(request, request.identity, request.id);
    const { store } = request.body;
    if (store !== undefined && store !== parts.store.url) throw fail('API_STORE', { store });
    const name = await packTarget(parts.store, target.project, request.body.name);
    const { gone: signal } = callerOf(request, reply);
    // Whatever store it was started from, the image is the cluster's.
    const isElsewhere = isOverflow(edges.view, target.address.edge, parts.overflow);
    const body = { ...request.body, name, store: isElsewhere ? parts.store.url : undefined };
    const packed = await askEdge<object>(request, target.address, target.id, 'POST', '/pack-diff', body, signal);
    await audited(request, target, 'sandbox.manage', 'done');
    return packed;
  });

  app.put(`${ONE}/limits`, { schema: { body: LimitsBody } }, async (request) => {
    const target = await targetOf(request, request.identity, request.id);
    const limits = await limitChanges.change(request, target, request.body);
    events.done('sandbox.changed', target.id, target.project);
    await audited(request, target, 'sandbox.manage', 'done');
    return limits;
  });

  await app.register(async (scope: FastifyInstance) => {
    // What is sent is the edge's to read.
    scope.removeAllContentTypeParsers();
    scope.addContentTypeParser('*', (_request, payload, done) => done(null, payload));
    const options = { schema: { hide: true } as object, config: { hot: true } };
    const pass = async (request: FastifyRequest, reply: FastifyReply) => {
      const target = await targetOf(request, request.identity, request.id);
      const { id, address, rest } = target;
      return passOn(request, reply, openTo(target, request.method), {
        id,
        edge: address.edge,
        isPort: /^ports\/\d+\//.test(rest),
        answered: (status) => answered(request, target, status),
      });
    };
    scope.delete(ONE, options, pass);
    scope.all(`${ONE}/*`, options, pass);
  });

  app.server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
    const given = request.headers['x-request-id'];
    const requestId = typeof given === 'string' && /^[\w.:/+=-]{1,128}$/.test(given) ? given : randomUUID();
    parts.upgraded.add(socket);
    socket.once('close', () => parts.upgraded.delete(socket));
    socket.on('error', () => {});
    const upgrading = async () => {
      takeSocketToken(request);
      const identity = await access.authenticate(request);
      const target = await targetOf(request, identity, requestId);
      const { id, address } = target;
      const passed = { id, edge: address.edge, isPort: true };
      await passUpgrade(request, socket, head, requestId, openTo(target, request.method ?? 'GET'), passed);
    };
    upgrading().catch((error: unknown) => refuseUpgrade(socket, error, requestId));
  });

  /** Which sandbox, and whether the caller may. @throws SANDBOX_ID, SANDBOX_GONE, EDGE_*, IAM_DENIED */
  async function targetOf(
    request: Pick<IncomingMessage, 'url' | 'method'>,
    identity: Identity,
    requestId: string,
  ): Promise<Target> {
    const [, given = '', rest = '', query = ''] = TARGET.exec(request.url ?? '') ?? [];
    const id = decoded(given);
    const address = parseSandboxId(id);
    const isEnding = rest === 'stop' || (rest === '' && request.method === 'DELETE');
    const { project, reservation, uid } = await (isEnding ? owners.ofEnded(address) : owners.of(address));
    await access.allowed(identity, actionOf(request.method ?? 'GET', rest), project, requestId, id);
    return { id, address, rest, query, project, reservation, uid };
  }

  function openTo({ address, rest, query, uid }: Target, method: string) {
    const url = edges.urlOf(address.edge);
    const name = encodeURIComponent(address.name);
    const path = `/v1/sandboxes/${name}${rest === '' ? '' : `/${rest}`}${query}`;
    return (headers: IncomingHttpHeaders): ClientRequest =>
      connections.open(url, {
        method,
        path,
        headers: uid === undefined ? headers : { ...headers, 'x-dsec-sandbox': uid },
      });
  }

  async function askEdge<T>(
    request: FastifyRequest,
    { name, edge }: SandboxAddress,
    id: string,
    method: 'GET' | 'POST',
    path: string,
    body?: object,
    signal?: AbortSignal,
  ): Promise<T> {
    const operation = request.headers['x-dsec-operation'];
    const headers = {
      'x-request-id': request.id,
      ...(typeof operation === 'string' ? { 'x-dsec-operation': operation } : {}),
    };
    try {
      const url = `/v1/sandboxes/${encodeURIComponent(name)}${path}`;
      return await edges.ask<T>(edge, { method, path: url, body, headers, signal, timeoutMs: 0 });
    } catch (error) {
      const problem = gone(id, error);
      if (problem !== error) owners.forget(id);
      throw problem;
    }
  }

  /** What the answer of the edge means to others. */
  async function answered(request: FastifyRequest, target: Target, status: number): Promise<void> {
    const { id, rest, project, reservation } = target;
    const { method } = request;
    if (status === 404 || status === 410) owners.forget(id);
    const isRemoval = method === 'DELETE' && rest === '';
    const action = actionOf(method, rest);
    if (action !== 'sandbox.manage') return;
    if (status < 300) {
      if (isRemoval) owners.forget(id);
      const type = isRemoval ? 'sandbox.gone' : rest === 'stop' ? 'sandbox.ended' : 'sandbox.changed';
      events.done(type, id, project);
      // Its roster would end it too, a little later.
      if ((isRemoval || rest === 'stop') && reservation !== undefined) {
        await parts.iam.release(reservation).catch((error: unknown) => parts.note(String(error)));
      }
    }
    await audited(request, target, action, status < 300 ? 'done' : 'failed');
  }

  async function audited(request: FastifyRequest, target: Target, action: Action, outcome: 'done' | 'failed') {
    const { id, project, rest } = target;
    const detail = { what: `${request.method} ${rest.slice(0, 100)}`.trim() };
    const entry = { ...whose(request.identity), action, project, target: id, outcome, requestId: request.id, detail };
    await access.audit(entry).catch((error: unknown) => parts.note(String(error)));
  }
}

export function callerOf(request: FastifyRequest, reply: FastifyReply): Caller {
  return new RequestCaller(request, reply);
}

class RequestCaller implements Caller {
  readonly identity: Identity;
  readonly requestId: string;
  isGone = false;
  private leaving: AbortController | undefined;

  constructor({ identity, id }: FastifyRequest, { raw }: FastifyReply) {
    this.identity = identity;
    this.requestId = id;
    // Of the answer: its connection may serve many more.
    raw.once('close', () => {
      if (raw.writableFinished) return;
      this.isGone = true;
      this.leaving?.abort(fail('API_CALLER_GONE'));
    });
  }

  get gone(): AbortSignal {
    if (this.leaving === undefined) {
      this.leaving = new AbortController();
      if (this.isGone) this.leaving.abort(fail('API_CALLER_GONE'));
    }
    return this.leaving.signal;
  }
}

/** @throws SANDBOX_ID */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    throw fail('SANDBOX_ID', { id: text.slice(0, 120) });
  }
}
