/** What of a file the kernel holds in memory: how much of an image was read, told without touching the reader. */
import { closeSync, fdatasyncSync, openSync } from 'node:fs';
import { systemCode } from '#base';
import { type Call, call, callInPool, type NumberedCall, syscall } from './libc.ts';

const POSIX_FADVISE: Call = { name: 'posix_fadvise', result: 'int', args: ['int', 'int64_t', 'int64_t', 'int'] };
const POSIX_FADV_WILLNEED = 3;
const POSIX_FADV_DONTNEED = 4;
// Linux 6.5. Range {offset, length}, 0 meaning the whole file; result {cached, dirty, writeback, evicted, recently evicted}, pages.
const CACHESTAT: NumberedCall = { name: 'cachestat', number: 451, args: ['int', 'void*', 'void*', 'uint'] };
const SYNC_FILE_RANGE: Call = { name: 'sync_file_range', result: 'int', args: ['int', 'int64_t', 'int64_t', 'uint'] };
const SYNC_FILE_RANGE_WRITE = 2;
const PAGE_BYTES = 4096;

/** Writes the file out and asks the kernel to forget its pages. Pages that are mapped or busy stay. */
export function dropCached(path: string): void {
  withFile(path, (fd) => {
    fdatasyncSync(fd);
    call(POSIX_FADVISE, [fd, 0, 0, POSIX_FADV_DONTNEED]);
  });
}

/** Has the kernel start reading the range into memory. A hint. */
export function readAhead(fd: number, offset: number, length: number): void {
  call(POSIX_FADVISE, [fd, offset, length, POSIX_FADV_WILLNEED]);
}

/**
 * Has the kernel start writing the range to the disk, in a thread of the pool, so that a later fsync has less to wait for. A hint: it makes
 * nothing safe, and an error of the disk is told by that fsync. `fd` must stay open until it is done.
 */
export async function beginWriteback(fd: number, offset: number, length: number): Promise<void> {
  await callInPool(SYNC_FILE_RANGE, [fd, offset, length, SYNC_FILE_RANGE_WRITE]);
}

/** Bytes of the file in the page cache; undefined where the kernel cannot tell. */
export function cachedBytes(path: string): number | undefined {
  try {
    return withFile(path, (fd) => {
      const range = Buffer.alloc(16);
      const result = Buffer.alloc(40);
      syscall(CACHESTAT, [fd, range, result, 0]);
      return Number(result.readBigUInt64LE(0)) * PAGE_BYTES;
    });
  } catch (error) {
    // EOPNOTSUPP: hugetlbfs; EPERM: a seccomp filter that does not know the call.
    if (['ENOSYS', 'EOPNOTSUPP', 'EPERM'].includes(systemCode(error) ?? '')) return undefined;
    throw error;
  }
}

function withFile<T>(path: string, work: (fd: number) => T): T {
  const fd = openSync(path, 'r');
  try {
    return work(fd);
  } finally {
    closeSync(fd);
  }
}
