/** Indexes that would take more memory than a disk may have are refused before they are read, those of all its layers together. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import { IndexMemory } from '../lsmt/index-memory.ts';

const BYTES_AN_ENTRY = 48;
/** As many as an index is filled up to. */
const ENTRIES = 256;
let root: string;
let before: string | undefined;

beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-index-memory-'));
  before = process.env.DSEC_DISK_INDEX_BYTES;
});
afterEach(() => {
  if (before === undefined) delete process.env.DSEC_DISK_INDEX_BYTES;
  else process.env.DSEC_DISK_INDEX_BYTES = before;
  rmSync(root, { recursive: true, force: true });
});

function allow(bytes: number): void {
  process.env.DSEC_DISK_INDEX_BYTES = String(bytes);
}

test('of all layers together, and nothing stays open', async () => {
  const folder = join(root, 'disk');
  await createDisk(folder, { sizeBytes: 1 << 20 });
  const { disk, snapshot } = await openDisk(folder);
  for (let layer = 0; layer < 2; layer++) {
    for (let at = 0; at < ENTRIES; at++) await disk.write((layer + at * 4) * 512, Buffer.alloc(512, 1 + (at % 255)));
    await snapshot();
  }
  await disk.close();
  allow(2 * ENTRIES * BYTES_AN_ENTRY - 1);
  await expect(openDisk(folder)).rejects.toMatchObject({
    code: 'DISK_INDEX_MEMORY',
    message: expect.stringMatching(
      /layer-[12]\.data: with its index of 256 entries the disk takes 24576 bytes .* 24575 are/,
    ),
  });
  // The lock of its writable layer was given back.
  allow(2 * ENTRIES * BYTES_AN_ENTRY);
  const again = await openDisk(folder);
  expect((await again.disk.read(512, 512)).equals(Buffer.alloc(512, 1))).toBe(true);
  await again.disk.close();
});

test('of a writable layer', async () => {
  const folder = join(root, 'disk');
  await createDisk(folder, { sizeBytes: 1 << 20 });
  const { disk } = await openDisk(folder);
  for (let at = 0; at < ENTRIES; at++) await disk.write(at * 4 * 512, Buffer.alloc(512, 1));
  await disk.close();
  allow(ENTRIES * BYTES_AN_ENTRY);
  await expect(openDisk(folder)).rejects.toMatchObject({ code: 'DISK_INDEX_MEMORY' });
  allow(10 * ENTRIES * BYTES_AN_ENTRY);
  await (await openDisk(folder)).disk.close();
});

test('without a word it is a share of what this process may have', () => {
  delete process.env.DSEC_DISK_INDEX_BYTES;
  const { mostBytes } = new IndexMemory();
  expect(mostBytes).toBeGreaterThan(16 << 20);
  expect(() => new IndexMemory().take(2 ** 40, 'x')).toThrowError(/1099511627776 entries/);
});
