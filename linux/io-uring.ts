/**
 * io_uring from JavaScript: the rings mapped into typed arrays, filled and emptied here, one system call for a batch. For whoever must
 * speak through it (ublk has no other door) or has many operations at hand.
 *
 * One thread drives a ring. Memory that an operation names stays in place and alive until its completion: Buffers that were allocated
 * for good, or pages of memory.ts. Layout: struct io_uring_params and io_uring_sqe of the kernel's include/uapi/linux/io_uring.h.
 */
import { closeSync } from 'node:fs';
import { fail, SyscallError } from './errors.ts';
import { type Bound, bind, syscallError } from './libc.ts';
import { addressOf, type Mapping, mapFile } from './memory.ts';

const SYSCALL = {
  name: 'syscall',
  result: 'long',
  args: ['long', 'long', 'long', 'long', 'long', 'long', 'long'],
} as const;
const IO_URING_SETUP = 425;
const IO_URING_ENTER = 426;
const ENTER_GETEVENTS = 1;

const OFFSET_RINGS = 0;
const OFFSET_SQES = 0x10000000;

const FEATURE_SINGLE_MMAP = 1;
const FEATURE_NODROP = 2;

const EINTR = 4;
const EBUSY = 16;
const ETIME = 62;

export const RING_FLAG = {
  CQSIZE: 1 << 3,
  /** 128-byte submissions: commands with much to say. */
  SQE128: 1 << 10,
  /** Completions are made when this thread enters the kernel, not by interrupting it. Kernel 5.19. */
  COOP_TASKRUN: 1 << 8,
  /** Kernel 6.0. */
  SINGLE_ISSUER: 1 << 12,
  /** Completions are made when this thread asks for them alone. Kernel 6.1; needs SINGLE_ISSUER. */
  DEFER_TASKRUN: 1 << 13,
} as const;

export const RING_OPERATION = { NOP: 0, FSYNC: 3, ASYNC_CANCEL: 14, READ: 22, WRITE: 23, URING_CMD: 46 } as const;
export const FSYNC_DATASYNC = 1;

export interface RingOptions {
  /** Submissions that fit; rounded up to a power of two by the kernel. */
  readonly entries: number;
  /** Of RING_FLAG. */
  readonly flags?: number;
  /** Completions that fit; twice the entries by default. */
  readonly completions?: number;
}

/** `result`: a count, or minus an errno. `userData`: what the submission was given. */
export type OnCompletion = (userData: number, result: number) => void;

let native: Bound | undefined;

export class IoUring {
  readonly fd: number;
  readonly entries: number;
  readonly completionEntries: number;
  /** 32-bit words of one submission: 16, or 32 with SQE128. */
  readonly #words: number;
  readonly #maps: readonly Mapping[];
  /** Both rings: heads, tails, completions. */
  readonly #ring: Int32Array;
  readonly #submissions: Int32Array;
  readonly #sqHead: number;
  readonly #sqTail: number;
  readonly #sqMask: number;
  readonly #cqHead: number;
  readonly #cqTail: number;
  readonly #cqMask: number;
  readonly #cqes: number;
  readonly #system: Bound;
  /** Of the submissions: the kernel sees it with the next `submit`. */
  #tail = 0;
  #open = true;

