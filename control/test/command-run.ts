/** Runs commands of the command line inside a test: same code, no process. */
import { PassThrough } from 'node:stream';
import type { Cleanup, Context } from '../cli/context.ts';
import { runCommandLine } from '../cli/main.ts';
import { Output } from '../cli/output.ts';

export interface CommandRun {
  readonly exitCode: number;
  readonly stdout: Buffer;
  /** stdout as text. */
  readonly text: string;
  readonly stderr: string;
}

/** @throws what the command throws */
export async function runCommand(...argv: string[]): Promise<CommandRun> {
  const stdout = new PassThrough({ highWaterMark: 64 << 20 });
  const stderr = new PassThrough({ highWaterMark: 1 << 20 });
  const cleanups: Cleanup[] = [];
  const context: Context = {
    signal: new AbortController().signal,
    output: new Output(stdout, stderr, () => {}),
    progress: () => {},
    defer: (cleanup) => cleanups.push(cleanup),
    takeSignals: () => {},
    exitCode: 0,
  };
  try {
    await runCommandLine(argv, context);
  } finally {
    for (const cleanup of cleanups.reverse()) await cleanup();
  }
  const bytes = (stdout.read() as Buffer | null) ?? Buffer.alloc(0);
  return {
    exitCode: context.exitCode,
    stdout: bytes,
    text: bytes.toString(),
    stderr: String(stderr.read() ?? ''),
  };
}
