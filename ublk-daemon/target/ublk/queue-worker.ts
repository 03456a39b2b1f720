/**
 * The thread of one ublk queue. It sits in one system call for all there is: requests of the kernel, the file's reads and writes, and
 * the owner's answers (an eventfd that is read through the same ring). What a turn has made, replies and file operations, goes out
 * with the call that waits for the next.
 *
 * Where a small file operation does not wait it is made at once, without the ring: the kernel gives writes into the page cache, and whatever
 * goes to tmpfs, to threads of its own, and the way there and back costs more than the copy.
 *
 * It ends when the device has been stopped: then each tag comes back with ENODEV. Or when it is told to leave: closing the ring takes back what
 * it had offered, and the kernel keeps the requests for the next server.
 */
import { readSync, writeSync } from 'node:fs';
import { type MessagePort, receiveMessageOnPort, workerData } from 'node:worker_threads';
import {
  becomeIoFlusher,
  CAPABILITY,
  dropEffective,
  IoUring,
  mapFile,
  mapPages,
  RING_FLAG,
  RING_OPERATION,
  SyscallError,
  viewPages,
} from '#linux';
import { isInMemory } from '../file-target.ts';
import { IO, IO_DESC_BYTES, MAX_DEPTH, OPERATION, OPERATION_FLAG } from './protocol.ts';
import { LEAVE, type QueueData, READY, type RequestBatch, type ResultBatch } from './queue-messages.ts';

const { device, queue, depth, maxIoBytes, buffers, wake, port, file, readOnly } = workerData as QueueData & {
  port: MessagePort;
};
/** `buffers` as bytes: of the owner, who unmaps them when this thread has ended. */
const memory = viewPages(buffers, depth * maxIoBytes);

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

const ring = openRing();
const pages = Math.ceil((depth * IO_DESC_BYTES) / 4096) * 4096;
const descriptors = mapFile(device, pages, queue * Math.ceil((MAX_DEPTH * IO_DESC_BYTES) / 4096) * 4096, {
  writable: false,
});
const described = new Uint32Array(descriptors.bytes.buffer, descriptors.bytes.byteOffset, pages >> 2);
const note = mapPages(4096);
const inMemory = file !== undefined && isInMemory(`/proc/self/fd/${file}`);
/** File operations that are with the kernel: they use the buffers. */
let working = 0;
/** How much of a tag's transfer is done: files may answer with less than asked. */
const done = new Float64Array(depth);
let live = depth;
let leaving = false;
let requests: RequestBatch = [];

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
// A mapping left behind would keep the device from being deleted.
descriptors.unmap();
ring.close();
note.unmap();
port.close();

function openRing(): IoUring {
  const entries = depth * 2 + 8;
  try {
    return new IoUring({ entries, flags: RING_FLAG.SINGLE_ISSUER | RING_FLAG.DEFER_TASKRUN });
  } catch (error) {
    // Before 6.1.
    if (!(error instanceof SyscallError) || error.code !== 'EINVAL') throw error;
    return new IoUring({ entries });
  }
}

function listenForOwner(): void {
  ring.prepareRead(wake, note.address, 8, undefined, WAKE);
}

/** Gives a tag's result to the kernel, and takes its next request. */
function answer(command: number, tag: number, result: number): void {
  const at = ring.prepare(RING_OPERATION.URING_CMD, device, tag);
  const { words } = ring;
  words[at + 2] = command;
  // struct ublksrv_io_cmd: queue and tag, result, address.
  words[at + 12] = queue | (tag << 16);
  words[at + 13] = result;
  ring.put64(at + 14, buffers + tag * maxIoBytes);
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
      for (let i = 0; i < message.length; i += 2) answer(IO.COMMIT_AND_FETCH, message[i]!, message[i + 1]!);
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
    requests.push(tag, operation, flagsOf(tag), offsetOf(tag), lengthOf(tag));
    return;
  }
  if (readOnly && operation !== OPERATION.READ && operation !== OPERATION.FLUSH) {
    answer(IO.COMMIT_AND_FETCH, tag, -EPERM);
    return;
  }
  switch (operation) {
    case OPERATION.READ:
    case OPERATION.WRITE:
      done[tag] = 0;
      if (lengthOf(tag) <= NOW_BYTES && (operation === OPERATION.WRITE || inMemory)) transferNow(tag);
      else transfer(tag);
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

function transferNow(tag: number): void {
  const result = transferredNow(tag);
  if (result < 0) answer(IO.COMMIT_AND_FETCH, tag, result);
  else finish(tag);
}

/** All of it, or minus an errno. */
function transferredNow(tag: number): number {
  const length = lengthOf(tag);
  const reads = operationOf(tag) === OPERATION.READ;
  try {
    for (let at = 0; at < length; ) {
      const to = tag * maxIoBytes + at;
      const from = offsetOf(tag) + at;
      const count = reads
        ? readSync(file!, memory, to, length - at, from)
        : writeSync(file!, memory, to, length - at, from);
      if (count === 0) return -EIO;
      at += count;
    }
    return length;
  } catch (error) {
    return (error as { errno?: number }).errno ?? -EIO;
  }
}

function transfer(tag: number): void {
  working++;
  const at = done[tag]!;
  const address = buffers + tag * maxIoBytes + at;
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
  done[tag] = done[tag]! + result;
  if (done[tag]! < lengthOf(tag)) transfer(tag);
  else finish(tag);
}

function finish(tag: number): void {
  if (operationOf(tag) === OPERATION.WRITE && (flagsOf(tag) & OPERATION_FLAG.FUA) !== 0) sync(tag);
  else answer(IO.COMMIT_AND_FETCH, tag, lengthOf(tag));
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
  // The kernel writes zeros itself where the file system cannot.
  if (result < 0 || (flagsOf(tag) & OPERATION_FLAG.FUA) === 0) answer(IO.COMMIT_AND_FETCH, tag, result);
  else sync(tag);
}
