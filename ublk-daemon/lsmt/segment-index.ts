/**
 * Which run of sectors is where: the segments of one sealed layer, or of a stack of up to 255 merged into one, sorted, without
 * overlap, never changed. Sixteen bytes a segment, packed as they are on disk with the layer's number as tag, so that four of them share
 * a cache line; no object is made by a lookup.
 *
 * A lookup takes a first guess from a small table with about a bucket a segment, and searches between two neighbours of it:
 * two or three cache misses, where a binary search over a million segments has twenty. Segments that crowd into few buckets cost the binary
 * search, no more.
 */
import { HOLE, type Pieces, ZEROED } from './pieces.ts';
import { MAX_SEGMENT_SECTORS } from './segment.ts';

const HIGH = 2 ** 32;
const WORDS = 4;
const ZEROED_BIT = 0x800000;
const LINEAR = 8;

export class SegmentIndex {
  readonly count: number;
  /** Four 32-bit words a segment: low and high half of each of its two words (segment.ts). */
  private readonly words: Uint32Array;
  private buckets: Uint32Array | undefined;
  private bucketScale = 1;

  constructor(words: Uint32Array, count: number) {
    this.count = count;
    this.words = words.subarray(0, count * WORDS);
  }

  static readonly empty = new SegmentIndex(new Uint32Array(0), 0);

  start(at: number): number {
    const { words } = this;
    return (words[at * WORDS + 1]! & 0x3ffff) * HIGH + words[at * WORDS]!;
  }

  end(at: number): number {
    return this.start(at) + (this.words[at * WORDS + 1]! >>> 18);
  }

  moffset(at: number): number {
    const { words } = this;
    return (words[at * WORDS + 3]! & 0x7fffff) * HIGH + words[at * WORDS + 2]!;
  }

  layer(at: number): number {
    return this.words[at * WORDS + 3]! >>> 24;
  }

  isZeroed(at: number): boolean {
    return (this.words[at * WORDS + 3]! & ZEROED_BIT) !== 0;
  }

  /** The first segment that ends after `sector`: it holds it, or begins after it; `count` when there is none. */
  find(sector: number): number {
    const buckets = this.buckets ?? this.makeBuckets();
    const bucket = Math.floor(sector * this.bucketScale);
    if (bucket >= buckets.length - 1) return this.count;
    const { words } = this;
    let low = buckets[bucket]!;
    let high = buckets[bucket + 1]!;
    while (high - low > LINEAR) {
      const middle = (low + high) >>> 1;
      if (this.end(middle) > sector) high = middle;
      else low = middle + 1;
    }
    // A few neighbours one by one: the processor guesses this loop better than the other.
    for (let at = low * WORDS; low < high; low++, at += WORDS) {
      const upper = words[at + 1]!;
      if ((upper & 0x3ffff) * HIGH + words[at]! + (upper >>> 18) > sector) break;
    }
    return low;
  }

  /** Adds the pieces of sectors `start` to `end` to `into`. */
  lookup(start: number, end: number, into: Pieces): void {
    const { words } = this;
    const at = this.find(start);
    const first = at * WORDS;
    // Most reads are of one run. Written out, since numbers that go through calls are allocated.
    if (into.count === 0 && first < words.length) {
      const low = words[first + 1]!;
      const from = (low & 0x3ffff) * HIGH + words[first]!;
      if (from <= start && from + (low >>> 18) >= end) {
        const high = words[first + 3]!;
        into.count = 1;
        into.starts[0] = start;
        into.ends[0] = end;
        if (high & ZEROED_BIT) into.layers[0] = ZEROED;
        else {
          into.layers[0] = high >>> 24;
          into.moffsets[0] = (high & 0x7fffff) * HIGH + words[first + 2]! + (start - from);
        }
        return;
      }
      if (from >= end) {
        into.count = 1;
        into.starts[0] = start;
        into.ends[0] = end;
        into.layers[0] = HOLE;
        return;
      }
    }
    this.addPieces(at, start, end, into);
  }

  private addPieces(first: number, start: number, end: number, into: Pieces): void {
    const { count } = this;
    let position = start;
    for (let at = first; at < count && position < end; at++) {
      const from = this.start(at);
      if (from >= end) break;
      if (from > position) {
        into.add(position, from, 0, HOLE);
        position = from;
      }
      const until = Math.min(this.end(at), end);
      if (this.isZeroed(at)) into.add(position, until, 0, ZEROED);
      else into.add(position, until, this.moffset(at) + (position - from), this.layer(at));
      position = until;
    }
    if (position < end) into.add(position, end, 0, HOLE);
  }

  /** Whether any sector of the range has been written, zeros counting or not. */
  touches(start: number, end: number, countZeroed: boolean): boolean {
    for (let at = this.find(start); at < this.count && this.start(at) < end; at++) {
      if (countZeroed || !this.isZeroed(at)) return true;
    }
    return false;
  }

  private makeBuckets(): Uint32Array {
    const { count } = this;
    const last = count === 0 ? 0 : this.end(count - 1);
    // Scaled by a power of two, so that the product below is exact and both sides agree in which bucket a sector is.
    let size = 1;
    while (last / size > Math.max(1, count)) size *= 2;
    this.bucketScale = 1 / size;
    const bucketCount = Math.floor(last / size) + 1;
    const buckets = new Uint32Array(bucketCount + 1);
    for (let bucket = 0, at = 0; bucket < bucketCount; bucket++) {
      const sector = bucket * size;
      while (at < count && this.end(at) <= sector) at++;
      buckets[bucket] = at;
    }
    buckets[bucketCount] = count;
    this.buckets = buckets;
    return buckets;
  }
}

/** Collects segments in order. */
export class IndexBuilder {
  count = 0;
  private words: Uint32Array;

  /** @param capacity segments that are expected; more may come */
  constructor(capacity = 64) {
    this.words = new Uint32Array(Math.max(1, capacity) * WORDS);
  }

  /** A run of any length: it becomes as many segments as it takes. */
  add(start: number, end: number, moffset: number, zeroed: boolean, layer: number): void {
    for (let from = start, place = moffset; from < end; ) {
      const sectors = Math.min(MAX_SEGMENT_SECTORS, end - from);
      this.addOne(from, sectors, place, zeroed, layer);
      from += sectors;
      if (!zeroed) place += sectors;
    }
  }

  /** A part of a segment of another index. */
  addPart(from: SegmentIndex, at: number, start: number, end: number): void {
    const zeroed = from.isZeroed(at);
    const skipped = zeroed ? 0 : start - from.start(at);
    this.addOne(start, end - start, from.moffset(at) + skipped, zeroed, from.layer(at));
  }

  build(): SegmentIndex {
    return new SegmentIndex(this.words, this.count);
  }

  private addOne(start: number, sectors: number, moffset: number, zeroed: boolean, layer: number): void {
    const at = this.count++ * WORDS;
    if (at === this.words.length) {
      const larger = new Uint32Array(this.words.length * 2);
      larger.set(this.words);
      this.words = larger;
    }
    this.words[at] = start % HIGH;
    this.words[at + 1] = Math.floor(start / HIGH) | (sectors << 18);
    this.words[at + 2] = moffset % HIGH;
    this.words[at + 3] = Math.floor(moffset / HIGH) | (zeroed ? ZEROED_BIT : 0) | (layer << 24);
  }
}
