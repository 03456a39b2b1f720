/**
 * What Node's fs cannot do with files: special nodes, nanosecond times of a symlink, data and holes, server-side copies.
 * Paths are byte strings or Buffers (they come from image trees); descriptors are Node's own numbers.
 */

import { systemCode } from '#base';
import { type BytePath, type Call, call, cBytes, type NumberedCall, syscall } from './libc.ts';

const AT_FDCWD = -100;
const AT_SYMLINK_NOFOLLOW = 0x100;

export const S_IFIFO = 0o010000;
export const S_IFCHR = 0o020000;
export const S_IFBLK = 0o060000;
export const S_IFSOCK = 0o140000;

// libc has it as a function only since glibc 2.33.
const MKNODAT: NumberedCall = {
  name: 'mknodat',
  number: { x64: 259, arm64: 33 },
  args: ['int', 'void*', 'uint', 'uint'],
};
const UTIMENSAT: Call = { name: 'utimensat', result: 'int', args: ['int', 'void*', 'void*', 'int'] };
const LCHOWN: Call = { name: 'lchown', result: 'int', args: ['void*', 'uint', 'uint'] };
const CHMOD: Call = { name: 'chmod', result: 'int', args: ['void*', 'uint'] };
const LSEEK: Call = { name: 'lseek', result: 'long', args: ['int', 'int64_t', 'int'] };
const FALLOCATE: Call = { name: 'fallocate', result: 'int', args: ['int', 'int', 'int64_t', 'int64_t'] };
const COPY_FILE_RANGE: NumberedCall = {
  name: 'copy_file_range',
  number: { x64: 326, arm64: 285 },
  args: ['int', 'void*', 'int', 'void*', 'size_t', 'uint'],
};

/** The kernel's 32-bit form of a device number: 12 bits of major, 20 of minor. */
export function makeDevice(major: number, minor: number): number {
  return ((minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xfff00) << 12)) >>> 0;
}

/** Major and minor of what `stat` gives as `rdev`. */
export function splitDevice(rdev: number | bigint): { major: number; minor: number } {
  const device = BigInt(rdev);
  return {
    major: Number(((device >> 8n) & 0xfffn) | ((device >> 32n) & 0xfffff000n)),
    minor: Number((device & 0xffn) | ((device >> 12n) & 0xffffff00n)),
  };
}

/** `mode` holds one of S_IFIFO, S_IFCHR, S_IFBLK, S_IFSOCK and the permission bits, which the umask does not touch. */
export function mknod(path: BytePath, mode: number, major = 0, minor = 0): void {
  const name = cBytes(path);
  syscall(MKNODAT, [AT_FDCWD, name, mode, makeDevice(major, minor)], path);
  call(CHMOD, [name, mode & 0o7777], path);
}

export function mkfifo(path: BytePath, mode: number): void {
  mknod(path, S_IFIFO | (mode & 0o7777));
}

/** A moment: whole seconds since 1970 (negative before) and 0..999_999_999 nanoseconds after it. */
export interface FileTime {
  readonly sec: number;
  readonly nsec: number;
}

/** Sets times of the path itself, a symlink included. */
export function lutimes(path: BytePath, atime: FileTime, mtime: FileTime): void {
  const times = Buffer.alloc(32);
  times.writeBigInt64LE(BigInt(atime.sec), 0);
  times.writeBigInt64LE(BigInt(atime.nsec), 8);
  times.writeBigInt64LE(BigInt(mtime.sec), 16);
  times.writeBigInt64LE(BigInt(mtime.nsec), 24);
  call(UTIMENSAT, [AT_FDCWD, cBytes(path), times, AT_SYMLINK_NOFOLLOW], path);
}

export function lchown(path: BytePath, uid: number, gid: number): void {
  call(LCHOWN, [cBytes(path), uid, gid], path);
}

const SEEK_DATA = 3;
const SEEK_HOLE = 4;

/** Offset of the first data byte at or after `offset`; undefined when only a hole follows. Moves the descriptor's position. */
export function seekData(fd: number, offset: number): number | undefined {
  try {
    return call(LSEEK, [fd, offset, SEEK_DATA], `fd ${fd}`);
  } catch (error) {
    if (systemCode(error) === 'ENXIO') return undefined;
    throw error;
  }
}

/** Offset of the first hole at or after `offset`: the file's end at the latest; undefined when `offset` is past the end. */
export function seekHole(fd: number, offset: number): number | undefined {
  try {
    return call(LSEEK, [fd, offset, SEEK_HOLE], `fd ${fd}`);
  } catch (error) {
    if (systemCode(error) === 'ENXIO') return undefined;
    throw error;
  }
}

/** Runs of data in a file of `sizeBytes`, in order; what lies between them reads as zeros. */
export function* dataRuns(fd: number, sizeBytes: number): Generator<{ offset: number; length: number }> {
  for (let at = 0; at < sizeBytes; ) {
    const start = seekData(fd, at);
    if (start === undefined || start >= sizeBytes) return;
    const end = Math.min(seekHole(fd, start) ?? sizeBytes, sizeBytes);
    if (end <= start) return;
    yield { offset: start, length: end - start };
    at = end;
  }
}

/** Copies inside the kernel; returns how many bytes, 0 at the end of the input. May copy less than asked. */
export function copyFileRange(
  fromFd: number,
  fromOffset: number,
  toFd: number,
  toOffset: number,
  length: number,
): number {
  const from = Buffer.alloc(8);
  const to = Buffer.alloc(8);
  from.writeBigInt64LE(BigInt(fromOffset));
  to.writeBigInt64LE(BigInt(toOffset));
  return syscall(COPY_FILE_RANGE, [fromFd, from, toFd, to, length, 0], `fd ${fromFd} to fd ${toFd}`);
}

/** Gives the range back to the file system; it reads as zeros, the size stays. */
export function punchHole(fd: number, offset: number, length: number): void {
  const KEEP_SIZE = 1;
  const PUNCH_HOLE = 2;
  call(FALLOCATE, [fd, KEEP_SIZE | PUNCH_HOLE, offset, length], `fd ${fd}`);
}

/** The range reads as zeros and keeps its room, where the file system can. The size stays. */
export function zeroRange(fd: number, offset: number, length: number): void {
  const KEEP_SIZE = 1;
  const ZERO_RANGE = 16;
  call(FALLOCATE, [fd, KEEP_SIZE | ZERO_RANGE, offset, length], `fd ${fd}`);
}
