/**
 * Lines of JSON over a connection that stays: what is written in one turn of the event loop goes out as one piece, and what arrives is taken line by
 * line, however it was cut on its way.
 */
import type { Writable } from 'node:stream';

const NEWLINE = 0x0a;

/** Whole lines of what arrives; the rest is kept for what comes next. */
export class LineReader {
  private rest: Buffer[] = [];
  private size = 0;
  private readonly mostBytes: number;

  constructor(mostBytes: number) {
    this.mostBytes = mostBytes;
  }

  /** @throws Error for a line that is longer than it may be */
  take(bytes: Buffer): string[] {
    const end = bytes.lastIndexOf(NEWLINE);
    if (end < 0) {
      this.keep(bytes);
      return [];
    }
    const head = bytes.subarray(0, end);
    const text = (this.rest.length === 0 ? head : Buffer.concat([...this.rest, head])).toString('utf8');
    this.rest = [];
    this.size = 0;
    if (end + 1 < bytes.length) this.keep(bytes.subarray(end + 1));
    return text.split('\n');
  }

  private keep(bytes: Buffer): void {
    this.size += bytes.length;
    if (this.size > this.mostBytes) throw new Error(`a line of more than ${this.mostBytes} bytes`);
    this.rest.push(bytes);
  }
}

export class LineWriter {
  private readonly stream: Writable;
  private waiting = '';
  private ended = false;

  constructor(stream: Writable) {
    this.stream = stream;
  }

  write(value: object): void {
    if (this.waiting === '') setImmediate(() => this.flush());
    this.waiting += `${JSON.stringify(value)}\n`;
  }

  /** After what was written. */
  end(): void {
    this.flush();
    this.ended = true;
    if (!this.stream.destroyed) this.stream.end();
  }

  private flush(): void {
    const text = this.waiting;
    this.waiting = '';
    if (text !== '' && !this.ended && !this.stream.destroyed) this.stream.write(text);
  }
}
