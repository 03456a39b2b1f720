/**
 * Random histories against the plain truth: whatever order reads, prefetches, evictions, restarts and faults of the source come in, a
 * read gives the blob's bytes or an error that the source made; the bounds hold; and what is on disk is not fetched again.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { expect, it } from 'vitest';
import { isDsecError } from '#base';
import { type ChunkCache, openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { MadeUpSource, makeBlob, ROOMY, randomFrom, temporaryFolder } from './made-up-source.ts';

const MIB = 2 ** 20;

it.each([1, 2, 3, 4, 5, 6])('history %i', { timeout: 60_000 }, async (seed) => {
  const random = randomFrom(seed);
  const below = (limit: number) => Math.floor(random() * limit);
  const blobs = [
    makeBlob(9 * MIB + 777, seed * 10),
    makeBlob(3 * MIB, seed * 10 + 1),
    makeBlob(1, seed * 10 + 2),
    makeBlob(0, seed * 10 + 3),
    makeBlob(6 * MIB + CHUNK_BYTES - 1, seed * 10 + 4),
  ];
  const source = new MadeUpSource(...blobs);
  source.meddle = async (_, right, signal) => {
    const kind = random();
    if (kind < 0.5) return right;
    if (kind < 0.8) await delay(below(3));
    else if (kind < 0.86) throw Object.assign(new Error('reset'), { code: 'ECONNRESET' });
    else if (kind < 0.92) right[below(right.length)]! ^= 1;
    else if (kind < 0.96) return right.subarray(0, below(right.length));
    if (signal?.aborted) throw signal.reason;
    return right;
  };
  const folder = temporaryFolder();
  const capacityBytes = seed % 2 === 0 ? 8 * MIB : undefined;
  const open = () =>
    openChunkCache({ folder, source, memoryBytes: MIB, capacityBytes, maxInFlight: 1 + (seed % 4), ...ROOMY });
  let cache: ChunkCache = await open();
  let failures = 0;
  let reads = 0;

  const act = async () => {
    const blob = blobs[below(blobs.length)]!;
    const cached = cache.open(blob);
    const offset = below(blob.sizeBytes + CHUNK_BYTES);
    const length = below(random() < 0.5 ? 5000 : 2 * MIB);
    const expected = blob.bytes.subarray(offset, offset + length);
    const kind = random();
    if (kind < 0.3) {
      const bytes = cached.readNow(offset, length);
      if (bytes !== undefined) expect(bytes.equals(expected)).toBe(true);
    } else if (kind < 0.35) {
      await cached.prefetch([{ offset, length }]).catch(() => failures++);
    } else if (kind < 0.4) {
      const abort = new AbortController();
      const read = cached.read(offset, length, { signal: abort.signal });
      setImmediate(() => abort.abort());
      await read.then((bytes) => expect(bytes.equals(expected)).toBe(true)).catch(() => failures++);
    } else if (kind < 0.42) {
      await cache.remove(blob.digest);
    } else if (kind < 0.44) {
      cached.release();
    } else {
      reads++;
      try {
        expect((await cached.read(offset, length)).equals(expected)).toBe(true);
      } catch (error) {
        if (!isDsecError(error) && (error as { code?: string }).code !== 'ECONNRESET') throw error;
        if (isDsecError(error)) expect(['CACHE_CHUNK_MISMATCH', 'CACHE_CLOSED']).toContain(error.code);
        failures++;
      }
    }
    const { memoryBytes, memoryLimitBytes, inFlight, diskBytes } = cache.stats();
    expect(memoryBytes).toBeLessThanOrEqual(memoryLimitBytes + source.mostInFlight * 4 * MIB);
    expect(inFlight).toBeLessThanOrEqual(1 + (seed % 4));
    if (capacityBytes !== undefined) expect(diskBytes).toBeLessThanOrEqual(capacityBytes);
  };

  for (let life = 0; life < 4; life++) {
    for (let round = 0; round < 25; round++) await Promise.all(Array.from({ length: 8 }, act));
    await cache.close();
    cache = await open();
  }
  expect(reads).toBeGreaterThan(100);
  expect(failures).toBeGreaterThan(0);

  // With an honest source every byte can be read, and then, where all fits, nothing is fetched any more.
  source.meddle = undefined;
  for (let pass = 0; pass < 2; pass++) {
    const before = source.asked.length;
    for (const blob of blobs) {
      const bytes = await cache.open(blob).read(0, blob.sizeBytes);
      expect(bytes.equals(blob.bytes)).toBe(true);
    }
    await cache.close();
    if (pass === 1 && capacityBytes === undefined) expect(source.asked.length).toBe(before);
    if (capacityBytes !== undefined) expect(cache.stats().evictedChunks).toBeGreaterThan(0);
    cache = await open();
  }
  await cache.close();
});
