/**
 * A thread of the layer server: takes requests from /dev/fuse and answers at once whatever it can: names and attributes from
 * metadata in memory, data from local files. What has to wait goes to the main thread as it came, and this thread takes the
 * next request meanwhile.
 */
import { type MessagePort, parentPort, workerData } from 'node:worker_threads';
import { fuse } from '#linux';
import { NO_REPLY } from '../data-server/blob-files-system.ts';
import { COUNTER, COUNTERS } from '../data-server/raw-messages.ts';
import { countHit, received, takeRequests } from '../data-server/take-requests.ts';
import type { OpenedLayer } from './layer-facts.ts';
import { errnoOf, LATER, LayerFilesSystem } from './layer-files-system.ts';
import type { LayerWorkerData } from './layer-messages.ts';

const {
  MAX_READ_BYTES,
  OPCODE,
  readLength,
  readOffset,
  REPLY_HEADER_BYTES,
  REQUEST_BUFFER_BYTES,
  sendBody,
  sendBytes,
} = fuse;
type RequestHeader = fuse.RequestHeader;

const { fd, layers, port, counters, row } = workerData as LayerWorkerData & { port: MessagePort };
const system = new LayerFilesSystem();
// Filled, so that every page is there: a page fault that SIGKILL cuts short would fail the copy.
const request = Buffer.alloc(REQUEST_BUFFER_BYTES, 1);
const reply = Buffer.alloc(REPLY_HEADER_BYTES + MAX_READ_BYTES, 1);
const count = new Float64Array(counters, row * COUNTERS * 8, COUNTERS);

for (const layer of layers) system.add(layer);
takeRequests(fd, request, count, (header, lengthBytes) => {
  if (header.opcode === OPCODE.READ ? !read(header) : !answer(header)) {
    parentPort!.postMessage(new Uint8Array(request.subarray(0, lengthBytes)));
  }
});

/** False: the main thread has to answer. */
function answer(header: RequestHeader): boolean {
  let result = system.answer(header, request, reply);
  if (result === LATER && learn()) result = system.answer(header, request, reply);
  if (result === LATER) return false;
  if (result !== NO_REPLY) sendBody(fd, reply, header, result);
  return true;
}

function read(header: RequestHeader): boolean {
  try {
    const bytes = bytesNow(header) ?? (learn() ? bytesNow(header) : undefined);
    if (bytes === undefined) return false;
    sendBytes(fd, reply, header, bytes);
    countHit(count, bytes.length);
  } catch (error) {
    sendBody(fd, reply, header, -errnoOf(error));
    count[COUNTER.failures]! += 1;
  }
  count[COUNTER.reads]! += 1;
  return true;
}

function bytesNow(header: RequestHeader): Buffer | undefined {
  return system.readNow(header.node, readOffset(request), Math.min(readLength(request), MAX_READ_BYTES));
}

/** Whether there was anything new. */
function learn(): boolean {
  return received<OpenedLayer>(port, (layer) => system.add(layer));
}
