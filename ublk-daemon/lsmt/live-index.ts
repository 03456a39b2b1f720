/**
 * The index of a writable layer: which sectors were written, and where their bytes are now. The latest write wins; what it covers is
 * cut, dropped or split.
 *
 * Sorted runs in leaves of at most 256, the leaves in one array: a write moves a few kilobytes at most, whatever the number of runs.
 * Neighbours whose bytes are neighbours become one run.
 */
import { HOLE, type Pieces, ZEROED } from './pieces.ts';
import { IndexBuilder, type SegmentIndex } from './segment-index.ts';

const CAPACITY = 256;

class Leaf {
  count = 0;
  readonly starts = new Float64Array(CAPACITY);
  readonly ends = new Float64Array(CAPACITY);
  /** Where the bytes begin in the data file; ZEROED_AT for zeros. */
  readonly moffsets = new Float64Array(CAPACITY);

  /** The first run that ends after `sector`. */
  find(sector: number): number {
    let low = 0;
    let high = this.count;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.ends[middle]! > sector) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  insert(at: number, start: number, end: number, moffset: number): void {
    this.starts.copyWithin(at + 1, at, this.count);
    this.ends.copyWithin(at + 1, at, this.count);
    this.moffsets.copyWithin(at + 1, at, this.count);
    this.starts[at] = start;
    this.ends[at] = end;
    this.moffsets[at] = moffset;
    this.count++;
  }

  remove(from: number, to: number): void {
    if (from === to) return;
    this.starts.copyWithin(from, to, this.count);
    this.ends.copyWithin(from, to, this.count);
    this.moffsets.copyWithin(from, to, this.count);
    this.count -= to - from;
  }

  /** The upper half, taken out. */
  split(): Leaf {
    const upper = new Leaf();
    const half = this.count >>> 1;
    upper.starts.set(this.starts.subarray(half, this.count));
    upper.ends.set(this.ends.subarray(half, this.count));
    upper.moffsets.set(this.moffsets.subarray(half, this.count));
    upper.count = this.count - half;
    this.count = half;
    return upper;
  }

  get lastEnd(): number {
    return this.ends[this.count - 1]!;
  }
}

const ZEROED_AT = -1;

export class LiveIndex {
  /** Runs. */
  count = 0;
  /** Sectors that have bytes. */
  dataSectors = 0;
  /** Never empty, but for the only one. */
  private readonly leaves: Leaf[] = [new Leaf()];

  /** @param moffset of the first sector's bytes; undefined: zeros */
  write(start: number, end: number, moffset: number | undefined): void {
    this.cut(start, end);
    const value = moffset ?? ZEROED_AT;
    if (moffset !== undefined) this.dataSectors += end - start;
    const number = this.leafOf(start);
    let leaf = this.leaves[number]!;
    let at = leaf.find(start);
    const before = at - 1;
    if (before >= 0 && leaf.ends[before] === start && continues(leaf, before, value)) {
      leaf.ends[before] = end;
      if (at < leaf.count && leaf.starts[at] === end && continues(leaf, before, leaf.moffsets[at]!)) {
        leaf.ends[before] = leaf.ends[at]!;
        leaf.remove(at, at + 1);
        this.count--;
      }
      return;
    }
    if (leaf.count === CAPACITY) {
      const upper = leaf.split();
      this.leaves.splice(number + 1, 0, upper);
      if (at > leaf.count) {
        at -= leaf.count;
        leaf = upper;
      }
    }
    leaf.insert(at, start, end, value);
    this.count++;
  }

  /** Forgets what is known of the range: it is a hole again. */
  cut(start: number, end: number): void {
    const { leaves } = this;
    let number = this.leafOf(start);
    for (let leaf = leaves[number]; leaf !== undefined; leaf = leaves[number]) {
      const from = leaf.find(start);
      if (from < leaf.count) {
        if (leaf.starts[from]! >= end) return;
        if (this.cutLeaf(number, from, start, end)) return;
      }
      if (leaf.count > 0 || leaves.length === 1) {
        number++;
        continue;
      }
      let next = number + 1;
      while (next < leaves.length && leaves[next]!.lastEnd <= end) this.forget(leaves[next++]!);
      leaves.splice(number, next - number);
      if (leaves.length === 0) leaves.push(new Leaf());
    }
  }

