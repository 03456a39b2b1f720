/** What is fetched ahead of readers, and what is told of it from outside. */
import { createHash } from 'node:crypto';
import { expect, it } from 'vitest';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { chunkFacts, readStoredChunks } from '../stored-chunks.ts';
import { MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

const CHUNKS = 12;

it('brings what can be had when a chunk is wrong, and fails with it; the wrong bytes are nowhere', async () => {
  const blob = makeBlob(CHUNKS * CHUNK_BYTES);
  const source = new MadeUpSource(blob);
  source.meddle = ({ offset, length }, right) => {
    const bad = 5 * CHUNK_BYTES;
    if (bad < offset || bad >= offset + length) return undefined;
    right[bad - offset]! ^= 1;
    return right;
  };
  const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
  const cached = cache.open(blob);
  // Reads of their own: what comes after the wrong one is to come too.
  const ranges = Array.from({ length: CHUNKS / 2 }, (_, i) => ({ offset: (2 * i + 1) * CHUNK_BYTES, length: 1 }));
  await expect(cached.prefetch(ranges)).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH' });
  await cache.flush();
  const states = Array.from({ length: CHUNKS }, (_, i) => cached.chunkState(i));
  expect(states).toEqual(states.map((_, i) => (i % 2 === 1 && i !== 5 ? 'disk' : 'cold')));
  expect(cached.readNow(5 * CHUNK_BYTES, 10)).toBeUndefined();
  await expect(cached.read(5 * CHUNK_BYTES, 10)).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH' });
  source.meddle = undefined;
  expect(await cached.read(5 * CHUNK_BYTES, 10)).toEqual(blob.bytes.subarray(5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 10));
  await cache.close();
});

it('gives up on a store that fails every time', async () => {
  const blob = makeBlob(80 * CHUNK_BYTES);
  const source = new MadeUpSource(blob);
  source.meddle = () => {
    throw new Error('away');
  };
  const cache = await openChunkCache({ folder: temporaryFolder(), source, maxInFlight: 4, ...ROOMY });
  // Every other chunk: no two of them in one read.
  const ranges = Array.from({ length: 40 }, (_, i) => ({ offset: 2 * i * CHUNK_BYTES, length: 1 }));
  const often = Array.from({ length: 20 }, () => ranges).flat();
  await expect(cache.open(blob).prefetch(often)).rejects.toThrow('away');
  expect(source.asked.length).toBeLessThan(often.length / 2);
  await cache.close();
});

it('says from outside what the map says, and nothing of what is not there', async () => {
  const blob = makeBlob(CHUNKS * CHUNK_BYTES);
  const folder = temporaryFolder();
  const cache = await openChunkCache({ folder, source: new MadeUpSource(blob), ...ROOMY });
  const cached = cache.open(blob);
  const tableHash = createHash('sha256').update(blob.chunkDigests).digest('hex');
  const subject = { digest: blob.digest, sizeBytes: blob.sizeBytes, tableHash };
  expect(readStoredChunks(folder, subject)).toBeUndefined();
  await cached.read(3 * CHUNK_BYTES, 10);
  await cached.prefetch([{ offset: 7 * CHUNK_BYTES, length: 1 }]);
  await cache.flush();
  await cache.tidy();
  const told = readStoredChunks(folder, subject)!;
  expect(told.equals(cached.chunkBytes())).toBe(true);
  expect(chunkFacts(told[3]!)).toEqual({ present: true, touched: true, fetched: 1 });
  expect(chunkFacts(told[7]!)).toEqual({ present: true, touched: false, fetched: 2 });
  expect(chunkFacts(told[0]!)).toEqual({ present: false, touched: false, fetched: 0 });
  expect(readStoredChunks(folder, { ...subject, sizeBytes: 1 })).toBeUndefined();
  expect(readStoredChunks(folder, { ...subject, tableHash: '0'.repeat(64) })).toBeUndefined();
  await cache.close();
});
