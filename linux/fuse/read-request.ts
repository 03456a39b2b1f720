/** One request from the device, and what the device says when there is none. */
import { readSync } from 'node:fs';
import { systemCode } from '#base';
import { type Bound, bind, syscallError } from '../libc.ts';

/** The mount is gone, and nobody asks any more. */
export const GONE = -1;
/** None is there: only of a device that does not block. */
export const NONE = -2;

const READ = { name: 'read', result: 'long', args: ['int', 'void*', 'size_t'] } as const;
const ERRNO = { ENOENT: 2, EINTR: 4, EAGAIN: 11, ENODEV: 19 } as const;

let read: Bound | undefined;

/** How many bytes the request has, or GONE, or NONE. `request` is at least as large as the largest that was agreed on. */
export function readRequest(fd: number, request: Buffer): number {
  for (;;) {
    try {
      return readSync(fd, request, 0, request.length, null);
    } catch (error) {
      switch (systemCode(error)) {
        case 'ENODEV':
          return GONE;
        case 'EAGAIN':
          return NONE;
        // Whoever asked gave up before we took its request.
        case 'ENOENT':
        case 'EINTR':
          continue;
        default:
          throw error;
      }
    }
  }
}

/** The same for a device that does not block, which mostly has none: an exception would cost more than the request. */
export function readRequestNow(fd: number, request: Buffer): number {
  read ??= bind(READ);
  for (;;) {
    const lengthBytes = read.call(fd, request, request.length);
    if (lengthBytes >= 0) return lengthBytes;
    const errno = read.errno();
    if (errno === ERRNO.EAGAIN) return NONE;
    if (errno === ERRNO.ENODEV) return GONE;
    if (errno !== ERRNO.ENOENT && errno !== ERRNO.EINTR) throw syscallError('read', errno, '/dev/fuse');
  }
}
