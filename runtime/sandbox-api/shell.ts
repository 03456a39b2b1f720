/**
 * A shell session: commands one after the other in one shell, which keeps its folder, variables and functions between them. What a
 * command does to the shell (a syntax error, an open quote, `exec`, `exit`, a kill) never spoils the next one: that works, or the
 * session says that it is lost (RUNTIME_SHELL_LOST), and how the shell ended.
 */
import type { OutputFrom, OutputPart } from './exec.ts';

export interface ShellOptions {
  /** The first of bash and sh that is there. */
  readonly shell?: string;
  readonly env?: readonly string[];
  readonly cwd?: string;
  readonly user?: string;
  /** Its streams are a terminal, stdout and stderr one. */
  readonly terminal?: { readonly rows: number; readonly columns: number };
}

export interface ShellResult {
  readonly exitCode: number;
  /** What it wrote; the ends of it beyond some megabytes. */
  readonly stdout: Buffer;
  readonly stderr: Buffer;
  /** Of the session's whole output, where this command's begins. */
  readonly stdoutOffset: number;
  readonly stderrOffset: number;
  /** Output that is not in `stdout` and `stderr`. */
  readonly missingBytes: number;
  /** It took longer than it might and was interrupted; or could not be, and then the session is lost. */
  readonly timedOut: boolean;
  /** The shell went with it (`exit`, `exec`, a kill): this was its last command. */
  readonly lost: boolean;
}

export interface ShellSession {
  readonly id: number;
  readonly lost: boolean;
  /** Waits for those before it. @throws RUNTIME_SHELL_LOST, RUNTIME_SANDBOX_GONE */
  run(command: string, options?: { readonly timeoutMs?: number }): Promise<ShellResult>;
  /** Input for what runs now, on a terminal; without one commands find their input at its end. */
  write(bytes: Buffer): Promise<void>;
  /** SIGINT to what runs now. */
  interrupt(): void;
  resize(rows: number, columns: number): void;
  output(from?: OutputFrom): AsyncIterable<OutputPart>;
  /** Resolves with the output since `from`, at least the last 128 KiB of it, when `pattern` is in that. @throws RUNTIME_SHELL_EXPECT after `timeoutMs` */
  expect(pattern: RegExp | string, options?: { readonly timeoutMs?: number; readonly from?: number }): Promise<Buffer>;
  /** Ends the shell with all that it started. */
  close(): Promise<void>;
}
