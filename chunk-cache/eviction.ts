/**
 * Which chunk to give up next: S3-FIFO (three queues: small, main, ghost) over the chunks of all blobs.
 *
 * Why: a hit changes one byte of shared memory and no list, so threads that answer hits by themselves can say what they used; what is
 * read once, as scans do, leaves through the small queue and never reaches the main one. bench/cache-eviction.bench.ts measures it
 * against LRU, CLOCK and SIEVE on traces with scans.
 *
 * - A chunk comes into `small` (a tenth of all), or into `main` when it left not long ago (`ghost` remembers).
 * - From the end of `small`: used while it was there, it goes on to `main`; else it leaves and `ghost` remembers it.
 * - From the end of `main`: used, it goes round again with one use less; else it leaves.
 * - Pinned chunks go round.
 *
 * Queues hold numbers (blob's slot and chunk), and which queue a chunk is in is a byte of its blob: a few bytes a chunk. A chunk that
 * vanishes otherwise is not searched for; its entry is stepped over when it comes up.
 */
import { type ChunkStates, COLD } from './chunk-states.ts';

const NOWHERE = 0;
const SMALL = 1;
const MAIN = 2;
const GHOST = 3;

const SMALL_PART = 0.1;
/** Uses in `small` that take a chunk on to `main`. */
const PROMOTE_USES = 1;
const CHUNKS_A_BLOB = 2 ** 26;

/** A blob as the policy sees it. */
export interface Evictable {
  readonly slot: number;
  readonly states: ChunkStates;
  /** A byte a chunk, the policy's own. */
  readonly queue: Uint8Array;
  readonly pinned: boolean;
}

export interface Victim<B> {
  readonly blob: B;
  readonly index: number;
}

export class EvictionPolicy<B extends Evictable> {
  readonly #blobAt: (slot: number) => B | undefined;
  readonly #small = new NumberQueue();
  readonly #main = new NumberQueue();
  readonly #ghost = new NumberQueue();
  /** How many chunks each queue holds, entries that mean nothing any more left out. By queue code. */
  readonly #counts = [0, 0, 0, 0];

  constructor(blobAt: (slot: number) => B | undefined) {
    this.#blobAt = blobAt;
  }

  /** The chunk is on disk now. */
  add(blob: B, index: number): void {
    const before = blob.queue[index]!;
    if (before === SMALL || before === MAIN) return;
    this.#move(blob, index, before === GHOST ? MAIN : SMALL);
  }

  /** All chunks of the blob are gone, and so is the blob. */
  forget(blob: B): void {
    for (const code of blob.queue) if (code !== NOWHERE) this.#counts[code]!--;
    blob.queue.fill(NOWHERE);
  }

  /** The next to go; the caller takes it away. Undefined when all that is left is pinned. */
  victim(): Victim<B> | undefined {
    let patience = 4 * (this.#small.length + this.#main.length) + 4;
    while (patience-- > 0) {
      const total = this.#counts[SMALL]! + this.#counts[MAIN]!;
      if (total === 0) return undefined;
      const fromSmall = this.#counts[SMALL]! > SMALL_PART * total || this.#counts[MAIN] === 0;
      const code = fromSmall ? SMALL : MAIN;
      const next = this.#next(code);
      if (next === undefined) continue;
      const { blob, index } = next;
      const uses = blob.states.useCount(index);
      if (blob.pinned) {
        this.#move(blob, index, MAIN);
      } else if (fromSmall && uses >= PROMOTE_USES) {
        blob.states.setUseCount(index, 0);
        this.#move(blob, index, MAIN);
      } else if (!fromSmall && uses > 0) {
        blob.states.setUseCount(index, uses - 1);
        this.#move(blob, index, MAIN);
      } else {
        this.#move(blob, index, fromSmall ? GHOST : NOWHERE);
        this.#trimGhost();
        return next;
      }
    }
    return undefined;
  }

  #queueOf(code: number): NumberQueue {
    return code === SMALL ? this.#small : code === MAIN ? this.#main : this.#ghost;
  }

  /** Takes the first entry that still means something; its chunk stays counted. Undefined when the queue has none. */
  #next(code: number): Victim<B> | undefined {
    const queue = this.#queueOf(code);
    for (;;) {
      const entry = queue.shift();
      if (entry === undefined) {
        // Every chunk that is counted has an entry; be safe against a miscount all the same.
        this.#counts[code] = 0;
        return undefined;
      }
      const blob = this.#blobAt(Math.floor(entry / CHUNKS_A_BLOB));
      const index = entry % CHUNKS_A_BLOB;
      if (blob === undefined || index >= blob.queue.length || blob.queue[index] !== code) continue;
      if (code !== GHOST && blob.states.state(index) === COLD) {
        this.#move(blob, index, NOWHERE);
        continue;
      }
      return { blob, index };
    }
  }

  #move(blob: B, index: number, to: number): void {
    const from = blob.queue[index]!;
    if (from !== NOWHERE) this.#counts[from]!--;
    blob.queue[index] = to;
    if (to === NOWHERE) return;
    this.#counts[to]!++;
    this.#queueOf(to).push(blob.slot * CHUNKS_A_BLOB + index);
  }

  /** `ghost` remembers as many as there are. */
  #trimGhost(): void {
    while (this.#counts[GHOST]! > this.#counts[SMALL]! + this.#counts[MAIN]!) {
      const oldest = this.#next(GHOST);
      if (oldest === undefined) return;
      this.#move(oldest.blob, oldest.index, NOWHERE);
    }
  }
}

/** First in, first out; amortized constant time. */
class NumberQueue {
  #items: number[] = [];
  #head = 0;

  get length(): number {
    return this.#items.length - this.#head;
  }

  push(value: number): void {
    this.#items.push(value);
  }

  shift(): number | undefined {
    if (this.#head === this.#items.length) return undefined;
    const value = this.#items[this.#head++];
    if (this.#head > 1024 && this.#head * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#head);
      this.#head = 0;
    }
    return value;
  }
}
