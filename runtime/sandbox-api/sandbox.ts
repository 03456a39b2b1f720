/**
 * A sandbox that stays, as every backend gives it: it idles until it is told what to do, and keeps its state between commands.
 *
 * States: `running` and `paused`, then `ended`, for ever, with the reason. Every operation is legal in every state, twice too: what is asked of a
 * paused one resumes it first; of one that has ended all fail with RUNTIME_SANDBOX_GONE, which says why it ended, and `stop` is no error.
 */
import type { Duplex } from 'node:stream';
import type { Capable } from './capabilities.ts';
import type { ExecHandle, ExecSpec } from './exec.ts';
import type { SandboxFiles, SandboxPath } from './files.ts';
import type { AllLimits, LimitChanges } from './limits.ts';
import type { ShellOptions, ShellSession } from './shell.ts';
import type { SandboxUsage } from './usage.ts';
import type { FileWatch, WatchOptions } from './watch.ts';

export type EndReason =
  /** It was asked to. */
  | 'stopped'
  /** Its time was up. */
  | 'expired'
  /** Nobody used it, and it was to end then. */
  | 'idle'
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

/** Latency-sensitive, or best effort: runs when no other wants to. */
export const SERVICE_CLASSES = ['ls', 'be'] as const;
export type ServiceClass = (typeof SERVICE_CLASSES)[number];

export const IDLE_ACTIONS = ['stop', 'pause'] as const;
export type IdleAction = (typeof IDLE_ACTIONS)[number];

export interface PauseReport {
  /** ISO 8601. */
  readonly pausedAt: string;
  /** Memory of the sandbox before and after; without cached files, which go by themselves when the machine needs room. */
  readonly beforeBytes: number;
  readonly afterBytes: number;
  /** Why nothing was given back. */
  readonly reason?: 'no swap' | 'no memory controller';
}

export interface Sandbox {
  readonly name: string;
  readonly backend: Capable;
  readonly state: 'running' | 'paused' | 'ended';
  readonly end: SandboxEnd | undefined;
  readonly files: SandboxFiles;
  /** Resolves when the command runs. @throws RUNTIME_COMMAND_NOT_FOUND, RUNTIME_COMMAND_NOT_EXECUTABLE, RUNTIME_USER, RUNTIME_SANDBOX_GONE */
  exec(spec: ExecSpec): Promise<ExecHandle>;
  /** One that was started before. @throws RUNTIME_EXEC_NOT_FOUND */
  command(id: number): ExecHandle;
  /** Oldest first. */
  commands(): ExecHandle[];
  openShell(options?: ShellOptions): Promise<ShellSession>;
  /** Resolves when every event from now on will be told. @throws RUNTIME_FILE, RUNTIME_WATCH_LIMIT, RUNTIME_SANDBOX_GONE */
  watch(path: SandboxPath, options?: WatchOptions): Promise<FileWatch>;
  /** A stream to what listens at 127.0.0.1 or ::1 inside, whatever network it has. @throws RUNTIME_PORT_CLOSED, RUNTIME_SANDBOX_GONE */
  connect(port: number, options?: { readonly signal?: AbortSignal }): Promise<Duplex>;
  /**
   * Its commands stand still and their memory is given back, where there is swap; files, sockets and timers live on. Its time (`ttlMs`) goes on.
   * @throws RUNTIME_UNSUPPORTED, RUNTIME_PAUSE_STUCK, RUNTIME_SANDBOX_GONE
   */
  pause(): Promise<PauseReport>;
  /** @throws RUNTIME_SANDBOX_GONE */
  resume(): Promise<void>;
  /**
   * Changes limits while it runs. @returns those that hold then
   * @throws RUNTIME_LIMIT, RUNTIME_LIMIT_REFUSED, RUNTIME_LIMIT_UNAVAILABLE; then they are as they were
   */
  update(changes: LimitChanges): Promise<AllLimits>;
  /** What it uses now, and has used so far; `disk`: what it changed is counted where no limit does. @throws RUNTIME_SANDBOX_GONE */
  usage(options?: { readonly disk?: boolean }): Promise<SandboxUsage>;
  /** SIGTERM to all, and after `timeMs` the end. Its changes stay until it is removed. */
  stop(options?: { readonly timeMs?: number }): Promise<SandboxEnd>;
  readonly ended: Promise<SandboxEnd>;
}
