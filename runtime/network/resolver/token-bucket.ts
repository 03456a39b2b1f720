/** So many a second on average, and some more at once. */
export class TokenBucket {
  private readonly perSecond: number;
  private readonly burst: number;
  private tokens: number;
  private lastMs: number;

  constructor(perSecond: number, burst: number, nowMs = performance.now()) {
    this.perSecond = perSecond;
    this.burst = burst;
    this.tokens = burst;
    this.lastMs = nowMs;
  }

  /** False: too much. */
  take(nowMs = performance.now()): boolean {
    this.tokens = Math.min(this.burst, this.tokens + ((nowMs - this.lastMs) / 1000) * this.perSecond);
    this.lastMs = nowMs;
    if (this.tokens < 1) return false;
    this.tokens--;
    return true;
  }
}
