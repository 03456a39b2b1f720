/** What goes wrong around a disk: no space, a second writer, damage, files that are gone: clear errors, nothing lost. */
import { spawnSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import {
  appendFileSync,
  cpSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { ByteSource } from '../byte-source.ts';
import { parseDiskConfig } from '../config/config-v1.ts';
import { createDisk, openDisk } from '../disk-folder.ts';
import { openStack } from '../layer/stack.ts';
import { Pieces } from '../lsmt/pieces.ts';
import { encodeSegment, SEGMENT_BYTES } from '../lsmt/segment.ts';
import { IndexBuilder } from '../lsmt/segment-index.ts';
import { StackedDisk } from '../stacked-disk.ts';
import { EntryLog } from '../writable/entry-log.ts';
import { FlushQueue } from '../writable/flush-queue.ts';
import { LogUpper } from '../writable/log-upper.ts';
import { DiskModel, SECTOR } from './disk-model.ts';

const MiB = 1024 * 1024;

let root: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-failure-'));
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

describe('a second writer', () => {
  test.each(['log', 'sparse'] as const)('%s: is refused, also from another process', async (mode) => {
    const folder = join(root, `busy-${mode}`);
    await createDisk(folder, { sizeBytes: MiB, mode });
    const first = await openDisk(folder);
    await expect(openDisk(folder)).rejects.toMatchObject({ code: 'DISK_BUSY' });
    const script = `import { openDisk } from '${join(import.meta.dirname, '../disk-folder.ts')}'; await openDisk(${JSON.stringify(folder)}).catch((e) => console.log(e.code))`;
    const { stdout } = spawnSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
      encoding: 'utf8',
    });
    expect(stdout.trim()).toBe('DISK_BUSY');
    await first.disk.close();
    await (await openDisk(folder)).disk.close();
    await expect(createDisk(folder, { sizeBytes: MiB })).rejects.toMatchObject({ code: 'DISK_EXISTS' });
  });
});

describe('damage', () => {
  /** Three flushed batches of ten sectors, and what is on the disk then. */
  async function makeDisk(name: string): Promise<{ folder: string; data: string; index: string; model: DiskModel }> {
    const folder = join(root, name);
    await createDisk(folder, { sizeBytes: MiB });
    const { disk } = await openDisk(folder);
    const model = new DiskModel(MiB / SECTOR);
    for (let batch = 0; batch < 3; batch++) {
      for (let at = 0; at < 10; at++) {
        const sector = batch * 100 + at * 2;
        await disk.write(sector * SECTOR, model.write(sector, 1, batch * 10 + at + 1));
      }
      await disk.flush();
    }
    await disk.close();
    return { folder, data: join(folder, 'layer-1.data'), index: join(folder, 'layer-1.index'), model };
  }

  test('in the middle of what had been flushed it is told, nothing is cut', async () => {
    const { folder, index } = await makeDisk('middle');
    const bytes = readFileSync(index);
    expect(bytes.length).toBe(4096 + 3 * 11 * SEGMENT_BYTES);
    for (const change of [
      (copy: Buffer) => copy.fill(0, 4096 + 5 * SEGMENT_BYTES, 4096 + 6 * SEGMENT_BYTES),
      (copy: Buffer) => copy.writeUInt8(copy[4096 + 3 * SEGMENT_BYTES]! ^ 1, 4096 + 3 * SEGMENT_BYTES),
      (copy: Buffer) => copy.writeUInt32LE(0xfffffff, 4096 + 12 * SEGMENT_BYTES + 8),
    ]) {
      const copy = Buffer.from(bytes);
      change(copy);
      writeFileSync(index, copy);
      await expect(openDisk(folder)).rejects.toMatchObject({ code: 'DISK_INDEX_DAMAGED' });
      expect(readFileSync(index).equals(copy)).toBe(true);
    }
    writeFileSync(index, bytes);
    await (await openDisk(folder)).disk.close();
  });

  test('data that was cut off behind flushed entries is told', async () => {
    const { folder, data } = await makeDisk('short-data');
    truncateSync(data, 4096 + 5 * SECTOR);
    await expect(openDisk(folder)).rejects.toMatchObject({ code: 'DISK_INDEX_DAMAGED' });
  });

  test('a torn end is cut, wherever it was torn', async () => {
    const { folder, data, index, model } = await makeDisk('torn');
    const whole = readFileSync(index);
    const bytes = readFileSync(data);
    const kept = 4096 + 2 * 11 * SEGMENT_BYTES;
    for (let size = kept; size < whole.length; size += 7) {
      writeFileSync(index, whole.subarray(0, size));
      writeFileSync(data, bytes);
      const { disk } = await openDisk(folder);
      const entries = Math.floor((size - kept) / SEGMENT_BYTES);
      expect(await model.difference(disk, 0, 200)).toBeUndefined();
      // What was whole of the torn batch had its data on the disk already.
      expect(await model.difference(disk, 200, entries * 2)).toBeUndefined();
      await disk.close();
    }
  });

  test('an end of zeros or of bytes that are no data is cut', async () => {
    const { folder, data, index, model } = await makeDisk('tail');
    const [dataSize, indexSize] = [statSync(data).size, statSync(index).size];
    appendFileSync(data, Buffer.alloc(777, 5));
    appendFileSync(index, Buffer.alloc(4096));
    const { disk } = await openDisk(folder);
    expect(await model.difference(disk)).toBeUndefined();
    await disk.close();
    expect([statSync(data).size, statSync(index).size]).toEqual([dataSize, indexSize]);
  });

  test('an index of another layer, and files that are gone', async () => {
    const one = await makeDisk('one');
    const other = await makeDisk('other');
    const own = readFileSync(one.index);
    cpSync(other.index, one.index);
    await expect(openDisk(one.folder)).rejects.toMatchObject({ code: 'DISK_NOT_WRITABLE' });
    writeFileSync(one.index, own);
    rmSync(other.data);
    await expect(openDisk(other.folder)).rejects.toMatchObject({ code: 'DISK_UPPER_MISSING' });
    await expect(openDisk(join(root, 'nowhere'))).rejects.toMatchObject({ code: 'DISK_NOT_FOUND' });
    const opened = await openDisk(one.folder);
    const { path } = await opened.snapshot();
    await opened.disk.close();
    rmSync(path);
    await expect(openDisk(one.folder)).rejects.toMatchObject({ code: 'DISK_LAYER_MISSING' });
  });

  test('entries that a tool without seals has added are taken as far as they can be', async () => {
    const { folder, data, index, model } = await makeDisk('foreign');
    const end = statSync(data).size;
    appendFileSync(data, model.write(500, 1, 77));
    const entries = Buffer.alloc(2 * SEGMENT_BYTES);
    encodeSegment(entries, 0, 500, 1, end / SECTOR, false);
    encodeSegment(entries, SEGMENT_BYTES, 600, 1, end / SECTOR + 1, false);
    appendFileSync(index, entries);
    const first = await openDisk(folder);
    expect(await model.difference(first.disk)).toBeUndefined();
    await first.disk.write(700 * SECTOR, model.write(700, 3, 78));
    await first.disk.close();
    const second = await openDisk(folder);
    expect(await model.difference(second.disk)).toBeUndefined();
    await second.disk.close();
  });
});

