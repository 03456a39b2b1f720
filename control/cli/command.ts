/**
 * What a command of `dsec` is. One file a command in commands/, loaded only when that command (or its help) is asked for.
 */
import type { Command } from 'commander';
import type { Context } from './context.ts';
import type { ExactPaths } from './exact-text.ts';

export interface Example {
  /** A whole command line, as a user would type it. */
  readonly line: string;
  readonly what: string;
}

export interface CommandDefinition {
  /** Full sentences; the one-line summary stands in command-table.ts. */
  readonly description: string;
  /** At least one. */
  readonly examples: readonly Example[];
  /** What --json prints, for docs/commands.md: every field in backquotes. */
  readonly json?: string;
  /** Paths that it takes byte for byte; everything else has to be UTF-8. */
  readonly exactPaths?: ExactPaths;
  /** Declares arguments and options, and binds `run` with `context`. */
  configure(command: Command, context: Context): void;
  /** Commands below it that can be declared alone, by their names: which costs less. */
  readonly parts?: Readonly<Record<string, (command: Command, context: Context) => void>>;
}
