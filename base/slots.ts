/** So many at a time; others wait for their turn, in order, and where a bound is given no more of them than that. */
export class Slots {
  private free: number;
  private readonly mayWait: number;
  private readonly waiting: (() => void)[] = [];

  constructor(atOnce: number, mayWait = Number.POSITIVE_INFINITY) {
    this.free = atOnce;
    this.mayWait = mayWait;
  }

  /** Rejects when as many wait as may. */
  async run<T>(work: () => Promise<T>): Promise<T> {
    if (this.free > 0) this.free--;
    else if (this.waiting.length >= this.mayWait) throw new Error(`${this.mayWait} wait already`);
    else await new Promise<void>((go) => this.waiting.push(go));
    try {
      return await work();
    } finally {
      const next = this.waiting.shift();
      if (next === undefined) this.free++;
      else next();
    }
  }
}
