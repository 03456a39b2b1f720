/** A shell session: commands one after the other in one shell, which keeps its folder, variables and functions between them. */

import { isUtf8 } from 'node:buffer';
import { randomUUID } from 'node:crypto';
import { onlyNew } from './command.ts';
import { DSecTimeoutError, ShellLost } from './errors.ts';
import { type OutputPart, parseFrames } from './output-frames.ts';
import { BackOff, bodyOf, type CallOptions, type Transport, within } from './transport.ts';

export interface ShellOptions {
  /** The first of bash and sh that is there. */
  readonly shell?: string;
  readonly env?: Readonly<Record<string, string>> | readonly string[];
  readonly cwd?: string;
  readonly user?: string;
  /** Its streams are a terminal, and one. */
  readonly terminal?: { readonly rows: number; readonly columns: number };
}

export class ShellResult {
  readonly exitCode: number;
  readonly stdoutRaw: Buffer;
  readonly stderrRaw: Buffer;
  /** Output beyond what a result holds. */
  readonly missingBytes: number;
  readonly timedOut: boolean;
  /** The shell went with it: this was its last command. */
  readonly lost: boolean;

  constructor(view: ShellView) {
    this.exitCode = view.exitCode;
    this.stdoutRaw = Buffer.from(view.stdoutBase64, 'base64');
    this.stderrRaw = Buffer.from(view.stderrBase64, 'base64');
    this.missingBytes = view.missingBytes;
    this.timedOut = view.timedOut;
    this.lost = view.lost;
  }

  get stdout(): string {
    return this.stdoutRaw.toString('utf8');
  }
  get stderr(): string {
    return this.stderrRaw.toString('utf8');
  }
}

interface ShellView {
  readonly exitCode: number;
  readonly stdoutBase64: string;
  readonly stderrBase64: string;
  readonly stdoutOffset: number;
  readonly missingBytes: number;
  readonly timedOut: boolean;
  readonly lost: boolean;
}

export interface Expected {
  /** What came since the last time, to the end of the match. */
  readonly output: Buffer;
  /** What matched, and its groups. */
  readonly match: readonly (string | undefined)[];
}

const EXPECT_MS = 30_000;
/** So much of what does not match is kept to match with what follows. */
const EXPECT_BYTES = 1 << 20;
const INPUT_BYTES = 256 << 10;

export class ShellSession implements AsyncDisposable {
  readonly id: number;
  private readonly transport: Transport;
  private readonly path: string;
  /** What `expect` has not looked at begins here. */
  private position = 0;

  constructor(transport: Transport, sandboxPath: string, id: number) {
    this.transport = transport;
    this.id = id;
    this.path = `${sandboxPath}/shells/${id}`;
  }

  /**
   * Runs a command, after those before it. A status that is not 0 is in the result. Given up (`signal`), it gets SIGINT.
   * @param options.timeoutMs In the sandbox: then the command is interrupted, and the result says `timedOut`.
   * @throws ShellLost, SandboxGone
   */
  async run(command: string, { signal, timeoutMs }: CallOptions = {}): Promise<ShellResult> {
    const call = { signal, body: { command, timeoutMs } };
    try {
      return new ShellResult(await this.transport.json<ShellView>('POST', `${this.path}/run`, call));
    } catch (error) {
      if (signal?.aborted === true) await this.interrupt({ timeoutMs: 15_000 }).catch(() => {});
      throw error;
    }
  }

  /** Input for what runs now, on a terminal. */
  async send(input: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    const bytes = Buffer.from(input as Uint8Array);
    for (let at = 0; at < bytes.length; at += INPUT_BYTES) {
      const piece = bytes.subarray(at, at + INPUT_BYTES);
      await this.transport.json('POST', `${this.path}/stdin`, { ...options, bytes: piece, operation: randomUUID() });
    }
  }

