/**
 * A thread of the raw transport: takes requests from /dev/fuse and answers at once whatever it can. A read whose bytes are
 * not there goes to the main thread as a message, and this thread takes the next request meanwhile.
 */
import { type MessagePort, parentPort, workerData } from 'node:worker_threads';
import { fuse } from '#linux';
import { BlobFilesSystem, NO_REPLY } from './blob-files-system.ts';
import { type BlobView, openView } from './blob-view.ts';
import { COUNTER, COUNTERS, type RawWorkerData, type ReadMessage } from './raw-messages.ts';
import type { ServedBlob } from './served-blob.ts';
import { countHit, received, takeRequests } from './take-requests.ts';

const {
  ERRNO,
  MAX_READ_BYTES,
  OPCODE,
  readLength,
  readOffset,
  REPLY_BODY,
  REPLY_HEADER_BYTES,
  REQUEST_BUFFER_BYTES,
  sendBody,
} = fuse;
type RequestHeader = fuse.RequestHeader;

const { fd, blobs, port, counters, row } = workerData as RawWorkerData & { port: MessagePort };
const system = new BlobFilesSystem();
const views = new Map<number, BlobView>();
// Filled, so that every page is there: a page fault that SIGKILL cuts short would fail the copy.
const request = Buffer.alloc(REQUEST_BUFFER_BYTES, 1);
const reply = Buffer.alloc(REPLY_HEADER_BYTES + MAX_READ_BYTES, 1);
const count = new Float64Array(counters, row * COUNTERS * 8, COUNTERS);

for (const blob of blobs) system.add(blob);
takeRequests(fd, request, count, (header) => {
  if (header.opcode === OPCODE.READ) read(header);
  else answer(header);
});

function answer(header: RequestHeader): void {
  if (header.opcode === OPCODE.READDIR || header.opcode === OPCODE.STATFS) learn();
  let result = system.answer(header, request, reply);
  if (result === -ERRNO.ENOENT && learn()) result = system.answer(header, request, reply);
  if (result !== NO_REPLY) sendBody(fd, reply, header, result);
}

function read(header: RequestHeader): void {
  let blob = system.byNode(header.node);
  if (blob === undefined && learn()) blob = system.byNode(header.node);
  if (blob === undefined) {
    sendBody(fd, reply, header, header.node === 1 ? -ERRNO.EISDIR : -ERRNO.EIO);
    return;
  }
  const offset = readOffset(request);
  const length = Math.max(0, Math.min(readLength(request), blob.sizeBytes - offset, MAX_READ_BYTES));
  if (length > 0 && !viewOf(blob).readInto(reply, REPLY_BODY, offset, length)) {
    const message: ReadMessage = [header.uniqueLow, header.uniqueHigh, header.node, offset, length];
    parentPort!.postMessage(message);
    return;
  }
  sendBody(fd, reply, header, length);
  count[COUNTER.reads]! += 1;
  countHit(count, length);
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
  return received<ServedBlob>(port, (blob) => system.add(blob));
}
