/**
 * The block service as an HTTP application on a unix socket: who may call, errors, logs and figures are here, what is asked for in
 * routes.ts. Whoever may open the socket file is its user or root, which the kernel is asked besides.
 */
import { randomUUID } from 'node:crypto';
import swagger from '@fastify/swagger';
import { type TSchema, Type } from '@sinclair/typebox';
import { type FastifyBaseLogger, fastify, LogController } from 'fastify';
import { type Logger, pino } from 'pino';
import { type DsecError, messageOf, systemCode } from '#base';
import { compileOnFirstUse, docsPage, dsecErrorOf, errorAnswer, type HttpApp, Metrics } from '#imagesvc';
import { peerOf } from '#linux';
import type { DiskDaemon } from '#ublk-daemon';
import type { StoreLayerOpener } from '../disk-layers.ts';
import { fail } from '../errors.ts';
import { cacheMetrics, diskMetrics } from './disk-metrics.ts';
import { diskRoutes } from './routes.ts';
import { ErrorSchema } from './schemas.ts';

const BODY_LIMIT = 64 * 1024;

/** Lines of JSON. Written at once, so that a crash loses none. */
export function logTo(fd: number, level: string): Logger {
  return pino({ level }, pino.destination({ dest: fd, sync: true }));
}

export interface AppOptions {
  readonly version: string;
  readonly logger: Logger;
  /** For figures of what it reads out of stores. */
  readonly layers?: StoreLayerOpener;
}

export async function createApp(daemon: DiskDaemon, options: AppOptions): Promise<HttpApp> {
  const app: HttpApp = fastify({
    loggerInstance: options.logger as FastifyBaseLogger,
    logController: new LogController({ disableRequestLogging: true }),
    bodyLimit: BODY_LIMIT,
    requestTimeout: 30_000,
    // Paths of raw files, with three characters a byte at worst.
    routerOptions: { maxParamLength: 16_384 },
    exposeHeadRoutes: false,
    genReqId: () => randomUUID(),
    requestIdHeader: false,
    schemaController: compileOnFirstUse(),
    ajv: { customOptions: { removeAdditional: false, coerceTypes: true, allErrors: false } },
  });
  const metrics = new Metrics();
  diskMetrics(metrics, daemon);
  if (options.layers !== undefined) cacheMetrics(metrics, options.layers);
  const requests = metrics.counter('dsec_http_requests_total', 'Requests by route and status.');

  app.addHook('onRequest', async (request, reply) => {
    reply.header('x-request-id', request.id).header('cache-control', 'no-store');
    const uid = peerOf(request.raw.socket)?.uid;
    if (uid !== 0 && uid !== process.geteuid?.()) throw fail('UBLKD_PEER', { uid: uid ?? 'unknown' });
  });
  app.addHook('onResponse', async (request, reply) => {
    const route = request.routeOptions.url ?? 'none';
    const { method } = request;
    const { statusCode: status, elapsedTime } = reply;
    requests.add({ method, route, status });
    if (request.routeOptions.config.hot && status < 500) return;
    const disk = (request.params as { name?: string } | undefined)?.name;
    request.log.info({ method, route, status, disk, ms: Math.round(elapsedTime * 10) / 10 }, 'request');
  });
  app.setErrorHandler((thrown, request, reply) => {
    const error = errorOf(thrown, daemon.disksRoot);
    if (error.http >= 500) request.log.error({ err: thrown }, error.code);
    return reply
      .code(error.http)
      .header('content-type', 'application/json; charset=utf-8')
      .send(JSON.stringify(errorAnswer(error, request.id)));
  });
  app.setNotFoundHandler((request) => {
    throw fail('UBLKD_ROUTE', { method: request.method, path: request.url.split('?')[0]!.slice(0, 200) });
  });

  await app.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title: 'DSec block service',
        version: options.version,
        description: 'Attaches disks of this node, and works on them while they are used.',
      },
    },
    transform: ({ schema, url }) => {
      const response = { ...(schema?.response as object), default: { ...ErrorSchema, description: 'An error' } };
      return { schema: { ...schema, response }, url };
    },
  });
  diskRoutes(app, daemon);
  operationRoutes(app, daemon, metrics);
  await app.ready();
  return app;
}

/** What a system call of the work failed with is for whoever asked: no room, mostly. */
function errorOf(thrown: unknown, disksFolder: string): DsecError {
  const error = dsecErrorOf(thrown, { bodyLimitBytes: BODY_LIMIT });
  if (error.code !== 'SERVER_INTERNAL') return error;
  const reason = messageOf(thrown);
  const noSpace = ['ENOSPC', 'EDQUOT'].includes(systemCode(thrown) ?? '');
  return noSpace ? fail('UBLKD_NO_SPACE', { reason, disksFolder }, thrown) : fail('UBLKD_INTERNAL', { reason }, thrown);
}

function httpBody(description: string, contentType: string, schema: TSchema = Type.String()) {
  return { description, content: { [contentType]: { schema } } };
}

const Ok = Type.Object({ status: Type.String() });

function operationRoutes(app: HttpApp, daemon: DiskDaemon, metrics: Metrics): void {
  const tags = ['operations'];
  app.get(
    '/healthz',
    {
      config: { hot: true },
      schema: { operationId: 'healthz', summary: 'Whether the process lives', tags, response: { 200: Ok } },
    },
    async () => ({ status: 'ok' }),
  );
  app.get(
    '/readyz',
    {
      config: { hot: true },
      schema: {
        operationId: 'readyz',
        summary: 'Whether what is attached is on the disk as it should be: not while the table cannot be written',
        tags,
        response: { 200: Ok },
      },
    },
    async () => {
      if (daemon.unsaved !== undefined) throw fail('UBLKD_NOT_READY', { problem: daemon.unsaved });
      return { status: 'ready' };
    },
  );
  app.get(
    '/metrics',
    {
      config: { hot: true },
      schema: {
        operationId: 'metrics',
        summary: "Figures in Prometheus' text format",
        tags,
        response: { 200: httpBody('Figures', 'text/plain') },
      },
    },
    async (_request, reply) => reply.header('content-type', 'text/plain; version=0.0.4').send(metrics.text()),
  );
  app.get(
    '/openapi.json',
    {
      schema: {
        operationId: 'openapi',
        summary: 'This API as an OpenAPI 3.1 document',
        tags,
        response: { 200: httpBody('The document', 'application/json', Type.Unknown()) },
      },
    },
    async (_request, reply) => reply.header('content-type', 'application/json').send(JSON.stringify(app.swagger())),
  );
  app.get(
    '/docs',
    {
      schema: {
        operationId: 'docs',
        summary: 'This API as a page',
        tags,
        response: { 200: httpBody('The page', 'text/html') },
      },
    },
    async (_request, reply) => reply.header('content-type', 'text/html; charset=utf-8').send(docsPage(app.swagger())),
  );
}
