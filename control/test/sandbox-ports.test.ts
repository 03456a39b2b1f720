/** Ports of sandboxes over HTTP and by `dsec sandbox port`, with a service of this machine in place of one inside a sandbox. */
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { createServer as httpServer, type IncomingMessage, request } from 'node:http';
import { type AddressInfo, connect, createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { text } from 'node:stream/consumers';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { DsecError } from '#base';
import { runtimeErrors, type SandboxNode } from '#runtime';
import type { Cleanup, Context } from '../cli/context.ts';
import { runCommandLine } from '../cli/main.ts';
import { Output } from '../cli/output.ts';
import { openPort } from '../runtime-service/port-client.ts';
import { sandboxSocket } from '../runtime-service/sandbox-client.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';

const closers: (() => unknown)[] = [];
let folder: string;
let socketPath: string;
let open: Socket[];
const saved = process.env.DSEC_RUN;

beforeEach(async () => {
  folder = fs.mkdtempSync(join(tmpdir(), 'dsec-ports-'));
  process.env.DSEC_RUN = folder;
  socketPath = sandboxSocket(folder);
  open = [];
  const sandbox = {
    name: 'box',
    state: 'running',
    facts: {},
    network: { view: () => undefined },
    connect: async (port: number) => {
      const socket = connect({ host: '127.0.0.1', port, allowHalfOpen: true });
      open.push(socket);
      socket.on('error', () => {});
      try {
        await once(socket, 'connect');
      } catch {
        throw new DsecError('RUNTIME_PORT_CLOSED', runtimeErrors.RUNTIME_PORT_CLOSED, {
          name: 'box',
          port,
          reason: 'no',
        });
      }
      return socket;
    },
  };
  const get = (name: string) => {
    if (name === 'box') return sandbox;
    throw new DsecError('RUNTIME_SANDBOX_NOT_FOUND', runtimeErrors.RUNTIME_SANDBOX_NOT_FOUND, { name });
  };
  const app = await sandboxApp({ get } as unknown as SandboxNode);
  await app.listen({ path: socketPath });
  closers.push(() => app.close());
});

afterEach(async () => {
  for (const close of closers.splice(0).reverse()) await close();
  if (saved === undefined) delete process.env.DSEC_RUN;
  else process.env.DSEC_RUN = saved;
  fs.rmSync(folder, { recursive: true, force: true });
});

async function listening(server: Server): Promise<number> {
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const sockets = new Set<Socket>();
  server.on('connection', (socket: Socket) => sockets.add(socket));
  closers.push(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return (server.address() as AddressInfo).port;
}

const echo = () =>
  listening(
    createServer({ allowHalfOpen: true }, (socket) => {
      socket.on('error', () => {});
      socket.pipe(socket);
    }),
  );

interface Answer {
  readonly status: number | undefined;
  readonly headers: IncomingMessage['headers'];
  readonly raw: readonly string[];
  readonly body: Buffer;
}

function ask(method: string, path: string, headers: object = {}, body?: Buffer | string): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const sent = request({ socketPath, method, path, headers: headers as Record<string, string> }, async (answer) => {
      const parts: Buffer[] = [];
      try {
        for await (const bytes of answer) parts.push(bytes as Buffer);
        const { statusCode: status, headers: got, rawHeaders: raw } = answer;
        resolve({ status, headers: got, raw, body: Buffer.concat(parts) });
      } catch (error) {
        reject(error);
      }
    });
    sent.once('error', reject);
    sent.end(body);
  });
}

