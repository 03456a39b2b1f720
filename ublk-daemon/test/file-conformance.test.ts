/** A disk as a file, and as a loop device over that file, through the suite of every way out. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { afterAll, describe, expect, vi } from 'vitest';
import { listLoops, readMountInfo } from '#linux';
import type { BlockTarget } from '../target/block-target.ts';
import { type FileServer, serveFile } from '../target/file/file-server.ts';
import { type DeviceClient, DeviceClients } from './device-client.ts';
import { run } from './run-command.ts';
import { type Attached, targetConformance, type WayOut } from './target-conformance.ts';

// Programs and processes are started for it, which a busy machine takes its time for.
vi.setConfig({ testTimeout: 300_000, hookTimeout: 300_000 });
const isRoot = process.getuid?.() === 0;
if (!isRoot) console.log('skipped: mounting needs root');

const folder = mkdtempSync(join(tmpdir(), 'dsec-file-'));
const processes = isRoot ? new DeviceClients() : undefined;
afterAll(async () => {
  await processes?.end();
  expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(folder))).toEqual([]);
  expect(listLoops().filter(({ file }) => file.startsWith(folder))).toEqual([]);
  rmSync(folder, { recursive: true, force: true });
});

function file(loop: boolean): WayOut {
  const servers = new Map<BlockTarget, FileServer>();
  const clients = new Set<DeviceClient>();
  let count = 0;
  return {
    name: loop ? 'a loop device over the file' : 'a file',
    exact: false,
    async attach(target) {
      let server = servers.get(target);
      if (server === undefined) {
        server = await serveFile({ target, path: join(folder, `${loop ? 'loop' : 'file'}-${count++}`), loop });
        servers.set(target, server);
      }
      const path = server.loop ?? server.path;
      const client = await processes!.open(path, target.readOnly);
      clients.add(client);
      const range = (offset: number, length: number) => ['-o', String(offset), '-l', String(length), path];
      const queue = (name: string) => Number(readFileSync(`/sys/block/${basename(path)}/${name}`, 'latin1'));
      const attached: Attached = {
        sizeBytes: loop ? queue('size') * 512 : (await stat(path)).size,
        // A file has none.
        blockSize: loop ? queue('queue/logical_block_size') : target.blockSize,
        read: (offset, length) => client.read(offset, length),
        write: (offset, data, options) => client.write(offset, data, options),
        flush: () => client.flush(),
        discard: async (offset, length) =>
          void (await (loop
            ? run('blkdiscard', ...range(offset, length))
            : run('fallocate', '-p', ...range(offset, length)))),
        writeZeroes: async (offset, length) =>
          void (await (loop
            ? run('blkdiscard', '-z', ...range(offset, length))
            : run('fallocate', '-z', '-n', ...range(offset, length)))),
        async detach() {
          clients.delete(client);
          await client.close();
        },
      };
      return attached;
    },
    async stop() {
      for (const client of clients) await client.close();
      clients.clear();
      await Promise.all([...servers.values()].map((server) => server.stop()));
      servers.clear();
    },
  };
}

describe.skipIf(!isRoot)('the file', () => {
  targetConformance(file(false));
});
describe.skipIf(!isRoot)('the loop device', () => {
  targetConformance(file(true));
});