test('a configuration that is none', () => {
  for (const text of [
    '',
    '[]',
    '{"lowers":{}}',
    '{"lowers":[{}]}',
    '{"lowers":[{"file":5}]}',
    '{"upper":{"data":5}}',
    '{"lowers":[{"file":"x","size":-1}]}',
    JSON.stringify({ lowers: Array(256).fill({ file: 'x' }) }),
  ]) {
    expect(() => parseDiskConfig(text, 'c')).toThrow(expect.objectContaining({ code: 'DISK_CONFIG' }));
  }
  const config = parseDiskConfig(
    '{"lowers":[{"file":"a"}],"upper":{"data":"","index":""},"download":{"enable":true}}',
    'c',
  );
  expect(config).toEqual({ lowers: [{ file: 'a' }], download: { enable: true } });
});

test('a read that began before a compaction gets what it saw, never a hole', async () => {
  const files = { data: join(root, 'race.data'), index: join(root, 'race.index') };
  const upper = await LogUpper.create(files, { virtualSize: MiB, uuid: '00000001-0000-4000-8000-000000000001' });
  const disk = new StackedDisk(await openStack([], MiB), upper);
  const old = Buffer.alloc(8192, 1);
  await disk.write(0, old);
  await disk.flush();
  // A slow read, held where it knows its place in the data file.
  let release = () => {};
  const slow = new Promise<void>((resolve) => {
    release = resolve;
  }).then(async () => {
    const into = Buffer.alloc(8192);
    await upper.source.read(into, 4096);
    return into;
  });
  upper.track(slow);
  await disk.write(0, Buffer.alloc(8192, 2));
  const compacted = disk.compact();
  await new Promise((resolve) => setTimeout(resolve, 100));
  release();
  expect((await slow).equals(old)).toBe(true);
  expect((await compacted).reclaimedBytes).toBe(8192);
  expect((await disk.read(0, 8192)).equals(Buffer.alloc(8192, 2))).toBe(true);
  await disk.close();
});

