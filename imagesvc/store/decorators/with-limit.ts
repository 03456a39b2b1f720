/**
 * A bound on reads at the same time. Those that someone waits for go first, and prefetch never takes the last places, so that a reader
 * finds one free. Within a priority: first come, first served. A read that is aborted while it waits leaves the queue.
 */
import type { StopSignal } from '#base';
import type { FetchPriority, RangeSource } from '#chunk-cache';

export interface LimitOptions {
  /** Reads at the same time; 32. */
  readonly concurrency?: number;
  /** Of these, prefetch takes at most; three quarters, at least 1. */
  readonly prefetch?: number;
}

export interface LimitedSource extends RangeSource {
  readonly load: { readonly running: number; readonly waiting: number };
}

interface Waiting {
  start(): void;
}

export function withLimit(source: RangeSource, options: LimitOptions = {}): LimitedSource {
  const { concurrency = 32, prefetch = Math.max(1, Math.floor((concurrency * 3) / 4)) } = options;
  // Sets keep their order, and let one that gives up leave from the middle.
  const queues: Record<FetchPriority, Set<Waiting>> = { interactive: new Set(), prefetch: new Set() };
  const running: Record<FetchPriority, number> = { interactive: 0, prefetch: 0 };

  const total = () => running.interactive + running.prefetch;
  const mayStart = (priority: FetchPriority) =>
    total() < concurrency && (priority === 'interactive' || running.prefetch < prefetch);

  const startSome = () => {
    for (const priority of ['interactive', 'prefetch'] as const) {
      for (const waiting of queues[priority]) {
        if (!mayStart(priority)) break;
        queues[priority].delete(waiting);
        waiting.start();
      }
    }
  };

  const place = (priority: FetchPriority, signal: StopSignal | undefined): Promise<void> =>
    new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason);
      if (mayStart(priority) && queues[priority].size === 0) {
        running[priority]++;
        return resolve();
      }
      const waiting: Waiting = {
        start() {
          signal?.removeEventListener('abort', onAbort);
          running[priority]++;
          resolve();
        },
      };
      const onAbort = () => {
        queues[priority].delete(waiting);
        reject(signal!.reason);
      };
      signal?.addEventListener('abort', onAbort, { once: true });
      queues[priority].add(waiting);
    });

  return {
    get load() {
      return { running: total(), waiting: queues.interactive.size + queues.prefetch.size };
    },
    async readRange(blob, offset, lengthBytes, options) {
      const { signal, priority } = options;
      await place(priority, signal);
      try {
        return await source.readRange(blob, offset, lengthBytes, options);
      } finally {
        running[priority]--;
        startSome();
      }
    },
  };
}
