/**
 * The apiserver: the only entrance of a cluster. It keeps no state: who may do what and what is reserved is in IAM's database, which nodes there are the
 * watcher says, and what a sandbox is its edge. Any number of instances may run over one database; each can be killed at any moment.
 */
import type { Duplex } from 'node:stream';
import type { FastifyInstance, FastifyRequest } from 'fastify';
import type { BlobStore } from '#imagesvc';
import { consoleRoutes } from '../console/console-routes.ts';
import type { Iam, Identity } from '../iam/iam.ts';
import { iamRoutes } from '../iam/routes.ts';
import { type TokenGiven, tokenOf } from '../service-base/cluster-token.ts';
import { createService, type ServiceOptions, serviceLogger } from '../service-base/service-app.ts';
import type { ClientTlsFiles } from '../service-base/tls-files.ts';
import { Access } from './access.ts';
import type { ApiParts } from './api-parts.ts';
import { clusterRoutes } from './cluster-routes.ts';
import { CREATE_STEPS, type CreateDefaults, SandboxMaker } from './create-sandbox.ts';
import { EdgeConnections } from './edge-connection.ts';
import { EdgeCreates } from './edge-creates.ts';
import { AWAY, Edges } from './edges.ts';
import { Events } from './events.ts';
import { fncallRoutes } from './fncall-routes.ts';
import { ImageLayers } from './image-layers.ts';
import { describeApi } from './openapi.ts';
import type { OverflowNodes } from './overflow.ts';
import { Owners } from './owners.ts';
import { RateLimit } from './rate-limit.ts';
import { Reconciler } from './reconcile.ts';
import { sandboxRoutes } from './sandbox-routes.ts';
import { WorkInHand } from './work-in-hand.ts';

export interface ApiserverOptions extends Pick<ServiceOptions, 'listen' | 'tls' | 'logLevel' | 'logger'> {
  /** It stays the caller's to close. */
  readonly iam: Iam;
  readonly watcherUrl: string;
  /** The store that sandboxes are made from. */
  readonly store: BlobStore;
  /** Nodes that take what the others have no room for. */
  readonly overflow?: OverflowNodes;
  readonly version: string;
  /** Of the cluster: shown to edges and watcher. */
  readonly token: TokenGiven;
  readonly peerTls?: ClientTlsFiles;
  readonly defaults?: Partial<CreateDefaults>;
  /** Requests a second of one principal; 0: as many as it likes. */
  readonly rateLimit?: number;
  /** Creations at once, and how many more may wait. */
  readonly creates?: { readonly atOnce: number; readonly waiting: number };
  readonly reconcileMs?: number;
  readonly pollMs?: number;
}

export interface Apiserver {
  readonly url: string;
  readonly parts: ApiParts;
  reload(): void;
  close(drainMs: number): Promise<void>;
}

export const DEFAULTS: CreateDefaults = { cpuMilli: 500, memoryBytes: 512 << 20, diskBytes: 2 * 2 ** 30 };
export const RATE_LIMIT = 1000;
export const CREATES = { atOnce: 512, waiting: 2048 };
const STEP_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5];

/** @throws SERVICE_*, SERVER_LISTEN, CONSOLE_MISSING */
export async function serveApi(options: ApiserverOptions): Promise<Apiserver> {
  const { iam, store, peerTls, listen, tls, watcherUrl } = options;
  const clusterToken = tokenOf(options.token);
  const logger = options.logger ?? serviceLogger(options.logLevel);
  const note = (problem: string) => logger.warn(problem);
  const access = new Access(iam, new RateLimit(options.rateLimit ?? RATE_LIMIT));
  const edges = new Edges({ watcherUrl, token: clusterToken, tls: peerTls, note, pollMs: options.pollMs });
  const events = new Events();
  const connections = new EdgeConnections(clusterToken, peerTls);
  const creates = new EdgeCreates({ connections, urlOf: (edge) => edges.urlOf(edge) });
  edges.onChange = (edge, what) => {
    events.node(edge, what);
    if (what !== 'down' && what !== 'gone') return;
    creates.lost(edge, AWAY);
    const url = edges.nodes.find((node) => node.edge === edge)?.url;
    if (url !== undefined) connections.lost(url, AWAY);
  };
  const identities = new WeakMap<FastifyRequest, Identity>();
  const service = createService({
    name: 'apiserver',
    listen,
    tls,
    logger,
    authenticate: async (request) => {
      const identity = await access.authenticate(request.raw);
      identities.set(request, identity);
      request.identity = identity;
    },
    notReady: () => edges.notReady,
  });
  const { app, metrics } = service;
  app.decorateRequest('identity');

  const steps = metrics.histogram('dsec_create_step_seconds', 'Steps of a creation.', STEP_SECONDS);
  const observeStep = Object.fromEntries(CREATE_STEPS.map((step) => [step, steps.of({ step })]));
  const work = new WorkInHand(options.creates ?? CREATES);
  metrics.gauge('dsec_creates_in_hand', 'Creations under way.', () => work.inHand);
  metrics.gauge('dsec_creates_waiting', 'Creations that wait for their turn.', () => work.waiting);
  metrics.gauge('dsec_event_readers', 'Open streams of events.', () => events.readers);
  const defaults = { ...DEFAULTS, ...options.defaults };
  const owners = new Owners(edges);
  const maker = new SandboxMaker({
    iam,
    access,
    edges,
    creates,
    layers: new ImageLayers(store, options.overflow?.storeUrl),
    storeUrl: store.url,
    overflow: options.overflow,
    defaults,
    work,
    note,
    observe: (step, seconds) => observeStep[step]?.(seconds),
    onCreated: (view, reservation) => {
      const { id, project = 'root', user = '', uid } = view;
      owners.learn(id, { project, user, reservation, uid: uid as string | undefined });
      events.created(view);
    },
  });
  const onRoster: ConstructorParameters<typeof Reconciler>[0]['onRoster'] = (edge, roster) =>
    events.roster(edge, roster);
  const reconciler = new Reconciler({ iam, edges, note, everyMs: options.reconcileMs, onRoster });
  const upgraded = new Set<Duplex>();
  const parts: ApiParts = {
    iam,
    access,
    edges,
    connections,
    owners,
    maker,
    work,
    events,
    reconciler,
    store,
    overflow: options.overflow,
    defaults,
    upgraded,
    note,
  };

  await describeApi(app, options.version);
  const plain = app as unknown as FastifyInstance;
  iamRoutes(plain, iam, { identityOf: async (request) => identities.get(request) as Identity });
  // Files alone: they ask for no token, and tell nothing.
  await plain.register(async (scope) => {
    scope.addHook('onRoute', (route) => {
      route.config = { ...route.config, role: 'open', hot: true };
    });
    consoleRoutes(scope);
  });
  clusterRoutes(app, parts);
  fncallRoutes(plain, parts);
  await sandboxRoutes(app, parts);

  service.onDraining(() => {
    events.close();
    for (const socket of upgraded) socket.destroy();
  });
  await edges.start();
  const url = await service.listen();
  reconciler.start();
  return {
    url,
    parts,
    reload() {
      clusterToken?.reload();
      service.reload();
    },
    async close(drainMs) {
      await service.close(drainMs);
      await maker.close();
      creates.close();
      await reconciler.close();
      await edges.close();
      connections.close();
    },
  };
}
