/**
 * A clock that counts what came in, not time: it ticks each time a thirty-second part of what the disk holds has come in, and
 * once in a while when nothing does. Uses of a chunk within one tick are one use (chunk-states.ts). Threads share it.
 */
const PART = 1 / 32;
const SMALLEST_STEP_BYTES = 1024 * 1024;

export class UseClock {
  readonly shared: SharedArrayBuffer;
  readonly #word: Int32Array;
  #sinceBytes = 0;

  constructor(shared = new SharedArrayBuffer(4)) {
    this.shared = shared;
    this.#word = new Int32Array(shared);
  }

  get tick(): number {
    return Atomics.load(this.#word, 0) >>> 0;
  }

  advance(): void {
    Atomics.add(this.#word, 0, 1);
    this.#sinceBytes = 0;
  }

  cameIn(bytes: number, heldBytes: number): void {
    this.#sinceBytes += bytes;
    if (this.#sinceBytes >= Math.max(SMALLEST_STEP_BYTES, heldBytes * PART)) this.advance();
  }
}
