/**
 * What is known of each chunk of one blob, in memory that threads share: the owner writes the states, any thread reads them.
 *
 * A state is one 32-bit word: two bits of state, thirty of generation. The generation grows whenever a chunk stops being
 * there, so a reader that loads the word, reads the file and loads the same word again knows that what it read was neither
 * punched out nor written anew meanwhile. That order (word, bytes, word) is the whole protocol; `read` through it only.
 *
 * `uses` is what eviction looks at, `touched` and `fetched` what statistics look at. Any thread writes them without
 * a lock: a lost update costs accuracy, nothing else.
 */

/** Not on disk, or not to be believed. */
export const COLD = 0;
/** On disk since an earlier process; not to be believed before its digest has been checked. */
export const STORED = 1;
/** On disk and checked by this process. */
export const VERIFIED = 2;
export type ChunkState = typeof COLD | typeof STORED | typeof VERIFIED;

const STATE_MASK = 3;
const GENERATION_STEP = 4;
/** Word 0: which file is the data file; it grows when the file is made anew. Words 1 and 2: the file's inode number. */
const HEADER_WORDS = 4;
/** `uses`: how often in the low two bits (at most 3), the tick of the last use in the other six. */
const USES_MASK = 3;
const TICKS = 64;

/** `fetched` of a chunk. */
export const FETCHED_INTERACTIVE = 1;
export const FETCHED_PREFETCH = 2;

export class ChunkStates {
  readonly count: number;
  readonly shared: SharedArrayBuffer;
  /** One byte a chunk: 1 when a reader has ever read of it. */
  readonly touched: Uint8Array;
  /** One byte a chunk: 0 never fetched, else who fetched it first: FETCHED_INTERACTIVE, FETCHED_PREFETCH. */
  readonly fetched: Uint8Array;
  /** One byte a chunk; see `noteUse`. */
  readonly uses: Uint8Array;
  readonly #words: Int32Array;
  #stored = 0;
  #verified = 0;

  private constructor(count: number, shared: SharedArrayBuffer) {
    const wordBytes = (HEADER_WORDS + count) * 4;
    this.count = count;
    this.shared = shared;
    this.#words = new Int32Array(shared, 0, HEADER_WORDS + count);
    this.touched = new Uint8Array(shared, wordBytes, count);
    this.fetched = new Uint8Array(shared, wordBytes + count, count);
    this.uses = new Uint8Array(shared, wordBytes + 2 * count, count);
  }

  static make(count: number): ChunkStates {
    return new ChunkStates(count, new SharedArrayBuffer((HEADER_WORDS + count) * 4 + 3 * count));
  }

  /** The same states, as another thread sees them. It must not call `set`. */
  static attach(count: number, shared: SharedArrayBuffer): ChunkStates {
    return new ChunkStates(count, shared);
  }

  /** State and generation; compare two of them to know that nothing happened in between. */
  word(index: number): number {
    return Atomics.load(this.#words, HEADER_WORDS + index);
  }

  state(index: number): ChunkState {
    return (this.word(index) & STATE_MASK) as ChunkState;
  }

  /** Owner only. A change to COLD begins a new generation. */
  set(index: number, state: ChunkState): void {
    const word = this.word(index);
    const before = word & STATE_MASK;
    if (before === state) return;
    if (before === STORED) this.#stored--;
    else if (before === VERIFIED) this.#verified--;
    if (state === STORED) this.#stored++;
    else if (state === VERIFIED) this.#verified++;
    const generation = (word - before + (state === COLD ? GENERATION_STEP : 0)) | 0;
    Atomics.store(this.#words, HEADER_WORDS + index, generation | state);
  }

  get storedCount(): number {
    return this.#stored;
  }

  get verifiedCount(): number {
    return this.#verified;
  }

  /** Which data file; a thread that has another one open must open it again. */
  get fileGeneration(): number {
    return Atomics.load(this.#words, 0);
  }

  /** Owner only, after every chunk has been set COLD and before the first of the new file is set. */
  newFile(): void {
    Atomics.add(this.#words, 0, 1);
  }

  /** Owner only: the inode of the data file; a file of that name with another inode is not the one that the states are about. */
  setInode(inode: bigint): void {
    Atomics.store(this.#words, 1, Number(BigInt.asIntN(32, inode)));
    Atomics.store(this.#words, 2, Number(BigInt.asIntN(32, inode >> 32n)));
  }

  isInode(inode: bigint): boolean {
    return (
      Atomics.load(this.#words, 1) === Number(BigInt.asIntN(32, inode)) &&
      Atomics.load(this.#words, 2) === Number(BigInt.asIntN(32, inode >> 32n))
    );
  }

  /**
   * A reader has read of the chunk. Uses within one tick count once: a kernel that reads a file front to back asks for the
   * pieces of a chunk one after another, and that is one use, not many.
   * Returns whether it counted.
   */
  noteUse(index: number, tick: number): boolean {
    this.touched[index] = 1;
    const before = this.uses[index]!;
    if (before >> 2 === tick % TICKS) return false;
    this.uses[index] = ((tick % TICKS) << 2) | Math.min(USES_MASK, (before & USES_MASK) + 1);
    return true;
  }

  /** The chunk has just come in: unused so far, and what its first reader reads in this tick is what it came for. */
  noteArrival(index: number, tick: number): void {
    this.uses[index] = (tick % TICKS) << 2;
  }

  useCount(index: number): number {
    return this.uses[index]! & USES_MASK;
  }

  setUseCount(index: number, count: number): void {
    this.uses[index] = (this.uses[index]! & ~USES_MASK) | count;
  }
}
