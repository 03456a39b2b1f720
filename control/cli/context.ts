/**
 * What one run of the command line shares: where output goes, whether it should end, what has to be undone at its end.
 */
import type { Readable } from 'node:stream';
import type { Progress } from '#base';
import type { Backend, Caller as SandboxCaller } from '#runtime';
import type { CommandClient } from '../runtime-service/own-commands.ts';
import type { Output } from './output.ts';

export type Cleanup = () => void | Promise<void>;

/** A client of the runtime service, whose command runs in the service's process. */
export interface Caller extends SandboxCaller {
  /** Its standard input is /dev/null. */
  readonly stdinIsNull: boolean;
  /** Sandboxes with the client's standard streams. */
  readonly backend: Backend;
  /** The client's standard input; it is read from when somebody asks for it. */
  readonly stdin: Readable;
  /** Of the sandboxes that stay. */
  readonly commands: CommandClient;
  /**
   * Before anything is done: from now on it is done here.
   * @throws NotServed when only a process of the client's own can do it
   */
  begin(options: { readonly store?: string; readonly runtime?: string }): void;
}

/** The client shall run the command in a process of its own. Nothing has been done yet. */
export class NotServed extends Error {}

export interface Context {
  /** Aborted by SIGINT and SIGTERM, and when whoever reads stdout has gone. */
  readonly signal: AbortSignal;
  readonly output: Output;
  /** Draws on a terminal, is silent elsewhere. */
  readonly progress: Progress;
  /** `cleanup` runs when the command ends, however it ends; last in, first out. */
  defer(cleanup: Cleanup): void;
  /** From now on SIGINT, SIGTERM, SIGHUP and SIGQUIT go to `handler` instead of ending the command: for `run`, which passes them on. */
  takeSignals(handler: (signal: NodeJS.Signals) => void): void;
  /** Who the command is run for, where that is not this process. Then `takeSignals` hands over every signal. */
  readonly caller?: Caller;
  /** Whether the sources are still those that run here; by default they are. */
  isFresh?(): boolean;
  /** The exit status when nothing fails; 0 until set. */
  exitCode: number;
}
