/**
 * Starts writing a part of a file to its disk without waiting for it. Who will fsync a large file at its end spreads the
 * work over the time in which the file is made.
 */
import { type Call, call } from './libc.ts';

const SYNC_FILE_RANGE: Call = { name: 'sync_file_range', result: 'int', args: ['int', 'int64_t', 'int64_t', 'uint'] };
const SYNC_FILE_RANGE_WRITE = 2;

/** A hint: where the kernel or the file system cannot, nothing happens. */
export function startWriteback(fd: number, offset: number, length: number): void {
  try {
    call(SYNC_FILE_RANGE, [fd, offset, length, SYNC_FILE_RANGE_WRITE]);
  } catch {
    // The fsync that follows does all of it.
  }
}
