/**
 * Counts what goes through a range source: reads, errors by code, bytes, and how long reads took (a histogram whose bounds suit
 * Prometheus). Aborted reads count as neither: nobody wanted them any more.
 */
import { isDsecError, systemCode } from '#base';
import type { FetchPriority, RangeSource } from '#chunk-cache';

export const LATENCY_BOUNDS_MS = [1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000] as const;

export interface ReadCounts {
  readonly reads: number;
  readonly bytes: number;
  readonly aborted: number;
  /** Code of the error -> how often. */
  readonly errors: Readonly<Record<string, number>>;
  /** Reads that took at most LATENCY_BOUNDS_MS[i] and more than the bound before; the last element: longer than all. */
  readonly latency: readonly number[];
  readonly latencySumMs: number;
}

export interface SourceMetrics {
  readonly inFlight: number;
  readonly interactive: ReadCounts;
  readonly prefetch: ReadCounts;
}

export interface MeteredSource extends RangeSource {
  /** As of now; a copy. */
  metrics(): SourceMetrics;
}

interface Counting {
  reads: number;
  bytes: number;
  aborted: number;
  errors: Record<string, number>;
  latency: number[];
  latencySumMs: number;
}

export function withMetrics(source: RangeSource, now: () => number = () => performance.now()): MeteredSource {
  const counts: Record<FetchPriority, Counting> = { interactive: newCounts(), prefetch: newCounts() };
  let inFlight = 0;
  return {
    metrics: () => structuredClone({ inFlight, ...counts }),
    async readRange(blob, offset, lengthBytes, options) {
      const { signal, priority } = options;
      const counting = counts[priority];
      const startedMs = now();
      inFlight++;
      try {
        const bytes = await source.readRange(blob, offset, lengthBytes, options);
        const tookMs = now() - startedMs;
        counting.reads++;
        counting.bytes += bytes.length;
        counting.latencySumMs += tookMs;
        const bucket = LATENCY_BOUNDS_MS.findIndex((bound) => tookMs <= bound);
        counting.latency[bucket < 0 ? LATENCY_BOUNDS_MS.length : bucket]!++;
        return bytes;
      } catch (error) {
        if (signal?.aborted) counting.aborted++;
        else {
          const code = isDsecError(error) ? error.code : (systemCode(error) ?? 'OTHER');
          counting.errors[code] = (counting.errors[code] ?? 0) + 1;
        }
        throw error;
      } finally {
        inFlight--;
      }
    },
  };
}

function newCounts(): Counting {
  return { reads: 0, bytes: 0, aborted: 0, errors: {}, latency: [...LATENCY_BOUNDS_MS, 0].fill(0), latencySumMs: 0 };
}
