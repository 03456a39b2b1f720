/** Reads that never wait, on a file system that can tell what is in memory and on one that has nothing to tell. */
import { closeSync, existsSync, mkdtempSync, openSync, rmSync, statfsSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { isInMemory, ReadyReads } from '#linux';

const TMPFS = 0x01021994;
const folders = [mkdtempSync(join(tmpdir(), 'dsec-ready-'))];
const shared = '/dev/shm';
const hasShared = existsSync(shared) && statfsSync(shared).type === TMPFS;
if (hasShared) folders.push(mkdtempSync(join(shared, 'dsec-ready-')));
else console.log(`skipped in part: ${shared} is no tmpfs`);
afterAll(() => {
  for (const folder of folders) rmSync(folder, { recursive: true });
});

describe.each(folders)('in %s', (folder) => {
  const path = join(folder, 'file');
  const bytes = Buffer.from(Array.from({ length: 10_000 }, (_, at) => at % 251));

  it('copies what was just written, to its place', () => {
    writeFileSync(path, bytes);
    const fd = openSync(path, 'r');
    try {
      const reads = new ReadyReads(fd);
      const into = Buffer.alloc(9000, 0xff);
      expect(reads.read(into, 100, 8192, 1000)).toBe(8192);
      expect(into.subarray(100, 8292).equals(bytes.subarray(1000, 9192))).toBe(true);
      expect([into[99], into[8292]]).toEqual([0xff, 0xff]);
      expect(reads.read(into, 0, 100, 9950)).toBe(50);
      expect(reads.read(into, 0, 100, 20_000)).toBe(0);
      // Again and again: one short answer is no reason to stop asking.
      expect(reads.read(into, 0, 100, 0)).toBe(100);
    } finally {
      closeSync(fd);
    }
  });

  it('says where files are in memory as a whole', () => {
    expect(isInMemory(folder)).toBe(statfsSync(folder).type === TMPFS);
  });
});
