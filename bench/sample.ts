/**
 * Two sides, measured in turn (A B A B), so that whatever else the machine does meets both. The ratio is the median of the
 * ratios of neighbours: drift over the run cancels out.
 */
import { round } from './benchmark.ts';

/** The value below which `part` of the sorted sample lies (0..1), by the nearest rank. */
export function quantile(sample: readonly number[], part: number): number {
  if (sample.length === 0) return Number.NaN;
  const sorted = [...sample].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(part * sorted.length) - 1))]!;
}

/** Of an even sample the mean of the middle two. */
export function median(sample: readonly number[]): number {
  const sorted = [...sample].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

export interface Summary {
  readonly n: number;
  readonly p50: number;
  readonly p99: number;
  readonly min: number;
}

export function summary(sample: readonly number[]): Summary {
  return {
    n: sample.length,
    p50: round(median(sample)),
    p99: round(quantile(sample, 0.99)),
    min: round(Math.min(...sample)),
  };
}

export interface Pairs {
  readonly ours: number[];
  readonly theirs: number[];
  /** Median of theirs/ours, pair by pair. */
  readonly ratio: number;
}

/**
 * Runs each side `n` times in turn, the first to go changing from pair to pair. Each returns what it measured.
 * @param between Before every run, not measured: what one side left to write must not slow the other.
 */
export async function inTurn(
  n: number,
  ours: (run: number) => Promise<number>,
  theirs: (run: number) => Promise<number>,
  between: () => Promise<void> | void = () => {},
): Promise<Pairs> {
  const a: number[] = [];
  const b: number[] = [];
  for (let run = 0; run < n; run++) {
    const sides = [async () => void a.push(await ours(run)), async () => void b.push(await theirs(run))];
    if (run % 2 === 1) sides.reverse();
    for (const side of sides) {
      await between();
      await side();
    }
  }
  return { ours: a, theirs: b, ratio: round(median(a.map((ms, i) => b[i]! / ms))) };
}
