/** Decoded blocks lie where the source of a ZFile wants them: read again they cost neither the source nor the codec. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { type BlockMemory, type ByteSource, MemorySource, PartSource } from '../byte-source.ts';
import { commitLayer } from '../layer/commit.ts';
import { openLayer } from '../layer/layer-file.ts';
import { SECTOR } from '../lsmt/header.ts';
import { IndexBuilder } from '../lsmt/segment-index.ts';

const folder = mkdtempSync(join(tmpdir(), 'dsec-zfile-memory-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

test.each([false, true])('in a tar: %s', async (tar) => {
  const path = join(folder, `layer-${tar}`);
  const bytes = Buffer.alloc(64 * 1024, 'compressible ');
  const index = new IndexBuilder(1);
  index.add(0, bytes.length / SECTOR, 0, false, 0);
  const zfile = { algorithm: 'zstd', blockSize: 4096 } as const;
  await commitLayer(path, index.build(), [new MemorySource('data', bytes)], { virtualSize: bytes.length, zfile, tar });

  const kept = new Map<number, Buffer>();
  const memory: BlockMemory = { get: (block) => kept.get(block), put: (block, data) => kept.set(block, data) };
  const file = readFileSync(path);
  let reads = 0;
  const source: ByteSource = {
    name: path,
    sizeBytes: file.length,
    async read(into, offset) {
      reads++;
      file.copy(into, 0, offset, offset + into.length);
    },
    readNow: () => false,
    blockMemory: () => memory,
    async close() {},
  };
  const layer = await openLayer(new PartSource(source, 0, file.length));
  const into = Buffer.alloc(4096);
  const offset = layer.index.moffset(0) * SECTOR;
  expect(layer.source.readNow(into, offset)).toBe(false);
  await layer.source.read(into, offset);
  expect(into.equals(bytes.subarray(0, 4096))).toBe(true);
  const before = reads;
  into.fill(0);
  expect(layer.source.readNow(into, offset)).toBe(true);
  expect(layer.source.read(into, offset)).toBeUndefined();
  expect(into.equals(bytes.subarray(0, 4096))).toBe(true);
  expect(reads).toBe(before);
  // What the memory has let go is read again.
  kept.clear();
  expect(layer.source.readNow(into, offset)).toBe(false);
  await layer.source.read(into, offset);
  expect(into.equals(bytes.subarray(0, 4096))).toBe(true);
  expect(reads).toBeGreaterThan(before);
});
