/**
 * A blob as its readers see it: any range, at any time, every byte verified. A chunk is looked for in memory, then on the local disk,
 * then asked for from the source; whatever it meets on the way (evicted meanwhile, damaged on disk) only sends it further down that line.
 *
 * Reads beyond the end give what there is, as pread does. The buffers given out are copies: the reader's own.
 */
import type { Digest, StopSignal } from '#base';
import { CHUNK_BYTES, chunkCount, chunkMatches } from './chunk.ts';
import { COLD, FETCHED_INTERACTIVE, FETCHED_PREFETCH, STORED, VERIFIED } from './chunk-states.ts';
import type { ChunkViewHandle } from './chunk-view.ts';
import type { DiskBlob } from './disk-blob.ts';
import type { DiskKeeper } from './disk-keeper.ts';
import { fail } from './errors.ts';
import type { Fetcher, FetchTarget } from './fetcher.ts';
import type { MemoryLevel } from './memory-level.ts';
import type { BlobFacts, FetchPriority } from './range-source.ts';
import { ReadAhead } from './read-ahead.ts';
import type { Counters } from './stats.ts';
import { chunkBytesOf } from './stored-chunks.ts';
import type { UseClock } from './use-clock.ts';

/** Room for the chunk number beside the blob's in a key of the memory level. */
const KEYS_A_BLOB = 2 ** 26;
/** Chunks that one call of `prefetch` has on its way at a time. */
const PREFETCH_CHUNKS = 256;
/** Chunks that may fail before it gives up: one that is wrong in the store must not keep the others from coming. */
const PREFETCH_FAILURES = 32;

export interface ByteRange {
  readonly offset: number;
  readonly length: number;
}

/** Things made of a blob's bytes, by number: blocks that were decompressed. What was put may be gone at any time. */
export interface DerivedBlocks {
  get(block: number): Buffer | undefined;
  put(block: number, bytes: Buffer): void;
}

/** What a blob shares with the others of its cache. */
export interface BlobSurroundings {
  readonly memory: MemoryLevel;
  readonly keeper: DiskKeeper;
  readonly fetcher: Fetcher;
  readonly clock: UseClock;
  readonly counters: Counters;
  readonly diskBytes: () => number;
  /** The memory for chunks on their way to the disk has become free. */
  readonly roomCame: () => void;
  /** Set once the cache is closed. */
  readonly closedWith: () => Error | undefined;
  readonly released: (blob: CachedBlob) => void;
  /** As of a blob: never used again in this cache. */
  readonly newId: () => number;
}

export class CachedBlob implements FetchTarget {
  readonly digest: Digest;
  readonly sizeBytes: number;
  readonly chunkDigests: Buffer;
  readonly chunkCount: number;
  /** The fetcher's own. */
  readonly tickets: FetchTarget['tickets'] = new Map();
  readonly #disk: DiskBlob;
  readonly #keyBase: number;
  readonly #around: BlobSurroundings;
  readonly #readAhead: ReadAhead;
  /** Chunks that have come and are not on the disk yet. */
  readonly #pending = new Map<number, Buffer>();
  /** Of these, the ones that go into memory then. */
  readonly #toKeep = new Set<number>();
  /** Chunks whose bytes on disk are being checked. */
  readonly #checking = new Map<number, Promise<Buffer | undefined>>();

  /** @param id Never used again in this cache. */
  constructor(facts: BlobFacts, disk: DiskBlob, id: number, around: BlobSurroundings) {
    this.digest = facts.digest;
    this.sizeBytes = facts.sizeBytes;
    this.chunkDigests = facts.chunkDigests;
    this.chunkCount = chunkCount(facts.sizeBytes);
    this.#disk = disk;
    this.#keyBase = id * KEYS_A_BLOB;
    this.#around = around;
    this.#readAhead = new ReadAhead(this.chunkCount);
    disk.inUse = true;
  }

  /** Every chunk is on the local disk and has been checked by this process. */
  get isComplete(): boolean {
    return this.#disk.states.verifiedCount === this.chunkCount;
  }

  /**
   * The cache file, once the blob is complete. Whoever uses it without the cache (as a mount's device) pins the blob first and looks
   * again: eviction leaves holes in a file that is not pinned.
   */
  get localPath(): string | undefined {
    return this.isComplete && this.#disk.exists ? this.#disk.dataPath : undefined;
  }

