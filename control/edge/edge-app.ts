/**
 * An edge over HTTP, for the other services of its cluster: the runtime's routes for each sandbox, creation with owner, amounts and admission, what the edge
 * has and takes, and the commands log. docs/cluster.md has the routes.
 */
import { type Static, Type } from '@sinclair/typebox';
import type { FastifyInstance } from 'fastify';
import type { NodeSandbox } from '#runtime';
import { fail } from '../errors.ts';
import type { FnCallHost } from '../fncall/fncall-host.ts';
import { fncallMetrics, fncallRoutes } from '../fncall/fncall-routes.ts';
import {
  createFields,
  createOptions,
  sandboxRoutes,
  sandboxView,
  takeOctets,
} from '../runtime-service/sandbox-routes.ts';
import type { Service } from '../service-base/service-app.ts';
import { createStream } from './create-stream.ts';
import type { EdgeNode } from './edge-node.ts';
import { edgeRoutes } from './edge-routes.ts';
import { refuseOther, refuseOthers, SANDBOX_HEADER } from './meant-sandbox.ts';
import type { OperationLog } from './operation-log.ts';
import { OPERATION_HEADER, recordOperations } from './operations.ts';
import { AMOUNTS_HEADER, amountsIn, amountsOf, LOCAL_OWNER, ownerFields, promisedOf } from './sandbox-owner.ts';

const CreateBody = Type.Object(
  { ...createFields, store: Type.Optional(createFields.store), ...ownerFields },
  { additionalProperties: false },
);

export interface EdgeAppOptions {
  readonly edge: EdgeNode;
  readonly operations: OperationLog;
  /** Where there are tasks too. */
  readonly fncall?: FnCallHost;
  /** Of images whose store is not named. */
  readonly storeUrl: string;
}

/** Before the service listens. */
export async function edgeApp(service: Service, { edge, operations, fncall, storeUrl }: EdgeAppOptions): Promise<void> {
  const { app, metrics } = service;
  const plain = app as unknown as FastifyInstance;
  takeOctets(plain);
  const idOf = (name: string) => idNow(edge, name);
  refuseOthers(plain, idOf);
  recordOperations(plain, operations, idOf);
  edgeRoutes(app, edge);
  if (fncall !== undefined) {
    fncallRoutes(plain, fncall);
    fncallMetrics(metrics, fncall);
  }
  const view = (sandbox: NodeSandbox) => {
    const held = edge.heldBy(sandbox.name);
    const { owner, amounts, alone } = held ?? promisedOf(sandbox.facts);
    return { ...sandboxView(sandbox), edge: edge.edge, owner, amounts, alone, admission: held?.admission };
  };
  app.get('/v1/sandboxes', async () => edge.list().map(view));
  const create = async (body: Static<typeof CreateBody>) => {
    const { owner = LOCAL_OWNER, amounts, backend = 'container', alone = false, gpuKind, ...asked } = body;
    if ((amounts?.gpus ?? 0) > 0 && (backend !== 'container' || (asked.runtime ?? 'dsec') !== 'dsec')) {
      throw fail('SANDBOX_BAD_REQUEST', { problem: 'gpus: containers have them, by our own launcher' });
    }
    const promised = { owner, amounts: amounts ?? amountsOf(asked, backend), backend, alone, gpuKind };
    const prepare = () => createOptions({ ...asked, backend, store: asked.store ?? storeUrl });
    const { sandbox, held } = await edge.createHeld(promised, asked.requestId, prepare);
    // It may have ended by now, and be no longer held.
    return { ...view(sandbox), owner: held.owner, amounts: held.amounts, admission: held.admission };
  };
  app.post('/v1/sandboxes', { config: { hot: true }, schema: { body: CreateBody } }, async ({ body }, reply) => {
    reply.code(201);
    return create(body as Static<typeof CreateBody>);
  });
  createStream(service, CreateBody, create);
  await sandboxRoutes(plain, edge, {
    machinePaths: false,
    view,
    update: (sandbox, changes, headers) => edge.update(sandbox, changes, amountsIn(headers[AMOUNTS_HEADER])),
    authorize(request) {
      service.authorize(request);
      const name = /^\/v1\/sandboxes\/([^/?]+)/.exec(request.url ?? '')?.[1] ?? '';
      refuseOther(idOf, name, request.headers[SANDBOX_HEADER]);
    },
    hidden: new Set(['authorization', SANDBOX_HEADER, OPERATION_HEADER]),
  });

  metrics.gauge('dsec_edge_sandboxes', 'Sandboxes by state.', () =>
    Object.entries(edge.counts()).map(([state, count]) => [{ state }, count] as const),
  );
  metrics.gauge('dsec_edge_reserved', 'Promised to sandboxes, by resource.', () =>
    Object.entries(edge.report().reserved).map(labelled),
  );
  metrics.gauge('dsec_edge_capacity', 'What it is willing to promise, by resource.', () =>
    Object.entries(edge.report().capacity).map(labelled),
  );
  metrics.gauge('dsec_edge_load', 'Of the machine, 0 to 1.', () => Object.entries(edge.report().load).map(labelled));
  metrics.gauge('dsec_edge_draining', '1: it takes nothing.', () => (edge.report().state === 'draining' ? 1 : 0));
}

function labelled([resource, value]: [string, number]) {
  return [{ resource }, value] as const;
}

function idNow(edge: EdgeNode, name: string): string | undefined {
  try {
    return edge.get(name).facts.id;
  } catch {
    return undefined;
  }
}
