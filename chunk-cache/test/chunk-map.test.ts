/** The format on disk, byte for byte, as docs/chunk-cache.md has it. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { digestFromHex } from '#base';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { formatMap, MAP_HEADER_BYTES, parseMap } from '../chunk-map.ts';
import { MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

const subject = {
  digest: digestFromHex('ab'.repeat(32)),
  sizeBytes: 2 * CHUNK_BYTES + 1,
  tableHash: Buffer.alloc(32, 0xcd),
};

it('has golden bytes', () => {
  const bytes = formatMap(subject, Buffer.of(1, 0, 7));
  expect(bytes).toHaveLength(4096 + 3);
  expect(bytes.toString('hex', 0, 24)).toBe('445345434d41503100100000000004000100080000000000');
  expect(bytes.toString('hex', 24, 56)).toBe('ab'.repeat(32));
  expect(bytes.toString('hex', 56, 88)).toBe('cd'.repeat(32));
  expect(bytes.toString('hex', 88, 92)).toBe('3a0f9b28');
  expect(bytes.subarray(92, 4096).equals(Buffer.alloc(4004))).toBe(true);
  expect(bytes.toString('hex', 4096)).toBe('010007');
  expect(parseMap(bytes)).toEqual({ ...subject, chunks: Buffer.of(1, 0, 7) });
});

it('no byte of the header can change, and no length', () => {
  const bytes = formatMap(subject, Buffer.of(1, 0, 7));
  for (let at = 0; at < 92; at++) {
    const damaged = Buffer.from(bytes);
    damaged[at]! ^= 1;
    expect(parseMap(damaged)).toBeUndefined();
  }
  for (const length of [0, 91, 4095, 4096, 4098]) expect(parseMap(bytes.subarray(0, length))).toBeUndefined();
  expect(parseMap(Buffer.concat([bytes, Buffer.alloc(1)]))).toBeUndefined();
});

it('is what a cache writes', async () => {
  const blob = makeBlob(3 * CHUNK_BYTES);
  const folder = temporaryFolder();
  const cache = await openChunkCache({ folder, source: new MadeUpSource(blob), ...ROOMY });
  await cache.open(blob).prefetch([{ offset: 2 * CHUNK_BYTES, length: 1 }]);
  await cache.open(blob).read(0, 10);
  await cache.close();
  const table = (await import('node:crypto')).createHash('sha256').update(blob.chunkDigests).digest('hex');
  const name = `${blob.digest.slice(7)}-${table.slice(0, 32)}.map`;
  const map = readFileSync(join(folder, 'v1/blobs', name));
  // Read by a reader, who fetched it; never seen; fetched ahead.
  expect([...map.subarray(MAP_HEADER_BYTES)]).toEqual([0b0111, 0, 0b1001]);
});
