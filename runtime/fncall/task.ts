/**
 * A task and what becomes of it, as callers have them. A task is whole in itself: code, files and input go in, and what its programs wrote, used and
 * left comes out. Nothing of it stays.
 */

import { isUtf8 } from 'node:buffer';
import { totalmem } from 'node:os';
import { posix } from 'node:path';
import { fail } from '../errors.ts';

export interface TaskFile {
  /** Relative to the task's folder, or absolute in one of its private folders. */
  readonly path: string;
  readonly content: Buffer;
  readonly mode?: number;
}

export interface TaskLimits {
  /** Of the run; the compiler has its own. */
  readonly wallMs?: number;
  readonly compileMs?: number;
  /** Processor time of all its processes together. */
  readonly cpuMs?: number;
  readonly memoryBytes?: number;
  readonly pids?: number;
  /** Of each stream, kept; what is written beyond is counted. */
  readonly outputBytes?: number;
  /** Of all that it writes to its folders. */
  readonly diskBytes?: number;
}

export interface FnCallTask {
  readonly language: string;
  readonly code?: string;
  /** Of `code`, in place of the language's own name for it. */
  readonly file?: string;
  readonly files?: readonly TaskFile[];
  readonly stdin?: Buffer;
  readonly args?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
  readonly limits?: TaskLimits;
  /** Patterns of files to give back: `*` and `?` within a name, `**` across folders. */
  readonly fetch?: readonly string[];
  /** It is compiled and not run: what the compiler made is what is fetched. */
  readonly compileOnly?: boolean;
  /** `false`: by an interpreter that starts for it, even where one waits. */
  readonly warm?: boolean;
}

export const TASK_STATUSES = [
  'finished',
  'compile_error',
  'runtime_error',
  'time_limit',
  'memory_limit',
  'output_limit',
  'sandbox_error',
] as const;
export type TaskStatus = (typeof TASK_STATUSES)[number];

export interface StepResult {
  readonly status: Exclude<TaskStatus, 'compile_error'>;
  /** Undefined when a signal ended it. */
  readonly exitCode: number | undefined;
  readonly signal: string | undefined;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
  /** What it wrote; more than `stdout` has where that is cut. */
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
  readonly wallMs: number;
  readonly cpuMs: number;
  /** Undefined where nothing counts it. */
  readonly peakMemoryBytes: number | undefined;
}

export interface TaskResult {
  readonly status: TaskStatus;
  readonly compile: StepResult | undefined;
  /** Undefined when it was not run. */
  readonly run: StepResult | undefined;
  readonly files: readonly TaskFile[];
  /** In words: why `sandbox_error`, or what could not be fetched. */
  readonly problem: string | undefined;
  readonly queueMs: number;
  readonly pool: string;
}

export interface CheckedLimits {
  readonly wallMs: number;
  readonly compileMs: number;
  readonly cpuMs: number | undefined;
  readonly memoryBytes: number;
  readonly pids: number;
  readonly outputBytes: number;
  readonly diskBytes: number;
}

/** Where a task's programs start, and where relative paths lead. */
export const TASK_FOLDER = '/work';
export const TASK_HOME = '/home/sandbox';

/** Empty for each task, on one tmpfs. Everything else is read-only. */
export const PRIVATE_FOLDERS = [
  { path: '/tmp', mode: 0o1777 },
  { path: '/var/tmp', mode: 0o1777 },
  { path: '/dev/shm', mode: 0o1777 },
  { path: '/run', mode: 0o755 },
  { path: TASK_HOME, mode: 0o700 },
  { path: TASK_FOLDER, mode: 0o755 },
] as const;

const MIB = 2 ** 20;

export const DEFAULT_LIMITS: CheckedLimits = {
  wallMs: 10_000,
  compileMs: 30_000,
  cpuMs: undefined,
  memoryBytes: 512 * MIB,
  pids: 128,
  outputBytes: MIB,
  diskBytes: 256 * MIB,
};

/** What a pool may allow. */
export const MOST: CheckedLimits = {
  wallMs: 3_600_000,
  compileMs: 3_600_000,
  cpuMs: 36_000_000,
  memoryBytes: 64 * 1024 * MIB,
  pids: 16_384,
  // Both streams have to fit into one frame.
  outputBytes: 3 * MIB,
  diskBytes: 64 * 1024 * MIB,
};

/** No task may ask for more, unless its pool says so: it is not to have the machine for itself, nor for long. */
export const USUAL_MOST: Partial<CheckedLimits> = {
  wallMs: 600_000,
  compileMs: 600_000,
  memoryBytes: Math.max(DEFAULT_LIMITS.memoryBytes, Math.floor(totalmem() / 2)),
  pids: 4096,
  diskBytes: Math.max(DEFAULT_LIMITS.diskBytes, Math.floor(totalmem() / 2)),
};

const LEAST: Readonly<Record<keyof CheckedLimits, number>> = {
  wallMs: 1,
  compileMs: 1,
  cpuMs: 1,
  memoryBytes: 4 * MIB,
  pids: 1,
  outputBytes: 0,
  diskBytes: 64 * 1024,
};

/** What a task of a pool may have at the most. */
export function highestLimits(defaults: TaskLimits = {}, most: TaskLimits = {}): { memoryBytes: number; pids: number } {
  const highest = (name: 'memoryBytes' | 'pids') =>
    Math.min(MOST[name], Math.max(most[name] ?? USUAL_MOST[name] ?? 0, defaults[name] ?? 0));
  return { memoryBytes: highest('memoryBytes'), pids: highest('pids') };
}

