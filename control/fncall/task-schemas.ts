/** Tasks and pools as JSON: what may be asked, and what is answered. */
import { type Static, Type } from '@sinclair/typebox';
import {
  type FnCallTask,
  type PoolOptions,
  type PoolView,
  type StepResult,
  type TaskFile,
  type TaskLimits,
  type TaskResult,
  textOf,
  USERNS_MODES,
} from '#runtime';
import { fail } from '../errors.ts';

const Text = Type.String({ maxLength: 1 << 20 });
const Name = Type.String({ maxLength: 4096 });
const Whole = Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER });
const Content = Type.String();

const Limits = Type.Object(
  {
    wallMs: Type.Optional(Whole),
    compileMs: Type.Optional(Whole),
    cpuMs: Type.Optional(Whole),
    memoryBytes: Type.Optional(Whole),
    pids: Type.Optional(Whole),
    outputBytes: Type.Optional(Whole),
    diskBytes: Type.Optional(Whole),
  },
  { additionalProperties: false },
);

const File = Type.Object(
  {
    path: Name,
    content: Type.Optional(Content),
    contentBase64: Type.Optional(Content),
    mode: Type.Optional(Type.Integer({ minimum: 0, maximum: 0o777 })),
  },
  { additionalProperties: false },
);

const Python = Type.Object(
  { imports: Type.Optional(Type.Array(Name, { maxItems: 200 })), program: Type.Optional(Name) },
  { additionalProperties: false },
);

const TASK = {
  pool: Type.Optional(Name),
  image: Type.Optional(Name),
  workspace: Type.Optional(Name),
  toolkits: Type.Optional(Type.Array(Name, { maxItems: 500 })),
  language: Name,
  code: Type.Optional(Content),
  file: Type.Optional(Name),
  files: Type.Optional(Type.Array(File, { maxItems: 1000 })),
  stdin: Type.Optional(Content),
  stdinBase64: Type.Optional(Content),
  args: Type.Optional(Type.Array(Text, { maxItems: 1000 })),
  env: Type.Optional(Type.Record(Type.String(), Text)),
  limits: Type.Optional(Limits),
  fetch: Type.Optional(Type.Array(Name, { maxItems: 100 })),
  compileOnly: Type.Optional(Type.Boolean()),
  warm: Type.Optional(Type.Boolean()),
};
const FirstTask = Type.Object(TASK, { additionalProperties: false });

export const RunBody = Type.Object(
  {
    ...TASK,
    store: Type.Optional(Name),
    /** In a cluster: whose it is. */
    project: Type.Optional(Name),
    /** Run before it, maybe elsewhere: what it gives back is put in. */
    from: Type.Optional(FirstTask),
  },
  { additionalProperties: false },
);
export type RunAsked = Static<typeof RunBody>;

const Row = Type.Object(
  {
    file: Name,
    compile: Type.Optional(Type.Array(Text)),
    run: Type.Array(Text),
    env: Type.Optional(Type.Record(Type.String(), Text)),
  },
  { additionalProperties: false },
);

export const PoolBody = Type.Object(
  {
    image: Name,
    store: Type.Optional(Name),
    workspace: Type.Optional(Name),
    toolkits: Type.Optional(Type.Array(Name, { maxItems: 500 })),
    floor: Type.Optional(Whole),
    ceiling: Type.Optional(Whole),
    queue: Type.Optional(Whole),
    queueMs: Type.Optional(Whole),
    idleMs: Type.Optional(Whole),
    tasks: Type.Optional(Whole),
    languages: Type.Optional(Type.Array(Name)),
    table: Type.Optional(Type.Record(Type.String(), Row)),
    env: Type.Optional(Type.Array(Text)),
    python: Type.Optional(Python),
    defaults: Type.Optional(Limits),
    most: Type.Optional(Limits),
    cpus: Type.Optional(Type.Number({ exclusiveMinimum: 0 })),
    gpu: Type.Optional(
      Type.Object(
        {
          mode: Type.Union([Type.Literal('exclusive'), Type.Literal('shared')]),
          profile: Type.Optional(Name),
          memoryMib: Type.Optional(Whole),
        },
        { additionalProperties: false },
      ),
    ),
    /** `host` is for those who may have it: whoever passes pools on asks for that. */
    userns: Type.Optional(Type.Union(USERNS_MODES.map((mode) => Type.Literal(mode)))),
  },
  { additionalProperties: false },
);
export type PoolAsked = Static<typeof PoolBody>;

/** @throws SANDBOX_BAD_REQUEST */
export function taskAsked(body: Static<typeof FirstTask>): FnCallTask {
  const { language, code, file, args, env, fetch, compileOnly, warm } = body;
  return {
    language,
    code,
    file,
    args,
    env,
    fetch,
    compileOnly,
    warm,
    limits: body.limits as TaskLimits | undefined,
    files: body.files?.map(({ path, mode, ...content }) => ({
      path,
      mode,
      content: bytesOf(content, path) ?? Buffer.alloc(0),
    })),
    stdin: bytesOf({ content: body.stdin, contentBase64: body.stdinBase64 }, 'stdin'),
  };
}

function bytesOf(given: { content?: string; contentBase64?: string }, what: string): Buffer | undefined {
  const { content, contentBase64 } = given;
  if (content !== undefined && contentBase64 !== undefined) {
    throw fail('SANDBOX_BAD_REQUEST', { problem: `${what}: text or base64, not both` });
  }
  if (contentBase64 === undefined) return content === undefined ? undefined : Buffer.from(content);
  return base64Bytes(contentBase64, what);
}

/** @throws SANDBOX_BAD_REQUEST */
export function base64Bytes(text: string, what: string): Buffer {
  // Without spaces first: one pattern for both would try every way to share them out.
  const digits = text.replace(/\s/g, '');
  if (!/^[A-Za-z0-9+/]*={0,2}$/.test(digits))
    throw fail('SANDBOX_BAD_REQUEST', { problem: `${what}: it is no base64` });
  return Buffer.from(digits, 'base64');
}

/** What the pool's own options are, of what was asked. */
export function poolOptions({ image: _i, store: _s, workspace: _w, toolkits: _t, ...options }: PoolAsked): PoolOptions {
  return options;
}

function stream(name: 'stdout' | 'stderr', bytes: Buffer): Record<string, string> {
  const text = textOf(bytes);
  return text === undefined ? { [`${name}Base64`]: bytes.toString('base64') } : { [name]: text };
}

function fileView({ path, content }: TaskFile): Record<string, string> {
  const text = textOf(content);
  return text === undefined ? { path, contentBase64: content.toString('base64') } : { path, content: text };
}

function stepView(step: StepResult | undefined): object | undefined {
  if (step === undefined) return undefined;
  const { stdout, stderr, ...rest } = step;
  return { ...rest, ...stream('stdout', stdout), ...stream('stderr', stderr) };
}

export function resultView(result: TaskResult): object {
  const { compile, run, files, ...rest } = result;
  return { ...rest, compile: stepView(compile), run: stepView(run), files: files.map(fileView) };
}

export function poolView(pool: PoolView): object {
  const { options, ...rest } = pool;
  return { ...rest, options };
}
