/** Whether a sandbox stands still, for how long it has in its life, and what waits until it goes on. */

export class Standing {
  private beforeMs: number;
  private since: number | undefined;
  private postponed: (() => void)[] = [];
  private goes: Promise<void> = Promise.resolve();
  private note: { resolve(): void; reject(error: Error): void } | undefined;

  /** `stoodMs`: until now. */
  constructor(stoodMs: number) {
    this.beforeMs = stoodMs;
  }

  get isStanding(): boolean {
    return this.since !== undefined;
  }

  stoodMs(): number {
    return this.beforeMs + (this.since === undefined ? 0 : Date.now() - this.since);
  }

  /** `sinceMs`: of one that stood already when this process came. Twice is no error. */
  stand(sinceMs = Date.now()): void {
    if (this.since !== undefined) return;
    this.since = sinceMs;
    this.begin();
  }

  private begin(): void {
    this.goes = new Promise((resolve, reject) => {
      this.note = { resolve, reject };
    });
    this.goes.catch(() => {});
  }

  /** What waited comes first. */
  go(): void {
    if (this.since === undefined) return;
    this.beforeMs = this.stoodMs();
    this.since = undefined;
    for (const work of this.postponed.splice(0)) work();
    this.note?.resolve();
  }

  /** Whoever waits is told that it does not go on now; it stands still as before. */
  refuse(error: Error): void {
    if (this.since === undefined) return;
    const { note } = this;
    this.begin();
    note?.reject(error);
  }

  /** It never goes on. */
  end(error: Error): void {
    this.postponed = [];
    this.since = undefined;
    this.note?.reject(error);
  }

  /** False: it goes, and it can be done now. */
  postpone(work: () => void): boolean {
    if (this.since === undefined) return false;
    this.postponed.push(work);
    return true;
  }

  /** Resolves when it goes. @throws what it ended with */
  gone(): Promise<void> {
    return this.goes;
  }
}
