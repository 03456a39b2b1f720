/**
 * A command in a sandbox. It goes on without whoever started it; its output is kept by the service and read from any offset, so that a connection
 * that is lost costs time, not output: reading goes on where it was, nothing is lost and nothing comes twice.
 */
import { randomUUID } from 'node:crypto';
import { Collector, CommandResult, type ExecResult } from './command-result.ts';
import { CommandFailed, connectionLost, errorFrom } from './errors.ts';
import { type OutputPart, parseFrames, type StreamName } from './output-frames.ts';
import { BackOff, bodyOf, type CallOptions, type Transport, within } from './transport.ts';

export interface OutputOptions {
  /** Offset of each stream to begin at; false leaves the stream out. */
  readonly stdout?: number | false;
  readonly stderr?: number | false;
  /** False: what there is now. */
  readonly follow?: boolean;
  readonly signal?: AbortSignal;
}

export interface CollectOptions extends CallOptions {
  /** Throws CommandFailed for what does not exit with 0. */
  readonly check?: boolean;
  /** Of each stream, beginning and end together; 64 MiB by default. What is beyond is counted. */
  readonly outputLimitBytes?: number;
  /** Sees what comes as it comes. */
  readonly onOutput?: (part: OutputPart) => void | Promise<void>;
}

export interface CommandView {
  readonly id: number;
  readonly args?: readonly string[];
  readonly startedMs?: number;
  readonly running: boolean;
  readonly result?: ExecResult;
}

const OUTPUT_LIMIT_BYTES = 64 << 20;
/** Of one request: small enough that the service can put it on record. */
const INPUT_BYTES = 256 << 10;
const BEYOND_ALL = Number.MAX_SAFE_INTEGER;

export class Command implements AsyncDisposable {
  readonly id: number;
  private readonly transport: Transport;
  private readonly path: string;
  private ended: ExecResult | undefined;
  private writing: Promise<unknown> = Promise.resolve();

  constructor(transport: Transport, sandboxPath: string, id: number, ended?: ExecResult) {
    this.transport = transport;
    this.id = id;
    this.path = `${sandboxPath}/commands/${id}`;
    this.ended = ended;
  }

  /** Undefined while it runs, as far as it is known here. */
  get result(): ExecResult | undefined {
    return this.ended;
  }

  /** What it is now. */
  async view(options: CallOptions = {}): Promise<CommandView> {
    const view = await this.transport.json<CommandView>('GET', this.path, options);
    this.ended = view.result ?? this.ended;
    return view;
  }

  /** Both streams as they come, to the end of the command; over connections that break. @throws SandboxGone */
  async *output({ stdout = 0, stderr = 0, follow, signal }: OutputOptions = {}): AsyncGenerator<OutputPart> {
    const at = { stdout: stdout === false ? BEYOND_ALL : stdout, stderr: stderr === false ? BEYOND_ALL : stderr };
    const backOff = new BackOff(this.transport.patienceMs);
    for (;;) {
      try {
        const answer = await this.transport.once('GET', `${this.path}/output`, { query: { ...at, follow }, signal });
        for await (const news of parseFrames(bodyOf(answer, signal))) {
          backOff.progress();
          if ('result' in news) {
            this.ended = news.result;
            return;
          }
          if ('error' in news) throw errorFrom(news.error);
          yield* onlyNew(news, at);
        }
        if (follow === false) return;
        throw connectionLost('output that ends without a result');
      } catch (error) {
        await backOff.after(error, signal);
      }
    }
  }

  /** The bytes of one stream. What the service had to drop is left out: `output` tells of it. */
  async *bytes(stream: StreamName, options: { readonly signal?: AbortSignal } = {}): AsyncGenerator<Buffer> {
    const other = stream === 'stdout' ? { stderr: false as const } : { stdout: false as const };
    for await (const { bytes } of this.output({ ...other, ...options })) if (bytes !== undefined) yield bytes;
  }

  /** Its end; what it writes is not read. Giving up leaves it running. @throws SandboxGone, DSecTimeoutError */
  async wait(options: CallOptions = {}): Promise<ExecResult> {
    if (this.ended !== undefined) return this.ended;
    return within(options, async (signal) => {
      for await (const _ of this.output({ stdout: false, stderr: false, signal }));
      return this.ended!;
    });
  }

  /** Its end, with all that it wrote. Giving up leaves it running. @throws CommandFailed with `check`, SandboxGone, DSecTimeoutError */
  async collect({ check, outputLimitBytes, onOutput, ...options }: CollectOptions = {}): Promise<CommandResult> {
    const limit = outputLimitBytes ?? OUTPUT_LIMIT_BYTES;
    const streams = { stdout: new Collector(limit), stderr: new Collector(limit) };
    await within(options, async (signal) => {
      for await (const part of this.output({ signal })) {
        if (part.bytes === undefined) streams[part.stream].skip(part.missingBytes ?? 0);
        else streams[part.stream].add(part.bytes);
        await onOutput?.(part);
      }
    });
    const result = new CommandResult(this.ended!, streams.stdout.collected, streams.stderr.collected);
    if (check === true && !result.ok) throw new CommandFailed(result);
    return result;
  }

  /** Input, in the order of the calls. Resolves when the service has taken it: a command that does not read holds it up. */
  async write(input: string | Uint8Array | AsyncIterable<Uint8Array>, options: CallOptions = {}): Promise<void> {
    return this.inOrder(async () => {
      for await (const bytes of piecesOf(input)) await this.stdin(bytes, false, options);
    });
  }

  /** The end of its input. */
  async closeStdin(options: CallOptions = {}): Promise<void> {
    return this.inOrder(() => this.stdin(Buffer.alloc(0), true, options));
  }

  /** To its process group: `SIGINT`, `SIGTERM`, ... */
  async signal(signal: string, options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/signal`, { ...options, body: { signal } });
  }

  /** SIGKILL to all that it has started. */
  async kill(options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/kill`, options);
  }

  async resize(rows: number, columns: number, options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/resize`, { ...options, body: { rows, columns } });
  }

  /** Ends it, if it still runs. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.ended === undefined) await this.kill().catch(() => {});
  }

  private async stdin(bytes: Uint8Array, close: boolean, options: CallOptions): Promise<void> {
    await this.transport.json('POST', `${this.path}/stdin`, {
      ...options,
      query: { close },
      bytes,
      operation: randomUUID(),
    });
  }

  private inOrder<T>(work: () => Promise<T>): Promise<T> {
    const done = this.writing.then(work);
    this.writing = done.catch(() => {});
    return done;
  }
}

/** Of a part, what lies behind what is known; `at` moves on. */
export function* onlyNew(part: OutputPart, at: Record<StreamName, number>): Generator<OutputPart> {
  const { stream, offset, bytes } = part;
  const known = at[stream];
  const length = bytes?.length ?? part.missingBytes ?? 0;
  if (offset > known) yield { stream, offset: known, missingBytes: offset - known };
  const skip = Math.max(0, known - offset);
  if (skip >= length) return;
  at[stream] = offset + length;
  if (bytes === undefined) yield { stream, offset: offset + skip, missingBytes: length - skip };
  else yield { stream, offset: offset + skip, bytes: bytes.subarray(skip) };
}

async function* piecesOf(input: string | Uint8Array | AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  if (typeof input === 'string' || input instanceof Uint8Array) {
    const bytes = Buffer.from(input as Uint8Array);
    for (let at = 0; at < bytes.length; at += INPUT_BYTES) yield bytes.subarray(at, at + INPUT_BYTES);
    return;
  }
  for await (const part of input) yield* piecesOf(part);
}
