/**
 * What every thread that reads a FUSE device does: it takes one request after the other until the mount is gone. It blocks in
 * read(2), so it hears nothing: what was added since waits on a port, emptied by `received` when a request names what the thread
 * does not know. Whoever adds has put it there before anyone can ask.
 */
import { type MessagePort, receiveMessageOnPort } from 'node:worker_threads';
import { fuse } from '#linux';
import { COUNTER } from './raw-messages.ts';

const { decodeHeader, emptyHeader, GONE, isResent, NONE, readRequest } = fuse;
type RequestHeader = fuse.RequestHeader;

/** `header` and `request` are good until `answer` returns. */
export function takeRequests(
  fd: number,
  request: Buffer,
  count: Float64Array,
  answer: (header: RequestHeader, lengthBytes: number) => void,
): void {
  const header = emptyHeader();
  for (;;) {
    const lengthBytes = readRequest(fd, request);
    if (lengthBytes === GONE) return;
    if (lengthBytes === NONE) continue;
    decodeHeader(request, header);
    if (isResent(header)) count[COUNTER.resent]! += 1;
    answer(header, lengthBytes);
  }
}

/** Hands over all that waits on the port. Whether there was anything. */
export function received<T>(port: MessagePort, take: (message: T) => void): boolean {
  for (let any = false; ; any = true) {
    const next = receiveMessageOnPort(port) as { message: T } | undefined;
    if (next === undefined) return any;
    take(next.message);
  }
}

/** A read that was answered in the thread. */
export function countHit(count: Float64Array, lengthBytes: number): void {
  count[COUNTER.hits]! += 1;
  count[COUNTER.readBytes]! += lengthBytes;
  if (lengthBytes > count[COUNTER.largestReadBytes]!) count[COUNTER.largestReadBytes] = lengthBytes;
}
