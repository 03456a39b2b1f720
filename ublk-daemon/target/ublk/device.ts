/**
 * A disk as /dev/ublkbN, served by threads of this process.
 *
 * A device outlives its server: when this process dies, requests wait, and another one takes over with `recover`. What was taken and not
 * answered is issued again (USER_RECOVERY_REISSUE). That is safe. An unanswered request may have happened, in part or not at all; done once
 * more it leaves the same: a write brings the same bytes to the same blocks, wherever a layer keeps them; discards, zeros and flushes add
 * up to one. Nor can it undo a later write to these blocks: who wants an order sends the second when the first is answered, and of two
 * at once either may be the last. What was answered, flushed or not, the next server still has: a raw file has it in the page
 * cache, a disk of layers beside its index (writable/pending-file.ts). A crash of the machine ends the device too.
 *
 * Order of ending, or the kernel waits for ever: STOP; the threads give back their mappings and end; their rings and the device's descriptor
 * are closed; DEL.
 */
import { accessSync, closeSync, constants, openSync, readdirSync, readFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { MessageChannel, type MessagePort, receiveMessageOnPort, type Worker } from 'node:worker_threads';
import { messageOf, spawnWorker, systemCode } from '#base';
import { becomeIoFlusher, CAPABILITY, hasEffective, type Mapping, makeEventFd, mapPages, raiseEventFd } from '#linux';
import { fail } from '../../errors.ts';
import type { BlockTarget } from '../block-target.ts';
import { fileOf, type Immediate, immediateOf } from '../capabilities.ts';
import { errnoOf } from '../target-error.ts';
import { UblkControl } from './control.ts';
import { FEATURE } from './features.ts';
import { type DeviceInfo, OPERATION, OPERATION_FLAG, STATE } from './protocol.ts';
import {
  LEAVE,
  NOTE_BYTES,
  type QueueData,
  READY,
  type RequestBatch,
  type ResultBatch,
  type RingOpened,
} from './queue-messages.ts';

export interface UblkOptions {
  readonly target: BlockTarget;
  /** 1 by default. */
  readonly queues?: number;
  /** Requests of a queue at once; 64 by default. */
  readonly depth?: number;
  /** 1 MiB by default. */
  readonly maxIoBytes?: number;
  /** The N of /dev/ublkbN; the kernel's choice by default. */
  readonly id?: number;
  /** 32 bits that `listUblk` shows again: by which a server knows its own devices after a crash. */
  readonly mark?: number;
}

export interface UblkDevice {
  readonly id: number;
  /** `/dev/ublkbN` */
  readonly path: string;
  /** Rejects when a thread fails: then the device waits for `recover`, or for `stop`. */
  readonly failed: Promise<never>;
  /**
   * Ends and deletes the device. What the target has not answered `graceMs` (5 s) later fails with EIO. Twice is no error.
   * @throws UBLK_TIMEOUT where the kernel does not end it: it may be asked again, and until then the target is in use
   */
  stop(graceMs?: number): Promise<void>;
  /** Whether another process can take it over: not those of users that are not root. They fail with this process. */
  readonly recoverable: boolean;
  /** The target has another size: the device gets it. False where the kernel cannot: it has it when it is served anew. */
  resized(): Promise<boolean>;
  /** Ends serving as if this process had died: the device stays, and its requests wait for `recoverUblk`. Twice is no error. */
  leave(): Promise<void>;
}

const MIB = 2 ** 20;

/**
 * Without CAP_SYS_ADMIN the device is an unprivileged one: its user's alone, not recoverable, and ended by the kernel with this process
 * when a request takes longer than 30 s.
 * @throws UBLK_UNAVAILABLE, UBLK_COMMAND, UBLK_TIMEOUT, UBLK_NODE where nobody gives this user the device's file
 */
export async function serveUblk(options: UblkOptions): Promise<UblkDevice> {
  const { target, queues = 1, depth = 64, maxIoBytes = MIB, id = -1, mark } = options;
  const control = new UblkControl();
  let added: DeviceInfo | undefined;
  const serving = new Serving(target, control);
  try {
    const privileged = hasEffective(CAPABILITY.SYS_ADMIN);
    const kind = privileged ? FEATURE.USER_RECOVERY | FEATURE.USER_RECOVERY_REISSUE : FEATURE.UNPRIVILEGED;
    // Disks of layers have their bytes in buffers anyway. The kernel does not let other users copy.
    const copies = privileged && fileOf(target) !== undefined && (await control.has(FEATURE.USER_COPY));
    const flags = FEATURE.CMD_IOCTL_ENCODE | kind | (copies ? FEATURE.USER_COPY : 0);
    added = await control.add({ id, queues, depth, maxIoBytes, pid: process.pid, flags, mark });
    if (!privileged) await ownNode(`/dev/ublkc${added.id}`);
    const { sizeBytes, blockSize, readOnly } = target;
    await control.setParams(added.id, { sizeBytes, blockSize, readOnly, maxIoBytes: added.maxIoBytes });
    await serving.attach(added);
    await control.start(added.id);
    return serving;
  } catch (error) {
    await serving.abandon(added?.id);
    throw error;
  }
}

/** How long the kernel may take to see that the server before is dead. */
const RECOVERY_MS = 60_000;

/**
 * Takes over a device whose server has died. The target has to be the same disk.
 * @throws UBLK_UNAVAILABLE, UBLK_COMMAND, UBLK_TIMEOUT, UBLK_SERVED where another process still serves it
 */
export async function recoverUblk(id: number, target: BlockTarget): Promise<UblkDevice> {
  const control = new UblkControl();
  const serving = new Serving(target, control);
  try {
    await startRecovery(control, id);
    await serving.attach(await control.info(id));
    await control.endRecovery(id);
    return serving;
  } catch (error) {
    // It may be another one's yet.
    await serving.leave();
    throw error;
  }
}

async function startRecovery(control: UblkControl, id: number): Promise<void> {
  const until = Date.now() + RECOVERY_MS;
  for (;;) {
    try {
      await control.startRecovery(id);
      return;
    } catch (error) {
      const code = systemCode(error);
      const { state, pid } = await control.info(id);
      // A server that died after this step: it is done.
      if (code === 'EINVAL' && state === STATE.QUIESCED) return;
      if (code !== 'EBUSY') throw error;
      // Until the kernel has seen the end of the one before.
      if (Date.now() > until) throw fail('UBLK_SERVED', { id, pid });
      await delay(10);
    }
  }
}

/**
 * Stops and deletes a device that nobody serves: what waits on it fails. False: there is none. One that is served is left alone, since
 * stopping it would wait for its server, perhaps for ever.
 * @throws UBLK_UNAVAILABLE, UBLK_COMMAND, UBLK_SERVED, UBLK_TIMEOUT
 */
export async function removeUblk(id: number): Promise<boolean> {
  const control = new UblkControl();
  try {
    // The end of a process that has just died is seen a moment later.
    for (const until = Date.now() + DYING_MS; ; await delay(10)) {
      const { state, pid } = await control.info(id);
      if (state !== STATE.LIVE || !isAlive(pid)) break;
      if (Date.now() > until) throw fail('UBLK_SERVED', { id, pid });
    }
    await control.stop(id);
    await control.remove(id);
    return true;
  } catch (error) {
    if (systemCode(error) === 'ENODEV') return false;
    throw error;
  } finally {
    await control.close();
  }
}

/** Every device there is, with the process that serves or served it. @throws UBLK_UNAVAILABLE */
export async function listUblk(): Promise<DeviceInfo[]> {
  const control = new UblkControl();
  try {
    const found: DeviceInfo[] = [];
    for (const name of readdirSync('/dev')) {
      const id = /^ublkc(\d+)$/.exec(name)?.[1];
      if (id === undefined) continue;
      // It may go meanwhile.
      const info = await control.info(Number(id)).catch(() => undefined);
      if (info !== undefined) found.push(info);
    }
    return found.sort((a, b) => a.id - b.id);
  } finally {
    await control.close();
  }
}

interface Queue {
  readonly worker: Worker;
  readonly port: MessagePort;
  readonly wake: number;
  readonly buffers: Mapping;
  readonly ended: Promise<void>;
  /** The descriptor of its ring, once it has one. */
  ring: number | undefined;
  /** Tags whose answer the target owes. */
  readonly owed: Set<number>;
  /** Requests that the target has, given up or not: its buffers stay mapped for them. */
  working: number;
  detached: boolean;
  results: ResultBatch;
  scheduled: boolean;
}

class Serving implements UblkDevice {
  readonly failed: Promise<never>;
  readonly #target: BlockTarget;
  readonly #immediate: Immediate | undefined;
  readonly #control: UblkControl;
  readonly #queues: Queue[] = [];
  #device: number | undefined;
  #info: DeviceInfo | undefined;
  #stopped: Promise<void> | undefined;
  #reject: (error: unknown) => void = () => {};

  constructor(target: BlockTarget, control: UblkControl) {
    this.#target = target;
    this.#immediate = immediateOf(target);
    this.#control = control;
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    // Whoever does not wait for it must not fall over it.
    this.failed.catch(() => {});
  }

  get id(): number {
    return this.#info!.id;
  }

  get path(): string {
    return `/dev/ublkb${this.id}`;
  }

  get recoverable(): boolean {
    return (this.#info!.flags & FEATURE.USER_RECOVERY) !== 0;
  }

  async resized(): Promise<boolean> {
    if (!this.recoverable || !(await this.#control.has(FEATURE.UPDATE_SIZE))) return false;
    await this.#control.updateSize(this.id, this.#target.sizeBytes);
    return true;
  }

  /** One thread a queue; resolves when all of them are ready for requests. */
  async attach(info: DeviceInfo): Promise<void> {
    // The target may be this thread's.
    becomeIoFlusher();
    this.#info = info;
    this.#device = await openDevice(`/dev/ublkc${info.id}`);
    await Promise.all(Array.from({ length: info.queues }, (_, queue) => this.#startQueue(info, queue)));
  }

  #startQueue({ depth, maxIoBytes, flags }: DeviceInfo, queue: number): Promise<void> {
    const { port1, port2 } = new MessageChannel();
    const buffers = mapPages(depth * maxIoBytes + NOTE_BYTES);
    const wake = makeEventFd();
    const data: QueueData = {
      device: this.#device!,
      queue,
      depth,
      maxIoBytes,
      buffers: buffers.address,
      wake,
      port: port2,
      file: fileOf(this.#target),
      sizeBytes: this.#target.sizeBytes,
      readOnly: this.#target.readOnly,
      copies: (flags & FEATURE.USER_COPY) !== 0,
    };
    const worker = spawnWorker('ublk-queue', new URL('./queue-worker.ts', import.meta.url), {
      workerData: data,
      transferList: [port2],
      // Its ring is no file that Node has opened; it closes everything itself.
      trackUnmanagedFds: false,
    });
    return new Promise((ready, failed) => {
      const ended = new Promise<void>((done) => worker.once('exit', () => done()));
      const started: Queue = {
        worker,
        port: port1,
        wake,
        buffers,
        ended,
        ring: undefined,
        owed: new Set(),
        working: 0,
        detached: false,
        results: [],
        scheduled: false,
      };
      this.#queues.push(started);
      worker.once('error', (error) => {
        const failure = fail('UBLK_QUEUE', { id: this.id, queue, reason: messageOf(error) }, error);
        failed(failure);
        this.#reject(failure);
      });
      port1.on('message', (message: RingOpened | typeof READY | RequestBatch) => {
        if (message === READY) ready();
        else if ('ring' in message) started.ring = message.ring;
        else this.#take(started, message, maxIoBytes);
      });
    });
  }

  #take(queue: Queue, batch: RequestBatch, maxIoBytes: number): void {
    // Its thread ended before this was heard: these are the next server's, and the buffers may be gone.
    if (queue.detached) return;
    for (let i = 0; i < batch.length; i += 5) {
      const [tag, operation, flags] = [batch[i]!, batch[i + 1]!, batch[i + 2]!];
      const [offset, length] = [batch[i + 3]!, batch[i + 4]!];
      const bytes = queue.buffers.bytes.subarray(tag * maxIoBytes, tag * maxIoBytes + length);
      const result = this.#performNow(operation, flags, offset, length, bytes);
      if (result !== undefined) queue.results.push(tag, result);
      else this.#performLater(queue, tag, this.#perform(operation, flags, offset, length, bytes), length);
    }
    // What was at hand does not wait for another turn of the event loop.
    sendResults(queue);
  }

  /** A count or minus an errno; undefined where the target has to wait. */
  #performNow(operation: number, flags: number, offset: number, length: number, bytes: Buffer): number | undefined {
    const immediate = this.#immediate;
    if (immediate === undefined) return undefined;
    try {
      if (operation === OPERATION.READ) return immediate.readNow(bytes, 0, offset, length) ? length : undefined;
      if (operation !== OPERATION.WRITE || (flags & OPERATION_FLAG.FUA) !== 0) return undefined;
      return immediate.writeNow(offset, bytes) ? length : undefined;
    } catch (error) {
      return -errnoOf(error);
    }
  }

  #performLater(queue: Queue, tag: number, work: Promise<void>, length: number): void {
    queue.owed.add(tag);
    queue.working++;
    work
      .then(
        () => this.#answer(queue, tag, length),
        (error: unknown) => this.#answer(queue, tag, -errnoOf(error)),
      )
      .finally(() => {
        queue.working--;
        releaseBuffers(queue);
      });
  }

  async #perform(operation: number, flags: number, offset: number, length: number, bytes: Buffer): Promise<void> {
    const target = this.#target;
    const fua = (flags & OPERATION_FLAG.FUA) !== 0;
    switch (operation) {
      case OPERATION.READ:
        (await target.read(offset, length)).copy(bytes);
        return;
      case OPERATION.WRITE:
        return target.write(offset, bytes, { fua });
      case OPERATION.FLUSH:
        return target.flush();
      case OPERATION.DISCARD:
        return target.discard(offset, length);
      case OPERATION.WRITE_ZEROES:
        return target.writeZeroes(offset, length, { fua, mayUnmap: (flags & OPERATION_FLAG.NO_UNMAP) === 0 });
      default:
        throw Object.assign(new Error(`operation ${operation}`), { code: 'EOPNOTSUPP' });
    }
  }

  #answer(queue: Queue, tag: number, result: number): void {
    // It was given up.
    if (!queue.owed.delete(tag)) return;
    queue.results.push(tag, result);
    if (queue.scheduled) return;
    queue.scheduled = true;
    setImmediate(() => {
      queue.scheduled = false;
      sendResults(queue);
    });
  }

  stop(graceMs = 5000): Promise<void> {
    this.#stopped ??= this.#stop(graceMs).catch((error) => {
      if (systemCode(error) === 'UBLK_TIMEOUT') this.#stopped = undefined;
      throw error;
    });
    return this.#stopped;
  }

  leave(): Promise<void> {
    this.#stopped ??= this.#leave();
    return this.#stopped;
  }

  async #leave(): Promise<void> {
    this.#dismiss();
    await this.#detach();
    await this.#control.close();
  }

  /** Tells the threads to leave the device to the next server. */
  #dismiss(): void {
    for (const { port, wake } of this.#queues) {
      port.postMessage(LEAVE);
      raiseEventFd(wake);
    }
  }

  async #stop(graceMs: number): Promise<void> {
    // Stopping waits for what is at work: a target that never answers would make it wait for ever.
    const timer = setTimeout(() => {
      for (const queue of this.#queues) for (const tag of queue.owed) this.#answer(queue, tag, -EIO);
    }, graceMs);
    let last = true;
    try {
      await this.#control.stop(this.id, graceMs);
      await this.#detach();
      await this.#control.remove(this.id);
    } catch (error) {
      last = systemCode(error) !== 'UBLK_TIMEOUT';
      throw error;
    } finally {
      clearTimeout(timer);
      if (last) await this.#control.close();
    }
  }

  async #detach(): Promise<void> {
    for (const queue of this.#queues.splice(0)) {
      await queue.ended;
      // One that ended at once may have told of its ring, unheard.
      for (let late = receiveMessageOnPort(queue.port); late !== undefined; late = receiveMessageOnPort(queue.port)) {
        if (late.message?.ring !== undefined) queue.ring = (late.message as RingOpened).ring;
      }
      queue.port.close();
      queue.worker.removeAllListeners();
      // Not by the thread itself: queue-worker.ts says why.
      if (queue.ring !== undefined) closeSync(queue.ring);
      closeSync(queue.wake);
      queue.detached = true;
      releaseBuffers(queue);
    }
    if (this.#device !== undefined) closeSync(this.#device);
    this.#device = undefined;
  }

  /** Of a start that failed. */
  async abandon(added: number | undefined): Promise<void> {
    if (added !== undefined) {
      // Ends the threads that wait for requests.
      await this.#control.stop(added).catch(() => this.#dismiss());
      await this.#detach();
      await this.#control.remove(added).catch(() => {});
    }
    await this.#control.close();
  }
}

