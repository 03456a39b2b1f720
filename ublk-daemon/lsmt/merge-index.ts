/**
 * One index of a stack of layers: above hides below, zeroed segments too. Layers are merged in pairs, then pairs of pairs, so that a
 * segment is touched about log2(layers) times, not once for each layer above it.
 */
import { IndexBuilder, SegmentIndex } from './segment-index.ts';

export const MAX_LAYERS = 255;

/** @param indexes bottom first, each with its own layer number in it. */
export function mergeIndexes(indexes: readonly SegmentIndex[]): SegmentIndex {
  let level = [...indexes];
  while (level.length > 1) {
    const next: SegmentIndex[] = [];
    for (let at = 0; at < level.length; at += 2) {
      const upper = level[at + 1];
      next.push(upper === undefined ? level[at]! : mergeTwo(level[at]!, upper));
    }
    level = next;
  }
  return level[0] ?? SegmentIndex.empty;
}

function mergeTwo(lower: SegmentIndex, upper: SegmentIndex): SegmentIndex {
  if (upper.count === 0) return lower;
  if (lower.count === 0) return upper;
  const out = new IndexBuilder(lower.count + upper.count);
  let at = 0;
  // How far the segment `at` of `lower` has been told or hidden.
  let done = lower.start(0);
  const tellLower = (until: number) => {
    while (at < lower.count) {
      const from = Math.max(done, lower.start(at));
      if (from >= until) return;
      const end = lower.end(at);
      if (end > until) {
        out.addPart(lower, at, from, until);
        done = until;
        return;
      }
      if (from < end) out.addPart(lower, at, from, end);
      at++;
      done = end;
    }
  };
  const hideLower = (until: number) => {
    done = Math.max(done, until);
    while (at < lower.count && lower.end(at) <= done) at++;
  };
  for (let top = 0; top < upper.count; top++) {
    tellLower(upper.start(top));
    out.addPart(upper, top, upper.start(top), upper.end(top));
    hideLower(upper.end(top));
  }
  tellLower(Number.POSITIVE_INFINITY);
  return out.build();
}

/** What of an index lies below sector `end`. */
export function clipIndex(index: SegmentIndex, end: number): SegmentIndex {
  const last = index.count - 1;
  if (last < 0 || index.end(last) <= end) return index;
  const out = new IndexBuilder(index.count);
  for (let at = 0; at < index.count && index.start(at) < end; at++) {
    out.addPart(index, at, index.start(at), Math.min(end, index.end(at)));
  }
  return out.build();
}