/** @throws RUNTIME_FNCALL_TASK */
export function checkedTaskLimits(
  given: TaskLimits = {},
  defaults: TaskLimits = {},
  most: TaskLimits = {},
): CheckedLimits {
  const all: Record<string, number | undefined> = { ...DEFAULT_LIMITS };
  for (const name of Object.keys(LEAST) as (keyof CheckedLimits)[]) {
    const value = given[name] ?? defaults[name] ?? DEFAULT_LIMITS[name];
    const highest = Math.min(most[name] ?? USUAL_MOST[name] ?? Number.POSITIVE_INFINITY, MOST[name]!);
    if (value === undefined) continue;
    if (!Number.isSafeInteger(value) || value < LEAST[name] || (value > highest && given[name] !== undefined)) {
      throw fail('RUNTIME_FNCALL_TASK', {
        field: `limits.${name}`,
        problem: `${value}: a whole number from ${LEAST[name]} to ${highest} is possible here`,
      });
    }
    all[name] = Math.min(value, highest);
  }
  return all as unknown as CheckedLimits;
}

const MAX_FILES = 1000;
/** Input files of one task. */
const MAX_FILE_BYTES = 256 * MIB;
/** Those that it gives back: they are in our memory, and then in the answer. */
export const MAX_FETCHED_BYTES = 32 * MIB;
const MAX_ARGUMENT_BYTES = 128 * 1024;
/** With the frame around it. */
const MAX_STDIN_BYTES = 7 * MIB;

/** What can be told before there is a container. @throws RUNTIME_FNCALL_TASK */
export function checkTask(task: FnCallTask): void {
  const bad = (field: string, problem: string) => fail('RUNTIME_FNCALL_TASK', { field, problem });
  const files = task.files ?? [];
  if (files.length > MAX_FILES) throw bad('files', `${files.length} of them; ${MAX_FILES} are possible`);
  for (const { path } of files) checkPath('files', path);
  if (task.file !== undefined) checkPath('file', task.file);
  const bytes = files.reduce((sum, { content }) => sum + content.length, Buffer.byteLength(task.code ?? ''));
  if (bytes > MAX_FILE_BYTES) throw bad('files', `${bytes} bytes together; ${MAX_FILE_BYTES} are possible`);
  if ((task.stdin?.length ?? 0) > MAX_STDIN_BYTES) {
    throw bad('stdin', `${task.stdin!.length} bytes; up to ${MAX_STDIN_BYTES} are possible, more can come as a file`);
  }
  const texts = [...(task.args ?? []), ...Object.entries(task.env ?? {}).flat(), ...(task.fetch ?? [])];
  if (texts.some((text) => text.includes('\0'))) throw bad('args, env or fetch', 'a NUL byte');
  if (texts.reduce((sum, text) => sum + text.length, 0) > MAX_ARGUMENT_BYTES) {
    throw bad('args, env and fetch', `longer than ${MAX_ARGUMENT_BYTES} bytes together`);
  }
  for (const name of Object.keys(task.env ?? {})) {
    if (name === '' || name.includes('=')) throw bad('env', `${JSON.stringify(name)} is no name of a variable`);
  }
  if ((task.fetch ?? []).length > 100) throw bad('fetch', 'more than 100 patterns');
  for (const pattern of task.fetch ?? []) checkPath('fetch', pattern);
}

const isPrivate = (path: string) => PRIVATE_FOLDERS.some((folder) => path.startsWith(`${folder.path}/`));

const BLOCK = 4096;

/** All of them are written before it begins. @throws RUNTIME_FNCALL_TASK */
export function checkRoom(files: readonly TaskFile[], diskBytes: number): void {
  const bytes = files.reduce((sum, { content }) => sum + Math.ceil(content.length / BLOCK) * BLOCK, 0);
  if (bytes <= diskBytes) return;
  const problem = `they take ${bytes} bytes, and limits.diskBytes is ${diskBytes}`;
  throw fail('RUNTIME_FNCALL_TASK', { field: 'files', problem });
}

function checkPath(field: string, path: string): void {
  const problem =
    path === '' || path.endsWith('/')
      ? 'it names no file'
      : path.includes('\0')
        ? 'a NUL byte'
        : path.split('/').includes('..')
          ? 'it has a part ..'
          : path.length > 3000
            ? 'it is too long'
            : path.startsWith('/') && !isPrivate(posix.normalize(path))
              ? `it is in none of the task’s own folders: ${PRIVATE_FOLDERS.map((one) => one.path).join(', ')}`
              : undefined;
  if (problem !== undefined)
    throw fail('RUNTIME_FNCALL_TASK', { field, problem: `${JSON.stringify(path)}: ${problem}` });
}

/** Text where it is text; programs write what they like. What is mostly control characters would take six times its size as JSON. */
export function textOf(bytes: Buffer): string | undefined {
  if (!isUtf8(bytes)) return undefined;
  let control = 0;
  for (const byte of bytes) if (byte < 0x20 && byte !== 0x0a && byte !== 0x0d && byte !== 0x09) control++;
  return control > SOME_CONTROL + bytes.length / 16 ? undefined : bytes.toString();
}
/** Colours of a terminal, say. */
const SOME_CONTROL = 1000;
