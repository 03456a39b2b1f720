/** NBD through the suite of every way out, over both kinds of socket and both kinds of replies. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe } from 'vitest';
import type { BlockTarget } from '../target/block-target.ts';
import { COMMAND, COMMAND_FLAG } from '../target/nbd/protocol.ts';
import { type NbdServer, serveNbd } from '../target/nbd/server.ts';
import { NbdClient } from './nbd-client.ts';
import { type Attached, targetConformance, type WayOut } from './target-conformance.ts';

const folder = mkdtempSync(join(tmpdir(), 'dsec-nbd-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function nbd(name: string, listen: (count: number) => string, structured: boolean): WayOut {
  const servers = new Map<BlockTarget, NbdServer>();
  let count = 0;
  return {
    name,
    exact: true,
    async attach(target) {
      let server = servers.get(target);
      if (server === undefined) {
        server = await serveNbd({ listen: listen(count++), exports: [{ name: '', target }] });
        servers.set(target, server);
      }
      return attached(await NbdClient.open(server.address, { structured }));
    },
    async stop() {
      await Promise.all([...servers.values()].map((server) => server.close()));
      servers.clear();
    },
  };
}

function attached(client: NbdClient): Attached {
  return {
    sizeBytes: client.sizeBytes,
    blockSize: client.blockSize.minimum,
    read: (offset, length) => client.read(offset, length),
    write: (offset, data, options) => client.write(offset, data, options?.fua ? COMMAND_FLAG.FUA : 0),
    flush: () => client.flush(),
    discard: async (offset, length) => void (await client.request(COMMAND.TRIM, offset, length)),
    writeZeroes: async (offset, length) => void (await client.request(COMMAND.WRITE_ZEROES, offset, length)),
    detach: () => client.disconnect(),
  };
}

describe('over a unix socket', () => {
  targetConformance(nbd('NBD, unix socket, structured replies', (count) => `unix:${folder}/${count}.sock`, true));
});
describe('over TCP', () => {
  targetConformance(nbd('NBD, TCP, simple replies', () => 'tcp:127.0.0.1:0', false));
});