  /** A byte a chunk: 1 when a reader has ever read of it; kept over restarts. */
  get touched(): Uint8Array {
    return this.#disk.states.touched;
  }

  /** A byte a chunk: 0 never fetched, 1 (FETCHED_INTERACTIVE) or 2 (FETCHED_PREFETCH) by who made it come; kept over restarts. */
  get fetched(): Uint8Array {
    return this.#disk.states.fetched;
  }

  /** Presence, `touched` and `fetched` of every chunk, a byte each, as the map on disk has them. */
  chunkBytes(): Buffer {
    return chunkBytesOf(this.#disk.states);
  }

  chunkState(index: number): 'cold' | 'disk' | 'memory' {
    if (this.#around.memory.has(this.#keyBase + index) || this.#pending.has(index)) return 'memory';
    return this.#disk.states.state(index) === COLD ? 'cold' : 'disk';
  }

  /**
   * A place in the memory level for what its reader makes of the blob, under the same bound as the chunks and by the same order of
   * use. The bytes stay the reader's: he gives what nobody changes.
   */
  derivedBlocks(): DerivedBlocks {
    const { memory, closedWith, newId } = this.#around;
    const base = newId() * KEYS_A_BLOB;
    return {
      get: (block) => (block < KEYS_A_BLOB ? memory.get(base + block, true) : undefined),
      put: (block, bytes) => {
        if (block < KEYS_A_BLOB && closedWith() === undefined) memory.put(base + block, bytes);
      },
    };
  }

  /** For a ChunkView in another thread. Good for as long as this blob is open. */
  view(): ChunkViewHandle {
    return {
      path: this.#disk.dataPath,
      sizeBytes: this.sizeBytes,
      states: this.#disk.states.shared,
      clock: this.#around.clock.shared,
    };
  }

  /**
   * Bytes from `offset`, fewer than `length` only at the blob's end.
   * @throws CACHE_CHUNK_MISMATCH, CACHE_CLOSED, CACHE_READ_RANGE, what the source throws, the signal's reason
   */
  async read(offset: number, length: number, options: { readonly signal?: StopSignal } = {}): Promise<Buffer> {
    this.#check(offset, length);
    const end = Math.min(offset + length, this.sizeBytes);
    if (end <= offset) return Buffer.alloc(0);
    const out = Buffer.allocUnsafe(end - offset);
    const first = Math.floor(offset / CHUNK_BYTES);
    const last = Math.floor((end - 1) / CHUNK_BYTES);
    const pieces: Promise<void>[] = [];
    for (let index = first; index <= last; index++) {
      const [start, stop, at] = pieceOf(index, offset, end);
      const counts = this.#noteUse(index);
      const chunk = this.#inMemory(index, counts);
      if (chunk !== undefined) {
        this.#around.counters.memoryHits++;
        chunk.copy(out, at, start, stop);
      } else {
        pieces.push(this.#readChunk(index, start, stop, out, at, options.signal));
      }
    }
    this.#lookAhead(first, last);
    await Promise.all(pieces);
    return out;
  }

  /** The same bytes at once when all are in memory, or on disk and verified; undefined when `read` must be asked. */
  readNow(offset: number, length: number): Buffer | undefined {
    this.#check(offset, length);
    const bytes = Buffer.allocUnsafe(Math.max(0, Math.min(length, this.sizeBytes - offset)));
    return this.readNowInto(bytes, 0, offset, bytes.length) === bytes.length ? bytes : undefined;
  }

  /** `readNow` into `target` from `at` on. Returns the number of bytes, or -1 when `read` must be asked. */
  readNowInto(target: Buffer, at: number, offset: number, length: number): number {
    const end = Math.min(offset + length, this.sizeBytes);
    if (end <= offset) return 0;
    const first = Math.floor(offset / CHUNK_BYTES);
    const last = Math.floor((end - 1) / CHUNK_BYTES);
    let memoryHits = 0;
    for (let index = first; index <= last; index++) {
      const [start, stop, into] = pieceOf(index, offset, end);
      const chunk = this.#inMemory(index, false);
      if (chunk !== undefined) {
        memoryHits++;
        chunk.copy(target, at + into, start, stop);
      } else if (
        this.#disk.states.state(index) !== VERIFIED ||
        !this.#disk.readNow(index, start, stop - start, target, at + into)
      ) {
        return -1;
      }
    }
    for (let index = first; index <= last; index++) this.#noteUse(index);
    this.#around.counters.memoryHits += memoryHits;
    this.#around.counters.diskHits += last - first + 1 - memoryHits;
    this.#lookAhead(first, last);
    return end - offset;
  }

  /**
   * Brings ranges into the cache, in the order given, behind what readers wait for. Resolves when all have come.
   * @throws what the source throws, when what else can be had has come, or a number of chunks has failed; the signal's reason
   */
  async prefetch(ranges: readonly ByteRange[], options: { readonly signal?: StopSignal } = {}): Promise<void> {
    const onTheWay = new Set<Promise<void>>();
    const failures: unknown[] = [];
    for (const index of this.#chunksOf(ranges)) {
      if (failures.length >= PREFETCH_FAILURES || options.signal?.aborted === true) break;
      if (this.chunkState(index) !== 'cold') continue;
      const one = this.#around.fetcher.fetch(this, index, 'prefetch', options.signal).then(
        () => void onTheWay.delete(one),
        (error) => {
          onTheWay.delete(one);
          failures.push(error);
        },
      );
      onTheWay.add(one);
      // Half of them, so that the next ones can leave in large reads again.
      if (onTheWay.size >= PREFETCH_CHUNKS) while (onTheWay.size > PREFETCH_CHUNKS / 2) await Promise.race(onTheWay);
    }
    await Promise.all(onTheWay);
    if (failures.length > 0) throw failures[0];
  }

  /** Checks every chunk on disk that this process has not checked yet, and drops those that are wrong. Returns `isComplete`. */
  async verifyStored(): Promise<boolean> {
    for (let index = 0; index < this.chunkCount; index++) {
      if (this.#disk.states.state(index) === STORED) await this.#believe(index);
    }
    return this.isComplete;
  }

  /** Gives up the memory that the blob takes; what is on disk stays. Opening it again makes another object. */
  release(): void {
    if (this.#around.closedWith() !== undefined) return;
    this.#disk.inUse = false;
    this.forgetMemory();
    this.#around.released(this);
  }

  forgetMemory(): void {
    for (let index = 0; index < this.chunkCount; index++) this.#around.memory.delete(this.#keyBase + index);
  }

  arrived(index: number, chunk: Buffer, priority: FetchPriority): void {
    const { states } = this.#disk;
    if (this.#around.closedWith() !== undefined) return;
    states.noteArrival(index, this.#around.clock.tick);
    if (states.fetched[index] === 0) {
      states.fetched[index] = priority === 'interactive' ? FETCHED_INTERACTIVE : FETCHED_PREFETCH;
    }
    this.#pending.set(index, chunk);
    // What was fetched ahead waits for its reader on the disk (and in the kernel's page cache).
    if (priority !== 'interactive') return;
    // A part of a larger read has to be copied: later, whoever waits comes first.
    if (isWhole(chunk)) this.#around.memory.put(this.#keyBase + index, chunk);
    else this.#toKeep.add(index);
  }

  landed(first: number, bytes: Buffer): void {
    const { memory, keeper, clock } = this.#around;
    const chunks = Array.from({ length: Math.ceil(bytes.length / CHUNK_BYTES) }, (_, k) => first + k);
    if (this.#around.closedWith() !== undefined) {
      for (const index of chunks) this.#pending.delete(index);
      return;
    }
    clock.cameIn(bytes.length, this.#around.diskBytes());
    memory.reserve(bytes.length);
    const done = (stored: number) => {
      memory.unreserve(bytes.length);
      for (const [k, index] of chunks.entries()) {
        const chunk = this.#pending.get(index);
        this.#pending.delete(index);
        const keep = this.#toKeep.delete(index) || k >= stored;
        if (keep && chunk !== undefined) this.#keepInMemory(index, chunk);
      }
      this.#around.roomCame();
    };
    keeper.store({ blob: this.#disk, first, bytes, chunks, done });
  }

  #check(offset: number, length: number): void {
    const closed = this.#around.closedWith();
    if (closed !== undefined) throw closed;
    if (Number.isSafeInteger(offset) && Number.isSafeInteger(length) && offset >= 0 && length >= 0) return;
    throw fail('CACHE_READ_RANGE', { blob: this.digest, offset, length });
  }

  #noteUse(index: number): boolean {
    return this.#disk.states.noteUse(index, this.#around.clock.tick);
  }

  #inMemory(index: number, counts: boolean): Buffer | undefined {
    return this.#around.memory.get(this.#keyBase + index, counts) ?? this.#pending.get(index);
  }

  /** A chunk that is part of a larger read would keep all of that alive. */
  #keepInMemory(index: number, chunk: Buffer): void {
    this.#around.memory.put(this.#keyBase + index, isWhole(chunk) ? chunk : copyOf(chunk));
  }

  #isMissing(index: number): boolean {
    return this.chunkState(index) === 'cold' && !this.tickets.has(index);
  }

  async #readChunk(index: number, start: number, stop: number, out: Buffer, at: number, signal?: StopSignal) {
    const { states } = this.#disk;
    const { counters } = this.#around;
    if (states.state(index) === STORED) {
      const chunk = await this.#believe(index);
      if (chunk !== undefined) {
        counters.diskHits++;
        chunk.copy(out, at, start, stop);
        return;
      }
    } else if (states.state(index) === VERIFIED) {
      const word = states.word(index);
      const there = await this.#disk.read(index, start, stop - start, out, at);
      const closed = this.#around.closedWith();
      if (closed !== undefined) throw closed;
      if (there) {
        counters.diskHits++;
        return;
      }
      if (states.word(index) === word) this.#drop(index);
    }
    // It may have come in meanwhile.
    const chunk = this.#inMemory(index, false) ?? (await this.#fetch(index, signal));
    chunk.copy(out, at, start, stop);
  }

  async #fetch(index: number, signal?: StopSignal): Promise<Buffer> {
    const { fetcher, counters } = this.#around;
    counters.misses++;
    const joined = this.tickets.get(index);
    try {
      return await fetcher.fetch(this, index, 'interactive', signal);
    } catch (error) {
      // A prefetch that was already under way failed: nobody has tried on behalf of a reader yet.
      if (joined?.run?.priority !== 'prefetch' || signal?.aborted === true) throw error;
      return this.#inMemory(index, false) ?? (await fetcher.fetch(this, index, 'interactive', signal));
    }
  }

  /** A chunk from before this process began: its bytes when they are right; else it is dropped. One check, whoever waits. */
  #believe(index: number): Promise<Buffer | undefined> {
    const known = this.#checking.get(index);
    if (known !== undefined) return known;
    const check = this.#checkStored(index).finally(() => this.#checking.delete(index));
    this.#checking.set(index, check);
    return check;
  }

  async #checkStored(index: number): Promise<Buffer | undefined> {
    const word = this.#disk.states.word(index);
    const chunk = Buffer.allocUnsafeSlow(this.#disk.lengthOf(index));
    const there = await this.#disk.read(index, 0, chunk.length, chunk, 0);
    const closed = this.#around.closedWith();
    if (closed !== undefined) throw closed;
    if (there && chunkMatches(this.chunkDigests, index, chunk)) {
      this.#disk.believe(index, word);
      this.#keepInMemory(index, chunk);
      return chunk;
    }
    if (this.#disk.states.word(index) === word) this.#drop(index);
    return undefined;
  }

  #drop(index: number): void {
    this.#around.counters.badOnDisk++;
    this.#disk.disbelieve(index);
  }

  #lookAhead(first: number, last: number): void {
    const ahead = this.#readAhead.note(first, last);
    if (ahead === undefined) return;
    for (let index = ahead.from; index < ahead.to; index++) {
      // Its failure is nobody's: whoever comes to need the chunk asks for it himself.
      if (this.#isMissing(index)) this.#around.fetcher.fetch(this, index, 'prefetch').catch(() => {});
    }
  }

  *#chunksOf(ranges: readonly ByteRange[]): Generator<number> {
    for (const { offset, length } of ranges) {
      this.#check(offset, length);
      const end = Math.min(offset + length, this.sizeBytes);
      for (let index = Math.floor(offset / CHUNK_BYTES); index * CHUNK_BYTES < end; index++) yield index;
    }
  }
}

/** Of chunk `index`, the part that [offset, end) wants: from, to (within the chunk), and where it goes in the result. */
function pieceOf(index: number, offset: number, end: number): [start: number, stop: number, at: number] {
  const chunkStart = index * CHUNK_BYTES;
  const start = Math.max(offset - chunkStart, 0);
  return [start, Math.min(end - chunkStart, CHUNK_BYTES), chunkStart + start - offset];
}

function isWhole(chunk: Buffer): boolean {
  return chunk.buffer.byteLength === chunk.length;
}

function copyOf(chunk: Buffer): Buffer {
  const copy = Buffer.allocUnsafeSlow(chunk.length);
  chunk.copy(copy);
  return copy;
}
