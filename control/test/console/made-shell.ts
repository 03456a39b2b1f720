/** Something like a shell on a terminal: echoes what is typed, knows `echo`, `size` and `exit`, and what Ctrl-C is. */
import { Readable } from 'node:stream';
import { outputFrame } from '../../runtime-service/output-frames.ts';

export class MadeShell {
  readonly id: number;
  size: { rows: number; columns: number };
  ended = false;
  /** Open streams of output. */
  readers = 0;
  /** All that was typed. */
  typed = '';
  private written: Buffer = Buffer.from('\x1b[1;32mmade\x1b[0m \x1b[38;2;90;160;230m~\x1b[0m $ ');
  private line = '';
  private result: { exitCode: number; signal?: NodeJS.Signals } | undefined;
  private wake: (() => void)[] = [];
  /** Ends the readers that there are, as a connection that breaks. */
  private breaks = 0;

  constructor(id: number, size: { rows: number; columns: number }) {
    this.id = id;
    this.size = size;
  }

  type(bytes: Buffer): void {
    const text = bytes.toString('utf8');
    this.typed += text;
    for (const key of text) this.key(key);
    this.changed();
  }

  private key(key: string): void {
    if (key === '\x03') {
      this.line = '';
      this.write('^C\r\n$ ');
    } else if (key === '\r') {
      const line = this.line;
      this.line = '';
      this.write('\r\n');
      if (line === 'exit') {
        this.end(0);
        return;
      }
      if (line === 'size') this.write(`${this.size.rows}x${this.size.columns}\r\n`);
      if (line.startsWith('echo ')) this.write(`${line.slice(5)}\r\n`);
      this.write('$ ');
    } else {
      this.line += key;
      this.write(key);
    }
  }

  write(text: string): void {
    this.written = Buffer.concat([this.written, Buffer.from(text)]);
    this.changed();
  }

  end(exitCode: number, signal?: NodeJS.Signals): void {
    if (this.ended) return;
    this.ended = true;
    this.result = { exitCode, signal };
    this.changed();
  }

  breakConnections(): void {
    this.breaks++;
    this.changed();
  }

  frames(from: number): Readable {
    return Readable.from(this.read(from), { objectMode: false });
  }

  private async *read(from: number): AsyncGenerator<Buffer> {
    const { breaks } = this;
    for (let at = from; ; ) {
      if (this.breaks !== breaks) return;
      if (at < this.written.length) {
        const offset = at;
        at = this.written.length;
        yield outputFrame.part({ stream: 'stdout', offset, bytes: this.written.subarray(offset) });
        continue;
      }
      if (this.result !== undefined) {
        yield outputFrame.result({
          ...this.result,
          timedOut: false,
          outOfMemory: false,
          stdoutBytes: at,
          stderrBytes: 0,
          durationMs: 1,
        });
        return;
      }
      await new Promise<void>((resolve) => this.wake.push(resolve));
    }
  }

  private changed(): void {
    for (const resolve of this.wake.splice(0)) resolve();
  }
}
