/**
 * A second request when the first takes longer than nearly all recent reads of its size did: the first answer wins, the other request
 * is aborted. Cuts the long tail of object stores. Bounded: few of all reads are hedged, so that a store that is slow as a
 * whole does not get twice the load. Only for interactive reads; nobody waits for a prefetch.
 */
import { StopController } from '#base';
import type { RangeSource } from '#chunk-cache';

export interface HedgeOptions {
  /** Of recent reads; 0.95. */
  readonly quantile?: number;
  /** No hedging before this many reads of a size are known; 20. */
  readonly minSamples?: number;
  /** Never earlier than this; 5 ms. */
  readonly minDelayMs?: number;
  /** Second requests, as a share of reads; 0.1. */
  readonly maxShare?: number;
  readonly clock?: HedgeClock;
  readonly onHedge?: (delayMs: number) => void;
}

export interface HedgeClock {
  now(): number;
  /** Returns what cancels it. */
  after(ms: number, work: () => void): () => void;
}

const systemClock: HedgeClock = {
  now: () => performance.now(),
  after: (ms, work) => {
    const timer = setTimeout(work, ms);
    return () => clearTimeout(timer);
  },
};

const RECENT = 128;
/** Sizes that take about as long: up to 256 KiB, 1 MiB, more. */
const SIZE_CLASSES = [256 * 1024, 1024 * 1024, Number.POSITIVE_INFINITY];
/** Second requests that may come at once, when none were needed for long. */
const BURST = 10;

export function withHedge(source: RangeSource, options: HedgeOptions = {}): RangeSource {
  const { quantile = 0.95, minSamples = 20, minDelayMs = 5, maxShare = 0.1, clock = systemClock, onHedge } = options;
  const recent = SIZE_CLASSES.map(() => new RecentTimes(quantile));
  let allowance = BURST;

  return {
    readRange(blob, offset, lengthBytes, { signal, ...rest }) {
      const times = recent[SIZE_CLASSES.findIndex((most) => lengthBytes <= most)]!;
      allowance = Math.min(BURST, allowance + maxShare);
      if (signal?.aborted) return Promise.reject(signal.reason);
      return new Promise<Buffer>((resolve, reject) => {
        const running = new Set<StopController>();
        let hedgePossible = rest.priority === 'interactive' && times.count >= minSamples;
        let cancelHedge = () => {};
        let over = false;
        const end = () => {
          over = true;
          cancelHedge();
          signal?.removeEventListener('abort', onAbort);
          for (const other of running) other.abort(new Error('another request was faster'));
        };
        const onAbort = () => {
          if (over) return;
          end();
          reject(signal!.reason);
        };
        const start = () => {
          const request = new StopController();
          const startedMs = clock.now();
          running.add(request);
          source.readRange(blob, offset, lengthBytes, { ...rest, signal: request.signal }).then(
            (bytes) => {
              running.delete(request);
              if (over) return;
              times.add(clock.now() - startedMs);
              end();
              resolve(bytes);
            },
            (error) => {
              running.delete(request);
              // The other one may still succeed; a failure is no reason for a hedge, that is what retries are for.
              if (over || running.size > 0) return;
              end();
              reject(error);
            },
          );
        };
        signal?.addEventListener('abort', onAbort, { once: true });
        start();
        if (!hedgePossible) return;
        const delayMs = Math.max(minDelayMs, times.quantile());
        cancelHedge = clock.after(delayMs, () => {
          if (over || !hedgePossible || allowance < 1) return;
          hedgePossible = false;
          allowance--;
          onHedge?.(delayMs);
          start();
        });
      });
    },
  };
}

/** A ring of the latest times; the quantile is worked out again after a few new ones. */
class RecentTimes {
  readonly #quantile: number;
  readonly #times: number[] = [];
  #next = 0;
  #value = 0;
  #stale = 0;

  constructor(quantile: number) {
    this.#quantile = quantile;
  }

  get count(): number {
    return this.#times.length;
  }

  add(ms: number): void {
    this.#times[this.#next] = ms;
    this.#next = (this.#next + 1) % RECENT;
    this.#stale++;
  }

  quantile(): number {
    if (this.#stale >= 8 || this.#value === 0) {
      const sorted = [...this.#times].sort((a, b) => a - b);
      this.#value = sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * this.#quantile))] ?? 0;
      this.#stale = 0;
    }
    return this.#value;
  }
}
