/** A task as orders for a container, and what the container tells as a result. */
import { constants } from 'node:os';
import { fail } from '../errors.ts';
import { taskEnvironment, withGpu } from './container-plan.ts';
import { argumentsFor, languageNamed } from './languages.ts';
import type { PoolContainer, RawResult } from './pool-container.ts';
import type { PoolOptions } from './pool-spec.ts';
import {
  type CheckedLimits,
  checkedTaskLimits,
  checkRoom,
  checkTask,
  type FnCallTask,
  type StepResult,
  TASK_FOLDER,
  type TaskFile,
  type TaskResult,
  type TaskStatus,
} from './task.ts';
import type { StepOrder, StepReport } from './task-wire.ts';

export interface PreparedTask {
  readonly task: FnCallTask;
  readonly limits: CheckedLimits;
  readonly files: readonly TaskFile[];
  readonly hasCompiler: boolean;
  /** What is run is the task's own. */
  readonly isCommand: boolean;
  /** Without what depends on the container. */
  steps(container: PoolContainer, imageEnv: readonly string[]): StepOrder[];
  /** After so long something is wrong with the container. */
  readonly patienceMs: number;
}

/** Before a container is taken. @throws RUNTIME_FNCALL_TASK, RUNTIME_FNCALL_LANGUAGE */
export function prepareTask(task: FnCallTask, options: PoolOptions): PreparedTask {
  checkTask(task);
  const { name, language } = languageNamed(task.language, options.table);
  if (options.languages !== undefined && !options.languages.includes(name)) {
    throw fail('RUNTIME_FNCALL_LANGUAGE', { language: task.language, known: options.languages.join(', ') });
  }
  const limits = checkedTaskLimits(task.limits, options.defaults, options.most);
  const file = task.file ?? language.file;
  const inFolder = (path: string) => (path.startsWith('/') ? path : `${TASK_FOLDER}/${path}`);
  const given = (task.files ?? []).map((one) => ({ ...one, path: inFolder(one.path) }));
  const code = task.code === undefined ? [] : [{ path: inFolder(file), content: Buffer.from(task.code) }];
  const files = [...given, ...code];
  checkRoom(files, limits.diskBytes);
  const isCommand = language.run.length === 0;
  if (isCommand && (task.args ?? []).length === 0) {
    throw fail('RUNTIME_FNCALL_TASK', {
      field: 'args',
      problem: `there is no program among them, and ${name} has none`,
    });
  }
  if (!isCommand && !files.some(({ path }) => path === inFolder(file))) {
    throw fail('RUNTIME_FNCALL_TASK', { field: 'code', problem: `there is none, and no file ${file} among its files` });
  }
  const [compile, run] = [language.compile, language.run].map((row) => row && argumentsFor(row, file));
  if (task.compileOnly === true && compile === undefined) {
    throw fail('RUNTIME_FNCALL_TASK', { field: 'compileOnly', problem: `${name} is not compiled` });
  }
  const own = Object.entries({ ...language.env, ...task.env }).map(([key, value]) => `${key}=${value}`);
  // A fork does what `python3 FILE` does, and nothing else that a row may say.
  const plain = language.compile === undefined && language.run[1] === '{file}';
  const warm = name === 'python' && options.python !== undefined && plain && task.warm !== false;
  return {
    task,
    limits,
    files,
    hasCompiler: compile !== undefined,
    isCommand,
    patienceMs: limits.compileMs + limits.wallMs + PATIENCE_MS,
    steps(container, imageEnv) {
      const env = taskEnvironment(withGpu(imageEnv, container.gpuEnv), options.env ?? [], own);
      const step = (
        args: readonly string[],
        wallMs: number,
        forked: boolean,
        stdin: Buffer,
        cpuMs: number,
      ): StepOrder => ({
        forked,
        args,
        env,
        cwd: TASK_FOLDER,
        stdin,
        wallMs,
        cpuMs,
        outputBytes: limits.outputBytes,
        writtenBytes: limits.outputBytes * WRITTEN_FACTOR + WRITTEN_BYTES,
        limits: resourceLimits(cpuMs),
        writes: container.groups.writes(limits),
      });
      const nothing = Buffer.alloc(0);
      const steps: StepOrder[] = [];
      if (compile !== undefined) steps.push(step(compile, limits.compileMs, false, nothing, 0));
      if (task.compileOnly !== true) {
        const args = [...(warm ? run!.slice(1) : run!), ...(task.args ?? [])];
        steps.push(step(args, limits.wallMs, warm, task.stdin ?? nothing, limits.cpuMs ?? 0));
      }
      return steps;
    },
  };
}

