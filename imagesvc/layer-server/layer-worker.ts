/**
 * A thread of the layer server: takes requests from /dev/fuse and answers at once whatever it can: names and attributes from
 * metadata in memory, data from local files. What has to wait goes to the main thread as it came, and this thread takes the
 * next request meanwhile.
 *
 * It blocks in read(2), so it hears nothing: layers that were opened since wait on a port, which is emptied whenever a
 * request names one that this thread does not know.
 */
import { readSync } from 'node:fs';
import { type MessagePort, parentPort, receiveMessageOnPort, workerData } from 'node:worker_threads';
import { systemCode } from '#base';
import { NO_REPLY } from '../data-server/blob-files-system.ts';
import {
  decodeHeader,
  emptyHeader,
  isResent,
  MAX_READ_BYTES,
  OPCODE,
  REPLY_HEADER_BYTES,
  REQUEST_BUFFER_BYTES,
  readLength,
  readOffset,
} from '../data-server/fuse-protocol.ts';
import { COUNTER, COUNTERS } from '../data-server/raw-messages.ts';
import type { OpenedLayer } from './layer-facts.ts';
import { errnoOf, LATER, LayerFilesSystem } from './layer-files-system.ts';
import type { LayerWorkerData } from './layer-messages.ts';
import { sendBody, sendBytes } from './send-reply.ts';

const { fd, layers, port, counters, row } = workerData as LayerWorkerData & { port: MessagePort };
const system = new LayerFilesSystem();
// Filled, so that every page is there: a page fault that SIGKILL cuts short would fail the copy.
const request = Buffer.alloc(REQUEST_BUFFER_BYTES, 1);
const reply = Buffer.alloc(REPLY_HEADER_BYTES + MAX_READ_BYTES, 1);
const header = emptyHeader();
const count = new Float64Array(counters, row * COUNTERS * 8, COUNTERS);

for (const layer of layers) system.add(layer);
serve();

function serve(): void {
  for (;;) {
    let lengthBytes: number;
    try {
      lengthBytes = readSync(fd, request, 0, request.length, null);
    } catch (error) {
      // ENOENT: the reader gave up before we took its request.
      if (['ENOENT', 'EINTR', 'EAGAIN'].includes(systemCode(error) ?? '')) continue;
      if (systemCode(error) === 'ENODEV') return;
      throw error;
    }
    decodeHeader(request, header);
    if (isResent(header)) count[COUNTER.resent]! += 1;
    if (header.opcode === OPCODE.READ ? !read() : !answer()) {
      parentPort!.postMessage(new Uint8Array(request.subarray(0, lengthBytes)));
    }
  }
}

/** False: the main thread has to answer. */
function answer(): boolean {
  let result = system.answer(header, request, reply);
  if (result === LATER && learn()) result = system.answer(header, request, reply);
  if (result === LATER) return false;
  if (result !== NO_REPLY) sendBody(fd, reply, header, result);
  return true;
}

function read(): boolean {
  try {
    const bytes = bytesNow() ?? (learn() ? bytesNow() : undefined);
    if (bytes === undefined) return false;
    sendBytes(fd, reply, header, bytes);
    count[COUNTER.hits]! += 1;
    count[COUNTER.readBytes]! += bytes.length;
    if (bytes.length > count[COUNTER.largestReadBytes]!) count[COUNTER.largestReadBytes] = bytes.length;
  } catch (error) {
    sendBody(fd, reply, header, -errnoOf(error));
    count[COUNTER.failures]! += 1;
  }
  count[COUNTER.reads]! += 1;
  return true;
}

function bytesNow(): Buffer | undefined {
  return system.readNow(header.node, readOffset(request), Math.min(readLength(request), MAX_READ_BYTES));
}

/** Whether there was anything new. */
function learn(): boolean {
  let learnt = false;
  for (;;) {
    const message = receiveMessageOnPort(port) as { message: OpenedLayer } | undefined;
    if (message === undefined) return learnt;
    system.add(message.message);
    learnt = true;
  }
}
