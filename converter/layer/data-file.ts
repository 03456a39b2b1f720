/**
 * File data in the making: appended to, read back, cut short where something is taken back; hashed as it passes and written
 * by other threads while this one goes on. It lies in a few page-aligned blocks of memory ("slabs") until both are done.
 *
 * One write is under way at a time, in the order of the slabs, so that bytes that were taken back cannot overwrite the ones
 * that replaced them. A blob of more than 64 MiB goes to the disk directly, from its beginning if its size is known by then: it
 * will be fsynced anyway, and a copy in the page cache costs more than the write and drives out what others use.
 */
import { closeSync, constants, ftruncateSync, openSync, readSync, write, writeSync, writev } from 'node:fs';
import { availableParallelism } from 'node:os';
import { systemCode } from '#base';
import {
  addressOf,
  type BlobDigests,
  type BlobMark,
  type BlobSha256,
  createBlobSha256,
  type Due,
  updatePair,
} from '#linux';

export const CHUNK_BYTES = 256 * 1024;
const PAGE_BYTES = 4096;
const SLAB_BYTES = 2 << 20;
/** `drain` lets so many wait for their turn: a disk is slow now and fast then. With more cores more files are written at once. */
const WAITING_SLABS = availableParallelism() > 2 ? 3 : 16;
/** More only while a write is under way that a new one must not overtake. */
const MAX_SLABS = WAITING_SLABS + 5;
/** Each write that ends waits for this thread to begin the next. */
const SLABS_A_WRITE = Math.max(4, WAITING_SLABS / 2);
/** For who writes something that stays and may be large. */
const DIRECT_FROM_BYTES = 64 << 20;

/** `directFromBytes` of a file that will have `leastBytes` or more, with `before` bytes in files that belong to it. */
export function directFrom(leastBytes: number, before = 0): number {
  return leastBytes >= DIRECT_FROM_BYTES ? 0 : Math.max(0, DIRECT_FROM_BYTES - before);
}

export interface DataFileOptions {
  /** Compute its digests. */
  readonly hash: boolean;
  /** What comes after so many bytes does not go through the page cache. */
  readonly directFromBytes?: number;
  /** Whether it will not stay as it is after all: then neither is worth while any more. */
  readonly isDoomed?: () => boolean;
}

interface Slab {
  readonly memory: Buffer;
  readonly start: number;
  fill: number;
  /** `open`: the last one, appended to. `full`: to be written, as far as it is filled. */
  state: 'open' | 'full' | 'writing' | 'written';
  /** Taken back while it was being written. */
  dropped: boolean;
}

export class DataFile {
  readonly #path: string | undefined;
  readonly #fd: number;
  #directFd: number | undefined;
  #directFromBytes: number;
  #hasher: BlobSha256 | undefined;
  readonly #isDoomed: (() => boolean) | undefined;
  /** In the order of their bytes; what is not in one of them is in the file. */
  #slabs: Slab[] = [];
  readonly #free: Buffer[] = [];
  #slabCount = 0;
  #writing: readonly Slab[] | undefined;
  #failure: { readonly error: unknown } | undefined;
  #wake: (() => void) | undefined;
  #hashed = 0;
  #mark: { readonly at: number; readonly state: BlobMark } | undefined;
  /** Bytes in it that count. */
  length = 0;
  /** Bytes from here on may still be taken back. Nothing is ever taken back to another place. */
  rewindPoint = 0;

  /** Without a path, bytes are hashed and not kept. */
  constructor(path: string | undefined, options: DataFileOptions) {
    this.#path = path;
    this.#directFromBytes = options.directFromBytes ?? Number.POSITIVE_INFINITY;
    this.#isDoomed = options.isDoomed;
    this.#hasher = options.hash ? createBlobSha256(CHUNK_BYTES) : undefined;
    this.#fd = path === undefined ? -1 : openSync(path, 'w+', 0o644);
  }

  append(pieces: readonly Buffer[]): void {
    for (const piece of pieces) {
      for (let at = 0; at < piece.length; ) {
        const space = this.space();
        const n = piece.copy(space, 0, at);
        this.commit(n);
        at += n;
      }
    }
  }

  /** Memory for what comes next; `commit` says how much of it was filled. */
  space(): Buffer {
    const slab = this.#open();
    return slab.memory.subarray(slab.fill);
  }

  commit(bytes: number): void {
    const slab = this.#open();
    slab.fill += bytes;
    this.length += bytes;
    if (slab.fill < slab.memory.length) return;
    slab.state = 'full';
    this.#pump();
  }

