/** Lookups in one index against a plain scan of its segments, in all the shapes that its table of first guesses could get wrong. */
import { describe, expect, test } from 'vitest';
import { HOLE, Pieces, ZEROED } from '../lsmt/pieces.ts';
import { IndexBuilder, type SegmentIndex } from '../lsmt/segment-index.ts';
import { randomNumbers } from './random-numbers.ts';

type Run = readonly [start: number, end: number, moffset: number, zeroed: boolean];

/** @param gap sectors before the next run, by its number */
function makeRuns(count: number, seed: number, gap: (at: number, dice: number) => number): Run[] {
  const next = randomNumbers(seed);
  const runs: Run[] = [];
  let sector = 0;
  for (let at = 0; at < count; at++) {
    sector += gap(at, next());
    const length = 1 + Math.floor(next() * (at % 50 === 0 ? 16383 : 40));
    runs.push([sector, sector + length, 8 + Math.floor(next() * 2 ** 45), next() < 0.1]);
    sector += length;
  }
  return runs;
}

function build(runs: readonly Run[]): SegmentIndex {
  const builder = new IndexBuilder(1);
  for (const [start, end, moffset, zeroed] of runs) builder.add(start, end, moffset, zeroed, 200);
  return builder.build();
}

function expected(runs: readonly Run[], start: number, end: number): number[][] {
  const found: number[][] = [];
  let position = start;
  for (const [from, until, moffset, zeroed] of runs) {
    if (until <= position) continue;
    if (from >= end) break;
    if (from > position) found.push([position, from, HOLE]);
    position = Math.max(position, from);
    const last = Math.min(until, end);
    found.push(zeroed ? [position, last, ZEROED] : [position, last, 200, moffset + (position - from)]);
    position = last;
  }
  if (position < end) found.push([position, end, HOLE]);
  return found;
}

function actual(index: SegmentIndex, start: number, end: number, pieces: Pieces): number[][] {
  pieces.clear();
  index.lookup(start, end, pieces);
  return Array.from({ length: pieces.count }, (_, at) => {
    const piece = [pieces.starts[at]!, pieces.ends[at]!, pieces.layers[at]!];
    return pieces.layers[at]! < 0 ? piece : [...piece, pieces.moffsets[at]!];
  });
}

/** Neighbours of one kind are one piece. */
function joined(pieces: number[][]): number[][] {
  const out: number[][] = [];
  for (const piece of pieces) {
    const last = out.at(-1);
    const follows = last !== undefined && last[2] === piece[2];
    if (follows && (piece[2]! < 0 || last[3]! + (last[1]! - last[0]!) === piece[3])) last[1] = piece[1]!;
    else out.push([...piece]);
  }
  return out;
}

describe.each<[string, Run[]]>([
  ['evenly spread', makeRuns(2000, 1, (_, dice) => Math.floor(dice * 60))],
  ['without holes', makeRuns(500, 2, () => 0)],
  ['crowded at the front, one far behind', makeRuns(2000, 3, (at) => (at === 1999 ? 2 ** 34 : 1))],
  ['two crowds', makeRuns(2000, 4, (at, dice) => (at === 1000 ? 2 ** 29 : Math.floor(dice * 3)))],
  ['up to just below 2^31', makeRuns(300, 5, (at) => (at === 150 ? 2 ** 31 - 2_000_000 : 9))],
  ['across 2^31', makeRuns(300, 6, (at) => (at === 150 ? 2 ** 31 - 50_000 : 9))],
  ['across 2^32', makeRuns(300, 7, (at) => (at === 150 ? 2 ** 32 - 50_000 : 9))],
  ['at the end of what an entry can say', makeRuns(20, 8, (at) => (at === 0 ? 2 ** 50 - 500_000 : 9))],
  ['one', makeRuns(1, 9, () => 5)],
])('segments %s', (_, runs) => {
  test('are found as a scan finds them', () => {
    const index = build(runs);
    const pieces = new Pieces();
    const next = randomNumbers(11);
    const last = runs.at(-1)![1];
    for (let round = 0; round < 3000; round++) {
      const [from, until] = runs[Math.floor(next() * runs.length)]!;
      const dice = next();
      const near = dice < 0.4 ? from : dice < 0.8 ? until : Math.floor(next() * last);
      const start = Math.max(0, near + Math.floor(next() * 9) - 4);
      const length = next() < 0.9 ? 1 + Math.floor(next() * 16) : 1 + Math.floor(next() * 5000);
      expect([start, length, actual(index, start, start + length, pieces)]).toEqual([
        start,
        length,
        joined(expected(runs, start, start + length)),
      ]);
    }
    expect(actual(index, last, last + 8, pieces)).toEqual([[last, last + 8, HOLE]]);
    expect(index.find(last)).toBe(index.count);
    expect(index.find(last - 1)).toBe(index.count - 1);
  });
});

test('more segments before a bucket than its two bytes can say', () => {
  // A million in the first of 64 buckets that share a base, the rest of the device empty.
  const builder = new IndexBuilder();
  const count = 200_000;
  for (let at = 0; at < count; at++) builder.add(at * 2, at * 2 + 1, 8 + at, false, 1);
  builder.add(2 ** 40, 2 ** 40 + 1, 8, false, 1);
  const index = builder.build();
  for (let at = 0; at < count; at += 997) {
    expect([index.find(at * 2), index.find(at * 2 + 1)]).toEqual([at, at + 1]);
  }
  expect(index.find(2 ** 39)).toBe(count);
  // What is kept for a segment.
  expect(index.memoryBytes / index.count).toBeLessThan(24);
});
