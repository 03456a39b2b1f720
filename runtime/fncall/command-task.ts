/**
 * A command of a sandbox (`ExecSpec`) as a task: the same program, arguments, variables, input and time-out; what a task has no way to give is refused
 * by its name. So a caller that is given the name of another backend finds the same call here, or is told that it is not there.
 */
import { constants } from 'node:os';
import { fail } from '../errors.ts';
import { unsupported } from '../sandbox-api/capabilities.ts';
import type { ExecSpec } from '../sandbox-api/exec.ts';
import { type FnCallTask, TASK_FOLDER, type TaskFile, type TaskResult } from './task.ts';

const FNCALL = 'fncall';

export interface TaskCommand extends Omit<ExecSpec, 'stdin' | 'requestId'> {
  readonly stdin?: Buffer;
  /** Put in before it runs. */
  readonly files?: readonly TaskFile[];
  /** Patterns of files to give back. */
  readonly fetch?: readonly string[];
}

/** @throws RUNTIME_UNSUPPORTED */
export function commandTask({ args, env = [], cwd, user, terminal, background, ...rest }: TaskCommand): FnCallTask {
  // All tasks are of one user and begin in one folder.
  if (user !== undefined || (cwd !== undefined && cwd !== TASK_FOLDER)) throw unsupported(FNCALL, 'environment');
  if (terminal !== undefined) throw unsupported(FNCALL, 'terminal');
  if (background === true) throw unsupported(FNCALL, 'resident');
  const pairs = env.map(String).map((entry): [string, string] => {
    const at = entry.indexOf('=');
    return [entry.slice(0, at), entry.slice(at + 1)];
  });
  const { stdin, files, fetch, timeoutMs } = rest;
  return {
    language: 'command',
    args: args.map(String),
    env: Object.fromEntries(pairs),
    stdin,
    files,
    fetch,
    limits: timeoutMs === undefined ? undefined : { wallMs: timeoutMs },
  };
}

export interface TaskCommandResult {
  readonly exitCode: number;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
  readonly timedOut: boolean;
  readonly files: readonly TaskFile[];
}

const NOT_RUN = /^(.*) could not be run: (\w+)$/;

/** What a command of a sandbox would have given. @throws RUNTIME_COMMAND_NOT_FOUND, RUNTIME_COMMAND_NOT_EXECUTABLE, RUNTIME_FNCALL_CONTAINER */
export function commandResult({ run, problem = '', status, files }: TaskResult, program: string): TaskCommandResult {
  const [, , code] = NOT_RUN.exec(problem) ?? [];
  if (code === 'ENOENT' || code === 'ENOTDIR') {
    throw fail('RUNTIME_COMMAND_NOT_FOUND', { command: program, reason: code });
  }
  if (code !== undefined) {
    throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command: program, path: program, reason: code });
  }
  if (run === undefined) throw fail('RUNTIME_FNCALL_CONTAINER', { reason: problem === '' ? status : problem });
  const { stdout, stderr, signal, exitCode = 128 + numberOf(signal) } = run;
  return { exitCode, stdout, stderr, timedOut: status === 'time_limit', files };
}

function numberOf(signal = ''): number {
  return (constants.signals as Readonly<Record<string, number>>)[signal] ?? 0;
}
