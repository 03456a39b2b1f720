/** Sends that never wait: what a socket has room for goes out at once, the rest is the caller's to send in another way. */
import { type Bound, bind } from './libc.ts';

const SEND = { name: 'send', result: 'long', args: ['int', 'void*', 'size_t', 'int'] } as const;
const MSG_DONTWAIT = 0x40;
const MSG_NOSIGNAL = 0x4000;

let send: Bound | undefined;

/**
 * How many bytes of `data` the socket took; 0 where it is full, and where it is broken: whoever then sends in the usual way
 * learns of the error.
 */
export function sendNow(fd: number, data: Buffer): number {
  send ??= bind(SEND);
  return Math.max(0, send.call(fd, data, data.length, MSG_DONTWAIT | MSG_NOSIGNAL));
}
