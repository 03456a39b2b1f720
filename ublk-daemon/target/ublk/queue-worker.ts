/**
 * The thread of one ublk queue. It sits in one system call for all there is: requests of the kernel, the file's reads and writes, and
 * the owner's answers (an eventfd that is read through the same ring). What a turn has made, replies and file operations, goes out
 * with the call that waits for the next.
 *
 * What a file has in memory goes straight between its pages and the request (request-bytes.ts). Where that cannot be, and a small operation
 * on the file does not wait, it is made at once, without the ring: the kernel gives writes into the page cache, and whatever goes to tmpfs, to
 * threads of its own, and the way there and back costs more than the copy.
 *
 * It ends when the device has been stopped: then each tag comes back with ENODEV. Or when it is told to leave: what it had offered is taken back
 * when its ring is closed, and the kernel keeps the requests for the next server. The owner closes the ring, after this thread's end: the
 * kernel hands a request over in the thread itself, and one that is on its way while the ring goes is put back only where it finds the thread
 * ended. With a thread that lives it would be with nobody, and the device would wait for it for ever.
 */
import { type MessagePort, receiveMessageOnPort, workerData } from 'node:worker_threads';
import {
  becomeIoFlusher,
  CAPABILITY,
  dropEffective,
  IoUring,
  isInMemory,
  type Mapping,
  mapFile,
  RING_FLAG,
  RING_OPERATION,
  readTo,
  writeFrom,
} from '#linux';
import { IO, IO_DESC_BYTES, MAX_DEPTH, OPERATION, OPERATION_FLAG } from './protocol.ts';
import {
  LEAVE,
  NOTE_BYTES,
  type QueueData,
  READY,
  type RequestBatch,
  type ResultBatch,
  type RingOpened,
} from './queue-messages.ts';
import { MappedFile, RequestBytes } from './request-bytes.ts';

const { device, queue, depth, maxIoBytes, buffers, wake, port, file, sizeBytes, readOnly, copies } =
  workerData as QueueData & { port: MessagePort };

/** User data: a tag, with one of these for what is not a request of the kernel. */
const WAKE = 1 << 30;
const TRANSFER = 1 << 20;
const SYNC = 2 << 20;
const ALLOCATE = 3 << 20;
const KIND_MASK = 15 << 20;
const TAG_MASK = (1 << 20) - 1;

/** Copies of more are worth a thread of the kernel's: it copies while this one takes the next request's bytes. */
const NOW_BYTES = 64 * 1024;

const FALLOCATE = 17;
const KEEP_SIZE = 1;
const PUNCH_HOLE = 2;
const ZERO_RANGE = 16;
const EIO = 5;
const EPERM = 1;
const EOPNOTSUPP = 95;

becomeIoFlusher();
// The kernel looks for partitions when a device starts, with reads that the starting process must answer. Not for a server whose
// threads are no administrators: ours need no partitions.
dropEffective(CAPABILITY.SYS_ADMIN);

const note = buffers + depth * maxIoBytes;
const inMemory = file !== undefined && isInMemory(`/proc/self/fd/${file}`);
const { ring, descriptors, bytes } = openQueue();
const described = new Uint32Array(
  descriptors.bytes.buffer,
  descriptors.bytes.byteOffset,
  descriptors.bytes.length >> 2,
);
const mapped = mapTheFile();
/** File operations that are with the kernel: they use the buffers. */
let working = 0;
/** How much of a tag's transfer is done: files may answer with less than asked. */
const done = new Float64Array(depth);
let live = depth;
let leaving = false;
let requests: RequestBatch = [];

try {
  serve();
} finally {
  // A mapping left behind would keep the device from being deleted.
  descriptors.unmap();
  mapped?.unmap();
  ring.unmap();
  port.close();
}

function serve(): void {
  listenForOwner();
  for (let tag = 0; tag < depth; tag++) answer(IO.FETCH, tag, -1);
  ring.submit();
  port.postMessage(READY);
  while ((live > 0 && !leaving) || working > 0) {
    ring.submit(1);
    ring.reap(completed);
    if (requests.length > 0) {
      port.postMessage(requests);
      requests = [];
    }
  }
}

