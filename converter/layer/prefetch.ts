/**
 * Reads a source ahead of whoever takes its bytes, up to a bound, so that bytes are at hand when they are needed and
 * can be taken without waiting for the event loop.
 */

/** A source that takes back the memory of a chunk that has been copied: what it reads next goes there. */
export interface RecyclingSource extends AsyncIterable<Buffer> {
  recycle?(chunk: Buffer): void;
}

export class Prefetch {
  private readonly source: RecyclingSource;
  private readonly iterator: AsyncIterator<Buffer>;
  private readonly boundBytes: number;
  private readonly signal: AbortSignal | undefined;
  private readonly chunks: Buffer[] = [];
  /** Of the first chunk, what was taken. */
  private taken = 0;
  private queued = 0;
  private isReading = false;
  private isDone = false;
  private isStopped = false;
  private failure: { readonly error: unknown } | undefined = undefined;
  private wake: (() => void) | undefined = undefined;
  private readonly onAbort = () => this.settle();

  constructor(source: RecyclingSource, boundBytes: number, signal: AbortSignal | undefined) {
    this.source = source;
    this.iterator = source[Symbol.asyncIterator]();
    this.boundBytes = boundBytes;
    this.signal = signal;
    signal?.addEventListener('abort', this.onAbort, { once: true });
    this.read();
  }

  /** Bytes that can be taken at once. */
  get availableBytes(): number {
    return this.queued;
  }

  /** The source has ended and everything was taken. */
  get isEnded(): boolean {
    return this.isDone && this.queued === 0;
  }

  /** Up to `maxBytes` of what has arrived, from one chunk. Empty when nothing has. */
  take(maxBytes: number): Buffer {
    const first = this.chunks[0];
    if (first === undefined) return Buffer.alloc(0);
    const end = Math.min(first.length, this.taken + maxBytes);
    const part = first.subarray(this.taken, end);
    this.taken = end;
    this.queued -= part.length;
    if (end === first.length) {
      this.chunks.shift();
      this.taken = 0;
    }
    this.read();
    return part;
  }

  /** Copies what has arrived into `into` from `start` on. @returns how much. */
  copy(into: Buffer, start: number): number {
    let at = start;
    while (at < into.length && this.queued > 0) {
      const first = this.chunks[0]!;
      const part = this.take(into.length - at);
      part.copy(into, at);
      at += part.length;
      if (this.chunks[0] !== first) this.source.recycle?.(first);
    }
    return at - start;
  }

  /** Waits until something more has arrived, the source has ended, or `stop` was called. @throws what the source threw; the signal's reason. */
  async more(): Promise<void> {
    const before = this.queued;
    while (this.queued === before && !this.isDone && !this.isStopped) {
      this.signal?.throwIfAborted();
      if (this.failure !== undefined) throw this.failure.error;
      this.read();
      await new Promise<void>((resolve) => {
        this.wake = resolve;
      });
    }
  }

  /** Ends the source if it has not ended. It is not waited for: a read that hangs must not hold up an error. */
  stop(): void {
    this.signal?.removeEventListener('abort', this.onAbort);
    this.isStopped = true;
    this.settle();
    if (!this.isDone && this.failure === undefined) {
      void Promise.resolve(this.iterator.return?.()).catch(() => {});
    }
  }

  private settle(): void {
    const wake = this.wake;
    this.wake = undefined;
    wake?.();
  }

  private read(): void {
    if (this.isReading || this.isDone || this.isStopped || this.failure !== undefined) return;
    if (this.queued >= this.boundBytes && this.queued > 0) return;
    this.isReading = true;
    this.iterator.next().then(
      (step) => {
        this.isReading = false;
        if (step.done) this.isDone = true;
        else if (step.value.length > 0) {
          this.chunks.push(step.value);
          this.queued += step.value.length;
        }
        this.settle();
        this.read();
      },
      (error: unknown) => {
        this.isReading = false;
        this.failure = { error };
        this.settle();
      },
    );
  }
}
