/** FnCall over HTTP, the same at the runtime service, at an edge and at `dsec serve fncall`. docs/fncall.md has it for users. */
import { type Static, Type } from '@sinclair/typebox';
import type { FastifyInstance, FastifyReply } from 'fastify';
import { DsecError } from '#base';
import type { Metrics } from '#imagesvc';
import { LANGUAGES, type PoolView } from '#runtime';
import { fail } from '../errors.ts';
import { stopWith } from '../runtime-service/route.ts';
import { DEFAULT_POOL, type FnCallHost } from './fncall-host.ts';
import { FusionBody, fusionAnswer, fusionProblem, fusionTask } from './sandbox-fusion.ts';
import { PoolBody, poolView, RunBody, resultView } from './task-schemas.ts';

export const TASK_BODY_BYTES = 64 << 20;

const PoolQuery = Type.Object({ pool: Type.Optional(Type.String({ maxLength: 100 })) });

export interface FnCallRoutesOptions {
  /** Callers are not known: they may run tasks, and neither make pools nor name stores. */
  readonly open?: boolean;
}

export function fncallRoutes(app: FastifyInstance, host: FnCallHost, { open = false }: FnCallRoutesOptions = {}): void {
  const large = { bodyLimit: TASK_BODY_BYTES };
  app.post('/v1/fncall/run', { ...large, schema: { body: RunBody } }, async ({ body }, reply) => {
    const asked = body as Static<typeof RunBody>;
    if (open && asked.store !== undefined) {
      throw fail('SANDBOX_BAD_REQUEST', {
        problem: 'store: without a token only images of the service’s own can be used',
      });
    }
    return resultView(await telling(reply, host.run(asked, stopWith(reply))));
  });
  app.get('/v1/fncall/languages', async () => LANGUAGES);
  app.get('/v1/fncall/pools', async () => host.node.pools().map(poolView));
  if (!open) poolRoutes(app, host);
  app.post(
    '/run_code',
    { ...large, schema: { body: FusionBody, querystring: PoolQuery } },
    async ({ body, query }, reply) => {
      const { pool = DEFAULT_POOL } = query as Static<typeof PoolQuery>;
      try {
        const task = fusionTask(body as Static<typeof FusionBody>);
        const result = host.runIn(host.node.poolNamed(pool), task, stopWith(reply));
        return fusionAnswer(await telling(reply, result));
      } catch (error) {
        const answer = fusionProblem(error);
        if (answer === undefined) throw error;
        return answer;
      }
    },
  );
}

function poolRoutes(app: FastifyInstance, host: FnCallHost): void {
  app.put('/v1/fncall/pools/:name', { schema: { body: PoolBody } }, async ({ body, params }) => {
    return poolView(await host.define((params as { name: string }).name, body as Static<typeof PoolBody>));
  });
  app.delete('/v1/fncall/pools/:name', async ({ params }) => {
    const { name } = params as { name: string };
    await host.remove(name);
    return { removed: name };
  });
}

/** How long to stay away is in the header too. */
async function telling<T>(reply: FastifyReply, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof DsecError && typeof error.params.retryAfter === 'number') {
      reply.header('retry-after', String(Math.max(1, Math.ceil(error.params.retryAfter))));
    }
    throw error;
  }
}

export function fncallMetrics(metrics: Metrics, host: FnCallHost): void {
  const each = (value: (pool: PoolView) => readonly (readonly [string, number])[]) => () =>
    host.node
      .pools()
      .flatMap((pool) => value(pool).map(([state, count]) => [{ pool: pool.name, state }, count] as const));
  metrics.gauge(
    'dsec_fncall_containers',
    'Containers for tasks, by pool and state.',
    each(({ ready, busy, starting }) => [
      ['ready', ready],
      ['busy', busy],
      ['starting', starting],
    ]),
  );
  metrics.gauge('dsec_fncall_waiting', 'Calls that wait for a container.', () =>
    host.node.pools().map(({ name, waiting }) => [{ pool: name }, waiting] as const),
  );
  metrics.gauge(
    'dsec_fncall_tasks',
    'Tasks since the pool was made: taken, refused, and those after which the container was replaced.',
    each(({ tasks, refused, replaced }) => [
      ['taken', tasks],
      ['refused', refused],
      ['replaced', replaced],
    ]),
  );
}