function sendResults(queue: Queue): void {
  if (queue.detached || queue.results.length === 0) return;
  queue.port.postMessage(queue.results);
  queue.results = [];
  raiseEventFd(queue.wake);
}

/** A target that answers late writes into its buffer all the same: touching one that is unmapped would end the process. */
function releaseBuffers(queue: Queue): void {
  if (queue.detached && queue.working === 0) queue.buffers.unmap();
}

const EIO = 5;
const OPEN_MS = 30_000;
const DYING_MS = 5000;
const NODE_MS = 10_000;

function isAlive(pid: number): boolean {
  try {
    // Not one that has ended and whose parent has not looked.
    return !/^\d+ \(.*\) [ZX]/s.test(readFileSync(`/proc/${pid}/stat`, 'latin1'));
  } catch {
    return false;
  }
}

/** Until udev, or whoever does its work, has given this user the file. */
async function ownNode(path: string): Promise<void> {
  for (const until = Date.now() + NODE_MS; ; await delay(5)) {
    try {
      return accessSync(path, constants.R_OK | constants.W_OK);
    } catch {
      if (Date.now() > until) throw fail('UBLK_NODE', { path, seconds: NODE_MS / 1000 });
    }
  }
}

/** udev, or devtmpfs, makes it a moment after the device. */
async function openDevice(path: string): Promise<number> {
  const until = Date.now() + OPEN_MS;
  for (;;) {
    try {
      return openSync(path, constants.O_RDWR);
    } catch (error) {
      // EBUSY: a server that has just died is being seen off.
      if (Date.now() > until || !['ENOENT', 'EBUSY', 'EACCES'].includes(systemCode(error) ?? '')) throw error;
      await delay(5);
    }
  }
}
