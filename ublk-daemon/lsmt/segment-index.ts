/**
 * Which run of sectors is where: the segments of one sealed layer, or of a stack of up to 255 merged into one, sorted, without
 * overlap, never changed. Sixteen bytes a segment, packed as they are on disk with the layer's number as tag, so that four of them share
 * a cache line; no object is made by a lookup.
 *
 * A lookup takes a first guess from a small table with a bucket a segment at most, and goes on from there one by one: a cache miss for the
 * guess and one or two for the segment, where a binary search over a million segments has twenty. The table takes about a byte a segment, so
 * that it stays in the processor's cache. Segments that crowd into few buckets cost a binary search, no more.
 */
import { HOLE, type Pieces, ZEROED } from './pieces.ts';
import { MAX_SEGMENT_SECTORS } from './segment.ts';

const HIGH = 2 ** 32;
const WORDS = 4;
const ZEROED_BIT = 0x800000;
/** Segments that are tried one by one before the search jumps. */
const NEAR = 8;
/** Buckets that share a base. */
const BLOCK_SHIFT = 6;
const MOST_WITHIN = 0xffff;

export class SegmentIndex {
  readonly count: number;
  /** Four 32-bit words a segment: low and high half of each of its two words (segment.ts). */
  private readonly words: Uint32Array;
  /** Where the last segment ends; -1 until the table is made, with the first lookup. */
  private lastEnd = -1;
  private bucketShift = 0;
  /** The same as `words`, and `lastEnd` where all sectors are below 2^31 and the table is made: what the short way of a lookup needs. */
  private readonly ints: Int32Array;
  private intEnd = 0;
  /** For each bucket the first segment that ends after its beginning, or one before it: base of its block and what is added. */
  private bases = new Uint32Array(0);
  private within = new Uint16Array(0);

  constructor(words: Uint32Array, count: number) {
    this.count = count;
    this.words = words.subarray(0, count * WORDS);
    this.ints = new Int32Array(words.buffer, words.byteOffset, count * WORDS);
  }

  /** Of the segments and of the table in front of them. */
  get memoryBytes(): number {
    return this.words.buffer.byteLength + this.bases.byteLength + this.within.byteLength;
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
    if (sector >= this.lastEnd) {
      if (this.lastEnd < 0) this.makeTable();
      if (sector >= this.lastEnd) return this.count;
    }
    const { words } = this;
    const bucket = Math.floor(sector / 2 ** this.bucketShift);
    const low = this.bases[bucket >>> BLOCK_SHIFT]! + this.within[bucket]!;
    // The last segment ends after it, so that no other end of the loop is needed.
    for (let at = low * WORDS, near = at + NEAR * WORDS; at < near; at += WORDS) {
      const upper = words[at + 1]!;
      if ((upper & 0x3ffff) * HIGH + words[at]! + (upper >>> 18) > sector) return at / WORDS;
    }
    return this.findFar(low + NEAR, sector);
  }

  /** Adds the pieces of sectors `start` to `end` to `into`. */
  lookup(start: number, end: number, into: Pieces): void {
    // Most reads are of one run, of a disk below 1 TiB: whole numbers of 32 bits then, and no calls, are half of what it takes otherwise.
    if (end <= this.intEnd && into.count === 0) {
      const { ints } = this;
      const sector = start | 0;
      const bucket = sector >>> this.bucketShift;
      let at = (this.bases[bucket >>> BLOCK_SHIFT]! + this.within[bucket]!) * WORDS;
      let from = ints[at]!;
      let until = from + (ints[at + 1]! >>> 18);
      for (const near = at + NEAR * WORDS; until <= sector && at < near; ) {
        at += WORDS;
        from = ints[at]!;
        until = from + (ints[at + 1]! >>> 18);
      }
      if (from <= sector && until >= end) {
        const high = ints[at + 3]!;
        into.count = 1;
        into.starts[0] = start;
        into.ends[0] = end;
        if (high & ZEROED_BIT) into.layers[0] = ZEROED;
        else {
          into.layers[0] = high >>> 24;
          into.moffsets[0] = (high & 0x7fffff) * HIGH + (ints[at + 2]! >>> 0) + (sector - from);
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
    this.addPieces(this.find(start), start, end, into);
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

  /** From `low` on, in steps that double, then by halves. */
  private findFar(low: number, sector: number): number {
    let step = NEAR;
    let from = low;
    let to = low + step;
    while (to < this.count && this.end(to) <= sector) {
      from = to + 1;
      step *= 2;
      to = from + step;
    }
    to = Math.min(to, this.count - 1);
    while (from < to) {
      const middle = (from + to) >>> 1;
      if (this.end(middle) > sector) to = middle;
      else from = middle + 1;
    }
    return from;
  }

  private makeTable(): void {
    const { count } = this;
    const lastEnd = count === 0 ? 0 : this.end(count - 1);
    let shift = 0;
    while (lastEnd / 2 ** shift > Math.max(1, count)) shift++;
    const size = 2 ** shift;
    const buckets = Math.floor(lastEnd / size) + 1;
    const bases = new Uint32Array((buckets >>> BLOCK_SHIFT) + 1);
    const within = new Uint16Array(buckets);
    for (let bucket = 0, at = 0; bucket < buckets; bucket++) {
      const sector = bucket * size;
      while (at < count && this.end(at) <= sector) at++;
      const block = bucket >>> BLOCK_SHIFT;
      if (bucket === block << BLOCK_SHIFT) bases[block] = at;
      // One that is too low is as good: the search goes up from it.
      within[bucket] = Math.min(at - bases[block]!, MOST_WITHIN);
    }
    this.bucketShift = shift;
    this.bases = bases;
    this.within = within;
    this.lastEnd = lastEnd;
    // Shifts of 32 bits take the number modulo 32.
    if (lastEnd < 2 ** 31 && shift < 31) this.intEnd = lastEnd;
  }
}

/** Collects segments in order. */
export class IndexBuilder {
  count = 0;
  private words: Uint32Array;
  private readonly most: number;

  /**
   * @param capacity segments that are expected; more may come
   * @param most will not be passed: room for more is not made on the way there
   */
  constructor(capacity = 64, most = Number.POSITIVE_INFINITY) {
    this.words = new Uint32Array(Math.max(1, capacity) * WORDS);
    this.most = most * WORDS;
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
    const used = this.count * WORDS;
    // An index lives as long as its disk: what it does not need goes back.
    const words = this.words.length > used * 1.25 ? this.words.slice(0, used) : this.words;
    return new SegmentIndex(words, this.count);
  }

  private addOne(start: number, sectors: number, moffset: number, zeroed: boolean, layer: number): void {
    const at = this.count++ * WORDS;
    if (at === this.words.length) {
      const length = this.words.length * 2;
      const larger = new Uint32Array(at < this.most ? Math.min(length, this.most) : length);
      larger.set(this.words);
      this.words = larger;
    }
    this.words[at] = start % HIGH;
    this.words[at + 1] = Math.floor(start / HIGH) | (sectors << 18);
    this.words[at + 2] = moffset % HIGH;
    this.words[at + 3] = Math.floor(moffset / HIGH) | (zeroed ? ZEROED_BIT : 0) | (layer << 24);
  }
}
