/**
 * Chunks in memory, bounded in bytes. Segmented LRU: a chunk comes in on probation and is promoted when it is asked for again
 * after it came; a scan of things read once passes through probation and leaves the protected ones alone. The order of use is
 * exact here, where every use passes through one thread anyway; the disk level, whose hits other threads answer, cannot have that.
 *
 * Chunks on their way to the disk count too (`reserve`): the bound is on both together.
 */

/** Part of the bound that promoted chunks may take. */
const PROTECTED_PART = 0.8;

export class MemoryLevel {
  readonly limitBytes: number;
  readonly #probation = new Map<number, Buffer>();
  readonly #protected = new Map<number, Buffer>();
  #probationBytes = 0;
  #protectedBytes = 0;
  #reservedBytes = 0;

  constructor(limitBytes: number) {
    this.limitBytes = limitBytes;
  }

  get usedBytes(): number {
    return this.#probationBytes + this.#protectedBytes + this.#reservedBytes;
  }

  get reservedBytes(): number {
    return this.#reservedBytes;
  }

  has(key: number): boolean {
    return this.#probation.has(key) || this.#protected.has(key);
  }

  /** @param count Whether this is a use: pieces of a chunk that one reader reads in a row are one use. */
  get(key: number, count: boolean): Buffer | undefined {
    const kept = this.#protected.get(key);
    if (kept !== undefined) {
      if (count) {
        this.#protected.delete(key);
        this.#protected.set(key, kept);
      }
      return kept;
    }
    const chunk = this.#probation.get(key);
    if (chunk === undefined || !count) return chunk;
    this.#probation.delete(key);
    this.#probationBytes -= chunk.length;
    this.#protected.set(key, chunk);
    this.#protectedBytes += chunk.length;
    this.#shrink();
    return chunk;
  }

  /** Keeps the bytes as they are, if they fit: whoever gives a part of a larger buffer keeps all of that alive. */
  put(key: number, chunk: Buffer): void {
    if (this.has(key)) return;
    this.#probation.set(key, chunk);
    this.#probationBytes += chunk.length;
    this.#shrink();
  }

  delete(key: number): void {
    this.#probationBytes -= this.#take(this.#probation, key);
    this.#protectedBytes -= this.#take(this.#protected, key);
  }

  /** Bytes held elsewhere that the bound is to cover. */
  reserve(bytes: number): void {
    this.#reservedBytes += bytes;
    this.#shrink();
  }

  unreserve(bytes: number): void {
    this.#reservedBytes -= bytes;
  }

  clear(): void {
    this.#probation.clear();
    this.#protected.clear();
    this.#probationBytes = 0;
    this.#protectedBytes = 0;
  }

  #shrink(): void {
    const protectedLimit = this.limitBytes * PROTECTED_PART;
    for (const [key, chunk] of this.#protected) {
      if (this.#protectedBytes <= protectedLimit) break;
      this.#protected.delete(key);
      this.#protectedBytes -= chunk.length;
      this.#probation.set(key, chunk);
      this.#probationBytes += chunk.length;
    }
    for (const [key, chunk] of this.#probation) {
      if (this.usedBytes <= this.limitBytes) return;
      this.#probation.delete(key);
      this.#probationBytes -= chunk.length;
    }
    for (const [key, chunk] of this.#protected) {
      if (this.usedBytes <= this.limitBytes) return;
      this.#protected.delete(key);
      this.#protectedBytes -= chunk.length;
    }
  }

  #take(segment: Map<number, Buffer>, key: number): number {
    const chunk = segment.get(key);
    if (chunk === undefined) return 0;
    segment.delete(key);
    return chunk.length;
  }
}