  /** Waits until it is in the session's output behind what was expected before. 30 seconds by default. @throws DSecTimeoutError, ShellLost */
  async expect(pattern: string | RegExp, { signal, timeoutMs = EXPECT_MS }: CallOptions = {}): Promise<Expected> {
    let seen = Buffer.alloc(0);
    try {
      return await within({ signal, timeoutMs }, async (stop) => {
        for await (const { bytes, offset, missingBytes } of this.output({
          stdout: this.position,
          stderr: false,
          signal: stop,
        })) {
          seen = bytes === undefined ? Buffer.alloc(0) : Buffer.concat([seen, bytes]);
          const end = offset + (bytes?.length ?? missingBytes ?? 0);
          const found = matchIn(seen, pattern);
          if (found !== undefined) {
            this.position = end - seen.length + found.end;
            return { output: seen.subarray(0, found.end), match: found.match };
          }
          if (seen.length > 2 * EXPECT_BYTES) seen = Buffer.from(seen.subarray(-EXPECT_BYTES));
        }
        throw new ShellLost({ code: 'RUNTIME_SHELL_LOST', message: 'the shell session is lost: it has ended' });
      });
    } catch (error) {
      if (!(error instanceof DSecTimeoutError) || signal?.aborted === true) throw error;
      const last = JSON.stringify(seen.toString('utf8').slice(-500));
      const message = `the shell did not write ${pattern} within ${timeoutMs} ms; the last it wrote: ${last}`;
      throw new DSecTimeoutError({ code: 'TIMEOUT', message, retryable: true });
    }
  }

  /** Its output as it comes, to its end; over connections that break. */
  async *output(
    options: {
      readonly stdout?: number | false;
      readonly stderr?: number | false;
      readonly follow?: boolean;
      readonly signal?: AbortSignal;
    } = {},
  ): AsyncGenerator<OutputPart> {
    const { stdout = 0, stderr = 0, follow, signal } = options;
    const beyond = Number.MAX_SAFE_INTEGER;
    const at = { stdout: stdout === false ? beyond : stdout, stderr: stderr === false ? beyond : stderr };
    const backOff = new BackOff(this.transport.patienceMs);
    for (;;) {
      try {
        const answer = await this.transport.once('GET', `${this.path}/output`, { query: { ...at, follow }, signal });
        for await (const news of parseFrames(bodyOf(answer, signal))) {
          backOff.progress();
          if ('stream' in news) yield* onlyNew(news, at);
        }
        return;
      } catch (error) {
        await backOff.after(error, signal);
      }
    }
  }

  /** SIGINT to what runs now. */
  async interrupt(options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/interrupt`, options);
  }

  async resize(rows: number, columns: number, options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/resize`, { ...options, body: { rows, columns } });
  }

  /** Ends it with all that it started. */
  async close(options: CallOptions = {}): Promise<void> {
    await this.transport.json('DELETE', this.path, options);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close().catch(() => {});
  }
}

function matchIn(seen: Buffer, pattern: string | RegExp): { end: number; match: (string | undefined)[] } | undefined {
  if (typeof pattern === 'string') {
    const bytes = Buffer.from(pattern);
    const at = seen.indexOf(bytes);
    return at < 0 ? undefined : { end: at + bytes.length, match: [pattern] };
  }
  // Where it is no UTF-8 as a whole (its beginning may be cut), byte by byte.
  const encoding = isUtf8(withoutCutEnd(seen)) ? 'utf8' : 'latin1';
  const text = seen.toString(encoding);
  const found = new RegExp(pattern.source, pattern.flags.replace(/[gy]/g, '')).exec(text);
  if (found === null) return undefined;
  return { end: Buffer.byteLength(text.slice(0, found.index + found[0].length), encoding), match: [...found] };
}

/** Without the first bytes of a character whose others have not come. */
function withoutCutEnd(bytes: Buffer): Buffer {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back]!;
    if (byte < 0x80) break;
    if (byte >= 0xc0) return byte >= (back === 1 ? 0xc0 : back === 2 ? 0xe0 : 0xf0) ? bytes.subarray(0, -back) : bytes;
  }
  return bytes;
}
