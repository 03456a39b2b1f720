/**
 * An edge over HTTP, for the other services of its cluster: the runtime's routes for each sandbox, creation with owner, amounts and admission, what the edge
 * has and takes, and the commands log. docs/cluster.md has the routes.
 */
import { type Static, Type } from '@sinclair/typebox';
import type { FastifyInstance } from 'fastify';
import type { ResidentSandbox } from '#runtime';
import {
  createFields,
  createOptions,
  sandboxRoutes,
  sandboxView,
  takeOctets,
} from '../runtime-service/sandbox-routes.ts';
import type { Service } from '../service-base/service-app.ts';
import type { EdgeNode } from './edge-node.ts';
import { edgeRoutes } from './edge-routes.ts';
import { refuseOther, refuseOthers, SANDBOX_HEADER } from './meant-sandbox.ts';
import type { OperationLog } from './operation-log.ts';
import { OPERATION_HEADER, recordOperations } from './operations.ts';
import { amountsOf, LOCAL_OWNER, ownerFields, promisedOf } from './sandbox-owner.ts';

const CreateBody = Type.Object(
  { ...createFields, store: Type.Optional(createFields.store), ...ownerFields },
  { additionalProperties: false },
);

export interface EdgeAppOptions {
  readonly edge: EdgeNode;
  readonly operations: OperationLog;
  /** Of images whose store is not named. */
  readonly storeUrl: string;
}

/** Before the service listens. */
export async function edgeApp(service: Service, { edge, operations, storeUrl }: EdgeAppOptions): Promise<void> {
  const { app, metrics } = service;
  const plain = app as unknown as FastifyInstance;
  takeOctets(plain);
  const idOf = (name: string) => idNow(edge, name);
  refuseOthers(plain, idOf);
  recordOperations(plain, operations, idOf);
  edgeRoutes(app, edge);
  const view = (sandbox: ResidentSandbox) => {
    const held = edge.heldBy(sandbox.name);
    const { owner, amounts, alone } = held ?? promisedOf(sandbox.facts);
    return { ...sandboxView(sandbox), edge: edge.edge, owner, amounts, alone, admission: held?.admission };
  };
  app.get('/v1/sandboxes', async () => edge.list().map(view));
  app.post('/v1/sandboxes', { config: { hot: true }, schema: { body: CreateBody } }, async ({ body }, reply) => {
    const {
      owner = LOCAL_OWNER,
      amounts,
      backend = 'container',
      alone = false,
      ...asked
    } = body as Static<typeof CreateBody>;
    const promised = { owner, amounts: amounts ?? amountsOf(asked), backend, alone };
    const prepare = () => createOptions({ ...asked, store: asked.store ?? storeUrl });
    const { sandbox, held } = await edge.createHeld(promised, asked.requestId, prepare);
    reply.code(201);
    // It may have ended by now, and be no longer held.
    return { ...view(sandbox), owner: held.owner, amounts: held.amounts, admission: held.admission };
  });
  await sandboxRoutes(plain, edge, {
    machinePaths: false,
    view,
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
