/**
 * One flush at a time. Whoever asks while one runs waits for the next, together with all others who ask meanwhile: the one that runs
 * may have begun before their writes. Other work that must not meet a flush takes its turn in the same line.
 */
export class FlushQueue {
  private running: Promise<unknown> | undefined;
  private next: Promise<void> | undefined;
  private readonly flushOnce: () => Promise<void>;

  constructor(flushOnce: () => Promise<void>) {
    this.flushOnce = flushOnce;
  }

  get isBusy(): boolean {
    return this.running !== undefined;
  }

  flush(): Promise<void> {
    if (this.next !== undefined) return this.next;
    if (this.running === undefined) return this.start(this.flushOnce);
    const next = this.alone(() => {
      this.next = undefined;
      return this.flushOnce();
    });
    this.next = next;
    return next;
  }

  /** Runs `work` while no flush does. */
  async alone<T>(work: () => Promise<T>): Promise<T> {
    while (this.running !== undefined) await this.running;
    return this.start(work);
  }

  private start<T>(work: () => Promise<T>): Promise<T> {
    const done = work();
    const running = done.then(
      () => {},
      () => {},
    );
    this.running = running.then(() => {
      this.running = undefined;
    });
    return done;
  }
}