/** All of it, or nothing is left behind. */
function openQueue() {
  // Not DEFER_TASKRUN: many kernels spin for ever where a request arrives while such a ring is closed (mended in 6.19, da579f05ef0f).
  const ring = new IoUring({ entries: depth * 2 + 8, flags: RING_FLAG.SINGLE_ISSUER | RING_FLAG.COOP_TASKRUN });
  let descriptors: Mapping | undefined;
  try {
    port.postMessage({ ring: ring.fd } satisfies RingOpened);
    const length = Math.ceil((depth * IO_DESC_BYTES) / 4096) * 4096;
    const offset = queue * Math.ceil((MAX_DEPTH * IO_DESC_BYTES) / 4096) * 4096;
    descriptors = mapFile(device, length, offset, { writable: false });
    // Without it the kernel copies between the request and its buffer: of a write before it is offered, of a read when it is answered.
    const bytes = copies ? new RequestBytes(device, queue) : undefined;
    return { ring, descriptors, bytes };
  } catch (error) {
    descriptors?.unmap();
    ring.unmap();
    throw error;
  }
}

function mapTheFile(): MappedFile | undefined {
  if (bytes === undefined || file === undefined) return undefined;
  try {
    return new MappedFile(bytes, { file, sizeBytes, readOnly, inMemory, maxIoBytes });
  } catch {
    // No addresses left for it: buffers do.
    return undefined;
  }
}

function listenForOwner(): void {
  ring.prepareRead(wake, note, NOTE_BYTES, undefined, WAKE);
}

/** Gives a tag's result to the kernel, and takes its next request. */
function answer(command: number, tag: number, result: number): void {
  const at = ring.prepare(RING_OPERATION.URING_CMD, device, tag);
  const { words } = ring;
  words[at + 2] = command;
  // struct ublksrv_io_cmd: queue and tag, result, address.
  words[at + 12] = queue | (tag << 16);
  words[at + 13] = result;
  if (!copies) ring.put64(at + 14, bufferOf(tag));
}

function bufferOf(tag: number): number {
  return buffers + tag * maxIoBytes;
}

/** What a read has found goes from its buffer to who asked. */
function given(tag: number, result: number): number {
  if (bytes === undefined || result <= 0 || operationOf(tag) !== OPERATION.READ) return result;
  return bytes.give(tag, bufferOf(tag), result) ? result : -EIO;
}

function completed(userData: number, result: number): void {
  if (userData === WAKE) {
    for (;;) {
      const received = receiveMessageOnPort(port) as { message: ResultBatch | typeof LEAVE } | undefined;
      if (received === undefined) break;
      const { message } = received;
      if (message === LEAVE) {
        leaving = true;
        return;
      }
      for (let i = 0; i < message.length; i += 2) {
        const tag = message[i]!;
        answer(IO.COMMIT_AND_FETCH, tag, given(tag, message[i + 1]!));
      }
    }
    listenForOwner();
    return;
  }
  const tag = userData & TAG_MASK;
  if ((userData & KIND_MASK) !== 0) working--;
  switch (userData & KIND_MASK) {
    case 0:
      // The device is being stopped, or this process is no longer its server.
      if (result < 0) live--;
      // What comes now is the next server's.
      else if (!leaving) request(tag);
      return;
    case TRANSFER:
      transferred(tag, result);
      return;
    case SYNC:
      answer(IO.COMMIT_AND_FETCH, tag, result < 0 ? result : lengthOf(tag));
      return;
    default:
      allocated(tag, result);
  }
}

function operationOf(tag: number): number {
  return described[tag * 6]! & 0xff;
}

function flagsOf(tag: number): number {
  return described[tag * 6]! & ~0xff;
}

function lengthOf(tag: number): number {
  return operationOf(tag) === OPERATION.FLUSH ? 0 : described[tag * 6 + 1]! * 512;
}

function offsetOf(tag: number): number {
  return (described[tag * 6 + 2]! + described[tag * 6 + 3]! * 2 ** 32) * 512;
}

