/**
 * Everything below /v1/sandboxes/:id/ is its edge's to answer: passed on as it comes, both ways, neither kept nor looked into. Whichever end goes, the
 * other one is told. Errors of the edge arrive in the one form of this API; what a service inside a sandbox answers through a port is its own.
 */
import type { ClientRequest, IncomingHttpHeaders, IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import { join } from '../runtime-service/port-streams.ts';
import { thrownByPeer } from '../service-base/peer-client.ts';
import { errorBody, retryAfterOf, serviceErrorOf } from '../service-base/service-errors.ts';
import { gone } from './edges.ts';

const OF_ONE_CONNECTION: ReadonlySet<string> = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
]);
/** Of the client's way to here: the edge is another host, and is shown another token. */
const OURS: ReadonlySet<string> = new Set(['authorization', 'host', 'expect', 'x-request-id', 'x-dsec-sandbox']);
const MOST_ERROR_BYTES = 64 << 10;

export interface Passed {
  readonly id: string;
  readonly edge: string;
  /** Whose answers are not the edge's: those of a service inside. */
  readonly isPort: boolean;
  /** Once the answer's head is there, with its status; the client gets it afterwards. Never rejects. */
  readonly answered?: (status: number) => Promise<void>;
}

/** `open` makes the request to the edge; it is not ended. */
export function passOn(
  request: FastifyRequest,
  reply: FastifyReply,
  open: (headers: IncomingHttpHeaders) => ClientRequest,
  passed: Passed,
): Promise<unknown> {
  const { raw } = request;
  return new Promise((resolve, reject) => {
    const asked = open(headersFor(raw, request.id));
    let answering = false;
    const clientGone = () => {
      if (!reply.raw.writableFinished) asked.destroy();
    };
    reply.raw.once('close', clientGone);
    asked.once('error', (error) => {
      // Part of an answer was given already: all that is left is to cut it short.
      if (answering) reply.raw.destroy();
      else reject(fail('EDGE_UNREACHABLE', { edge: passed.edge, reason: messageOf(error) }, error));
    });
    asked.once('response', async (answer) => {
      const status = answer.statusCode ?? 502;
      answer.on('error', () => reply.raw.destroy());
      await passed.answered?.(status);
      const isError = status >= 400 && !passed.isPort && /json/.test(answer.headers['content-type'] ?? '');
      if (isError) {
        errorOf(answer, passed, status).then(reject, reject);
        return;
      }
      answering = true;
      reply.hijack();
      const head = answerHeaders(answer, request.id);
      reply.raw.writeHead(status, answer.statusMessage, head);
      // A reader wants to know that it has begun, also when nothing comes yet.
      reply.raw.flushHeaders();
      answer.pipe(reply.raw);
      const ended = () => {
        if (!answer.complete) reply.raw.destroy();
        resolve(reply);
      };
      if (answer.closed) ended();
      else answer.once('close', ended);
    });
    raw.pipe(asked);
    raw.once('error', () => asked.destroy());
    raw.once('close', () => {
      if (!raw.complete) asked.destroy();
    });
  });
}

/** The same for what is upgraded: from then on bytes, both ways. */
export function passUpgrade(
  request: IncomingMessage,
  socket: Duplex,
  head: Buffer,
  requestId: string,
  open: (headers: IncomingHttpHeaders) => ClientRequest,
  passed: Passed,
): Promise<void> {
  return new Promise((resolve, reject) => {
    const { upgrade } = request.headers;
    const asked = open({ ...headersFor(request, requestId), connection: 'Upgrade', upgrade });
    socket.once('close', () => asked.destroy());
    asked.once('error', (error) =>
      reject(fail('EDGE_UNREACHABLE', { edge: passed.edge, reason: messageOf(error) }, error)),
    );
    asked.once('upgrade', (answer, other: Duplex, first: Buffer) => {
      other.on('error', () => {});
      if (socket.destroyed) {
        other.destroy();
        return resolve();
      }
      socket.write(`HTTP/1.1 101 Switching Protocols\r\n${rawHeaders(answer)}\r\n`, 'latin1');
      if (first.length > 0) other.unshift(first);
      if (head.length > 0) socket.unshift(head);
      join(socket, other);
      resolve();
    });
    asked.once('response', (answer) => {
      const status = answer.statusCode ?? 502;
      if (status >= 400 && /json/.test(answer.headers['content-type'] ?? '')) {
        errorOf(answer, passed, status).then(reject, reject);
        return;
      }
      // What listens there does not upgrade: its answer goes on as it is, and the connection ends with it.
      socket.write(
        `HTTP/1.1 ${status} ${answer.statusMessage}\r\n${rawHeaders(answer, true)}Connection: close\r\n\r\n`,
        'latin1',
      );
      answer.pipe(socket);
      resolve();
    });
    asked.end();
  });
}