test('a compaction waits for no read of what lies below, and no flush for what a compaction waits for', async () => {
  const files = { data: join(root, 'remote.data'), index: join(root, 'remote.index') };
  const upper = await LogUpper.create(files, { virtualSize: MiB, uuid: '00000001-0000-4000-8000-000000000002' });
  // A store that is away.
  let answer = () => {};
  const away = new Promise<void>((resolve) => {
    answer = resolve;
  });
  const source: ByteSource = {
    name: 'far',
    sizeBytes: MiB,
    read: (into) => away.then(() => void into.fill(7)),
    readNow: () => false,
    close: async () => {},
  };
  const below = new IndexBuilder();
  below.add(0, 64, 8, false, 0);
  const uuid = upper.parentUuid;
  const lowers = { layers: [], sources: [source], index: below.build(), virtualSize: MiB, uuid, close: async () => {} };
  const disk = new StackedDisk(lowers, upper);
  await disk.write(64 * SECTOR, Buffer.alloc(8192, 1));
  // One piece of it is at hand, the other far away.
  const reading = disk.read(60 * SECTOR, 8192);
  await disk.write(64 * SECTOR, Buffer.alloc(8192, 2));
  expect((await disk.compact()).reclaimedBytes).toBe(8192);
  const frozen = disk.frozen();
  await disk.write(64 * SECTOR, Buffer.alloc(8192, 3));
  const compacted = disk.compact();
  await disk.write(90 * SECTOR, Buffer.alloc(512, 4), { fua: true });
  await disk.flush();
  expect((await frozen.read(64 * SECTOR, 8192)).equals(Buffer.alloc(8192, 2))).toBe(true);
  await frozen.close();
  expect((await compacted).reclaimedBytes).toBe(8192);
  answer();
  expect((await reading).equals(Buffer.concat([Buffer.alloc(4 * SECTOR, 7), Buffer.alloc(12 * SECTOR, 1)]))).toBe(true);
  await disk.close();
});

test('an index that is mostly of what was overwritten is written anew by a flush, also after a kill', async () => {
  const files = { data: join(root, 'worn.data'), index: join(root, 'worn.index') };
  const upper = await LogUpper.create(files, { virtualSize: MiB, uuid: randomUUID().toUpperCase() });
  Object.assign(upper, { wornEntries: 100 });
  let most = 0;
  for (let round = 0; round < 200; round++) {
    for (let sector = 0; sector < 5; sector++) upper.write(sector * 2, Buffer.alloc(SECTOR, round + 1));
    await upper.flush();
    most = Math.max(most, statSync(files.index).size);
  }
  // 1,000 were written.
  expect(most).toBeLessThan(4096 + 130 * SEGMENT_BYTES);
  upper.write(0, Buffer.alloc(SECTOR, 7));
  // As after a kill: without a flush.
  await upper.close();
  const again = await LogUpper.open(files);
  expect(again.recovered.unflushed).toBeGreaterThan(0);
  const sectorAt = async (sector: number) => {
    const pieces = new Pieces();
    again.lookup(sector, sector + 1, pieces);
    const bytes = Buffer.alloc(SECTOR);
    await again.source.read(bytes, pieces.moffsets[0]! * SECTOR);
    return bytes[0];
  };
  expect([await sectorAt(0), await sectorAt(2), await sectorAt(8)]).toEqual([7, 200, 200]);
  await again.close();
});

test('discarding an empty disk writes nothing; a large discard of data is a few entries', async () => {
  const folder = join(root, 'discard');
  await createDisk(folder, { sizeBytes: 64 * 1024 * MiB });
  const { disk } = await openDisk(folder);
  await disk.discard(0, disk.sizeBytes);
  await disk.flush();
  expect(statSync(join(folder, 'layer-1.index')).size).toBe(4096);
  await disk.write(32 * 1024 * MiB, Buffer.alloc(MiB, 3));
  await disk.discard(0, disk.sizeBytes);
  await disk.flush();
  expect((await disk.read(32 * 1024 * MiB, MiB)).equals(Buffer.alloc(MiB))).toBe(true);
  await disk.write(0, Buffer.alloc(MiB));
  await disk.flush();
  expect(disk.usage).toEqual({ liveBytes: 0, usedBytes: MiB });
  await disk.close();
});

