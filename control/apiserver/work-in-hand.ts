/**
 * Back-pressure: so much work at once, a bounded queue behind it, and whoever comes after that is told to come again, before anything was done
 * for him. What waits goes in order; one that gives up waiting leaves the queue.
 */
import { fail } from '../errors.ts';

export interface WorkLimits {
  readonly atOnce: number;
  readonly waiting: number;
}

interface Waiter {
  readonly go: () => void;
}

export class WorkInHand {
  private running = 0;
  private readonly waiters = new Set<Waiter>();
  private readonly limits: WorkLimits;

  constructor(limits: WorkLimits) {
    this.limits = limits;
  }

  get inHand(): number {
    return this.running;
  }

  get waiting(): number {
    return this.waiters.size;
  }

  /** `patient`: waits however many wait already, since whoever asks bounds that himself. @throws API_BUSY, the reason why its asker has gone */
  async run<T>(work: () => Promise<T>, asker?: { readonly gone: AbortSignal }, patient = false): Promise<T> {
    if (this.running >= this.limits.atOnce) {
      if (!patient && this.waiters.size >= this.limits.waiting) {
        throw fail('API_BUSY', { inHand: this.running, waiting: this.waiters.size });
      }
      await this.turn(asker?.gone);
    } else this.running++;
    try {
      return await work();
    } finally {
      this.next();
    }
  }

  private turn(signal: AbortSignal | undefined): Promise<void> {
    return new Promise((resolve, reject) => {
      const waiter: Waiter = {
        go: () => {
          signal?.removeEventListener('abort', gone);
          resolve();
        },
      };
      const gone = () => {
        if (this.waiters.delete(waiter)) reject(signal?.reason);
      };
      if (signal?.aborted) return reject(signal.reason);
      signal?.addEventListener('abort', gone, { once: true });
      this.waiters.add(waiter);
    });
  }

  /** A place that becomes free goes to whoever waits longest: nobody new can slip in between. */
  private next(): void {
    for (const waiter of this.waiters) {
      this.waiters.delete(waiter);
      waiter.go();
      return;
    }
    this.running--;
  }
}
