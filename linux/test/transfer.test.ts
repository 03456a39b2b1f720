/** Copies by address, and what is in memory of a mapped file. */
import { closeSync, ftruncateSync, mkdtempSync, openSync, readSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { mapForKernel, mapPages } from '../memory.ts';
import { Residency, readTo, writeFrom } from '../transfer.ts';

const PAGE = 4096;
const EFAULT = 14;
const EBADF = 9;

describe.each(['/dev/shm', tmpdir()])('in %s', (place) => {
  let folder: string;
  let fd: number;
  let other: number;

  beforeAll(() => {
    folder = mkdtempSync(join(place, 'dsec-transfer-'));
    fd = openSync(join(folder, 'file'), 'w+');
    other = openSync(join(folder, 'other'), 'w+');
    writeSync(fd, Buffer.alloc(2 * PAGE, 'a'));
    ftruncateSync(fd, 16 * PAGE);
  });
  afterAll(() => {
    for (const one of [fd, other]) closeSync(one);
    rmSync(folder, { recursive: true });
  });

  test('from and to pages', () => {
    const pages = mapPages(PAGE);
    expect(readTo(pages.address + 10, 100, fd, PAGE)).toBe(100);
    expect(pages.bytes.toString('latin1', 0, 111)).toBe(`${'\0'.repeat(10)}${'a'.repeat(100)}\0`);
    expect(writeFrom(pages.address, 50, other, 7)).toBe(50);
    expect(readTo(pages.address, PAGE, other, 0)).toBe(57);
    expect(readTo(pages.address, 1, 9999, 0)).toBe(-EBADF);
    pages.unmap();
  });

  test('from a mapped file, which may have shrunk', () => {
    const map = mapForKernel(fd, 16 * PAGE, { writable: false });
    expect(writeFrom(map.address + PAGE, PAGE, other, 0)).toBe(PAGE);
    const read = Buffer.alloc(PAGE);
    readSync(other, read, 0, PAGE, 0);
    expect(read.equals(Buffer.alloc(PAGE, 'a'))).toBe(true);
    map.letGo();
    expect(writeFrom(map.address + PAGE, PAGE, other, PAGE)).toBe(PAGE);
    ftruncateSync(fd, PAGE);
    expect(writeFrom(map.address + PAGE, PAGE, other, 0)).toBe(-EFAULT);
    // Not a writable mapping.
    expect(readTo(map.address, PAGE, other, 0)).toBe(-EFAULT);
    ftruncateSync(fd, 16 * PAGE);
    map.unmap();
    map.unmap();
  });

  test('what is in memory, and what is a hole', () => {
    writeSync(fd, Buffer.alloc(2 * PAGE, 'b'), 0, 2 * PAGE, 4 * PAGE);
    const map = mapForKernel(fd, 16 * PAGE, { writable: false });
    const residency = new Residency(16 * PAGE);
    expect(residency.has(map.address + 4 * PAGE, 2 * PAGE)).toBe(true);
    expect(residency.has(map.address + 4 * PAGE, 100)).toBe(true);
    expect(residency.has(map.address + 4 * PAGE, 3 * PAGE)).toBe(false);
    expect(residency.has(map.address + 10 * PAGE, PAGE)).toBe(false);
    map.unmap();
    expect(residency.has(map.address, PAGE)).toBe(false);
  });
});
