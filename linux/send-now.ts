/** Sends and receipts that never wait: what a socket has room for goes out at once, what has come is taken; the rest is the caller's. */
import { type Bound, bind } from './libc.ts';
import { addressOf } from './memory.ts';

const SEND = { name: 'send', result: 'long', args: ['int', 'void*', 'size_t', 'int'] } as const;
const MSG_DONTWAIT = 0x40;
const MSG_NOSIGNAL = 0x4000;

// The address as a number: a part of a buffer that has no object of its own.
const RECV = { name: 'recv', result: 'long', args: ['int', 'int64_t', 'size_t', 'int'] } as const;

let send: Bound | undefined;
let recv: Bound | undefined;

/**
 * How many bytes of `data` the socket took; 0 where it is full, and where it is broken: whoever then sends in the usual way
 * learns of the error.
 */
export function sendNow(fd: number, data: Buffer): number {
  send ??= bind(SEND);
  return Math.max(0, send.call(fd, data, data.length, MSG_DONTWAIT | MSG_NOSIGNAL));
}

/**
 * Takes what has come into `into[at..]`, and how many bytes that were; 0 where there is nothing, and where the socket is broken or
 * at its end: whoever then reads in the usual way learns of it.
 */
export function receiveNow(fd: number, into: Buffer, at: number): number {
  if (at < 0 || at > into.length) throw new RangeError(`${at} of ${into.length} bytes`);
  recv ??= bind(RECV);
  return Math.max(0, recv.call(fd, addressOf(into) + at, into.length - at, MSG_DONTWAIT));
}
