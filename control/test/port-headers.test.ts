/** What listens in a sandbox is not shown what is between the services of a cluster, by requests and by upgrades. */
import { connect, createServer, type Server } from 'node:net';
import { type FastifyInstance, fastify } from 'fastify';
import { afterAll, beforeAll, expect, it } from 'vitest';
import type { NodeSandbox } from '#runtime';
import { portRoutes } from '../runtime-service/port-routes.ts';

let app: FastifyInstance;
let inside: Server;
let heard = '';

beforeAll(async () => {
  inside = createServer((socket) => {
    socket.on('error', () => {});
    socket.on('data', (bytes) => {
      heard += bytes;
      if (heard.endsWith('\r\n\r\n')) socket.end('HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok');
    });
  });
  await new Promise<void>((done) => inside.listen(0, '127.0.0.1', done));
  const address = inside.address() as { port: number };
  app = fastify({ forceCloseConnections: true });
  const sandbox = { connect: async () => connect(address.port, '127.0.0.1') } as unknown as NodeSandbox;
  const hidden = new Set(['authorization', 'x-dsec-sandbox']);
  await portRoutes(app, { get: () => sandbox }, { hidden });
  await app.listen({ port: 0, host: '127.0.0.1' });
});
afterAll(async () => {
  await app.close();
  await new Promise((done) => inside.close(done));
});

async function ask(extra: string): Promise<string> {
  heard = '';
  const { port } = app.server.address() as { port: number };
  const head =
    'GET /v1/sandboxes/one/ports/80/path HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nAUTHORIZATION: Bearer second\r\nX-Dsec-Sandbox: id\r\nX-Mine: 1\r\n';
  await new Promise<void>((done) => {
    const socket = connect(port, '127.0.0.1');
    socket.on('data', () => {});
    socket.once('close', () => done());
    socket.write(`${head}${extra}\r\n`);
  });
  return heard.toLowerCase();
}

it.each(['Connection: close\r\n', 'Connection: Upgrade\r\nUpgrade: websocket\r\n'])('%j', async (extra) => {
  const told = await ask(extra);
  expect(told).toMatch(/^get \/path http\/1.1\r\n/);
  expect(told).toContain('x-mine: 1');
  expect(told).not.toMatch(/secret|second|x-dsec/);
});
