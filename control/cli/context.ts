/**
 * What one run of the command line shares: where output goes, whether it should end, what has to be undone at its end.
 */
import type { Progress } from '#base';
import type { Output } from './output.ts';

export type Cleanup = () => void | Promise<void>;

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
  /** The exit status when nothing fails; 0 until set. */
  exitCode: number;
}
