/** Both transports, held to the same tests: what they show of blobs, and that every byte of every read is right. */
import { execFile } from 'node:child_process';
import { mkdirSync, mkdtempSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { open, readdir, readFile, stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { digestFromHex, digestOf, hexOf } from '#base';
import { umount } from '#linux';
import { nativeUnavailable, serveNative } from '../data-server/native-transport.ts';
import { connectFuse, serveRaw } from '../data-server/raw-transport.ts';
import type { ServedBlob } from '../data-server/served-blob.ts';
import type { Transport, TransportOptions } from '../data-server/transport.ts';
import { noise } from './made-up-image.ts';

const run = promisify(execFile);
const READER = fileURLToPath(new URL('./fuse-reader.mjs', import.meta.url));
const isRoot = process.getuid?.() === 0;
const noNative = isRoot ? nativeUnavailable() : 'needs root';
if (noNative !== undefined) console.log(`fuse-native: skipped: ${noNative}`);

const MIB = 1024 * 1024;

interface Served {
  readonly transport: Transport;
  close(): Promise<void>;
}

const KINDS: readonly {
  kind: 'raw' | 'native';
  largest: number;
  serve(mountPoint: string, options: TransportOptions): Promise<Served>;
}[] = [
  {
    kind: 'raw',
    largest: MIB,
    async serve(mountPoint, options) {
      const { fd } = connectFuse(mountPoint, 'dsec-test');
      const transport = serveRaw({ ...options, fd, threads: 2 });
      return {
        transport,
        async close() {
          umount(mountPoint);
          await transport.ended;
        },
      };
    },
  },
  {
    kind: 'native',
    largest: 128 * 1024,
    async serve(mountPoint, options) {
      const transport = await serveNative({ ...options, mountPoint });
      return { transport, close: () => transport.unmount() };
    },
  },
];

for (const { kind, largest, serve } of KINDS) {
  describe.skipIf(!isRoot || (kind === 'native' && noNative !== undefined))(`the ${kind} transport`, () => {
    let root: string;
    let mountPoint: string;
    let served: Served;
    const files = new Map<string, string>();
    const blobs: ServedBlob[] = [];
    let fetches = 0;
    let failing = false;

    const makeBlob = (name: string, sizeBytes: number, view: 'file' | 'none'): ServedBlob => {
      const path = join(root, name);
      const bytes = noise(name, sizeBytes);
      writeFileSync(path, bytes);
      const digest = digestOf(bytes);
      files.set(hexOf(digest), path);
      return {
        digest,
        sizeBytes,
        node: 2 + blobs.length,
        view: view === 'file' ? { kind: 'file', path } : { kind: 'none' },
      };
    };

    const read = async (blob: ServedBlob, order: Record<string, unknown>) => {
      const name = hexOf(blob.digest);
      const argument = JSON.stringify({ path: join(mountPoint, name), expected: files.get(name), ...order });
      const { stdout } = await run(process.execPath, [READER, argument]);
      return JSON.parse(stdout) as { reads: number; bytes: number; wrong: number; errors: string[] };
    };

    beforeAll(async () => {
      root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-fuse-')));
      mountPoint = join(root, 'mnt');
      mkdirSync(mountPoint);
      for (const [name, size, view] of [
        ['warm', 8 * MIB + 123, 'file'],
        ['cold', 5 * MIB + 4097, 'none'],
        ['tiny', 5, 'file'],
        ['empty', 0, 'none'],
      ] as const) {
        blobs.push(makeBlob(name, size, view));
      }
      served = await serve(mountPoint, {
        blobs,
        reader: {
          async read(blob, offset, length) {
            fetches++;
            if (failing) throw new Error('the store is away');
            const file = await open(files.get(hexOf(blob.digest))!);
            try {
              const { buffer } = await file.read(Buffer.alloc(length), 0, length, offset);
              return buffer;
            } finally {
              await file.close();
            }
          },
        },
      });
    });

    afterAll(async () => {
      await served?.close();
      rmSync(root, { recursive: true, force: true });
    });

    // Whoever is handed one, as the user of a jail, may read it: the folder above is root’s alone.
    it('lists the blobs by their digits, as read-only files with their sizes', async () => {
      expect(await readdir(mountPoint)).toEqual(expect.arrayContaining(blobs.map((blob) => hexOf(blob.digest))));
      for (const blob of blobs) {
        const found = await stat(join(mountPoint, hexOf(blob.digest)));
        expect(found.isFile()).toBe(true);
        expect(found.mode & 0o7777).toBe(0o444);
        expect(found.size).toBe(blob.sizeBytes);
      }
      expect((await stat(mountPoint)).isDirectory()).toBe(true);
    });

    it('knows no other name', async () => {
      for (const name of ['f'.repeat(64), 'x', 'n'.repeat(255)]) {
        await expect(stat(join(mountPoint, name))).rejects.toMatchObject({ code: 'ENOENT' });
      }
      const inside = join(mountPoint, hexOf(blobs[0]!.digest), 'x');
      await expect(stat(inside)).rejects.toMatchObject({ code: 'ENOTDIR' });
    });

    it('is read-only', async () => {
      const path = join(mountPoint, hexOf(blobs[0]!.digest));
      const written = open(path, 'r+').then(async (file) => {
        try {
          await file.write('x', 0);
        } finally {
          await file.close();
        }
      });
      await expect(written).rejects.toThrow();
      await expect(open(join(mountPoint, 'new'), 'w')).rejects.toThrow();
    });

    for (const direct of [false, true]) {
      const how = direct ? 'around the page cache' : 'through the page cache';
      it(`gives every byte, in order, ${how}`, async () => {
        for (const blob of blobs) {
          const block = direct ? MIB : 65536;
          const result = await read(blob, { mode: 'sequential', block, direct });
          expect(result).toMatchObject({ bytes: blob.sizeBytes, wrong: 0, errors: [] });
        }
      });

      it(`gives every byte, at random, from several readers at once, ${how}`, async () => {
        const orders = [0, 1, 2, 3].map((k) =>
          read(blobs[k % 2]!, { mode: 'random', block: k < 2 ? 4096 : 262144, count: 60, seed: k, direct }),
        );
        for (const result of await Promise.all(orders))
          expect(result).toMatchObject({ reads: 60, wrong: 0, errors: [] });
      });
    }

    it('reads nothing beyond the end', async () => {
      for (const direct of [false, true]) {
        const result = await read(blobs[0]!, { mode: 'beyond', block: 4096, direct });
        expect(result).toMatchObject({ bytes: 0, wrong: 0, errors: [] });
      }
    });

    it('takes requests as large as the transport says', async () => {
      await read(blobs[0]!, { mode: 'sequential', block: 4 * MIB, direct: true });
      expect(served.transport.stats().largestReadBytes).toBe(largest);
    });

    it('answers what is there without asking the reader', async () => {
      const before = fetches;
      await read(blobs[0]!, { mode: 'random', block: 4096, count: 50, direct: true });
      expect(fetches).toBe(before);
      await read(blobs[1]!, { mode: 'random', block: 4096, count: 5, direct: true });
      expect(fetches).toBe(before + 5);
    });

    it('shows a blob that is added while it runs, at once', async () => {
      for (let i = 0; i < 10; i++) {
        const blob = makeBlob(`added-${i}`, 100_000 + i, i % 2 === 0 ? 'file' : 'none');
        const path = join(mountPoint, hexOf(blob.digest));
        await expect(stat(path)).rejects.toMatchObject({ code: 'ENOENT' });
        served.transport.add(blob);
        blobs.push(blob);
        expect(digestOf(await readFile(path))).toBe(blob.digest);
      }
      expect((await readdir(mountPoint)).length).toBe(blobs.length);
    });

    it('turns a failed fetch into an error, never into bytes, and recovers', async () => {
      failing = true;
      const failed = await read(blobs[1]!, { mode: 'random', block: 4096, count: 3, direct: true });
      failing = false;
      expect(failed).toMatchObject({ reads: 0, bytes: 0, wrong: 0, errors: ['EIO', 'EIO', 'EIO'] });
      const later = await read(blobs[1]!, { mode: 'random', block: 4096, count: 3, direct: true });
      expect(later).toMatchObject({ reads: 3, wrong: 0, errors: [] });
      expect(served.transport.stats().failures).toBe(3);
    });

    it('lists thousands of blobs', async () => {
      for (let i = 0; i < 3000; i++) {
        const digest = digestFromHex(i.toString(16).padStart(64, '0'));
        served.transport.add({ digest, sizeBytes: i, node: 2 + blobs.length + i, view: { kind: 'none' } });
      }
      expect(new Set(await readdir(mountPoint)).size).toBe(blobs.length + 3000);
    });
  });
}
