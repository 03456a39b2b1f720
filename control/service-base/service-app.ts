/**
 * What every service of the cluster is built on: a fastify app with TLS, the cluster's token, request ids, logs, figures, health, and an end that
 * lets what is being answered be answered. Routes are the service's own.
 *
 * - A route with `config: { role: 'open' }` asks for no token; one with `config: { hot: true }` is logged only when it fails.
 * - `authenticate` in place of the token: for a service that knows its callers itself. What it throws is the answer.
 */
import { randomUUID } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import type { Server as TlsServer } from 'node:tls';
import { type FastifyBaseLogger, type FastifyRequest, fastify, LogController } from 'fastify';
import { type Logger, pino } from 'pino';
import type { DsecError } from '#base';
import { compileOnFirstUse, type HttpApp, listenHttp, Metrics, parseListenAddress } from '#imagesvc';
import { fail } from '../errors.ts';
import { type TokenGiven, tokenOf } from './cluster-token.ts';
import { errorBody, retryAfterOf, serviceErrorOf } from './service-errors.ts';
import { type ServerTlsFiles, serverTls } from './tls-files.ts';

export interface ServiceOptions {
  /** Shown in messages: `edge`, `watcher`, `apiserver`. */
  readonly name: string;
  /** `HOST:PORT` or `unix:/path`. Over TCP a token or `authenticate` is needed. */
  readonly listen: string;
  readonly tls?: ServerTlsFiles;
  readonly token?: TokenGiven;
  readonly authenticate?: (request: FastifyRequest) => Promise<void>;
  readonly logLevel?: string;
  /** In place of lines of JSON on stderr. */
  readonly logger?: Logger;
  readonly bodyLimitBytes?: number;
  /** Why it cannot serve now; undefined: it can. */
  readonly notReady?: () => string | undefined;
  readonly errorOf?: (thrown: unknown) => DsecError;
}

export interface Service {
  readonly app: HttpApp;
  readonly metrics: Metrics;
  readonly logger: Logger;
  /** Of requests that the app never sees, such as upgrades. @throws SERVICE_TOKEN */
  readonly authorize: (request: IncomingMessage) => void;
  readonly draining: boolean;
  /** After the last route. Where it listens: `http(s)://HOST:PORT` or `unix:/path`. @throws SERVER_LISTEN */
  listen(): Promise<string>;
  /** Certificates that were renewed, and the token. @throws SERVICE_TLS_FILE, SERVICE_TOKEN_FILE */
  reload(): void;
  /** Nobody new; what is being answered has `graceMs`. `onDraining` ends streams that would never end by themselves. */
  close(graceMs: number): Promise<void>;
  onDraining(end: () => void): void;
}

const BODY_BYTES = 1 << 20;
const REQUEST_ID = /^[\w.:/+=-]{1,128}$/;
const SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30];

/** Lines of JSON. Written at once, so that a crash loses none. */
export function serviceLogger(level = 'info'): Logger {
  return pino({ level }, pino.destination({ dest: 2, sync: true }));
}