/** For files and for the kernel, on a busy machine. */
const PATIENCE_MS = 60_000;
/** What a program may write beyond what is kept, before it is ended. */
const WRITTEN_FACTOR = 16;
const WRITTEN_BYTES = 64 * 2 ** 20;

const NO_END = 0xffff_ffff_ffff_ffffn;
const [RLIMIT_CPU, RLIMIT_STACK, RLIMIT_CORE, RLIMIT_NOFILE] = [0, 3, 4, 7];

/** Beside its control group: no core files, and a stack as deep as its memory goes. */
function resourceLimits(cpuMs: number): StepOrder['limits'] {
  const seconds = BigInt(Math.ceil(cpuMs / 1000) + 1);
  return [
    [RLIMIT_CORE, 0n, 0n],
    [RLIMIT_STACK, 64n << 20n, NO_END],
    [RLIMIT_NOFILE, 4096n, 65_536n],
    ...(cpuMs === 0 ? [] : [[RLIMIT_CPU, seconds, seconds] as const]),
  ];
}

export function resultOf(raw: RawResult, prepared: PreparedTask, pool: string, queueMs: number): TaskResult {
  const { hasCompiler, isCommand, task } = prepared;
  const reports = new Map(raw.steps.map((report) => [report.step, stepResult(report)]));
  const compile = hasCompiler ? reports.get(0) : undefined;
  const run = task.compileOnly === true ? undefined : reports.get(hasCompiler ? 1 : 0);
  const files = raw.files.map(({ path, content }) => ({
    path: path.startsWith(`${TASK_FOLDER}/`) ? path.slice(TASK_FOLDER.length + 1) : path,
    content,
  }));
  const said = { compile, run, files, queueMs, pool };
  if (raw.notRun !== undefined) {
    const { step, what, code } = raw.notRun;
    const problem = step === 255 ? `${what} could not be written: ${code}` : `${what} could not be run: ${code}`;
    // What was compiled and cannot be executed is the task's own, and so is a program that it names.
    const own = isCommand || step === 255 || (step === 1 && hasCompiler);
    return { ...said, status: own ? 'runtime_error' : 'sandbox_error', problem };
  }
  const problem = raw.fetchProblem === '' ? undefined : `files to fetch: ${raw.fetchProblem}`;
  const status: TaskStatus =
    compile !== undefined && compile.status !== 'finished'
      ? 'compile_error'
      : (run?.status ?? (task.compileOnly === true ? 'finished' : 'sandbox_error'));
  return { ...said, status, problem };
}

/** Of one that never came to an end that somebody could tell. */
export function sandboxError(problem: string, pool: string, queueMs: number): TaskResult {
  return { status: 'sandbox_error', compile: undefined, run: undefined, files: [], problem, queueMs, pool };
}

const STATUS_OF: Readonly<Record<Exclude<StepReport['reason'], 'none'>, StepResult['status']>> = {
  wall: 'time_limit',
  cpu: 'time_limit',
  memory: 'memory_limit',
  output: 'output_limit',
};

function stepResult(report: StepReport): StepResult {
  const number = report.status & 0x7f;
  const signal = number === 0 ? undefined : (signalName(number) ?? `signal ${number}`);
  const exitCode = number === 0 ? (report.status >> 8) & 0xff : undefined;
  const { reason, stdout, stderr, stdoutBytes, stderrBytes, wallMs, cpuMs, peakBytes } = report;
  return {
    status: reason !== 'none' ? STATUS_OF[reason] : exitCode === 0 ? 'finished' : 'runtime_error',
    exitCode,
    signal,
    stdout,
    stderr,
    stdoutBytes,
    stderrBytes,
    wallMs,
    cpuMs,
    peakMemoryBytes: peakBytes === 0 ? undefined : peakBytes,
  };
}

function signalName(number: number): string | undefined {
  return Object.entries(constants.signals).find(([, value]) => value === number)?.[0];
}
