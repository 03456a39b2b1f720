/** Replies to the device. One whose asker is gone is nobody's. */
import { writeSync, writevSync } from 'node:fs';
import { systemCode } from '#base';
import { encodeReplyHeader, REPLY_BODY, REPLY_HEADER_BYTES, type RequestHeader } from './fuse-protocol.ts';

/** Up to here copying is cheaper than a second buffer for the kernel to look at. */
export const COPIED_BYTES = 16 * 1024;

/** The request that is answered. */
export type Asked = Pick<RequestHeader, 'uniqueLow' | 'uniqueHigh'>;

/** `result`: how many bytes of body `reply` holds, or a negative errno. */
export function sendBody(fd: number, reply: Buffer, header: Asked, result: number): void {
  const bodyBytes = Math.max(0, result);
  encodeReplyHeader(reply, bodyBytes, Math.max(0, -result), header.uniqueLow, header.uniqueHigh);
  send(() => writeSync(fd, reply, 0, REPLY_HEADER_BYTES + bodyBytes));
}

/** `scratch` holds the header, and a short body: REPLY_BODY + COPIED_BYTES. */
export function sendBytes(fd: number, scratch: Buffer, header: Asked, bytes: Buffer): void {
  encodeReplyHeader(scratch, bytes.length, 0, header.uniqueLow, header.uniqueHigh);
  if (bytes.length <= COPIED_BYTES) {
    bytes.copy(scratch, REPLY_BODY);
    send(() => writeSync(fd, scratch, 0, REPLY_HEADER_BYTES + bytes.length));
  } else send(() => writevSync(fd, [scratch.subarray(0, REPLY_HEADER_BYTES), bytes]));
}

function send(write: () => void): void {
  try {
    write();
  } catch (error) {
    // ENOENT: its reader is gone; ENODEV: the mount is, and the next read says so.
    if (!['ENOENT', 'ENODEV'].includes(systemCode(error) ?? '')) throw error;
  }
}