function request(tag: number): void {
  const operation = operationOf(tag);
  if (file === undefined) {
    if (operation === OPERATION.WRITE && !taken(tag)) answer(IO.COMMIT_AND_FETCH, tag, -EIO);
    else requests.push(tag, operation, flagsOf(tag), offsetOf(tag), lengthOf(tag));
    return;
  }
  if (readOnly && operation !== OPERATION.READ && operation !== OPERATION.FLUSH) {
    answer(IO.COMMIT_AND_FETCH, tag, -EPERM);
    return;
  }
  switch (operation) {
    case OPERATION.READ:
      if (mapped?.read(tag, offsetOf(tag), lengthOf(tag))) answer(IO.COMMIT_AND_FETCH, tag, lengthOf(tag));
      else if (inMemory && lengthOf(tag) <= NOW_BYTES) transferNow(tag);
      else transfer(tag, 0);
      return;
    case OPERATION.WRITE:
      if (mapped?.write(tag, offsetOf(tag), lengthOf(tag))) finish(tag);
      else if (!taken(tag)) answer(IO.COMMIT_AND_FETCH, tag, -EIO);
      else if (lengthOf(tag) <= NOW_BYTES) transferNow(tag);
      else transfer(tag, 0);
      return;
    case OPERATION.FLUSH:
      sync(tag);
      return;
    case OPERATION.DISCARD:
      allocate(tag, PUNCH_HOLE | KEEP_SIZE);
      return;
    case OPERATION.WRITE_ZEROES:
      allocate(tag, ((flagsOf(tag) & OPERATION_FLAG.NO_UNMAP) !== 0 ? ZERO_RANGE : PUNCH_HOLE) | KEEP_SIZE);
      return;
    default:
      answer(IO.COMMIT_AND_FETCH, tag, -EOPNOTSUPP);
  }
}

/** The bytes of a write are in its buffer. */
function taken(tag: number): boolean {
  return bytes === undefined || bytes.take(tag, bufferOf(tag), lengthOf(tag));
}

function transferNow(tag: number): void {
  const length = lengthOf(tag);
  const move = operationOf(tag) === OPERATION.READ ? readTo : writeFrom;
  for (let at = 0; at < length; ) {
    const count = move(bufferOf(tag) + at, length - at, file!, offsetOf(tag) + at);
    if (count <= 0) {
      // The file ended inside the disk.
      answer(IO.COMMIT_AND_FETCH, tag, count < 0 ? count : -EIO);
      return;
    }
    at += count;
  }
  finish(tag);
}

function transfer(tag: number, at: number): void {
  working++;
  done[tag] = at;
  const address = bufferOf(tag) + at;
  const length = lengthOf(tag) - at;
  if (operationOf(tag) === OPERATION.READ) ring.prepareRead(file!, address, length, offsetOf(tag) + at, TRANSFER | tag);
  else ring.prepareWrite(file!, address, length, offsetOf(tag) + at, TRANSFER | tag);
}

function transferred(tag: number, result: number): void {
  if (result <= 0) {
    // The file ended inside the disk.
    answer(IO.COMMIT_AND_FETCH, tag, result < 0 ? result : -EIO);
    return;
  }
  const at = done[tag]! + result;
  if (at < lengthOf(tag)) transfer(tag, at);
  else finish(tag);
}

function finish(tag: number): void {
  if (operationOf(tag) === OPERATION.WRITE && (flagsOf(tag) & OPERATION_FLAG.FUA) !== 0) sync(tag);
  else answer(IO.COMMIT_AND_FETCH, tag, given(tag, lengthOf(tag)));
}

function sync(tag: number): void {
  working++;
  ring.prepareSync(file!, SYNC | tag);
}

function allocate(tag: number, mode: number): void {
  working++;
  const at = ring.prepare(FALLOCATE, file!, ALLOCATE | tag);
  ring.put64(at + 2, offsetOf(tag));
  ring.put64(at + 4, lengthOf(tag));
  ring.words[at + 6] = mode;
}

function allocated(tag: number, result: number): void {
  mapped?.forget(offsetOf(tag), lengthOf(tag));
  // The kernel writes zeros itself where the file system cannot.
  if (result < 0 || (flagsOf(tag) & OPERATION_FLAG.FUA) === 0) answer(IO.COMMIT_AND_FETCH, tag, result);
  else sync(tag);
}
