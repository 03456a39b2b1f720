/** The client of a service: connections that it has kept, and that the service closes meanwhile. */
import { createReadStream, mkdtempSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import type { Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { SandboxClient } from '../runtime-service/sandbox-client.ts';

describe('a client that keeps connections', () => {
  let folder: string;
  let server: Server;
  const open = new Set<Socket>();
  let seen = 0;
  beforeEach(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-client-'));
    server = createServer((request, response) => {
      seen++;
      request.resume().once('end', () => response.setHeader('content-type', 'application/json').end('[]'));
    });
    server.on('connection', (socket) => open.add(socket));
    await new Promise<void>((resolve) => server.listen(join(folder, 'socket'), resolve));
  });
  afterEach(() => {
    server.close();
    for (const socket of open) socket.destroy();
    rmSync(folder, { recursive: true });
  });

  it('asks once more when one was closed before it was used again, and only then', async () => {
    const client = new SandboxClient(join(folder, 'socket'));
    for (let i = 0; i < 20; i++) {
      await Promise.all([client.list(), client.list()]);
      // It has not heard of that when it asks.
      for (const socket of open) socket.destroy();
      open.clear();
    }
    expect(seen).toBe(40);
    server.close();
    await expect(client.list()).rejects.toMatchObject({ code: expect.stringMatching(/^S/) });
  });

  it('tells a file that cannot be read from a service that is away', async () => {
    const client = new SandboxClient(join(folder, 'socket'));
    const path = join(folder, 'none');
    await expect(client.write('x', '/to', createReadStream(path))).rejects.toMatchObject({ code: 'ENOENT', path });
  });
});
