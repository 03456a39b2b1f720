/**
 * The image service as an HTTP application: who calls and what they may do, limits, errors, logs and figures are here, the
 * routes in routes/. It does not listen by itself (listen.ts), so that tests can call it without a port.
 *
 * A caller is known by a bearer token. Where there are no tokens, everybody who can reach the service is the one caller
 * that `openCaller` names.
 */
import { randomUUID } from 'node:crypto';
import swagger from '@fastify/swagger';
import { type FastifyBaseLogger, fastify, LogController } from 'fastify';
import { type Logger, pino } from 'pino';
import type { Digest } from '#base';
import { fail } from '../errors.ts';
import { mountedBlobs } from '../gc/mounted-blobs.ts';
import type { NodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { AllowedPaths } from './allowed-paths.ts';
import type { App, Shared } from './app-types.ts';
import { compileOnFirstUse } from './compile-on-first-use.ts';
import { dsecErrorOf, errorAnswer } from './error-answer.ts';
import { JobQueue, type JobRunner } from './jobs/job-queue.ts';
import { JobStore } from './jobs/job-store.ts';
import { storeRunner } from './jobs/run-job.ts';
import { Metrics } from './metrics.ts';
import { OpenTrees } from './open-trees.ts';
import { imageRoutes } from './routes/images.ts';
import { jobRoutes } from './routes/jobs.ts';
import { nodeRoutes } from './routes/node.ts';
import { operationRoutes } from './routes/operations.ts';
import { traceRoutes } from './routes/traces.ts';
import { ErrorSchema } from './schemas.ts';
import { allows, type Caller, Tokens } from './tokens.ts';

export interface ImageServiceOptions {
  readonly store: BlobStore;
  /** Where jobs are kept. One service at a time. */
  readonly stateDir: string;
  readonly version: string;
  readonly logger: Logger;
  readonly tokens?: Tokens;
  /** Who everybody is when there are no tokens. */
  readonly openCaller?: Caller;
  /** Without tokens, over TCP: names by which the service may be called, so that no web page can call it by another one. */
  readonly hostNames?: readonly string[];
  /** Folders that requests may name. */
  readonly allowedPaths?: readonly string[];
  readonly folders?: Partial<NodeFolders>;
  readonly limits?: {
    readonly concurrency?: number;
    /** Jobs of one caller, waiting and running. */
    readonly jobsPerCaller?: number;
    /** Requests of one caller at the same time: 64 by default. */
    readonly requestsPerCaller?: number;
    /** 64 KiB by default. */
    readonly bodyBytes?: number;
  };
  /** Blobs that are needed beside those of names and mounts: garbage collection leaves them. */
  readonly moreInUse?: () => Promise<ReadonlySet<Digest>>;
  /** In place of conversion into the store, for tests. */
  readonly runner?: JobRunner;
}

export interface ImageService {
  readonly app: App;
  readonly queue: JobQueue;
  /** Takes nothing more, ends all streams, gives running jobs `graceMs`, and closes. */
  close(graceMs?: number): Promise<void>;
}

/** Lines of JSON. Written at once, so that a crash loses none; standard output is for what was asked for. */
export function logTo(fd: number, level: string): Logger {
  return pino({ level }, pino.destination({ dest: fd, sync: true }));
}

const LAST_ANSWERS_MS = 500;
const NOBODY: Caller = { name: 'nobody', role: 'read' };

/** @throws SERVER_STATE_BUSY */
export async function createImageService(options: ImageServiceOptions): Promise<ImageService> {
  const { store, logger, limits = {}, tokens = new Tokens(), openCaller = { name: 'local', role: 'admin' } } = options;
  const bodyLimitBytes = limits.bodyBytes ?? 64 * 1024;
  const requestsPerCaller = limits.requestsPerCaller ?? 64;
  const queue = await JobQueue.open({
    store: JobStore.open(options.stateDir),
    runner: options.runner ?? storeRunner(store),
    concurrency: limits.concurrency,
    perCaller: limits.jobsPerCaller,
    onError: (error, { id }) => logger.error({ err: error, job: id }, 'job'),
  });
  const metrics = new Metrics();
  const trees = new OpenTrees(store);
  let draining = false;
  const shared: Shared = {
    store,
    queue,
    trees,
    metrics,
    paths: new AllowedPaths(options.allowedPaths),
    folders: options.folders ?? {},
    inUse: async () =>
      new Set([...(await mountedBlobs(store, options.folders)), ...((await options.moreInUse?.()) ?? [])]),
    isDraining: () => draining,
    streams: new Set(),
  };

  const app: App = fastify({
    loggerInstance: logger as FastifyBaseLogger,
    // What a request was and how it went is one line, written below.
    logController: new LogController({ disableRequestLogging: true }),
    bodyLimit: bodyLimitBytes,
    requestTimeout: 30_000,
    routerOptions: { maxParamLength: 1024 },
    exposeHeadRoutes: false,
    genReqId: () => randomUUID(),
    requestIdHeader: false,
    schemaController: compileOnFirstUse(),
    ajv: { customOptions: { removeAdditional: false, coerceTypes: true, allErrors: false } },
  });

  const requests = metrics.counter('dsec_http_requests_total', 'Requests by route and status.');
  const seconds = metrics.histogram(
    'dsec_http_request_seconds',
    'Time from the head of a request to the end of its answer.',
    [0.001, 0.005, 0.025, 0.1, 0.5, 2, 10],
  );
  const startedAt = Date.now();
  metrics.gauge('dsec_jobs', 'Jobs by state.', () =>
    Object.entries(queue.counts()).map(([state, count]) => [{ state }, count] as const),
  );
  metrics.gauge('dsec_open_streams', 'Watchers of jobs.', () => shared.streams.size);
  metrics.gauge('dsec_open_trees', 'Images open for browsing.', () => trees.size);
  metrics.gauge('process_resident_memory_bytes', 'Resident memory.', () => process.memoryUsage.rss());
  metrics.gauge('process_start_time_seconds', 'When the service started.', () => startedAt / 1000);

  app.decorateRequest('caller');
  const atWork = new Map<string, number>();
  app.addHook('onRequest', async (request, reply) => {
    request.caller = NOBODY;
    reply.header('x-request-id', request.id).header('x-content-type-options', 'nosniff');
    reply.header('cache-control', 'no-store');
    const { role } = request.routeOptions.config;
    if (role === undefined || role === 'open') return;
    request.caller = callerOf(request.headers);
    if (!allows(request.caller, role)) {
      const { name, role: has } = request.caller;
      const what = `${request.method} ${request.routeOptions.url}`;
      throw fail('SERVER_FORBIDDEN', { what, role, caller: name, has });
    }
    if (draining && request.method !== 'GET') throw fail('SERVER_DRAINING');
    const { name } = request.caller;
    const count = atWork.get(name) ?? 0;
    if (count >= requestsPerCaller) throw fail('SERVER_BUSY', { caller: name, count });
    atWork.set(name, count + 1);
    reply.raw.once('close', () => {
      const left = (atWork.get(name) ?? 1) - 1;
      if (left === 0) atWork.delete(name);
      else atWork.set(name, left);
    });
  });

  const callerOf = (headers: { authorization?: string; host?: string }): Caller => {
    if (tokens.none) {
      const host = (headers.host ?? '').replace(/:\d+$/, '').toLowerCase();
      if (options.hostNames === undefined || options.hostNames.includes(host)) return openCaller;
      throw fail('SERVER_FORBIDDEN', { what: `calling it "${host}"`, role: 'token', caller: 'nobody', has: 'none' });
    }
    const token = /^Bearer +(\S+) *$/i.exec(headers.authorization ?? '')?.[1];
    const caller = token === undefined ? undefined : tokens.find(token);
    if (caller === undefined) throw fail('SERVER_UNAUTHORIZED');
    return caller;
  };

  app.addHook('onResponse', async (request, reply) => {
    const route = request.routeOptions.url ?? 'none';
    const { method } = request;
    const { statusCode: status, elapsedTime } = reply;
    requests.add({ method, route, status });
    seconds.observe({ method, route }, elapsedTime / 1000);
    if (request.routeOptions.config.hot && status < 500) return;
    const caller = request.caller.name;
    request.log.info({ method, route, status, caller, ms: Math.round(elapsedTime * 10) / 10 }, 'request');
  });

  app.setErrorHandler((thrown, request, reply) => {
    const error = dsecErrorOf(thrown, { bodyLimitBytes: request.routeOptions.bodyLimit ?? bodyLimitBytes });
    if (error.http >= 500) request.log.error({ err: thrown }, error.code);
    if (error.http === 401) reply.header('www-authenticate', 'Bearer');
    if (error.http === 429 || error.http === 503) reply.header('retry-after', 2);
    return reply
      .code(error.http)
      .header('content-type', 'application/json; charset=utf-8')
      .send(JSON.stringify(errorAnswer(error, request.id)));
  });
  app.setNotFoundHandler((request) => {
    throw fail('SERVER_ROUTE_NOT_FOUND', { method: request.method, path: request.url.split('?')[0]!.slice(0, 200) });
  });

  await app.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title: 'DSec image service',
        version: options.version,
        description: 'Converts images, shows what is in them, and mounts them on its node.',
      },
      components: { securitySchemes: { token: { type: 'http', scheme: 'bearer' } } },
    },
    transform: ({ schema, url, route }) => {
      const { role = 'open' } = route.config ?? {};
      const response = { ...(schema?.response as object), default: { ...ErrorSchema, description: 'An error' } };
      const security = role === 'open' ? undefined : [{ token: [] }];
      return { schema: { ...schema, response, security, 'x-role': role }, url };
    },
  });
  operationRoutes(app, shared);
  imageRoutes(app, shared);
  jobRoutes(app, shared);
  nodeRoutes(app, shared);
  traceRoutes(app, shared);
  await app.ready();

  let closing: Promise<void> | undefined;
  const close = async (graceMs: number) => {
    draining = true;
    const deadlineMs = Date.now() + graceMs;
    for (const stream of shared.streams) stream.end();
    await queue.drain(graceMs);
    // Answers that are being sent have the rest of the time. A connection on which a request was never finished has no end.
    const cut = setTimeout(() => app.server.closeAllConnections(), Math.max(LAST_ANSWERS_MS, deadlineMs - Date.now()));
    await app.close();
    clearTimeout(cut);
    await trees.close();
  };
  return {
    app,
    queue,
    close(graceMs = 10_000) {
      if (closing !== undefined) {
        // Asked again: by somebody who has less time.
        setTimeout(() => queue.stopRunning(), graceMs).unref();
        return closing;
      }
      closing = close(graceMs);
      return closing;
    },
  };
}
