/** A raw file as a disk: bytes, holes, the lock, and files that are no disk or stop being one. */
import { randomBytes } from 'node:crypto';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { openFileTarget } from '../target/file-target.ts';

const MIB = 2 ** 20;
let folder: string;
let count = 0;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-raw-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function sparse(sizeBytes: number): string {
  const path = join(folder, `${count++}.raw`);
  writeFileSync(path, '');
  truncateSync(path, sizeBytes);
  return path;
}

describe('what is no disk', () => {
  test.each([
    ['an empty file', 0, 'TARGET_FILE_SIZE'],
    ['half a block', 256, 'TARGET_FILE_SIZE'],
    ['a block and a half', 768, 'TARGET_FILE_SIZE'],
  ])('%s', async (_, sizeBytes, code) => {
    const path = sparse(sizeBytes);
    await expect(openFileTarget(path)).rejects.toMatchObject({ code });
  });

  test('a folder, a missing file, 512-byte blocks where 4096 are asked for', async () => {
    mkdirSync(join(folder, 'sub'));
    await expect(openFileTarget(join(folder, 'sub'), { readOnly: true })).rejects.toMatchObject({
      code: 'TARGET_FILE_KIND',
    });
    await expect(openFileTarget(join(folder, 'none'))).rejects.toMatchObject({ code: 'ENOENT' });
    await expect(openFileTarget(sparse(512), { blockSize: 4096 })).rejects.toMatchObject({ code: 'TARGET_FILE_SIZE' });
  });
});

test('one writer, or many readers', async () => {
  const path = sparse(MIB);
  const writer = await openFileTarget(path);
  await expect(openFileTarget(path)).rejects.toMatchObject({ code: 'TARGET_BUSY' });
  await expect(openFileTarget(path, { readOnly: true })).rejects.toMatchObject({ code: 'TARGET_BUSY' });
  await writer.close();
  const readers = [await openFileTarget(path, { readOnly: true }), await openFileTarget(path, { readOnly: true })];
  await expect(openFileTarget(path)).rejects.toMatchObject({ code: 'TARGET_BUSY' });
  for (const reader of readers) await reader.close();
  await (await openFileTarget(path)).close();
});

test('what is written is in the file, at once and later', async () => {
  const path = sparse(4 * MIB);
  const target = await openFileTarget(path);
  const data = randomBytes(8192);
  await target.write(MIB, data, { fua: true });
  expect(target.writeNow(2 * MIB, data)).toBe(true);
  await target.flush();
  const content = readFileSync(path);
  expect(content.subarray(MIB, MIB + 8192).equals(data)).toBe(true);
  expect(content.subarray(2 * MIB, 2 * MIB + 8192).equals(data)).toBe(true);
  const into = Buffer.alloc(8192 + 16);
  if (target.readNow(into, 16, MIB, 8192)) expect(into.subarray(16).equals(data)).toBe(true);
  expect((await target.read(2 * MIB, 8192)).equals(data)).toBe(true);
  await target.close();
  await expect(target.read(0, 512)).rejects.toMatchObject({ code: 'ESHUTDOWN' });
  expect(() => target.writeNow(0, data)).toThrow();
  await target.close();
});

test('discard gives the room back, zeros that count keep it', async () => {
  const path = sparse(4 * MIB);
  const target = await openFileTarget(path);
  await target.write(0, randomBytes(4 * MIB));
  await target.flush();
  const full = statSync(path).blocks;
  await target.discard(MIB, 2 * MIB);
  await target.flush();
  expect(statSync(path).blocks).toBeLessThanOrEqual(full - (2 * MIB) / 512 + 16);
  expect((await target.read(MIB, 2 * MIB)).equals(Buffer.alloc(2 * MIB))).toBe(true);
  const extents = await target.extents(0, 4 * MIB);
  expect(extents.reduce((sum, { length }) => sum + length, 0)).toBe(4 * MIB);
  expect(extents.some(({ hole, zero, length }) => hole && zero && length >= MIB)).toBe(true);
  await target.writeZeroes(0, MIB, { mayUnmap: false, fua: true });
  expect((await target.read(0, MIB)).equals(Buffer.alloc(MIB))).toBe(true);
  expect(statSync(path).size).toBe(4 * MIB);
  await target.close();
});

test('data that was found before a discard is found as a hole after it', async () => {
  const target = await openFileTarget(sparse(4 * MIB));
  await target.write(0, randomBytes(4 * MIB));
  expect((await target.extents(0, 64 * 1024)).every(({ hole }) => !hole)).toBe(true);
  await target.discard(0, MIB);
  expect((await target.extents(0, 64 * 1024))[0]).toEqual({ length: 64 * 1024, hole: true, zero: true });
  await target.close();
});

test('read-only refuses writes; ranges outside are refused before they have an effect', async () => {
  const path = sparse(MIB);
  const reader = await openFileTarget(path, { readOnly: true });
  await expect(reader.write(0, Buffer.alloc(512))).rejects.toMatchObject({ code: 'EPERM' });
  await expect(reader.discard(0, 512)).rejects.toMatchObject({ code: 'EPERM' });
  expect(() => reader.writeNow(0, Buffer.alloc(512))).toThrow('read-only');
  await reader.flush();
  await reader.close();
  const target = await openFileTarget(path);
  for (const [offset, length] of [
    [MIB, 512],
    [MIB - 512, 1024],
    [1, 512],
    [0, 100],
    [-512, 512],
    [Number.MAX_SAFE_INTEGER, 512],
    [Number.NaN, 512],
  ] as const) {
    await expect(target.read(offset, length)).rejects.toMatchObject({ code: 'EINVAL' });
    expect(() => target.readNow(Buffer.alloc(4096), 0, offset, length)).toThrow();
    await expect(target.discard(offset, length)).rejects.toMatchObject({ code: 'EINVAL' });
  }
  expect(statSync(path).size).toBe(MIB);
  await target.close();
});

test('a file that another program shortened gives an error that names it, not zeros', async () => {
  const path = sparse(MIB);
  const target = await openFileTarget(path);
  truncateSync(path, 4096);
  await expect(target.read(0, 8192)).rejects.toMatchObject({ code: 'EIO', row: 'TARGET_FILE_SHORT' });
  expect((await target.read(0, 4096)).length).toBe(4096);
  const into = Buffer.alloc(8192);
  expect(target.readNow(into, 0, 0, 8192)).toBe(false);
  await target.close();
});

test('flushes at the same time share what they can, and all resolve', async () => {
  const target = await openFileTarget(sparse(MIB));
  const flushes = Array.from({ length: 50 }, async (_, i) => {
    await target.write((i % 16) * 4096, randomBytes(4096));
    await target.flush();
  });
  await Promise.all(flushes);
  await target.close();
});
