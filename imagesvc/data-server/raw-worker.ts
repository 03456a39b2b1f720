/**
 * A thread of the raw transport: takes requests from /dev/fuse and answers at once whatever it can. A read whose bytes are
 * not there goes to the main thread as a message, and this thread takes the next request meanwhile.
 *
 * It blocks in read(2), so it hears nothing: blobs that were added since wait on a port, which is emptied whenever a request
 * names one that this thread does not know. Whoever adds has put them there before anyone can ask.
 */
import { readSync, writeSync } from 'node:fs';
import { type MessagePort, parentPort, receiveMessageOnPort, workerData } from 'node:worker_threads';
import { systemCode } from '#base';
import { BlobFilesSystem, NO_REPLY } from './blob-files-system.ts';
import { type BlobView, openView } from './blob-view.ts';
import {
  decodeHeader,
  ERRNO,
  emptyHeader,
  encodeReplyHeader,
  isResent,
  MAX_READ_BYTES,
  OPCODE,
  REPLY_BODY,
  REPLY_HEADER_BYTES,
  REQUEST_BUFFER_BYTES,
  readLength,
  readOffset,
} from './fuse-protocol.ts';
import { COUNTER, COUNTERS, type RawWorkerData, type ReadMessage } from './raw-messages.ts';
import type { ServedBlob } from './served-blob.ts';

const { fd, blobs, port, counters, row } = workerData as RawWorkerData & { port: MessagePort };
const system = new BlobFilesSystem();
const views = new Map<number, BlobView>();
// Filled, so that every page is there: a page fault that SIGKILL cuts short would fail the copy.
const request = Buffer.alloc(REQUEST_BUFFER_BYTES, 1);
const reply = Buffer.alloc(REPLY_HEADER_BYTES + MAX_READ_BYTES, 1);
const header = emptyHeader();
const count = new Float64Array(counters, row * COUNTERS * 8, COUNTERS);

for (const blob of blobs) system.add(blob);
serve();

function serve(): void {
  for (;;) {
    try {
      readSync(fd, request, 0, request.length, null);
    } catch (error) {
      // ENOENT: the reader gave up before we took its request.
      if (['ENOENT', 'EINTR', 'EAGAIN'].includes(systemCode(error) ?? '')) continue;
      if (systemCode(error) === 'ENODEV') return;
      throw error;
    }
    decodeHeader(request, header);
    if (isResent(header)) count[COUNTER.resent]! += 1;
    if (header.opcode === OPCODE.READ) read();
    else answer();
  }
}

function answer(): void {
  if (header.opcode === OPCODE.READDIR || header.opcode === OPCODE.STATFS) learn();
  let result = system.answer(header, request, reply);
  if (result === -ERRNO.ENOENT && learn()) result = system.answer(header, request, reply);
  if (result === NO_REPLY) return;
  if (result < 0) send(0, -result);
  else send(result, 0);
}

function read(): void {
  let blob = system.byNode(header.node);
  if (blob === undefined && learn()) blob = system.byNode(header.node);
  if (blob === undefined) {
    send(0, header.node === 1 ? ERRNO.EISDIR : ERRNO.EIO);
    return;
  }
  const offset = readOffset(request);
  const length = Math.max(0, Math.min(readLength(request), blob.sizeBytes - offset, MAX_READ_BYTES));
  if (length > 0 && !viewOf(blob).readInto(reply, REPLY_BODY, offset, length)) {
    const message: ReadMessage = [header.uniqueLow, header.uniqueHigh, header.node, offset, length];
    parentPort!.postMessage(message);
    return;
  }
  send(length, 0);
  count[COUNTER.reads]! += 1;
  count[COUNTER.hits]! += 1;
  count[COUNTER.readBytes]! += length;
  if (length > count[COUNTER.largestReadBytes]!) count[COUNTER.largestReadBytes] = length;
}

function viewOf(blob: ServedBlob): BlobView {
  let view = views.get(blob.node);
  if (view === undefined) {
    view = openView(blob.view);
    views.set(blob.node, view);
  }
  return view;
}

/** Whether there was anything new. */
function learn(): boolean {
  let learnt = false;
  for (;;) {
    const message = receiveMessageOnPort(port) as { message: ServedBlob } | undefined;
    if (message === undefined) return learnt;
    system.add(message.message);
    learnt = true;
  }
}

function send(bodyBytes: number, error: number): void {
  encodeReplyHeader(reply, bodyBytes, error, header.uniqueLow, header.uniqueHigh);
  try {
    writeSync(fd, reply, 0, REPLY_HEADER_BYTES + bodyBytes);
  } catch (failure) {
    // ENOENT: its reader is gone; ENODEV: the mount is, and the next read says so.
    if (!['ENOENT', 'ENODEV'].includes(systemCode(failure) ?? '')) throw failure;
  }
}
