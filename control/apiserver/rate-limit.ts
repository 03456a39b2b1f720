/**
 * How often one principal may ask: so many requests a second, and as many at once as two seconds bring. A bucket that is full again is
 * forgotten, so memory is bounded by who asked in the last seconds.
 */
import { fail } from '../errors.ts';

interface Bucket {
  tokens: number;
  atMs: number;
}

const BURST_SECONDS = 2;
const SWEEP_AT = 4096;

export class RateLimit {
  private readonly buckets = new Map<string, Bucket>();
  private readonly perSecond: number;
  private readonly now: () => number;

  /** 0: no limit. */
  constructor(perSecond: number, now: () => number = () => performance.now()) {
    this.perSecond = perSecond;
    this.now = now;
  }

  /** @throws API_RATE */
  take(principal: string): void {
    const { perSecond } = this;
    if (perSecond === 0) return;
    const most = perSecond * BURST_SECONDS;
    const atMs = this.now();
    let bucket = this.buckets.get(principal);
    if (bucket === undefined) {
      if (this.buckets.size >= SWEEP_AT) this.sweep(atMs);
      bucket = { tokens: most, atMs };
      this.buckets.set(principal, bucket);
    }
    bucket.tokens = Math.min(most, bucket.tokens + ((atMs - bucket.atMs) / 1000) * perSecond);
    bucket.atMs = atMs;
    if (bucket.tokens < 1) {
      throw fail('API_RATE', { principal, perSecond, retryAfter: Math.ceil((1 - bucket.tokens) / perSecond) });
    }
    bucket.tokens--;
  }

  private sweep(atMs: number): void {
    for (const [principal, bucket] of this.buckets) {
      if (atMs - bucket.atMs > BURST_SECONDS * 1000) this.buckets.delete(principal);
    }
  }
}
