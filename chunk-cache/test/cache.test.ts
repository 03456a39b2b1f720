/** What readers of a blob see, and what the source is asked for. */
import { describe, expect, it } from 'vitest';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

const SIZE = 5 * CHUNK_BYTES + 1234;

describe('reading', () => {
  it('gives the bytes of any range, and less at the end', async () => {
    const blob = makeBlob(SIZE);
    const cache = await openChunkCache({ folder: temporaryFolder(), source: new MadeUpSource(blob), ...ROOMY });
    const cached = cache.open(blob);
    for (const [offset, length] of [
      [0, 1],
      [CHUNK_BYTES - 1, 2],
      [100, SIZE - 100],
      [SIZE - 1, 1],
      [SIZE - 10, 1000],
      [5 * CHUNK_BYTES, CHUNK_BYTES],
      [0, SIZE + 1],
      [3, 0],
    ] as const) {
      const expected = blob.bytes.subarray(offset, offset + length);
      expect((await cached.read(offset, length)).equals(expected)).toBe(true);
      expect(cached.readNow(offset, length)?.equals(expected)).toBe(true);
    }
    expect(await cached.read(SIZE, 10)).toHaveLength(0);
    expect(await cached.read(SIZE + CHUNK_BYTES * 3, 10)).toHaveLength(0);
    expect(cached.readNow(SIZE + 1, 10)).toHaveLength(0);
    await cache.close();
  });

  it('refuses ranges that are none', async () => {
    const blob = makeBlob(10);
    const cache = await openChunkCache({ folder: temporaryFolder(), source: new MadeUpSource(blob), ...ROOMY });
    const cached = cache.open(blob);
    for (const [offset, length] of [
      [-1, 1],
      [0, -1],
      [0.5, 1],
      [Number.NaN, 1],
      [0, Number.POSITIVE_INFINITY],
      [2 ** 53, 1],
    ] as const) {
      await expect(cached.read(offset, length)).rejects.toMatchObject({ code: 'CACHE_READ_RANGE' });
      expect(() => cached.readNow(offset, length)).toThrow(expect.objectContaining({ code: 'CACHE_READ_RANGE' }));
    }
    await cache.close();
  });

  it.each([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])('a blob of %i bytes', async (size) => {
    const blob = makeBlob(size);
    const source = new MadeUpSource(blob);
    const folder = temporaryFolder();
    for (let life = 0; life < 2; life++) {
      const cache = await openChunkCache({ folder, source, ...ROOMY });
      const cached = cache.open(blob);
      expect((await cached.read(0, size + 100)).equals(blob.bytes)).toBe(true);
      expect(await cached.read(size, 1)).toHaveLength(0);
      await cache.flush();
      expect(cached.isComplete).toBe(true);
      await cache.close();
    }
    expect(source.asked).toHaveLength(size === 0 ? 0 : 1);
  });

  it('gives buffers that are the reader’s own', async () => {
    const blob = makeBlob(CHUNK_BYTES);
    const cache = await openChunkCache({ folder: temporaryFolder(), source: new MadeUpSource(blob), ...ROOMY });
    const cached = cache.open(blob);
    (await cached.read(0, 100)).fill(0);
    cached.readNow(0, 100)!.fill(0);
    await cache.flush();
    cached.readNow(0, 100)!.fill(0);
    expect((await cached.read(0, 100)).equals(blob.bytes.subarray(0, 100))).toBe(true);
    await cache.close();
  });
});

