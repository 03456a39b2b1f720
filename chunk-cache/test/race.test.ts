/** What happens in the moment between a reader's look at a chunk's state and its read of the file: the file system call is that moment. */
import { statSync } from 'node:fs';
import { expect, it, vi } from 'vitest';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES, chunkCount, sha256 } from '../chunk.ts';
import { ChunkStates, COLD, VERIFIED } from '../chunk-states.ts';
import { ChunkView } from '../chunk-view.ts';
import type { DiskBlob } from '../disk-blob.ts';
import { DiskKeeper } from '../disk-keeper.ts';
import { DiskLevel } from '../disk-level.ts';
import { EvictionPolicy } from '../eviction.ts';
import { Counters } from '../stats.ts';
import { MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

let during: (() => void) | undefined;
let failWrite: Error | undefined;
vi.mock('node:fs', async (original) => {
  const fs = await original<typeof import('node:fs')>();
  const once = () => {
    const work = during;
    during = undefined;
    work?.();
  };
  const custom = Symbol.for('nodejs.util.promisify.custom');
  return {
    ...fs,
    write: Object.assign(() => {}, {
      [custom]: async (...args: [number, Buffer, number, number, number]) => {
        const bytesWritten = fs.writeSync(...args);
        const error = failWrite;
        failWrite = undefined;
        if (error !== undefined) throw error;
        return { bytesWritten, buffer: args[1] };
      },
    }),
    readSync: (...args: Parameters<typeof fs.readSync>) => {
      once();
      return fs.readSync(...args);
    },
    read: Object.assign(() => {}, {
      [custom]: async (...args: [number, Buffer, number, number, number]) => {
        once();
        return { bytesRead: fs.readSync(...args), buffer: args[1] };
      },
    }),
  };
});

const blob = makeBlob(4 * CHUNK_BYTES);

async function openRead() {
  const source = new MadeUpSource(blob);
  const cache = await openChunkCache({ folder: temporaryFolder(), source, memoryBytes: CHUNK_BYTES, ...ROOMY });
  const cached = cache.open(blob);
  await cached.prefetch([{ offset: 0, length: blob.sizeBytes }]);
  await cache.flush();
  const states = ChunkStates.attach(chunkCount(blob.sizeBytes), cached.view().states);
  return { source, cache, cached, states };
}

it.each(['gone', 'gone and come again'])('a chunk that is %s is not given out by a view', async (kind) => {
  const { cache, cached, states } = await openRead();
  const view = new ChunkView(cached.view());
  during = () => {
    states.set(1, COLD);
    if (kind !== 'gone') states.set(1, VERIFIED);
  };
  expect(view.readNow(CHUNK_BYTES + 5, 10)).toBeUndefined();
  expect(during).toBeUndefined();
  if (kind !== 'gone')
    expect(view.readNow(CHUNK_BYTES + 5, 10)).toEqual(blob.bytes.subarray(CHUNK_BYTES + 5, CHUNK_BYTES + 15));
  view.close();
  await cache.close();
});

it('nor by the cache at once', async () => {
  const { cache, cached, states } = await openRead();
  during = () => {
    states.set(1, COLD);
    states.set(1, VERIFIED);
  };
  expect(cached.readNow(CHUNK_BYTES + 5, 10)).toBeUndefined();
  expect(during).toBeUndefined();
  await cache.close();
});

it('and one that leaves under an asynchronous read is fetched again', async () => {
  const { source, cache, cached } = await openRead();
  source.asked.length = 0;
  let removed: Promise<void> | undefined;
  during = () => {
    removed = cache.remove(blob.digest);
  };
  expect(await cached.read(2 * CHUNK_BYTES, 10)).toEqual(blob.bytes.subarray(2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 10));
  await removed;
  expect(during).toBeUndefined();
  expect(await cached.read(2 * CHUNK_BYTES, 10)).toEqual(blob.bytes.subarray(2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 10));
  expect(source.asked.length).toBe(1);
  await cache.close();
});

it('a blob that is removed under a reader gets new files at once', async () => {
  const { source, cache, cached } = await openRead();
  let refilled: Promise<unknown> | undefined;
  during = () => {
    refilled = cache
      .remove(blob.digest)
      .then(() => cached.prefetch([{ offset: 0, length: blob.sizeBytes }]))
      .then(() => cache.flush());
  };
  await cached.read(2 * CHUNK_BYTES, 10);
  await refilled;
  const view = new ChunkView(cached.view());
  expect(view.readNow(0, blob.sizeBytes)?.equals(blob.bytes)).toBe(true);
  view.close();
  await cache.close();
  const again = await openChunkCache({ folder: cache.folder, source, ...ROOMY });
  source.asked.length = 0;
  expect((await again.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
  expect(source.asked).toHaveLength(0);
  await again.close();
});

it('a write that fails makes no hole where the chunk was already', async () => {
  const disk = new DiskLevel(temporaryFolder());
  const stored = disk.blobFor({ digest: blob.digest, sizeBytes: blob.sizeBytes, tableHash: sha256(blob.chunkDigests) });
  const policy = new EvictionPolicy<DiskBlob>((slot) => disk.blobAt(slot));
  const room = { capacityBytes: Number.POSITIVE_INFINITY, minFreeBytes: 0 };
  const keeper = new DiskKeeper(disk, policy, room, { retryMs: 0, counters: new Counters() });
  const store = (first: number, count: number) =>
    new Promise<number>((done) => {
      const bytes = blob.bytes.subarray(first * CHUNK_BYTES, (first + count) * CHUNK_BYTES);
      const chunks = Array.from({ length: count }, (_, i) => first + i);
      keeper.store({ blob: stored, first, bytes, chunks, done });
    });
  expect(await store(1, 1)).toBe(1);
  failWrite = Object.assign(new Error('no space'), { code: 'ENOSPC' });
  expect(await store(0, 3)).toBe(0);
  expect(keeper.problem).toBe('ENOSPC');
  const bytes = Buffer.alloc(CHUNK_BYTES);
  expect(stored.readNow(1, 0, CHUNK_BYTES, bytes, 0)).toBe(true);
  expect(bytes.equals(blob.bytes.subarray(CHUNK_BYTES, 2 * CHUNK_BYTES))).toBe(true);
  // What was written beside it has been given back.
  expect(statSync(stored.dataPath).blocks * 512).toBeLessThanOrEqual(CHUNK_BYTES + 65_536);
  expect(await store(0, 3)).toBe(3);
  expect(keeper.problem).toBeUndefined();
  await keeper.flush();
  disk.close();
});
