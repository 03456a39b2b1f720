/** A file system that is full under a disk: what fails says so and changes nothing, and space that comes back is used. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { mount, umount } from '#linux';
import { createDisk, openDisk } from '../disk-folder.ts';
import { MAX_SEGMENT_SECTORS, SEGMENT_BYTES, segmentOffset } from '../lsmt/segment.ts';
import { errnoOf } from '../target/target-error.ts';
import { PendingFile } from '../writable/pending-file.ts';
import { DiskModel, SECTOR } from './disk-model.ts';

const MiB = 1024 * 1024;
const SECTORS = (8 * MiB) / SECTOR;

let root: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-full-'));
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

describe.skipIf(process.getuid?.() !== 0)('a full disk', () => {
  test.each(['log', 'sparse'] as const)(
    '%s: writes fail with ENOSPC, reads go on, space that comes back is used',
    async (mode) => {
      const small = join(root, `small-${mode}`);
      mkdirSync(small);
      mount('none', small, 'tmpfs', 0, 'size=4m');
      try {
        const folder = join(small, 'disk');
        await createDisk(folder, { sizeBytes: 8 * MiB, mode });
        const { disk } = await openDisk(folder);
        const model = new DiskModel(SECTORS);
        await disk.write(0, model.write(0, 1024, 1));
        await disk.flush();
        writeFileSync(join(small, 'ballast'), Buffer.alloc(2 * MiB));
        let failed = 0;
        for (let start = 1024; start < SECTORS; start += 256) {
          const bytes = new DiskModel(SECTORS).write(start, 256, 2);
          try {
            await disk.write(start * SECTOR, bytes);
            model.write(start, 256, 2);
          } catch (error) {
            expect(error).toMatchObject({ code: 'ENOSPC' });
            expect(errnoOf(error)).toBe(28);
            failed++;
            // What a failed write covers may be either; here nothing was.
            break;
          }
        }
        expect(failed).toBe(1);
        expect(await model.difference(disk, 0, 1024)).toBeUndefined();
        await disk.flush().catch((error) => expect(error.code).toBe('ENOSPC'));
        rmSync(join(small, 'ballast'));
        await disk.write(7000 * SECTOR, model.write(7000, 256, 3));
        await disk.flush();
        expect(await model.difference(disk, 7000, 256)).toBeUndefined();
        await disk.close();
        const again = await openDisk(folder);
        expect(await model.difference(again.disk, 0, 1024)).toBeUndefined();
        expect(await model.difference(again.disk, 7000, 256)).toBeUndefined();
        await again.disk.close();
      } finally {
        umount(small);
      }
    },
  );

  test('a snapshot and a compaction that find no space leave all as it was', async () => {
    const small = join(root, 'small-snapshot');
    mkdirSync(small);
    mount('none', small, 'tmpfs', 0, 'size=4m');
    try {
      const folder = join(small, 'disk');
      await createDisk(folder, { sizeBytes: 8 * MiB });
      const opened = await openDisk(folder);
      const model = new DiskModel(SECTORS);
      for (let at = 0; at < 1000; at++) await opened.disk.write(at * 2 * SECTOR, model.write(at * 2, 1, at + 1));
      await opened.disk.flush();
      const files = readdirSync(folder).sort();
      // All that is left.
      spawnSync('sh', ['-c', `cat /dev/zero > ${small}/ballast`]);
      await expect(opened.snapshot()).rejects.toMatchObject({ code: 'ENOSPC' });
      await expect(opened.disk.compact()).rejects.toMatchObject({ code: 'ENOSPC' });
      expect(readdirSync(folder).sort()).toEqual(files);
      rmSync(join(small, 'ballast'));
      await opened.disk.write(SECTOR, model.write(1, 1, 5000));
      await opened.snapshot();
      await opened.disk.compact();
      expect(await model.difference(opened.disk)).toBeUndefined();
      await opened.disk.close();
    } finally {
      umount(small);
    }
  });
});

test.skipIf(process.getuid?.() !== 0).each(['log', 'sparse'] as const)(
  'a shrinking that finds no space loses nothing, %s',
  async (mode) => {
    const small = join(root, `small-shrink-${mode}`);
    mkdirSync(small);
    mount('none', small, 'tmpfs', 0, 'size=4m');
    const folder = join(small, 'disk');
    await createDisk(folder, { sizeBytes: 8 * MiB, mode });
    const opened = await openDisk(folder);
    const { disk } = opened;
    try {
      const model = new DiskModel(SECTORS);
      await disk.write(0, model.write(0, 64, 1));
      await opened.snapshot();
      for (let at = 100; at < 3000; at += 8) await disk.write(at * SECTOR, model.write(at, 3, at));
      await disk.write((SECTORS - 64) * SECTOR, model.write(SECTORS - 64, 64, 2));
      await disk.flush();
      const files = readdirSync(folder).sort();
      // At each point of it: a page more is left each time.
      let failed = 0;
      for (let pages = 0; ; pages++) {
        spawnSync('sh', ['-c', `cat /dev/zero > ${small}/ballast; truncate -s -${pages * 4096} ${small}/ballast`]);
        const done = await opened.resize(4096, { shrink: true }).then(
          () => true,
          (error) => {
            expect(error).toMatchObject({ code: 'ENOSPC' });
            return false;
          },
        );
        rmSync(join(small, 'ballast'));
        if (done) break;
        failed++;
        expect(readdirSync(folder).sort()).toEqual(files);
        expect(disk.sizeBytes).toBe(8 * MiB);
        expect(await model.difference(disk)).toBeUndefined();
      }
      expect(failed).toBeGreaterThan(3);
      await opened.resize(8 * MiB);
      const expected = new DiskModel(SECTORS);
      expected.write(0, 64, 1);
      expected.zero(8, SECTORS - 8);
      expect(await expected.difference(disk)).toBeUndefined();
      await disk.close();
      const again = await openDisk(folder);
      const difference = await expected.difference(again.disk);
      await again.disk.close();
      expect(difference).toBeUndefined();
    } finally {
      await disk.close();
      umount(small);
    }
  },
);

test.skipIf(process.getuid?.() !== 0)('an answer that was half written down is not found by the next process', () => {
  const small = join(root, 'small-pending');
  mkdirSync(small);
  // One page: a header as long as 8 entries, and 248 entries.
  mount('none', small, 'tmpfs', 0, 'size=4k');
  try {
    const path = join(small, 'index.pending');
    const file = new PendingFile(path, 'X');
    for (let at = 0; at < 246; at++) file.add(at, at + 1, 8, true);
    expect(() => file.add(0, 4 * MAX_SEGMENT_SECTORS, 8, true)).toThrowError(/ENOSPC/);
    file.add(1000, 1001, 8, true);
    const { found } = new PendingFile(path, 'X');
    expect(found.length).toBe(247 * SEGMENT_BYTES);
    expect(segmentOffset(found, 246 * SEGMENT_BYTES)).toBe(1000);
    file.close();
  } finally {
    umount(small);
  }
});