/** Of a connection that has no answer of the app. */
export function refuseUpgrade(socket: Duplex, thrown: unknown, requestId: string): void {
  const error = serviceErrorOf(thrown);
  const body = JSON.stringify(errorBody(error, requestId));
  const retryAfter = retryAfterOf(error);
  const lines = [
    `HTTP/1.1 ${error.http} ${error.code}`,
    'Connection: close',
    'Content-Type: application/json; charset=utf-8',
    `X-Request-Id: ${requestId}`,
    ...(retryAfter === undefined ? [] : [`Retry-After: ${retryAfter}`]),
    `Content-Length: ${Buffer.byteLength(body)}`,
  ];
  socket.end(`${lines.join('\r\n')}\r\n\r\n${body}`);
}

async function errorOf(answer: IncomingMessage, { id, edge }: Passed, status: number): Promise<unknown> {
  const parts: Buffer[] = [];
  let size = 0;
  for await (const part of answer) {
    size += (part as Buffer).length;
    if (size > MOST_ERROR_BYTES) break;
    parts.push(part as Buffer);
  }
  const error = gone(id, thrownByPeer(Buffer.concat(parts).toString('utf8'), status, `edge ${edge}`));
  // It is we who were not known there, not the client here.
  if ((error as { code?: unknown }).code === 'SERVICE_TOKEN') {
    return fail('EDGE_UNREACHABLE', { edge, reason: 'it does not know the token of this cluster' }, error);
  }
  return error;
}

function headersFor(request: IncomingMessage, requestId: string): IncomingHttpHeaders {
  const kept: IncomingHttpHeaders = {};
  const named = namedIn(request);
  for (const [name, value] of Object.entries(request.headers)) {
    if (!OF_ONE_CONNECTION.has(name) && !OURS.has(name) && !named.has(name)) kept[name] = value;
  }
  if (request.headers['transfer-encoding'] !== undefined) kept['transfer-encoding'] = 'chunked';
  kept['x-request-id'] = requestId;
  return kept;
}

/** Several of one name stay several. */
function answerHeaders(answer: IncomingMessage, requestId: string): string[] {
  const named = namedIn(answer);
  const pairs: string[] = ['x-request-id', requestId];
  for (let at = 0; at < answer.rawHeaders.length; at += 2) {
    const name = answer.rawHeaders[at]!.toLowerCase();
    if (OF_ONE_CONNECTION.has(name) || named.has(name) || name === 'x-request-id') continue;
    pairs.push(answer.rawHeaders[at]!, answer.rawHeaders[at + 1]!);
  }
  return pairs;
}

function rawHeaders(answer: IncomingMessage, closing = false): string {
  let text = '';
  for (let at = 0; at < answer.rawHeaders.length; at += 2) {
    const name = answer.rawHeaders[at]!;
    if (closing && OF_ONE_CONNECTION.has(name.toLowerCase())) continue;
    text += `${name}: ${answer.rawHeaders[at + 1]}\r\n`;
  }
  return text;
}

function namedIn({ headers }: IncomingMessage): ReadonlySet<string> {
  return new Set(
    String(headers.connection ?? '')
      .split(',')
      .map((name) => name.trim().toLowerCase()),
  );
}