describe('fetching', () => {
  it('fetches each chunk once for 200 readers at a time', async () => {
    const blob = makeBlob(40 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    source.meddle = async (_, right) => {
      await new Promise((resolve) => setTimeout(resolve, 5));
      return right;
    };
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    const reads = Array.from({ length: 200 }, async (_, i) => {
      const offset = (i * 7919 * 64) % (blob.sizeBytes - 300_000);
      const bytes = await cached.read(offset, 300_000);
      expect(bytes.equals(blob.bytes.subarray(offset, offset + 300_000))).toBe(true);
    });
    await Promise.all(reads);
    await cached.read(0, blob.sizeBytes);
    const counts = source.chunkCounts(blob.digest);
    expect(counts.size).toBe(40);
    expect([...counts.values()].every((count) => count === 1)).toBe(true);
    await cache.close();
  });

  it('joins neighbouring misses into one read of at most 4 MiB', async () => {
    const blob = makeBlob(20 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    await cached.read(0, blob.sizeBytes);
    expect(source.asked.map(({ offset, length }) => [offset / CHUNK_BYTES, length / CHUNK_BYTES])).toEqual([
      [0, 16],
      [16, 4],
    ]);
    await cache.close();
  });

  it('keeps everything over a restart', async () => {
    const blobs = [makeBlob(SIZE, 1), makeBlob(9 * CHUNK_BYTES, 2)];
    const source = new MadeUpSource(...blobs);
    const folder = temporaryFolder();
    for (let life = 0; life < 3; life++) {
      const cache = await openChunkCache({ folder, source, ...ROOMY });
      for (const blob of blobs) {
        const cached = cache.open(blob);
        expect((await cached.read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
        expect([...cached.touched].every((one) => one === 1)).toBe(true);
        expect([...cached.fetched].every((one) => one === 1)).toBe(true);
      }
      await cache.close();
      expect(source.asked).toHaveLength(2);
    }
  });

  it('shows a complete blob as a file', async () => {
    const blob = makeBlob(SIZE);
    const { readFileSync } = await import('node:fs');
    const folder = temporaryFolder();
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder, source, ...ROOMY });
    const cached = cache.open(blob);
    await cached.read(0, 10);
    await cache.flush();
    expect([cached.isComplete, cached.localPath]).toEqual([false, undefined]);
    expect([cached.chunkState(0), cached.chunkState(1)]).toEqual(['memory', 'cold']);
    await cached.prefetch([{ offset: 0, length: SIZE }]);
    await cache.flush();
    expect(cached.isComplete).toBe(true);
    expect(cached.chunkState(3)).toBe('disk');
    expect(readFileSync(cached.localPath!).equals(blob.bytes)).toBe(true);
    expect([...cached.fetched]).toEqual([1, 2, 2, 2, 2, 2]);
    expect([...cached.touched]).toEqual([1, 0, 0, 0, 0, 0]);
    await cache.close();
    const again = await openChunkCache({ folder, source, ...ROOMY });
    const reopened = again.open(blob);
    // Nobody has checked it since.
    expect(reopened.localPath).toBeUndefined();
    expect(await reopened.verifyStored()).toBe(true);
    expect(readFileSync(reopened.localPath!).equals(blob.bytes)).toBe(true);
    await again.close();
  });
});

describe('what readers make of a blob', () => {
  it('is kept in the same memory, under the same bound, and gone with the cache', async () => {
    const blob = makeBlob(4 * CHUNK_BYTES);
    const memoryBytes = 2 * CHUNK_BYTES;
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY, memoryBytes });
    const cached = cache.open(blob);
    const mine = cached.derivedBlocks();
    const others = cached.derivedBlocks();
    const bytes = Buffer.alloc(4096, 1);
    mine.put(0, bytes);
    others.put(0, Buffer.alloc(4096, 2));
    expect(mine.get(0)).toBe(bytes);
    expect(others.get(0)?.[0]).toBe(2);
    expect(mine.get(1)).toBeUndefined();
    for (let block = 1; block < 1000; block++) others.put(block, Buffer.alloc(4096));
    // Used twice: a scan leaves it.
    expect(mine.get(0)).toBe(bytes);
    expect(others.get(1)).toBeUndefined();
    for (let offset = 0; offset < 4 * CHUNK_BYTES; offset += CHUNK_BYTES) await cached.read(offset, 1);
    await cache.flush();
    expect(cache.stats().memoryBytes).toBeLessThanOrEqual(memoryBytes);
    mine.put(2 ** 40, bytes);
    expect(mine.get(2 ** 40)).toBeUndefined();
    await cache.close();
    mine.put(5, bytes);
    expect(mine.get(0) ?? mine.get(5)).toBeUndefined();
  });
});
