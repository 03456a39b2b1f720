/**
 * SandboxFusion's `POST /run_code`, for programs that know that dialect: fields and words are its own. What it calls a language is looked up in the
 * pool's table; a limit it does not name is the pool's.
 */
import { type Static, Type } from '@sinclair/typebox';
import { type FnCallTask, isUnknownLanguage, type StepResult, type TaskResult } from '#runtime';
import { base64Bytes } from './task-schemas.ts';

export const FusionBody = Type.Object({
  code: Type.String(),
  language: Type.String({ maxLength: 100 }),
  compile_timeout: Type.Optional(Type.Union([Type.Number(), Type.Null()])),
  run_timeout: Type.Optional(Type.Union([Type.Number(), Type.Null()])),
  memory_limit_MB: Type.Optional(Type.Union([Type.Number(), Type.Null()])),
  stdin: Type.Optional(Type.Union([Type.String(), Type.Null()])),
  files: Type.Optional(Type.Union([Type.Record(Type.String(), Type.Union([Type.String(), Type.Null()])), Type.Null()])),
  fetch_files: Type.Optional(Type.Union([Type.Array(Type.String()), Type.Null()])),
});
export type FusionAsked = Static<typeof FusionBody>;

const DEFAULT_SECONDS = 10;
const MIB = 2 ** 20;

const LANGUAGES: Readonly<Record<string, string>> = { nodejs: 'javascript', python_gpu: 'python' };

/** @throws SANDBOX_BAD_REQUEST */
export function fusionTask(body: FusionAsked): FnCallTask {
  const { code, language, stdin, files, fetch_files } = body;
  const milliseconds = (seconds: number | null | undefined) =>
    Math.max(1, Math.round((seconds ?? DEFAULT_SECONDS) * 1000));
  const memory = body.memory_limit_MB ?? -1;
  return {
    language: LANGUAGES[language] ?? language,
    code,
    stdin: stdin === null || stdin === undefined ? undefined : Buffer.from(stdin),
    files: Object.entries(files ?? {}).flatMap(([path, content]) =>
      content === null ? [] : [{ path: plain(path), content: base64Bytes(content, path) }],
    ),
    // It fetches by name; what is a pattern here is one there too, then.
    fetch: fetch_files?.map(plain),
    limits: {
      compileMs: milliseconds(body.compile_timeout),
      wallMs: milliseconds(body.run_timeout),
      ...(memory > 0 ? { memoryBytes: Math.round(memory * MIB) } : {}),
    },
  };
}

function plain(path: string): string {
  return path.replace(/^(\.\/)+/, '');
}

/** A failure of ours is told as its SandboxError, with 200, as it does. */
export function fusionAnswer(result: TaskResult): object {
  const { status, compile, run, problem } = result;
  const word = status === 'finished' ? 'Success' : status === 'sandbox_error' ? 'SandboxError' : 'Failed';
  return {
    status: word,
    message: problem ?? '',
    compile_result: commandResult(compile),
    run_result: commandResult(run),
    executor_pod_name: null,
    files: Object.fromEntries(result.files.map(({ path, content }) => [path, content.toString('base64')])),
  };
}

function commandResult(step: StepResult | undefined): object | null {
  if (step === undefined) return null;
  const { status, exitCode, signal, stdout, stderr, wallMs } = step;
  const ended = exitCode ?? -(SIGNALS[signal ?? ''] ?? 9);
  return {
    status: status === 'time_limit' ? 'TimeLimitExceeded' : 'Finished',
    execution_time: wallMs / 1000,
    return_code: status === 'time_limit' ? null : ended,
    stdout: stdout.toString(),
    stderr: stderr.toString(),
  };
}

/** As Python tells an end by a signal: below zero. */
const SIGNALS: Readonly<Record<string, number>> = {
  SIGKILL: 9,
  SIGSEGV: 11,
  SIGABRT: 6,
  SIGFPE: 8,
  SIGTERM: 15,
  SIGXCPU: 24,
  SIGILL: 4,
  SIGBUS: 7,
};

/** Of a request that never became a task. */
export function fusionProblem(error: unknown): object | undefined {
  if (!isUnknownLanguage(error)) return undefined;
  return {
    status: 'SandboxError',
    message: (error as Error).message,
    compile_result: null,
    run_result: null,
    executor_pod_name: null,
    files: {},
  };
}
