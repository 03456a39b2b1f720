/** How a command ended, and what it wrote. */

export interface ExecResult {
  /** 128 + n after signal n. */
  readonly exitCode: number;
  readonly signal?: string;
  /** Ended by its time-out, with every process of it. */
  readonly timedOut: boolean;
  /** Memory ran out in the sandbox, and the kernel chose this. */
  readonly outOfMemory: boolean;
  readonly durationMs: number;
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
}

export class CommandResult {
  readonly exitCode: number;
  readonly signal: string | undefined;
  readonly timedOut: boolean;
  readonly outOfMemory: boolean;
  readonly durationMs: number;
  readonly stdoutRaw: Buffer;
  readonly stderrRaw: Buffer;
  /** Of each stream, bytes that are not in it: they lay in the middle, where the limit (`outputLimitBytes`) or the service's was passed. */
  readonly stdoutMissingBytes: number;
  readonly stderrMissingBytes: number;

  constructor(end: ExecResult, stdout: Collected, stderr: Collected) {
    this.exitCode = end.exitCode;
    this.signal = end.signal;
    this.timedOut = end.timedOut;
    this.outOfMemory = end.outOfMemory;
    this.durationMs = end.durationMs;
    this.stdoutRaw = stdout.bytes;
    this.stderrRaw = stderr.bytes;
    this.stdoutMissingBytes = stdout.missingBytes;
    this.stderrMissingBytes = stderr.missingBytes;
  }

  get ok(): boolean {
    return this.exitCode === 0 && !this.timedOut;
  }
  /** As UTF-8. */
  get stdout(): string {
    return this.stdoutRaw.toString('utf8');
  }
  get stderr(): string {
    return this.stderrRaw.toString('utf8');
  }
}

export interface Collected {
  readonly bytes: Buffer;
  readonly missingBytes: number;
}

/** Keeps the beginning and the end of a stream, each up to half of the limit. */
export class Collector {
  private readonly half: number;
  private readonly head: Buffer[] = [];
  private headBytes = 0;
  private tail: Buffer[] = [];
  private tailBytes = 0;
  private missing = 0;

  constructor(limitBytes: number) {
    this.half = Math.max(1, Math.floor(limitBytes / 2));
  }

  add(bytes: Buffer): void {
    const room = this.missing === 0 ? Math.min(this.half - this.headBytes, bytes.length) : 0;
    // A copy: a part may lie in a much larger buffer.
    if (room > 0) this.head.push(Buffer.from(bytes.subarray(0, room)));
    this.headBytes += room;
    const rest = bytes.subarray(room);
    if (rest.length === 0) return;
    this.tail.push(Buffer.from(rest));
    this.tailBytes += rest.length;
    let over = this.tailBytes - this.half;
    while (over > 0) {
      const first = this.tail[0]!;
      const cut = Math.min(over, first.length);
      if (cut === first.length) this.tail.shift();
      else this.tail[0] = first.subarray(cut);
      this.tailBytes -= cut;
      this.missing += cut;
      over -= cut;
    }
  }

  /** So many bytes are lost between what came before and what comes. */
  skip(count: number): void {
    this.missing += count;
    if (count > 0) {
      // What is kept stays one gap: the end begins anew behind it.
      this.missing += this.tailBytes;
      this.tail = [];
      this.tailBytes = 0;
    }
  }

  get collected(): Collected {
    return { bytes: Buffer.concat([...this.head, ...this.tail]), missingBytes: this.missing };
  }
}
