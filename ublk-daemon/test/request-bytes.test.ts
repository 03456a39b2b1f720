/**
 * Requests and the mapped file of a disk, with a sparse file in the place of /dev/ublkcN: bytes are read and written there at the
 * same places. What the driver makes of them is tested in the lab.
 */
import { closeSync, fstatSync, ftruncateSync, mkdtempSync, openSync, readSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { MappedFile, RequestBytes } from '../target/ublk/request-bytes.ts';

const PAGE = 4096;
const SIZE = 64 * PAGE;
/** struct ublksrv_io_desc's neighbour in the kernel's header: UBLKSRV_IO_BUF_OFFSET, 25 bits of a buffer, 16 of a tag. */
const placeOf = (queue: number, tag: number) => Number(0x80000000n + (BigInt(queue) << 41n) + (BigInt(tag) << 25n));

describe.each([
  { place: '/dev/shm', inMemory: true },
  { place: tmpdir(), inMemory: false },
])('a file in $place', ({ place, inMemory }) => {
  let folder: string;
  let file: number;
  let device: number;
  let mapped: MappedFile;

  beforeEach(() => {
    folder = mkdtempSync(join(place, 'dsec-request-'));
    file = openSync(join(folder, 'file'), 'w+');
    device = openSync(join(folder, 'device'), 'w+');
    ftruncateSync(file, SIZE);
    mapped = map({});
  });
  afterEach(() => {
    mapped.unmap();
    for (const fd of [file, device]) closeSync(fd);
    rmSync(folder, { recursive: true });
  });

  function map(more: { readOnly?: boolean; sizeBytes?: number }): MappedFile {
    const facts = { file, sizeBytes: SIZE, readOnly: false, inMemory, maxIoBytes: SIZE, ...more };
    return new MappedFile(new RequestBytes(device, 0), facts);
  }

  function at(fd: number, position: number, length: number): Buffer {
    const bytes = Buffer.alloc(length);
    readSync(fd, bytes, 0, length, position);
    return bytes;
  }

  test('a read takes what is in memory, of any sectors', () => {
    const data = Buffer.from(Array.from({ length: 3 * PAGE }, (_, i) => (i * 7) & 0xff));
    writeSync(file, data, 0, data.length, 5 * PAGE);
    expect(mapped.read(3, 5 * PAGE + 512, 2 * PAGE)).toBe(true);
    expect(at(device, placeOf(0, 3), 2 * PAGE).equals(data.subarray(512, 512 + 2 * PAGE))).toBe(true);
    expect(mapped.read(0, 7 * PAGE, 2 * PAGE)).toBe(false);
  });

  test('holes are left to others, and stay holes', () => {
    expect(mapped.read(1, 0, SIZE)).toBe(false);
    expect(mapped.read(1, 9 * PAGE, 512)).toBe(false);
    expect(fstatSync(file).blocks).toBe(0);
    // Known to be there, and then made a hole.
    writeSync(file, Buffer.alloc(SIZE, 'x'), 0, SIZE, 0);
    expect(mapped.read(1, 0, SIZE)).toBe(true);
    ftruncateSync(file, 0);
    ftruncateSync(file, SIZE);
    mapped.forget(0, SIZE);
    expect(mapped.read(1, 0, PAGE)).toBe(false);
    expect(fstatSync(file).blocks).toBe(0);
  });

  test('what lies beyond the mapping, or beyond a file that shrank, is not read', () => {
    writeSync(file, Buffer.alloc(SIZE, 'x'), 0, SIZE, 0);
    const half = map({ sizeBytes: SIZE / 2 });
    expect(half.read(1, SIZE / 2 - PAGE, PAGE)).toBe(true);
    expect(half.read(1, SIZE / 2 - PAGE, 2 * PAGE)).toBe(false);
    half.unmap();
    expect(mapped.read(1, SIZE - PAGE, PAGE)).toBe(true);
    ftruncateSync(file, PAGE);
    expect(mapped.read(1, SIZE - PAGE, PAGE)).toBe(false);
  });

  test('a write goes into the pages of tmpfs alone', () => {
    const data = Buffer.alloc(2 * PAGE, 'w');
    writeSync(device, data, 0, data.length, placeOf(0, 2));
    expect(mapped.write(2, 6 * PAGE + 512, PAGE)).toBe(inMemory);
    expect(at(file, 6 * PAGE + 512, PAGE).equals(inMemory ? data.subarray(0, PAGE) : Buffer.alloc(PAGE))).toBe(true);
    expect(mapped.write(2, SIZE - PAGE, 2 * PAGE)).toBe(false);
    // The request has fewer bytes than that.
    expect(mapped.write(9, 0, PAGE)).toBe(false);
    const readOnly = map({ readOnly: true });
    expect(readOnly.write(2, 0, PAGE)).toBe(false);
    readOnly.unmap();
  });
});

test('requests of other queues have other places', () => {
  const folder = mkdtempSync(join('/dev/shm', 'dsec-request-'));
  const device = openSync(join(folder, 'device'), 'w+');
  const file = openSync(join(folder, 'file'), 'w+');
  writeSync(file, Buffer.alloc(PAGE, 'q'));
  const mapped = new MappedFile(new RequestBytes(device, 3), {
    ...{ file, sizeBytes: PAGE, readOnly: true, inMemory: true, maxIoBytes: PAGE },
  });
  expect(mapped.read(5, 0, PAGE)).toBe(true);
  expect(fstatSync(device).size).toBe(placeOf(3, 5) + PAGE);
  mapped.unmap();
  closeSync(device);
  closeSync(file);
  rmSync(folder, { recursive: true });
});