  /** Forgets what lies after `length`: `rewindPoint`, or something that was not hashed yet. */
  rewind(length: number): void {
    for (let last = this.#slabs.at(-1); last !== undefined && last.start >= length; last = this.#slabs.at(-1)) {
      this.#slabs.pop();
      if (last.state === 'writing') last.dropped = true;
      else this.#free.push(last.memory);
    }
    const last = this.#slabs.at(-1);
    if (last !== undefined && last.start + last.fill > length) {
      last.fill = length - last.start;
      if (last.state === 'full') last.state = 'open';
    }
    this.length = length;
    if (this.#hashed <= length) return;
    if (this.#mark?.at !== length) throw new Error(`nothing marks byte ${length} of the data`);
    this.#hasher!.restore(this.#mark.state);
    this.#hashed = length;
  }

  /** Fills `into` from `position` on. */
  readAt(position: number, into: Buffer): void {
    for (let done = 0; done < into.length; ) {
      const at = position + done;
      const slab = this.#slabs.find(({ start, fill }) => start + fill > at);
      if (slab !== undefined && slab.start <= at) {
        done += slab.memory.copy(into, done, at - slab.start, slab.fill);
        continue;
      }
      const length = Math.min(into.length - done, (slab?.start ?? Number.POSITIVE_INFINITY) - at);
      const n = readSync(this.#fd, into, done, length, at);
      if (n === 0) throw new Error(`${this.#path} ends early`);
      done += n;
    }
  }

  /** Hashes what has come; `besides` are other streams' dues, two at most, hashed in the same pass. */
  hash(besides: readonly Due[] = []): void {
    if (this.#hasher !== undefined && this.#isDoomed?.() === true) {
      this.#hasher = undefined;
      this.#directFromBytes = Number.POSITIVE_INFINITY;
      this.#hashed = 0;
      this.#release();
    }
    let rest = besides.filter(({ bytes }) => bytes.length > 0);
    const due = (length: number): readonly Due[] => {
      if (rest.length === 0) return rest;
      const parts = rest.map(({ stream, bytes }) => ({ stream, bytes: bytes.subarray(0, length) }));
      rest = rest
        .filter(({ bytes }) => bytes.length > length)
        .map(({ stream, bytes }) => ({ stream, bytes: bytes.subarray(length) }));
      return parts;
    };
    if (this.#hasher !== undefined && this.#hashed < this.length) {
      for (const slab of this.#slabs) {
        while (this.#hashed < slab.start + slab.fill) {
          if (this.#hashed === this.rewindPoint) this.#mark = { at: this.#hashed, state: this.#hasher.mark() };
          const from = this.#hashed - slab.start;
          const to = this.#hashed < this.rewindPoint ? Math.min(slab.fill, this.rewindPoint - slab.start) : slab.fill;
          this.#hasher.update(slab.memory.subarray(from, to), due(to - from));
          this.#hashed += to - from;
        }
      }
      this.#release();
    }
    const [a, b] = rest;
    if (a !== undefined && b !== undefined) updatePair(a.stream, a.bytes, b.stream, b.bytes);
    else a?.stream.update(a.bytes);
  }

  /** Waits until not too much is left to be written. @throws what a write has failed with */
  async drain(): Promise<void> {
    await this.#written(WAITING_SLABS);
  }

  /** Hashes and writes the rest. The digests, where they were asked for and it is not doomed. */
  async finish(): Promise<BlobDigests | undefined> {
    this.hash();
    const last = this.#slabs.at(-1);
    if (last?.state === 'open' && last.fill > 0) last.state = 'full';
    this.#pump();
    await this.#written(0);
    if (this.#path !== undefined) ftruncateSync(this.#fd, this.length);
    return this.#hasher?.finish();
  }

  /** Once no write is under way: the descriptor's number could be another file's by then. */
  async close(): Promise<void> {
    this.#failure ??= { error: new Error('the file was closed') };
    while (this.#writing !== undefined) await this.#turn();
    if (this.#path !== undefined) closeSync(this.#fd);
    if (this.#directFd !== undefined) closeSync(this.#directFd);
    for (const { memory } of this.#slabs.splice(0)) this.#free.push(memory);
    spareSlabs.push(...this.#free.splice(0, MAX_SLABS - spareSlabs.length));
  }

  #open(): Slab {
    const last = this.#slabs.at(-1);
    if (last?.state === 'open') return last;
    const memory = this.#free.pop() ?? this.#moreMemory();
    const slab: Slab = { memory, start: this.length, fill: 0, state: 'open', dropped: false };
    this.#slabs.push(slab);
    return slab;
  }

  #moreMemory(): Buffer {
    if (this.#slabCount >= MAX_SLABS) {
      // Whoever appends all this does not come back to the event loop in between: so it is done here and now.
      this.hash();
      const slab = this.#slabs.find(
        ({ state, start, fill }) => state === 'full' && !this.#beingWritten(start, start + fill),
      );
      if (slab !== undefined && this.#free.length === 0) {
        this.#throwFailure();
        for (let done = 0; done < slab.fill; ) {
          done += writeSync(this.#fd, slab.memory, done, slab.fill - done, slab.start + done);
        }
        slab.state = 'written';
        this.#release();
      }
      const memory = this.#free.pop();
      if (memory !== undefined) return memory;
    }
    this.#slabCount++;
    return spareSlabs.pop() ?? alignedBuffer(SLAB_BYTES);
  }

  #beingWritten(from: number, to: number): boolean {
    // A slab that was cut short may have been longer when its write began.
    return (this.#writing ?? []).some(({ start, memory }) => start < to && start + memory.length > from);
  }

  /** Slabs that are written and hashed can be used again. */
  #release(): void {
    this.#slabs = this.#slabs.filter((slab) => {
      const done = slab.state === 'written' && (this.#hasher === undefined || slab.start + slab.fill <= this.#hashed);
      if (done) this.#free.push(slab.memory);
      return !done;
    });
  }

  #pump(): void {
    if (this.#writing !== undefined || this.#failure !== undefined) return;
    const first = this.#slabs.findIndex(({ state }) => state === 'full');
    if (first < 0) return;
    const slabs: Slab[] = [];
    for (const slab of this.#slabs.slice(first, first + SLABS_A_WRITE)) {
      const before = slabs.at(-1);
      // Between two that are left there may be one that was written out of turn.
      if (slab.state !== 'full' || (before !== undefined && before.start + before.fill !== slab.start)) break;
      slab.state = this.#path === undefined ? 'written' : 'writing';
      slabs.push(slab);
    }
    if (this.#path === undefined) {
      this.#release();
      return;
    }
    this.#writing = slabs;
    const buffers = slabs.map(({ memory, fill }) => memory.subarray(0, fill));
    this.#write(buffers, slabs[0]!.start);
  }

  #write(buffers: readonly Buffer[], position: number): void {
    const direct = this.#isDirect(buffers, position);
    const onWritten = (error: NodeJS.ErrnoException | null, n: number) => {
      if (error !== null && direct && systemCode(error) === 'EINVAL') {
        // A file system that takes the flag and not the write.
        this.#directFromBytes = Number.POSITIVE_INFINITY;
        return this.#write(buffers, position);
      }
      if (error !== null) return this.#endWrite({ error });
      const rest = behind(buffers, n);
      if (rest.length > 0) this.#write(rest, position + n);
      else this.#endWrite(undefined);
    };
    const fd = direct ? this.#directFd! : this.#fd;
    if (buffers.length === 1) write(fd, buffers[0]!, 0, buffers[0]!.length, position, onWritten);
    else writev(fd, buffers, position, onWritten);
  }

  #isDirect(buffers: readonly Buffer[], position: number): boolean {
    if (position < this.#directFromBytes || position % PAGE_BYTES !== 0) return false;
    if (buffers.some((bytes) => bytes.length % PAGE_BYTES !== 0 || addressOf(bytes) % PAGE_BYTES !== 0)) return false;
    if (this.#directFd !== undefined) return true;
    try {
      this.#directFd = openSync(this.#path!, constants.O_WRONLY | constants.O_DIRECT);
      return true;
    } catch {
      this.#directFromBytes = Number.POSITIVE_INFINITY;
      return false;
    }
  }

  #endWrite(failure: { readonly error: unknown } | undefined): void {
    const slabs = this.#writing!;
    this.#writing = undefined;
    this.#failure ??= failure;
    for (const slab of slabs) {
      slab.state = 'written';
      if (slab.dropped) this.#free.push(slab.memory);
    }
    this.#release();
    this.#pump();
    this.#wake?.();
  }

  #throwFailure(): void {
    if (this.#failure !== undefined) throw this.#failure.error;
  }

  async #written(waiting: number): Promise<void> {
    this.#throwFailure();
    // Waiting for all: for what was taken back while it was written, too.
    while (this.#writing !== undefined && (waiting === 0 || this.#unwritten() > waiting)) {
      await this.#turn();
      this.#throwFailure();
    }
  }

  #unwritten(): number {
    return this.#slabs.filter(({ state }) => state === 'full' || state === 'writing').length;
  }

  /** Until a write ends. */
  #turn(): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = resolve;
    });
  }
}

/** What of the buffers comes after `done` bytes. */
function behind(buffers: readonly Buffer[], done: number): Buffer[] {
  let left = done;
  const rest: Buffer[] = [];
  for (const bytes of buffers) {
    if (left < bytes.length) rest.push(bytes.subarray(left));
    left = Math.max(0, left - bytes.length);
  }
  return rest;
}

/** Of files before, for the next ones: new memory costs more than what is in it already. */
const spareSlabs: Buffer[] = [];

/** Not cleared. */
function alignedBuffer(sizeBytes: number): Buffer {
  const memory = Buffer.allocUnsafeSlow(sizeBytes + PAGE_BYTES);
  const start = (PAGE_BYTES - (addressOf(memory) % PAGE_BYTES)) % PAGE_BYTES;
  return memory.subarray(start, start + sizeBytes);
}
