/**
 * Ports of a sandbox through the runtime service, whatever network the sandbox has:
 *
 *     /v1/sandboxes/NAME/ports/PORT/PATH   any HTTP request, and any upgrade (WebSocket), goes to the service as if it had come to PATH
 *     /v1/sandboxes/NAME/ports/PORT        upgraded to "dsec-tcp": from then on bytes, both ways; or to a WebSocket with bytes in its messages, for browsers
 *
 * Requests and answers are passed on as they come, neither kept nor looked into but for what concerns one connection alone (RFC 9110, 7.6.1).
 */
import { request as httpRequest, type IncomingHttpHeaders, type IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { fail } from '../errors.ts';
import { join, TCP_PROTOCOL } from './port-streams.ts';
import { errorOf, ONE_SANDBOX, type Sandboxes } from './route.ts';
import { joinWebSocket, WEBSOCKET } from './web-socket-port.ts';

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

export interface PortRouteOptions {
  /** Throws what is to be the answer to an upgrade: those are no requests of the app. */
  readonly authorize?: (request: IncomingMessage) => void;
  /** Headers between whoever asks and us, such as tokens, in small letters: what listens in a sandbox does not get them. */
  readonly hidden?: ReadonlySet<string>;
}

export async function portRoutes(
  app: FastifyInstance,
  node: Pick<Sandboxes, 'get'>,
  { authorize, hidden = new Set() }: PortRouteOptions = {},
): Promise<void> {
  const upgraded = new Set<Duplex>();
  app.server.on('upgrade', (request: IncomingMessage, socket: Duplex, head: Buffer) => {
    // Of a server that has an `upgrade` listener each such request is its own.
    upgraded.add(socket);
    socket.once('close', () => upgraded.delete(socket));
    socket.on('error', () => {});
    const upgrading = async () => {
      authorize?.(request);
      await upgrade(node, request, socket, head, hidden);
    };
    upgrading().catch((error: unknown) => refuse(socket, error));
  });
  // They are no connections of the server any more.
  app.addHook('preClose', async () => {
    for (const socket of upgraded) socket.destroy();
  });
  await app.register(async (scope) => {
    // The body is the service's.
    scope.removeAllContentTypeParsers();
    scope.addContentTypeParser('*', (_request, payload, done) => done(null, payload));
    const schema = { hide: true };
    scope.all(`${ONE_SANDBOX}/ports/:port/*`, { schema }, (request, reply) => pass(node, request, reply, hidden));
  });
}

async function pass(
  node: Pick<Sandboxes, 'get'>,
  request: FastifyRequest,
  reply: FastifyReply,
  hidden: ReadonlySet<string>,
): Promise<unknown> {
  const { sandbox, port, path } = targetOf(request.raw.url);
  const connection = await node.get(sandbox).connect(port);
  const gone = () => connection.destroy();
  reply.raw.once('close', gone);
  return new Promise((resolve, reject) => {
    const passed = httpRequest({
      createConnection: () => connection,
      method: request.raw.method,
      path,
      headers: { ...without(hidden, endToEnd(request.raw.headers)), host: `127.0.0.1:${port}`, connection: 'close' },
    });
    passed.once('error', (error) => {
      const problem = fail('SANDBOX_PORT_ANSWER', { port, name: sandbox, reason: error.message });
      // Part of an answer was given already: all that is left is to cut it short.
      if (reply.raw.headersSent) reply.raw.destroy();
      else reject(problem);
    });
    passed.once('response', (answer) => {
      reply.hijack();
      reply.raw.writeHead(answer.statusCode ?? 502, answer.statusMessage, withoutOwn(answer));
      answer.pipe(reply.raw);
      answer.once('error', () => reply.raw.destroy());
      answer.once('close', () => {
        if (!answer.complete) reply.raw.destroy();
        resolve(reply);
      });
    });
    request.raw.pipe(passed);
    request.raw.once('close', () => {
      if (!request.raw.complete) gone();
    });
  });
}

async function upgrade(
  node: Pick<Sandboxes, 'get'>,
  request: IncomingMessage,
  socket: Duplex,
  head: Buffer,
  hidden: ReadonlySet<string>,
): Promise<void> {
  const { sandbox, port, path, isRaw } = targetOf(request.url);
  const protocol = String(request.headers.upgrade).toLowerCase();
  if (isRaw && protocol !== TCP_PROTOCOL && protocol !== WEBSOCKET) {
    const problem = `a port itself is upgraded to ${TCP_PROTOCOL} or ${WEBSOCKET}, not to ${protocol}`;
    throw fail('SANDBOX_BAD_REQUEST', { problem });
  }
  const connection = await node.get(sandbox).connect(port);
  if (socket.destroyed) {
    connection.destroy();
    return;
  }
  if (isRaw && protocol === WEBSOCKET) return joinWebSocket(request, socket, head, connection);
  if (isRaw) {
    socket.write(`HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: ${TCP_PROTOCOL}\r\n\r\n`);
  } else {
    // Names and values as they came, in their order.
    const lines = [`${request.method} ${path} HTTP/1.1`, `Host: 127.0.0.1:${port}`];
    for (let at = 0; at < request.rawHeaders.length; at += 2) {
      const name = request.rawHeaders[at]!;
      const key = name.toLowerCase();
      if (key !== 'host' && !hidden.has(key)) lines.push(`${name}: ${request.rawHeaders[at + 1]}`);
    }
    connection.write(Buffer.from(`${lines.join('\r\n')}\r\n\r\n`, 'latin1'));
  }
  if (head.length > 0) connection.write(head);
  join(socket, connection);
}

const TARGET = /^\/v1\/sandboxes\/([^/?]+)\/ports\/(\d{1,5})(\/[^?]*)?(\?.*)?$/;

/** @throws SANDBOX_BAD_REQUEST */
function targetOf(url: string | undefined) {
  const [, name = '', digits = '', path, query = ''] = TARGET.exec(url ?? '') ?? [];
  const port = Number(digits);
  if (name === '' || port < 1 || port > 65_535) {
    throw fail('SANDBOX_BAD_REQUEST', {
      problem: 'it is no /v1/sandboxes/NAME/ports/PORT/PATH with a port from 1 to 65535',
    });
  }
  return { sandbox: decoded(name), port, path: `${path ?? '/'}${query}`, isRaw: path === undefined };
}

function decoded(name: string): string {
  try {
    return decodeURIComponent(name);
  } catch {
    throw fail('SANDBOX_BAD_REQUEST', { problem: `${name} is no name` });
  }
}

function endToEnd(headers: IncomingHttpHeaders): IncomingHttpHeaders {
  const named = String(headers.connection ?? '')
    .split(',')
    .map((name) => name.trim().toLowerCase());
  return Object.fromEntries(
    Object.entries(headers).filter(([name]) => !OF_ONE_CONNECTION.has(name) && !named.includes(name)),
  );
}

function without(hidden: ReadonlySet<string>, headers: IncomingHttpHeaders): IncomingHttpHeaders {
  return Object.fromEntries(Object.entries(headers).filter(([name]) => !hidden.has(name)));
}

/** Several of one name stay several. */
function withoutOwn(answer: IncomingMessage): string[] {
  const kept = endToEnd(answer.headers);
  const pairs: string[] = [];
  for (let at = 0; at < answer.rawHeaders.length; at += 2) {
    if (answer.rawHeaders[at]!.toLowerCase() in kept) pairs.push(answer.rawHeaders[at]!, answer.rawHeaders[at + 1]!);
  }
  return pairs;
}

function refuse(socket: Duplex, thrown: unknown): void {
  const { code, message, hint, retryable, exit, http } = errorOf(thrown);
  const body = JSON.stringify({ error: { code, message, hint, retryable, exit } });
  socket.end(
    `HTTP/1.1 ${http} ${code}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`,
  );
}
