/** Gives back to the file system what lies in a data file between the bytes that its index refers to: the file's size stays. */
import { punchHole, seekData, seekHole } from '#linux';
import { LSMT_BLOCK, SECTOR } from '../lsmt/header.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';

/** Then others have a turn. */
const PUNCHES_AT_ONCE = 256;

/** @param taken other ranges of bytes that are in use @returns bytes given back */
export async function punchGaps(
  fd: number,
  live: SegmentIndex,
  taken: readonly [number, number][],
  end: number,
): Promise<number> {
  const starts: number[] = [];
  const ends: number[] = [];
  for (let at = 0; at < live.count; at++) {
    if (live.isZeroed(at)) continue;
    starts.push(live.moffset(at) * SECTOR);
    ends.push((live.moffset(at) + live.end(at) - live.start(at)) * SECTOR);
  }
  for (const [from, to] of taken) {
    starts.push(from);
    ends.push(to);
  }
  // They do not overlap, so that the n-th start belongs to the n-th end.
  const sortedStarts = Float64Array.from(starts).sort();
  const sortedEnds = Float64Array.from(ends).sort();
  let reclaimed = 0;
  let position = LSMT_BLOCK;
  for (let at = 0; at <= sortedStarts.length; at++) {
    const until = sortedStarts[at] ?? end;
    const from = Math.ceil(position / LSMT_BLOCK) * LSMT_BLOCK;
    const to = Math.floor(until / LSMT_BLOCK) * LSMT_BLOCK;
    reclaimed += punchData(fd, from, to);
    position = sortedEnds[at] ?? end;
    if (at % PUNCHES_AT_ONCE === PUNCHES_AT_ONCE - 1) await new Promise((resolve) => setImmediate(resolve));
  }
  return reclaimed;
}

/** What an earlier compaction has given back counts no more. */
function punchData(fd: number, from: number, to: number): number {
  let punched = 0;
  for (let at = from; at < to; ) {
    const start = seekData(fd, at);
    if (start === undefined || start >= to) break;
    const stop = Math.min(to, seekHole(fd, start) ?? to);
    punchHole(fd, start, stop - start);
    punched += stop - start;
    at = stop;
  }
  return punched;
}
