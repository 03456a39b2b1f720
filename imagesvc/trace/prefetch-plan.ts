/**
 * From a trace to the reads that fetch it: a few large ones, the first needed first.
 *
 * The chunks are taken in the order of the trace, a window of 16 MiB after the other. Within a window they are sorted by their
 * place in the blob and joined up to 4 MiB, over gaps of one chunk too, as long as a read has at most a fifth of what nobody asked for.
 * The reads of a window go in the order in which the first of their chunks is needed.
 */
import type { Digest } from '#base';
import { CHUNK_BYTES } from '../catalog/image.ts';
import type { Trace } from './trace.ts';

export interface PlannedRange {
  readonly offset: number;
  readonly length: number;
}

const WINDOW_CHUNKS = 64;
const READ_CHUNKS = 16;
const GAP_CHUNKS = 1;
/** Wanted chunks for each one in a gap. */
const WANTED_A_GAP = 4;

/** Reads of each blob, in the order in which they are to be made. */
export function planPrefetch(trace: Trace): Map<Digest, PlannedRange[]> {
  const plan = new Map<Digest, PlannedRange[]>();
  trace.blobs.forEach(({ digest, sizeBytes }, blob) => {
    const chunks = trace.chunks.filter((one) => one.blob === blob).map(({ chunk }) => chunk);
    const ranges: PlannedRange[] = [];
    for (let at = 0; at < chunks.length; at += WINDOW_CHUNKS) {
      for (const [first, end] of runsOf(chunks.slice(at, at + WINDOW_CHUNKS))) {
        const offset = first * CHUNK_BYTES;
        ranges.push({ offset, length: Math.min(end * CHUNK_BYTES, sizeBytes) - offset });
      }
    }
    if (ranges.length > 0) plan.set(digest, [...(plan.get(digest) ?? []), ...ranges]);
  });
  return plan;
}

/** [first, end) of each read. `chunks` in the order in which they are needed. */
function runsOf(chunks: readonly number[]): [number, number][] {
  const need = new Map(chunks.map((chunk, i) => [chunk, i]));
  const runs: { first: number; end: number; needed: number; gaps: number }[] = [];
  for (const chunk of [...chunks].sort((a, b) => a - b)) {
    const run = runs.at(-1);
    const needed = need.get(chunk)!;
    if (run !== undefined && joins(run, chunk)) {
      run.gaps += chunk - run.end;
      run.end = chunk + 1;
      run.needed = Math.min(run.needed, needed);
    } else runs.push({ first: chunk, end: chunk + 1, needed, gaps: 0 });
  }
  return runs.sort((a, b) => a.needed - b.needed).map(({ first, end }) => [first, end]);
}

function joins({ first, end, gaps }: { first: number; end: number; gaps: number }, chunk: number): boolean {
  const gap = chunk - end;
  if (gap > GAP_CHUNKS || chunk + 1 - first > READ_CHUNKS) return false;
  return gap === 0 || (gaps + gap) * WANTED_A_GAP <= end - first - gaps;
}
