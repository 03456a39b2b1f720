/**
 * Several traces of one image as one: every chunk and file that any of them has, ordered by the mean of their places. A place
 * is relative (0 first, 1 last), so that a long trace does not push a short one to its front; a trace that does not have
 * a chunk has no say about it. Equal means go by blob and chunk, or by path: the same traces, the same order.
 */
import type { ByteString } from '#base';
import type { Trace, TracedChunk, TracedFile } from './trace.ts';

interface Placed<T> {
  readonly item: T;
  /** Sum and number of its places. */
  sum: number;
  count: number;
  msSum: number;
}

/** All of one image; at least one. The command is that of the first. */
export function mergeTraces(traces: readonly Trace[]): Trace {
  const [first, ...more] = traces;
  if (first === undefined) throw new TypeError('no trace to merge');
  if (more.length === 0) return first;
  const blobs = [...new Map(traces.flatMap((trace) => trace.blobs.map((blob) => [blob.digest, blob]))).values()];
  blobs.sort((a, b) => (a.digest < b.digest ? -1 : 1));
  const number = new Map(blobs.map((blob, i) => [blob.digest, i]));
  const chunks = merged(
    traces.map((trace) => trace.chunks.map((one) => ({ ...one, blob: number.get(trace.blobs[one.blob]!.digest)! }))),
    ({ blob, chunk }) => `${blob}/${chunk}`,
    (a: TracedChunk, b) => a.blob - b.blob || a.chunk - b.chunk,
  ).map(({ item, ms }) => ({ ...item, ms }));
  const ranges = new Map<ByteString, (readonly [number, number])[]>();
  for (const { files } of traces) {
    for (const file of files) ranges.set(file.path, [...(ranges.get(file.path) ?? []), ...file.ranges]);
  }
  const files = merged(
    traces.map((trace) => trace.files),
    ({ path }) => path,
    (a: TracedFile, b) => (a.path < b.path ? -1 : 1),
  ).map(({ item, ms }) => ({ ...item, ms, ranges: joinRanges(ranges.get(item.path)!) }));
  const truncated = traces.some((trace) => trace.truncated === true);
  return { image: first.image, command: first.command, blobs, chunks, files, ...(truncated ? { truncated } : {}) };
}

function merged<T extends { readonly ms: number }>(
  lists: readonly (readonly T[])[],
  keyOf: (item: T) => string,
  order: (a: T, b: T) => number,
): { item: T; ms: number }[] {
  const placed = new Map<string, Placed<T>>();
  for (const list of lists) {
    list.forEach((item, i) => {
      const place = list.length === 1 ? 0 : i / (list.length - 1);
      const key = keyOf(item);
      const known = placed.get(key);
      if (known === undefined) placed.set(key, { item, sum: place, count: 1, msSum: item.ms });
      else {
        known.sum += place;
        known.count++;
        known.msSum += item.ms;
      }
    });
  }
  return [...placed.values()]
    .sort((a, b) => a.sum / a.count - b.sum / b.count || order(a.item, b.item))
    .map(({ item, msSum, count }) => ({ item, ms: Math.round((msSum / count) * 10) / 10 }));
}

/** Sorted, those that overlap or touch made one. */
export function joinRanges(ranges: readonly (readonly [number, number])[]): [number, number][] {
  const out: [number, number][] = [];
  for (const [offset, length] of [...ranges].sort((a, b) => a[0] - b[0])) {
    const last = out.at(-1);
    if (last !== undefined && offset <= last[0] + last[1]) last[1] = Math.max(last[1], offset + length - last[0]);
    else if (length > 0) out.push([offset, length]);
  }
  return out;
}
