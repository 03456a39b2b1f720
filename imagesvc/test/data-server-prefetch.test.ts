/** What a data server fetches ahead, over a store that gives wrong bytes: no reader ever sees them, and nothing else suffers. */
import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  realpathSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import { CHUNK_BYTES, type Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import {
  type DataServer,
  type DataServerPrograms,
  ensureDataServer,
  stopDataServers,
} from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { ReadLog } from '../data-server/read-log.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import { openTree } from '../reader/image-tree.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import type { Trace } from '../trace/trace.ts';
import { keepTrace } from '../trace/trace-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { someBytes } from './store-conformance.ts';

const isRoot = process.getuid?.() === 0;
if (!isRoot) console.log('data server prefetch: skipped: it needs root');

describe.skipIf(!isRoot)('prefetching', { timeout: 180_000 }, () => {
  let root: string;
  let store: BlobStore;
  let image: Image;
  let programs: DataServerPrograms;
  let count = 0;
  let folders: { runDir: string; cacheDir: string };

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-prefetch-')));
    programs = await bundlePrograms(join(root, 'bundle'));
    mkdirSync(join(root, 'tree'));
    for (let i = 0; i < 40; i++) writeFileSync(join(root, 'tree', `f${i}`), someBytes(CHUNK_BYTES, `file ${i}`));
    store = await openStore(`file://${root}/store`);
    await convertToStore(store, `dir:${root}/tree`, 'files:1');
    image = await openImage(store, 'files:1');
  }, 180_000);
  afterAll(async () => {
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  const onNode = async (work: (server: DataServer, target: string) => Promise<void>, problems: string[] = []) => {
    count++;
    folders = { runDir: join(root, `run${count}`), cacheDir: join(root, `cache${count}`) };
    const target = join(root, `mnt${count}`);
    mkdirSync(target);
    try {
      const onTraceProblem = (text: string) => problems.push(text);
      const files = lazyBlobFiles({ store, programs, ...folders, prefetch: [image], onTraceProblem });
      await mountImage({ files, image, target, ...folders });
      await files.handedOver!();
      const server = await ensureDataServer(store.url, { programs, ...folders });
      while (((await server.stats()).prefetching ?? 0) > 0) await delay(20);
      await work(server, target);
    } finally {
      for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
      await stopDataServers({ ...folders, force: true });
    }
  };

  const traceOf = (chunks: readonly number[]): Trace => {
    const { blob } = image.layers[0]!.devices[0]!;
    return {
      image: image.manifestDigest,
      command: [],
      blobs: [{ digest: blob.digest, sizeBytes: blob.size }],
      chunks: chunks.map((chunk, ms) => ({ blob: 0, chunk, ms })),
      files: [],
    };
  };

  it('brings exactly the chunks of the trace, and what is read of them is no fetch', async () => {
    await keepTrace(store, image, 'all', traceOf(Array.from({ length: 40 }, (_, i) => 39 - i)));
    await onNode(async (server, target) => {
      for (let i = 0; i < 40; i++) {
        expect(readFileSync(join(target, `f${i}`)).equals(readFileSync(join(root, 'tree', `f${i}`)))).toBe(true);
      }
      const { cache, transport } = await server.stats();
      expect(cache).toMatchObject({ interactiveReads: 0, prefetchReads: 3, prefetchBytes: 40 * CHUNK_BYTES });
      expect(transport.failures).toBe(0);
      const { digest } = image.layers[0]!.devices[0]!.blob;
      expect((await server.chunks(digest))!.length).toBe(40);
      // Present, read, fetched ahead.
      expect([...(await server.chunks(digest))!].every((byte) => byte === 1 + 2 + 8)).toBe(true);
    });
  });

  it('never serves wrong bytes: the chunk they were for fails alone, and is right once the store is', async () => {
    await keepTrace(store, image, 'all', traceOf(Array.from({ length: 40 }, (_, i) => i)));
    const { digest } = image.layers[0]!.devices[0]!.blob;
    const path = store.localPath(digest)!;
    const whole = readFileSync(path);
    const tree = await openTree(store, image);
    const extent = [...tree.extents(tree.lookup('/f17'))].find(({ device }) => device > 0)!;
    await tree.close();
    const damaged = Buffer.from(whole);
    damaged[extent.offset + 5000]! ^= 1;
    const { mode } = statSync(path);
    chmodSync(path, 0o600);
    writeFileSync(path, damaged);
    try {
      await onNode(async (server, target) => {
        const { cache } = (await server.stats()) as { cache: { mismatches: number; prefetchBytes: number } };
        expect(cache.mismatches).toBeGreaterThan(0);
        const bad = Math.floor(extent.offset / CHUNK_BYTES);
        expect((await server.chunks(digest))![bad]! & 1).toBe(0);
        expect(() => readFileSync(join(target, 'f17'))).toThrow(/EIO/);
        for (let i = 0; i < 40; i++) {
          if (i === 17) continue;
          expect(readFileSync(join(target, `f${i}`)).equals(readFileSync(join(root, 'tree', `f${i}`)))).toBe(true);
        }
        writeFileSync(path, whole);
        expect(readFileSync(join(target, 'f17')).equals(readFileSync(join(root, 'tree', 'f17')))).toBe(true);
      });
    } finally {
      writeFileSync(path, whole);
      chmodSync(path, mode);
    }
  });

  it('a trace that names what is not there is told, and the mount is there all the same', async () => {
    await store.putRecord('trace', `${image.manifestDigest.slice(7)}.${'5'.repeat(64)}.gone`, {});
    const problems: string[] = [];
    await onNode(async (_server, target) => {
      expect(readFileSync(join(target, 'f3')).length).toBe(CHUNK_BYTES);
    }, problems);
    expect(problems).toEqual([expect.stringContaining('gone')]);
    await store.deleteRecord('trace', `${image.manifestDigest.slice(7)}.${'5'.repeat(64)}.gone`);
  });

  it('refuses what is no blob and what are no ranges, and goes on', async () => {
    await onNode(async (server, target) => {
      const { digest } = image.layers[0]!.devices[0]!.blob;
      const none = image.manifestDigest;
      await expect(server.prefetch(none, [])).rejects.toMatchObject({ code: 'DATA_CONTROL' });
      await server.prefetch(digest, [{ offset: -1, length: 5 }]);
      await server.prefetch(digest, [{ offset: 2 ** 52, length: 5 }]);
      await expect(server.recorded()).rejects.toMatchObject({ code: 'DATA_CONTROL' });
      expect(await server.chunks(none)).toBeUndefined();
      expect(readFileSync(join(target, 'f3')).length).toBe(CHUNK_BYTES);
    });
  });
});

it('a read log keeps order, and counts what it has no room for', () => {
  const log = ReadLog.withCapacity(3);
  const other = new ReadLog(log.shared);
  for (let i = 0; i < 5; i++) (i % 2 === 0 ? log : other).add(2, i * 10, 5);
  const { reads, dropped } = other.reads();
  expect(reads.map(({ offset }) => offset)).toEqual([0, 10, 20]);
  expect(dropped).toBe(2);
  const times = reads.map(({ ms }) => ms);
  expect(times).toEqual([...times].sort((a, b) => a - b));
});