describe('ports of a sandbox over HTTP', { timeout: 60_000 }, () => {
  it('pass requests and answers on as they are', async () => {
    const seen: { method?: string; url?: string; headers: IncomingMessage['headers']; body: Buffer }[] = [];
    const port = await listening(
      httpServer(async (incoming, answer) => {
        const parts: Buffer[] = [];
        for await (const bytes of incoming) parts.push(bytes as Buffer);
        const { method, url, headers } = incoming;
        seen.push({ method, url, headers, body: Buffer.concat(parts) });
        answer.writeHead(207, 'Fine', [
          ['Set-Cookie', 'a=1'],
          ['Set-Cookie', 'b=2'],
          ['X-Own', 'yes'],
          ['Connection', 'X-Hop'],
          ['X-Hop', 'no'],
        ]);
        answer.end(Buffer.concat(parts));
      }),
    );
    const body = randomBytes(300_000);
    const headers = { 'content-type': 'application/json', 'x-mine': 'kept', 'transfer-encoding': 'chunked', te: 'x' };
    const answer = await ask('PUT', `/v1/sandboxes/box/ports/${port}/a%2Fb/../c?x=1&y=%20`, headers, body);
    expect([answer.status, answer.headers['set-cookie'], answer.headers['x-own'], answer.headers['x-hop']]).toEqual([
      207,
      ['a=1', 'b=2'],
      'yes',
      undefined,
    ]);
    expect(answer.body.equals(body)).toBe(true);
    expect(seen[0]).toMatchObject({
      method: 'PUT',
      url: '/a%2Fb/../c?x=1&y=%20',
      headers: { host: `127.0.0.1:${port}`, 'x-mine': 'kept', 'content-type': 'application/json' },
    });
    expect(seen[0]!.headers.te).toBeUndefined();
    expect(seen[0]!.body.equals(body)).toBe(true);
    const head = await ask('HEAD', `/v1/sandboxes/box/ports/${port}/`);
    expect([head.status, head.body.length]).toEqual([207, 0]);
    expect((await ask('DELETE', `/v1/sandboxes/box/ports/${port}/x`)).status).toBe(207);
  });

  it('say what is wrong: no such sandbox, no such port, no HTTP, an answer that is cut short', async () => {
    const closed = await listening(createServer());
    const garbled = await listening(createServer((socket) => void socket.end('SSH-2.0-nothing\r\n')));
    const short = await listening(
      createServer((socket) => {
        socket.once('data', () => {
          socket.write('HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this');
          setTimeout(() => socket.destroy(), 50);
        });
      }),
    );
    const codes = async (path: string) => {
      const { status, body } = await ask('GET', path);
      return [status, (JSON.parse(String(body)) as { error: { code: string } }).error.code];
    };
    expect(await codes(`/v1/sandboxes/other/ports/${closed}/`)).toEqual([404, 'RUNTIME_SANDBOX_NOT_FOUND']);
    expect(await codes('/v1/sandboxes/box/ports/1/')).toEqual([502, 'RUNTIME_PORT_CLOSED']);
    expect(await codes('/v1/sandboxes/box/ports/0/')).toEqual([400, 'SANDBOX_BAD_REQUEST']);
    expect(await codes('/v1/sandboxes/box/ports/70000/x')).toEqual([400, 'SANDBOX_BAD_REQUEST']);
    expect(await codes(`/v1/sandboxes/box/ports/${garbled}/`)).toEqual([502, 'SANDBOX_PORT_ANSWER']);
    await expect(ask('GET', `/v1/sandboxes/box/ports/${short}/`)).rejects.toThrow(/aborted|hang up|reset/);
  });

  it('end inside when the client goes', async () => {
    const port = await listening(httpServer(() => {}));
    const sent = request({ socketPath, path: `/v1/sandboxes/box/ports/${port}/slow` });
    sent.on('error', () => {});
    sent.end();
    while (open.length === 0) await new Promise((go) => setTimeout(go, 5));
    await new Promise((go) => setTimeout(go, 100));
    sent.destroy();
    if (!open[0]!.destroyed) await once(open[0]!, 'close');
    expect(open[0]!.destroyed).toBe(true);
  });

  it('upgrade: what is said is what the service says, whatever protocol it is', async () => {
    const server = httpServer((_, answer) => answer.writeHead(418).end('no upgrade'));
    server.on('upgrade', (incoming: IncomingMessage, socket: Socket, head: Buffer) => {
      const key = String(incoming.headers['sec-websocket-key']);
      const accept = createHash('sha1').update(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest('base64');
      socket.write(
        `HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: ${accept}\r\nX-Url: ${incoming.url}\r\n\r\n`,
      );
      socket.write(head);
      socket.pipe(socket);
    });
    const port = await listening(server);
    const headers = {
      connection: 'Upgrade',
      upgrade: 'websocket',
      'sec-websocket-version': '13',
      'sec-websocket-key': 'dGhlIHNhbXBsZSBub25jZQ==',
    };
    const sent = request({ socketPath, path: `/v1/sandboxes/box/ports/${port}/chat?room=1`, headers });
    sent.end();
    const [answer, socket] = (await once(sent, 'upgrade')) as [IncomingMessage, Socket];
    expect([answer.headers['sec-websocket-accept'], answer.headers['x-url']]).toEqual([
      's3pPLMBiTxaQ9kYGzzhZRbK+xOo=',
      '/chat?room=1',
    ]);
    const bytes = randomBytes(500_000);
    const parts: Buffer[] = [];
    socket.on('data', (part: Buffer) => parts.push(part));
    socket.end(bytes);
    await once(socket, 'end');
    expect(Buffer.concat(parts).equals(bytes)).toBe(true);
  });

  it('of no HTTP at all: bytes both ways, each way ending by itself', async () => {
    const port = await echo();
    const connection = await openPort('box', port);
    const bytes = randomBytes(2 << 20);
    const parts: Buffer[] = [];
    connection.on('data', (part: Buffer) => parts.push(part));
    connection.end(bytes);
    await once(connection, 'end');
    expect(Buffer.concat(parts).equals(bytes)).toBe(true);
    await expect(openPort('box', 1)).rejects.toMatchObject({ code: 'RUNTIME_PORT_CLOSED' });
    await expect(openPort('other', port)).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_NOT_FOUND' });
    await expect(openPort('box', port, '/nowhere/at/all')).rejects.toMatchObject({ code: 'SANDBOX_NO_SERVICE' });
  });

  it('by the command: a port here for each of them', async () => {
    const port = await echo();
    const run = start('sandbox', 'port', 'box', `:${port}`, `0:${port}`, '--json');
    const view = JSON.parse(await run.line()) as { address: string; port: number; inside: number }[];
    expect(view.map(({ address, inside }) => [address, inside])).toEqual([
      ['127.0.0.1', port],
      ['127.0.0.1', port],
    ]);
    const answers = await Promise.all(
      Array.from({ length: 20 }, async (_, n) => {
        const socket = connect({ host: '127.0.0.1', port: view[n % 2]!.port, allowHalfOpen: true });
        socket.end(`number ${n}`);
        return text(socket);
      }),
    );
    expect(answers).toEqual(Array.from({ length: 20 }, (_, n) => `number ${n}`));
    run.stop();
    await run.ended;
    await expect(once(connect(view[0]!.port, '127.0.0.1'), 'connect')).rejects.toMatchObject({ code: 'ECONNREFUSED' });
  });

  it('by the command: what cannot be', async () => {
    const taken = await echo();
    await expect(start('sandbox', 'port', 'other', '80').ended).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_NOT_FOUND',
    });
    await expect(start('sandbox', 'port', 'box', `${taken}:80`).ended).rejects.toMatchObject({
      code: 'SANDBOX_PORT_LISTEN',
    });
    for (const wrong of ['x', '80:', '0', '70000', '1:2:3', '-1']) {
      await expect(start('sandbox', 'port', 'box', '--', wrong).ended).rejects.toMatchObject({ code: 'CLI_USAGE' });
    }
    const run = start('sandbox', 'port', 'box', ':1');
    const port = Number(/:(\d+) -> box:1/.exec(await run.line())![1]);
    const socket = connect(port, '127.0.0.1');
    const error: unknown = await once(socket, 'data').catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'ECONNRESET' });
    expect(await run.note()).toMatch(/port 1 of sandbox box cannot be reached/);
    run.stop();
    await run.ended;
  });
});

/** A command that runs until it is told to stop. */
function start(...argv: string[]) {
  const [stdout, stderr] = [new PassThrough(), new PassThrough()];
  const cleanups: Cleanup[] = [];
  const stopping = new AbortController();
  const context: Context = {
    signal: stopping.signal,
    output: new Output(stdout, stderr, () => {}),
    progress: () => {},
    defer: (cleanup) => cleanups.push(cleanup),
    takeSignals: () => {},
    exitCode: 0,
  };
  const ended = runCommandLine(argv, context).finally(async () => {
    for (const cleanup of cleanups.reverse()) await cleanup();
  });
  ended.catch(() => {});
  closers.push(() => stopping.abort());
  const first = async (stream: PassThrough) => String(((await once(stream, 'data')) as [Buffer])[0]);
  return { ended, stop: () => stopping.abort(), line: () => first(stdout), note: () => first(stderr) };
}