  lookup(start: number, end: number, into: Pieces, layer: number): void {
    let position = start;
    let number = this.leafOf(start);
    let leaf = this.leaves[number]!;
    let at = leaf.find(start);
    while (position < end) {
      if (at === leaf.count) {
        number++;
        if (number >= this.leaves.length) break;
        leaf = this.leaves[number]!;
        at = 0;
        continue;
      }
      const from = leaf.starts[at]!;
      if (from >= end) break;
      if (from > position) {
        into.add(position, from, 0, HOLE);
        position = from;
      }
      const until = Math.min(end, leaf.ends[at]!);
      const moffset = leaf.moffsets[at]!;
      if (moffset === ZEROED_AT) into.add(position, until, 0, ZEROED);
      else into.add(position, until, moffset + (position - from), layer);
      position = until;
      at++;
    }
    if (position < end) into.add(position, end, 0, HOLE);
  }

  /** Runs in order. `moffset` is undefined for zeros. */
  forEach(visit: (start: number, end: number, moffset: number | undefined) => void): void {
    for (const leaf of this.leaves) {
      for (let at = 0; at < leaf.count; at++) {
        const moffset = leaf.moffsets[at]!;
        visit(leaf.starts[at]!, leaf.ends[at]!, moffset === ZEROED_AT ? undefined : moffset);
      }
    }
  }

  /** As it is now, for good. */
  freeze(layer: number, zeroedMoffset: number): SegmentIndex {
    const builder = new IndexBuilder(this.count);
    this.forEach((start, end, moffset) => {
      builder.add(start, end, moffset ?? zeroedMoffset, moffset === undefined, layer);
    });
    return builder.build();
  }

  /** The leaf that a run from `sector` on belongs to. */
  private leafOf(sector: number): number {
    const { leaves } = this;
    let low = 0;
    let high = leaves.length;
    while (high - low > 1) {
      const middle = (low + high) >>> 1;
      if (leaves[middle]!.starts[0]! <= sector) low = middle;
      else high = middle;
    }
    return low;
  }

  /** @returns whether nothing after it can be in the range */
  private cutLeaf(number: number, from: number, start: number, end: number): boolean {
    const leaf = this.leaves[number]!;
    let at = from;
    const runStart = leaf.starts[at]!;
    const runEnd = leaf.ends[at]!;
    const moffset = leaf.moffsets[at]!;
    const isData = moffset !== ZEROED_AT;
    if (runStart < start) {
      leaf.ends[at] = start;
      if (isData) this.dataSectors -= Math.min(runEnd, end) - start;
      if (runEnd > end) {
        this.insertAfter(number, at, end, runEnd, isData ? moffset + (end - runStart) : ZEROED_AT);
        return true;
      }
      at++;
    }
    const keep = at;
    while (at < leaf.count && leaf.ends[at]! <= end) {
      if (leaf.moffsets[at] !== ZEROED_AT) this.dataSectors -= leaf.ends[at]! - leaf.starts[at]!;
      at++;
    }
    let isLast = false;
    if (at < leaf.count) {
      isLast = true;
      const first = leaf.starts[at]!;
      if (first < end) {
        leaf.starts[at] = end;
        if (leaf.moffsets[at] !== ZEROED_AT) {
          leaf.moffsets[at] = leaf.moffsets[at]! + (end - first);
          this.dataSectors -= end - first;
        }
      }
    }
    this.count -= at - keep;
    leaf.remove(keep, at);
    return isLast;
  }

  private insertAfter(number: number, at: number, start: number, end: number, moffset: number): void {
    let leaf = this.leaves[number]!;
    let position = at + 1;
    if (leaf.count === CAPACITY) {
      const upper = leaf.split();
      this.leaves.splice(number + 1, 0, upper);
      if (position > leaf.count) {
        position -= leaf.count;
        leaf = upper;
      }
    }
    leaf.insert(position, start, end, moffset);
    this.count++;
  }

  private forget(leaf: Leaf): void {
    for (let at = 0; at < leaf.count; at++) {
      if (leaf.moffsets[at] !== ZEROED_AT) this.dataSectors -= leaf.ends[at]! - leaf.starts[at]!;
    }
    this.count -= leaf.count;
  }
}

function continues(leaf: Leaf, at: number, moffset: number): boolean {
  const own = leaf.moffsets[at]!;
  if (own === ZEROED_AT || moffset === ZEROED_AT) return own === moffset;
  return own + (leaf.ends[at]! - leaf.starts[at]!) === moffset;
}
