/**
 * A command in a sandbox, whatever the backend, and whether it is looked at from the same process or over a network.
 *
 * - It lives on without anybody who looks: output is kept, and read from any offset, by any number of readers.
 * - While somebody reads, no byte is lost: a reader that is slow slows the command, as at a pipe. Without a reader what is beyond
 *   the limit is dropped in the middle, and a reader is told how many bytes are missing.
 * - `wait` is about the command's own process. Children that it leaves behind may go on writing; they do not hold it.
 */

export interface ExecSpec {
  readonly args: readonly (string | Buffer)[];
  /** `NAME=VALUE`, above what the sandbox has by default. */
  readonly env?: readonly (string | Buffer)[];
  /** The sandbox's by default; it has to exist. */
  readonly cwd?: string;
  /** `name`, `uid`, `name:group` or `uid:gid` of the sandbox's own accounts, as they are now. */
  readonly user?: string;
  /** False: it finds its input at its end. */
  readonly stdin?: boolean;
  readonly terminal?: { readonly rows: number; readonly columns: number };
  /** Then it is ended with all that it has started. What the sandbox is paused meanwhile does not count. */
  readonly timeoutMs?: number;
  /** A sandbox whose only running commands are of these is idle. */
  readonly background?: boolean;
  /** Asking again with the same one gives the same command. */
  readonly requestId?: string;
}

export interface ExecResult {
  /** 128 + n after signal n. */
  readonly exitCode: number;
  readonly signal?: NodeJS.Signals;
  /** Ended by its time-out, and every process of it. */
  readonly timedOut: boolean;
  /** Memory ran out in the sandbox, and the kernel chose this. */
  readonly outOfMemory: boolean;
  /** Written before it ended. */
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
  readonly durationMs: number;
}

export type StreamName = 'stdout' | 'stderr';

/** In order for each stream; `missingBytes` instead of bytes where output was dropped. */
export type OutputPart =
  | { readonly stream: StreamName; readonly offset: number; readonly bytes: Buffer; readonly missingBytes?: undefined }
  | { readonly stream: StreamName; readonly offset: number; readonly bytes?: undefined; readonly missingBytes: number };

export interface OutputFrom {
  readonly stdout?: number;
  readonly stderr?: number;
  /** False: what there is now. True, the default: until the command has ended and all that it had written is told. */
  readonly follow?: boolean;
  readonly signal?: AbortSignal;
}

export interface ExecHandle {
  readonly id: number;
  /** Undefined while it runs. */
  readonly result: ExecResult | undefined;
  /** Resolves when there is room for more. What comes when nobody reads any more is dropped. */
  write(bytes: Buffer): Promise<void>;
  closeStdin(): Promise<void>;
  output(from?: OutputFrom): AsyncIterable<OutputPart>;
  resize(rows: number, columns: number): void;
  /** To its process group. */
  kill(signal: NodeJS.Signals): void;
  /** SIGKILL to all that it has started, wherever that has gone. */
  killTree(): Promise<void>;
  /** @throws RUNTIME_SANDBOX_GONE when the sandbox ended before it */
  wait(): Promise<ExecResult>;
}