/** @throws SERVICE_NEEDS_TOKEN, SERVICE_TLS_FILE, SERVER_LISTEN */
export function createService(options: ServiceOptions): Service {
  const { name, token, authenticate, tls, errorOf = serviceErrorOf } = options;
  const address = parseListenAddress(options.listen);
  if (address.kind === 'tcp' && token === undefined && authenticate === undefined) {
    throw fail('SERVICE_NEEDS_TOKEN', { service: name, address: options.listen });
  }
  const logger = options.logger ?? serviceLogger(options.logLevel);
  const metrics = new Metrics();
  const clusterToken = tokenOf(token);
  const endings: (() => void)[] = [];
  let draining = false;

  const app = fastify({
    ...(tls === undefined ? {} : { https: serverTls(tls) }),
    loggerInstance: logger as FastifyBaseLogger,
    // What a request was and how it went is one line, written below.
    logController: new LogController({ disableRequestLogging: true }),
    bodyLimit: options.bodyLimitBytes ?? BODY_BYTES,
    routerOptions: { maxParamLength: 4096 },
    exposeHeadRoutes: false,
    forceCloseConnections: 'idle',
    keepAliveTimeout: 72_000,
    genReqId: (request: IncomingMessage) => {
      const given = request.headers['x-request-id'];
      return typeof given === 'string' && REQUEST_ID.test(given) ? given : randomUUID();
    },
    requestIdHeader: false,
    schemaController: compileOnFirstUse(),
    ajv: { customOptions: { removeAdditional: false, coerceTypes: true, allErrors: false } },
  }) as unknown as HttpApp;

  const requests = metrics.counter('dsec_http_requests_total', 'Requests by route and status.');
  const seconds = metrics.histogram(
    'dsec_http_request_seconds',
    'Time from the head of a request to the end of its answer.',
    SECONDS,
  );
  const startedAt = Date.now() / 1000;
  metrics.gauge('process_resident_memory_bytes', 'Resident memory.', () => process.memoryUsage.rss());
  metrics.gauge('process_cpu_seconds', 'Processor time, user and system.', () => {
    const { user, system } = process.cpuUsage();
    return (user + system) / 1e6;
  });
  metrics.gauge('process_start_time_seconds', 'When the service started.', () => startedAt);

  const authorize = (request: IncomingMessage) => {
    if (clusterToken !== undefined && !clusterToken.accepts(request.headers.authorization))
      throw fail('SERVICE_TOKEN', { service: name });
  };
  app.addHook('onRequest', async (request, reply) => {
    reply.header('x-request-id', request.id);
    const { config, url } = request.routeOptions;
    if (config.role === 'open' && url !== undefined) return;
    if (authenticate !== undefined) await authenticate(request);
    else authorize(request.raw);
    if (draining && request.method !== 'GET') throw fail('SERVICE_DRAINING', { service: name });
  });
  const figures = new Map<string, { readonly count: () => void; readonly observe: (seconds: number) => void }>();
  app.addHook('onResponse', (request, reply, done) => {
    const { url: route = 'none', config } = request.routeOptions;
    const { method } = request;
    const { statusCode: status, elapsedTime } = reply;
    const key = `${method} ${status} ${route}`;
    let figure = figures.get(key);
    if (figure === undefined) {
      const labels = { method, route };
      figure = { count: requests.of({ ...labels, status }), observe: seconds.of(labels) };
      figures.set(key, figure);
    }
    figure.count();
    figure.observe(elapsedTime / 1000);
    if (!config.hot || status >= 500) {
      request.log.info({ method, route, status, ms: Math.round(elapsedTime * 10) / 10 }, 'request');
    }
    done();
  });
  app.setErrorHandler((thrown, request, reply) => {
    const error = errorOf(thrown);
    // What this machine or backend cannot do is an answer as any other: no fault of ours.
    if (error.http === 501) request.log.info({ problem: error.message }, error.code);
    else if (error.http >= 500 && error.http !== 503) request.log.error({ err: thrown }, error.code);
    const retryAfter = retryAfterOf(error);
    if (retryAfter !== undefined) reply.header('retry-after', retryAfter);
    return reply
      .code(error.http)
      .header('content-type', 'application/json; charset=utf-8')
      .send(JSON.stringify(errorBody(error, request.id)));
  });
  app.setNotFoundHandler((request) => {
    throw fail('SERVICE_ROUTE', { method: request.method, path: request.url.split('?')[0]!.slice(0, 200) });
  });

  const open = { role: 'open', hot: true } as const;
  const hide = { hide: true };
  app.get('/healthz', { config: open, schema: hide }, async () => ({ status: 'ok' }));
  app.get('/readyz', { config: open, schema: hide }, async () => {
    const problem = draining ? 'it is ending' : options.notReady?.();
    if (problem !== undefined) throw fail('SERVICE_NOT_READY', { service: name, problem });
    return { status: 'ready' };
  });
  app.get('/metrics', { config: { hot: true }, schema: hide }, async (_request, reply) =>
    reply.header('content-type', 'text/plain; version=0.0.4').send(metrics.text()),
  );

  return {
    app,
    metrics,
    logger,
    authorize,
    get draining() {
      return draining;
    },
    async listen() {
      const url = await listenHttp(app, address);
      return tls === undefined ? url : url.replace(/^http:/, 'https:');
    },
    reload() {
      clusterToken?.reload();
      if (tls !== undefined) (app.server as unknown as TlsServer).setSecureContext(serverTls(tls));
    },
    onDraining(end) {
      endings.push(end);
    },
    async close(graceMs) {
      draining = true;
      for (const end of endings) end();
      const cut = setTimeout(() => app.server.closeAllConnections(), graceMs);
      // One that has had its answer would be kept for the next request.
      const idle = setInterval(() => app.server.closeIdleConnections(), 50);
      await app.close();
      clearTimeout(cut);
      clearInterval(idle);
    },
  };
}
