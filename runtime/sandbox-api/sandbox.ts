/**
 * A sandbox that stays, as every backend gives it: it idles until it is told what to do, and keeps its state between commands.
 *
 * States: `running`, then `ended`, for ever, with the reason. Every operation is legal in every state: of one that has ended they fail
 * with RUNTIME_SANDBOX_GONE, which says why it ended, and `stop` is no error, twice too.
 */
import type { Capable } from './capabilities.ts';
import type { ExecHandle, ExecSpec } from './exec.ts';
import type { SandboxFiles } from './files.ts';
import type { ShellOptions, ShellSession } from './shell.ts';

export type EndReason =
  /** It was asked to. */
  | 'stopped'
  /** Its time was up. */
  | 'expired'
  | 'out-of-memory'
  /** Its agent was killed by something else. */
  | 'killed'
  /** Its agent broke the protocol, or ended by itself. */
  | 'failed'
  /** Whatever held it died, or the machine did. */
  | 'lost';

export interface SandboxEnd {
  readonly reason: EndReason;
  /** For people. */
  readonly detail: string;
  /** ISO 8601. */
  readonly at: string;
}

export interface Sandbox {
  readonly name: string;
  readonly backend: Capable;
  readonly state: 'running' | 'ended';
  readonly end: SandboxEnd | undefined;
  readonly files: SandboxFiles;
  /** Resolves when the command runs. @throws RUNTIME_COMMAND_NOT_FOUND, RUNTIME_COMMAND_NOT_EXECUTABLE, RUNTIME_USER, RUNTIME_SANDBOX_GONE */
  exec(spec: ExecSpec): Promise<ExecHandle>;
  /** One that was started before. @throws RUNTIME_EXEC_NOT_FOUND */
  command(id: number): ExecHandle;
  /** Oldest first. */
  commands(): ExecHandle[];
  openShell(options?: ShellOptions): Promise<ShellSession>;
  /** SIGTERM to all, and after `timeMs` the end. Its changes stay until it is removed. */
  stop(options?: { readonly timeMs?: number }): Promise<SandboxEnd>;
  readonly ended: Promise<SandboxEnd>;
}