  /** @throws SyscallError: ENOSYS, EPERM where the kernel or a filter forbids io_uring, EINVAL for flags it does not know */
  constructor({ entries, flags = 0, completions = 0 }: RingOptions) {
    const params = Buffer.alloc(120);
    params.writeUInt32LE(completions, 4);
    params.writeUInt32LE(flags | (completions > 0 ? RING_FLAG.CQSIZE : 0), 8);
    native ??= bind(SYSCALL);
    this.#system = native;
    this.fd = native.call(IO_URING_SETUP, entries, addressOf(params), 0, 0, 0, 0);
    if (this.fd < 0) throw syscallError('io_uring_setup', native.errno(), '');
    const word = (offset: number) => params.readUInt32LE(offset);
    const features = word(20);
    try {
      if ((features & FEATURE_SINGLE_MMAP) === 0 || (features & FEATURE_NODROP) === 0) {
        throw syscallError('io_uring_setup', 38, 'a kernel before 5.5');
      }
      this.entries = word(0);
      this.completionEntries = word(4);
      this.#words = (flags & RING_FLAG.SQE128) !== 0 ? 32 : 16;
      const [sqArray, cqes] = [word(64), word(100)];
      const ringBytes = Math.max(sqArray + this.entries * 4, cqes + this.completionEntries * 16);
      const rings = mapFile(this.fd, ringBytes, OFFSET_RINGS);
      let sqes: Mapping;
      try {
        sqes = mapFile(this.fd, this.entries * this.#words * 4, OFFSET_SQES);
      } catch (error) {
        rings.unmap();
        throw error;
      }
      this.#maps = [rings, sqes];
      this.#ring = wordsOf(rings);
      this.#submissions = wordsOf(sqes);
      [this.#sqHead, this.#sqTail] = [word(40) >> 2, word(44) >> 2];
      [this.#cqHead, this.#cqTail] = [word(80) >> 2, word(84) >> 2];
      this.#sqMask = this.#ring[word(48) >> 2]!;
      this.#cqMask = this.#ring[word(88) >> 2]!;
      this.#cqes = cqes >> 2;
      // Submission n always lies in slot n.
      for (let i = 0; i < this.entries; i++) this.#ring[(sqArray >> 2) + i] = i;
    } catch (error) {
      closeSync(this.fd);
      throw error;
    }
  }

  /** Submissions that the kernel has not taken. */
  get pending(): number {
    return (this.#tail - Atomics.load(this.#ring, this.#sqHead)) | 0;
  }

  /** Completions that wait for `reap`. */
  get ready(): number {
    return (Atomics.load(this.#ring, this.#cqTail) - this.#ring[this.#cqHead]!) | 0;
  }

  /**
   * A zeroed submission, the next to go: answers where its 32-bit words begin in `words`. The caller fills the rest before it calls
   * `submit`; `userData` comes back with the completion.
   * @throws LINUX_RING_FULL when as many wait as fit
   */
  prepare(operation: number, fd: number, userData: number): number {
    const tail = this.#tail;
    if (((tail - this.#ring[this.#sqHead]!) | 0) >= this.entries) {
      throw fail('LINUX_RING_FULL', { entries: this.entries });
    }
    const at = (tail & this.#sqMask) * this.#words;
    const words = this.#submissions;
    words[at] = operation;
    words[at + 1] = fd;
    // Shorter than `fill`, which is a call.
    for (let word = 2; word < this.#words; word++) words[at + word] = 0;
    words[at + 8] = userData;
    this.#tail = (tail + 1) | 0;
    return at;
  }

  /** Submissions as 32-bit words: what `prepare` answers is an index into them. */
  get words(): Int32Array {
    return this.#submissions;
  }

  /** Two words hold a 64-bit number: an address, an offset. */
  put64(at: number, value: number): void {
    this.#submissions[at] = value | 0;
    this.#submissions[at + 1] = Math.floor(value / 2 ** 32) | 0;
  }

  /** `address`: of memory that stays. A position of undefined is the descriptor's own. */
  prepareRead(fd: number, address: number, length: number, position: number | undefined, userData: number): void {
    this.#transfer(RING_OPERATION.READ, fd, address, length, position, userData);
  }

  prepareWrite(fd: number, address: number, length: number, position: number | undefined, userData: number): void {
    this.#transfer(RING_OPERATION.WRITE, fd, address, length, position, userData);
  }

  prepareSync(fd: number, userData: number): void {
    this.#submissions[this.prepare(RING_OPERATION.FSYNC, fd, userData) + 7] = FSYNC_DATASYNC;
  }

  #transfer(
    operation: number,
    fd: number,
    address: number,
    length: number,
    position: number | undefined,
    data: number,
  ) {
    const at = this.prepare(operation, fd, data);
    if (position === undefined) this.put64(at + 2, -1);
    else this.put64(at + 2, position);
    this.put64(at + 4, address);
    this.#submissions[at + 6] = length;
  }

  /**
   * Hands over what was prepared, and waits until at least `waitFor` completions are there. May return early, with fewer: a signal
   * came, or completions have to be reaped first. @throws SyscallError
   */
  submit(waitFor = 0): void {
    Atomics.store(this.#ring, this.#sqTail, this.#tail);
    if (this.#system.call(IO_URING_ENTER, this.fd, this.pending, waitFor, ENTER_GETEVENTS, 0, 0) >= 0) return;
    const errno = this.#system.errno();
    if (errno !== EINTR && errno !== EBUSY && errno !== ETIME) throw syscallError('io_uring_enter', errno, '');
  }

  /** Takes every completion that is there; answers how many. What `take` prepares may already be for the next `submit`. */
  reap(take: OnCompletion): number {
    const ring = this.#ring;
    const tail = Atomics.load(ring, this.#cqTail);
    let head = ring[this.#cqHead]!;
    const count = (tail - head) | 0;
    try {
      while (head !== tail) {
        const at = this.#cqes + (head & this.#cqMask) * 4;
        const userData = ring[at]!;
        const result = ring[at + 2]!;
        head = (head + 1) | 0;
        take(userData, result);
      }
    } finally {
      // Whatever it threw: what was taken is not taken twice.
      Atomics.store(ring, this.#cqHead, head);
    }
    return count;
  }

  /**
   * What is at work is cancelled or finished by the kernel, unseen: its memory has to stay until it is known to be done. A mapping left
   * behind would keep the ring, and every file in it, alive.
   */
  close(): void {
    if (this.#open) closeSync(this.unmap());
  }

  /** `close`, but for the descriptor that it answers: for a ring that must not go before its thread. */
  unmap(): number {
    this.#open = false;
    for (const mapping of this.#maps) mapping.unmap();
    return this.fd;
  }
}

function wordsOf({ bytes }: Mapping): Int32Array {
  return new Int32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
}

/** Why io_uring cannot be used here; undefined when it can. */
export function ringObstacle(flags = 0): string | undefined {
  try {
    new IoUring({ entries: 2, flags }).close();
    return undefined;
  } catch (error) {
    return error instanceof SyscallError ? `io_uring_setup: ${error.code}` : String(error);
  }
}
