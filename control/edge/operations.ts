/**
 * The commands log over HTTP: a request on a sandbox that changes something may carry `x-dsec-operation: ID`. Repeated, it gets the answer that was given
 * first (with `x-dsec-repeated: true`), whether that was done or refused; one that failed on our side is carried out again.
 */
import { createHash } from 'node:crypto';
import { Readable } from 'node:stream';
import type { FastifyInstance, FastifyRequest } from 'fastify';
import { fail } from '../errors.ts';
import { ONE_SANDBOX } from '../runtime-service/route.ts';
import { OPERATION_BODY_BYTES, type OperationLog, type RunningOperation } from './operation-log.ts';

export const OPERATION_HEADER = 'x-dsec-operation';

declare module 'fastify' {
  interface FastifyRequest {
    operation?: RunningOperation;
  }
}

const OPERATION = /^[\w.:/+=-]{1,128}$/;
/** What a folder may be called. Sandboxes of other names are not there. */
const NAME = /^[a-z0-9][a-z0-9_.-]{0,62}$/;
/** Carried out twice they are not the same as once. */
const ONCE = /\/(?:stdin|files\/rename|screen\/input|console)$/;
/** These have request ids of their own, by which the runtime knows them again. */
const WITH_REQUEST_ID: ReadonlySet<string> = new Set([`${ONE_SANDBOX}/commands`, `${ONE_SANDBOX}/fork`]);

/** Before the routes. `idOf`: which sandbox has the name now. */
export function recordOperations(
  app: FastifyInstance,
  log: OperationLog,
  idOf: (name: string) => string | undefined,
): void {
  app.decorateRequest('operation');
  app.addHook('preHandler', async (request, reply) => {
    const operation = request.headers[OPERATION_HEADER];
    const { url: route = '' } = request.routeOptions;
    if (operation === undefined || request.method === 'GET' || !route.startsWith(ONE_SANDBOX)) return;
    // What it says is the business of whoever listens there.
    if (route.startsWith(`${ONE_SANDBOX}/ports`)) return;
    if (typeof operation !== 'string' || !OPERATION.test(operation)) {
      throw fail('OPERATION_ID', { problem: 'it is no id' });
    }
    const { name = '' } = request.params as { name?: string };
    if (!NAME.test(name)) return;
    const body = await wholeBody(request, operation);
    const bodyDigest = createHash('sha256').update(body).digest('hex');
    const print = { target: `${request.method} ${request.url}`, bodyDigest };
    if (WITH_REQUEST_ID.has(route)) {
      request.body = { requestId: `operation ${operation}`, ...(request.body as object) };
    }
    const begun = await log.begin(name, idOf(name), operation, print, !ONCE.test(route));
    if (begun.running !== undefined) {
      request.operation = begun.running;
      return;
    }
    const { status, contentType, body: answer } = begun.answer;
    reply.code(status).header('x-dsec-repeated', 'true');
    if (contentType !== undefined) reply.header('content-type', contentType);
    return reply.send(answer);
  });
  app.addHook('onSend', async (request, reply, payload) => {
    const running = request.operation;
    if (running === undefined) return payload;
    const { statusCode: status } = reply;
    const type = reply.getHeader('content-type');
    const body = bytesOf(payload);
    if (status >= 500 || status === 429 || body === undefined) running.end(undefined);
    else running.end({ status, contentType: typeof type === 'string' ? type : undefined, body });
    return payload;
  });
  // Whoever asked has gone before there was an answer, and the work has been given up.
  app.addHook('onResponse', async (request) => request.operation?.end(undefined));
}

/** What is a stream is taken whole, so that it can be compared. @throws OPERATION_TOO_LARGE */
async function wholeBody(request: FastifyRequest, operation: string): Promise<Buffer> {
  const { body } = request;
  const tooLarge = () => fail('OPERATION_TOO_LARGE', { operation, limitBytes: OPERATION_BODY_BYTES });
  if (body === undefined || body === null) return Buffer.alloc(0);
  if (!(body instanceof Readable)) {
    const text = Buffer.from(JSON.stringify(body));
    if (text.length > OPERATION_BODY_BYTES) throw tooLarge();
    return text;
  }
  const parts: Buffer[] = [];
  let size = 0;
  for await (const part of body) {
    size += (part as Buffer).length;
    if (size > OPERATION_BODY_BYTES) throw tooLarge();
    parts.push(part as Buffer);
  }
  const whole = Buffer.concat(parts);
  request.body = Readable.from(whole.length === 0 ? [] : [whole]);
  return whole;
}

function bytesOf(payload: unknown): Buffer | undefined {
  if (payload === undefined || payload === null) return Buffer.alloc(0);
  if (typeof payload === 'string') return Buffer.from(payload);
  return Buffer.isBuffer(payload) ? payload : undefined;
}