test('after a failed fsync nothing more is written, reads go on, and opening brings the last flush', async () => {
  const folder = join(root, 'broken');
  await createDisk(folder, { sizeBytes: MiB });
  const files = { data: join(folder, 'layer-1.data'), index: join(folder, 'layer-1.index') };
  const upper = await LogUpper.open(files);
  const disk = new StackedDisk(await openStack([], MiB), upper);
  await disk.write(0, Buffer.alloc(4096, 1));
  await disk.flush();
  const { data } = upper as unknown as { data: { datasync(): Promise<void> } };
  data.datasync = () => Promise.reject(Object.assign(new Error('EIO'), { code: 'EIO' }));
  await disk.write(4096, Buffer.alloc(4096, 2));
  await expect(disk.flush()).rejects.toMatchObject({ code: 'DISK_BROKEN' });
  await expect(disk.flush()).rejects.toMatchObject({ code: 'DISK_BROKEN' });
  await expect(disk.write(0, Buffer.alloc(512, 3))).rejects.toMatchObject({ code: 'DISK_BROKEN' });
  await expect(disk.discard(0, 512)).rejects.toMatchObject({ code: 'DISK_BROKEN' });
  expect((await disk.read(4096, 4096)).equals(Buffer.alloc(4096, 2))).toBe(true);
  await expect(disk.close()).rejects.toMatchObject({ code: 'DISK_BROKEN' });
  const again = await openDisk(folder);
  const expected = Buffer.concat([Buffer.alloc(4096, 1), Buffer.alloc(4096)]);
  expect((await again.disk.read(0, 8192)).equals(expected)).toBe(true);
  await again.disk.close();
});

test('where there are bytes and where not', async () => {
  const folder = join(root, 'extents');
  await createDisk(folder, { sizeBytes: 8192 * MiB });
  const { disk, snapshot } = await openDisk(folder);
  const hole = (length: number) => ({ length, hole: true, zero: true });
  expect(await disk.extents(0, disk.sizeBytes)).toEqual([hole(disk.sizeBytes)]);
  await disk.write(4096, Buffer.alloc(8192, 1));
  await snapshot();
  await disk.write(12288, Buffer.alloc(4096, 2));
  await disk.discard(4096, 4096);
  await disk.write(5000 * MiB, Buffer.alloc(512, 3));
  const told: unknown[] = [];
  for (let at = 0; at < disk.sizeBytes; ) {
    for (const extent of await disk.extents(at, disk.sizeBytes - at)) {
      told.push(extent);
      at += extent.length;
    }
  }
  const data = told.filter((one) => !(one as { hole: boolean }).hole);
  expect(told.slice(0, 2)).toEqual([hole(8192), { length: 8192, hole: false, zero: false }]);
  expect(data).toEqual([
    { length: 8192, hole: false, zero: false },
    { length: 512, hole: false, zero: false },
  ]);
  await disk.close();
});

test('ranges that are no whole sectors of the disk, and a disk that is closed, are refused', async () => {
  const folder = join(root, 'ranges');
  await createDisk(folder, { sizeBytes: MiB });
  const { disk } = await openDisk(folder);
  for (const [offset, length] of [
    [1, 512],
    [0, 100],
    [MiB, 512],
    [-512, 512],
    [0, 2 * MiB],
  ] as const) {
    await expect(disk.read(offset, length)).rejects.toMatchObject({ code: 'EINVAL' });
    await expect(disk.discard(offset, length)).rejects.toMatchObject({ code: 'EINVAL' });
  }
  expect((await disk.read(MiB, 0)).length).toBe(0);
  await disk.close();
  await disk.close();
  await expect(disk.read(0, 512)).rejects.toMatchObject({ code: 'ESHUTDOWN' });
  await expect(disk.write(0, Buffer.alloc(512))).rejects.toMatchObject({ code: 'ESHUTDOWN' });
  const readOnly = new StackedDisk(await openStack([]));
  expect(readOnly.readOnly).toBe(true);
  await readOnly.close();
});

test('a flush queue: those who wait share one, and it begins after their writes', async () => {
  let running = 0;
  let started = 0;
  const gates: (() => void)[] = [];
  const queue = new FlushQueue(async () => {
    started++;
    expect(++running).toBe(1);
    await new Promise<void>((resolve) => gates.push(resolve));
    running--;
  });
  const first = queue.flush();
  const second = queue.flush();
  const third = queue.flush();
  expect(third).toBe(second);
  expect(started).toBe(1);
  gates[0]!();
  await first;
  await new Promise((resolve) => setImmediate(resolve));
  expect(started).toBe(2);
  const fourth = queue.flush();
  expect(fourth).not.toBe(second);
  gates[1]!();
  await second;
  await new Promise((resolve) => setImmediate(resolve));
  gates[2]!();
  await fourth;
  expect(started).toBe(3);
});

test('entries that could not be written come before those that came later', () => {
  const [earlier, later] = [new EntryLog(), new EntryLog()];
  for (let at = 0; at < 300; at++) earlier.add(at, at + 1, 8 + at, false);
  for (let at = 0; at < 300; at++) later.add(at, at + 20_000, 5000, true);
  later.prepend(earlier);
  expect(later.count).toBe(900);
  expect(
    later
      .sealed()
      .subarray(0, 300 * SEGMENT_BYTES)
      .equals(earlier.plain()),
  ).toBe(true);
});
