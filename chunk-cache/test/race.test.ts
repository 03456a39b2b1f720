/** What happens in the moment between a reader's look at a chunk's state and its read of the file: the file system call is that moment. */
import { expect, it, vi } from 'vitest';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES, chunkCount } from '../chunk.ts';
import { ChunkStates, COLD, VERIFIED } from '../chunk-states.ts';
import { ChunkView } from '../chunk-view.ts';
import { MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

let during: (() => void) | undefined;
vi.mock('node:fs', async (original) => {
  const fs = await original<typeof import('node:fs')>();
  const once = () => {
    const work = during;
    during = undefined;
    work?.();
  };
  return {
    ...fs,
    readSync: (...args: Parameters<typeof fs.readSync>) => {
      once();
      return fs.readSync(...args);
    },
    read: Object.assign(() => {}, {
      [Symbol.for('nodejs.util.promisify.custom')]: async (...args: [number, Buffer, number, number, number]) => {
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
