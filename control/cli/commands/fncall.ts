/** `dsec fncall`: short tasks in containers that are there already. */
import { readFileSync, writeFileSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { constants } from 'node:os';
import { basename, dirname, extname, join } from 'node:path';
import { messageOf } from '#base';
import { LANGUAGES } from '#runtime';
import { fail } from '../../errors.ts';
import type { PoolAsked } from '../../fncall/task-schemas.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { type PoolFlags, poolAsked, withPoolOptions } from '../fncall-options.ts';
import { repeated } from '../repeated.ts';
import { sandboxClient, withApi } from '../sandbox-client-of.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface StepView {
  readonly status: string;
  readonly exitCode?: number;
  readonly signal?: string;
  readonly stdout?: string;
  readonly stdoutBase64?: string;
  readonly stderr?: string;
  readonly stderrBase64?: string;
  readonly stdoutBytes: number;
  readonly stderrBytes: number;
}
interface RunView {
  readonly status: string;
  readonly problem?: string;
  readonly compile?: StepView;
  readonly run?: StepView;
  readonly files: readonly { readonly path: string; readonly content?: string; readonly contentBase64?: string }[];
}
interface PoolRow {
  readonly edge?: string;
  readonly name: string;
  readonly image: string;
  readonly ready: number;
  readonly busy: number;
  readonly starting: number;
  readonly waiting: number;
  readonly floor: number;
  readonly ceiling: number;
  readonly tasks: number;
  readonly refused: number;
  readonly replaced: number;
  readonly problem?: string;
}

interface RunFlags extends JsonOption {
  readonly pool?: string;
  readonly image?: string;
  readonly language?: string;
  readonly code?: string;
  readonly stdin?: boolean;
  readonly file?: string[];
  readonly env?: string[];
  readonly fetch?: string[];
  readonly to?: string;
  readonly timeout?: string;
  readonly cpuTime?: string;
  readonly memory?: string;
  readonly pids?: string;
  readonly disk?: string;
}

export const definition: CommandDefinition = {
  description:
    'Runs short tasks that leave nothing behind: code goes in, what it wrote and used comes out (docs/fncall.md). Each runs in namespaces of its own in a container ' +
    'that is there already. The runtime service of this machine runs them (`dsec serve runtime`), or a node of the cluster whose API is in force.',
  examples: [
    { line: 'sudo dsec fncall run main.py --image python', what: 'a file, by its ending a Python program' },
    {
      line: 'sudo dsec fncall pool default --image python --floor 2 --python-import numpy',
      what: 'two containers that wait, with numpy imported',
    },
    { line: "sudo dsec fncall run --language bash --code 'echo hello'", what: 'in the pool `default`' },
  ],
  json: 'run: `status`, `problem`, `pool`, `queueMs`, `compile`, `run`, `files`; pools: an array, pool: an object: `name`, `image`, `ready`, `busy`, `starting`, `waiting`, `floor`, `ceiling`, `tasks`, `refused`, `replaced`, `problem`, `options`; rm: `removed`; languages: an object of `file`, `compile`, `run` by name',
  configure(command, context) {
    addRun(command.command('run'), context);
    addPools(command.command('pools'), context);
    addPool(command.command('pool'), context);
    addRemove(command.command('rm'), context);
    addLanguages(command.command('languages'), context);
    withApi(command, context);
  },
};

type Sub = Parameters<CommandDefinition['configure']>[0];

function addRun(command: Sub, context: Context): void {
  const { output } = context;
  command.description(
    'Compiles (where the language is) and runs one program, and shows what it wrote. Exit status: the program’s; 1 where it could not be compiled, 124 after its time, ' +
      '137 where it took too much memory, 128 + n after signal n, 125 where it could not be run.',
  );
  withExamples(withJson(command), [
    {
      line: 'dsec fncall run main.cpp --memory 256MiB --timeout 2s --stdin < input.txt',
      what: 'with limits and input',
    },
    { line: "dsec fncall run plot.py --fetch '*.png' --to out/", what: 'files that it made' },
  ])
    .argument('[file]', 'of the code; else --code')
    .option('--pool <name>', 'which pool runs it (default: the one called default)')
    .option('--image <name>', 'in a pool of this image, made for it')
    .option('--language <name>', 'by the ending of the file, where that says it')
    .option('--code <text>', 'the code itself')
    .option('--stdin', 'pass on standard input')
    .option('--file <path>', 'another file, put beside the code by its name; may be given several times', repeated)
    .option('--env <name=value>', 'may be given several times', repeated)
    .option('--fetch <pattern>', 'files to bring back, such as *.txt or out/**; may be given several times', repeated)
    .option('--to <folder>', 'where they go (default: here)')
    .option('--timeout <time>', 'of the run (default: 10s)')
    .option('--cpu-time <time>', 'of all its processes together')
    .option('--memory <size>', 'default: 512MiB')
    .option('--pids <n>', 'processes and threads (default: 128)')
    .option('--disk <size>', 'of all that it writes (default: 256MiB)')
    .action(async (file: string | undefined, options: RunFlags) => {
      const body = await runBody(file, options);
      const result = await sandboxClient(context).ask<RunView>('POST', '/v1/fncall/run', body);
      for (const one of result.files) await writeFetched(options.to ?? '.', one);
      if (options.json) await output.json(result);
      else {
        const shown = result.run ?? result.compile;
        await output.write(bytes(shown?.stdout, shown?.stdoutBase64));
        context.output.stderr.write(bytes(shown?.stderr, shown?.stderrBase64));
        if (result.problem !== undefined) output.note(result.problem);
        const lacking = lackingProgram(result);
        if (lacking !== undefined) output.note(lacking);
        if (!['finished', 'runtime_error'].includes(result.status)) output.note(result.status.replaceAll('_', ' '));
      }
      context.exitCode = exitCodeOf(result);
    });
}

function bytes(text: string | undefined, base64: string | undefined): Buffer {
  return base64 === undefined ? Buffer.from(text ?? '') : Buffer.from(base64, 'base64');
}

/** What to do about a language whose program the image does not have. */
function lackingProgram({ status, problem }: RunView): string | undefined {
  const program = /^(\S+) could not be run: ENOENT$/.exec(problem ?? '')?.[1];
  if (status !== 'sandbox_error' || program === undefined) return undefined;
  const other = program === 'bash' ? '--language sh takes its sh' : 'name one that has it with --image or --pool';
  return `the image of the pool has no ${program}; ${other}`;
}

function exitCodeOf({ status, run }: RunView): number {
  const codes: Record<string, number> = {
    compile_error: 1,
    time_limit: 124,
    memory_limit: 137,
    output_limit: 153,
    sandbox_error: 125,
  };
  const signal = constants.signals[run?.signal as NodeJS.Signals];
  return codes[status] ?? (signal === undefined ? (run?.exitCode ?? 1) : 128 + signal);
}

async function runBody(file: string | undefined, options: RunFlags): Promise<object> {
  const usage = (problem: string) => fail('CLI_USAGE', { problem, program: 'dsec fncall run' });
  if ((file === undefined) === (options.code === undefined)) throw usage('a file or --code, one of them');
  if (options.pool !== undefined && options.image !== undefined) throw usage('--pool or --image, not both');
  const language = options.language ?? languageOf(file);
  if (language === undefined) throw usage('--language is missing: the ending of the file does not say it');
  const time = (flag: string, text: string | undefined) => (text === undefined ? undefined : parseDuration(flag, text));
  const size = (flag: string, text: string | undefined) => (text === undefined ? undefined : parseSize(flag, text));
  const pids = options.pids === undefined ? undefined : Number(options.pids);
  if (pids !== undefined && !Number.isSafeInteger(pids)) throw usage(`--pids ${options.pids}: it is no number`);
  const env = (options.env ?? []).map((entry) => {
    const at = entry.indexOf('=');
    if (at < 1) throw usage(`--env ${entry}: NAME=VALUE`);
    return [entry.slice(0, at), entry.slice(at + 1)] as const;
  });
  return {
    pool: options.pool,
    image: options.image,
    language,
    code: options.code ?? readCode(file!),
    files: (options.file ?? []).map((path) => ({
      path: basename(path),
      contentBase64: readBytes(path).toString('base64'),
    })),
    stdinBase64: options.stdin ? (await allOf(process.stdin)).toString('base64') : undefined,
    env: Object.fromEntries(env),
    fetch: options.fetch,
    limits: {
      wallMs: time('--timeout', options.timeout),
      cpuMs: time('--cpu-time', options.cpuTime),
      memoryBytes: size('--memory', options.memory),
      pids,
      diskBytes: size('--disk', options.disk),
    },
  };
}

function languageOf(file: string | undefined): string | undefined {
  if (file === undefined) return undefined;
  return Object.entries(LANGUAGES).find(([, { file: own }]) => extname(own) === extname(file))?.[0];
}

function readBytes(path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw fail('CLI_USAGE', { problem: `${path}: ${messageOf(error)}`, program: 'dsec fncall run' });
  }
}

const readCode = (path: string) => readBytes(path).toString();

async function allOf(stream: AsyncIterable<unknown>): Promise<Buffer> {
  const parts: Buffer[] = [];
  for await (const part of stream) parts.push(Buffer.from(part as Buffer));
  return Buffer.concat(parts);
}

/** Below the folder, whatever a task calls its files. */
async function writeFetched(folder: string, { path, content, contentBase64 }: RunView['files'][number]): Promise<void> {
  const target = join(folder, join('/', path));
  await mkdir(dirname(target), { recursive: true });
  writeFileSync(target, bytes(content, contentBase64));
}

function addPools(command: Sub, context: Context): void {
  const { output } = context;
  command.description('Lists the pools, those too that calls have made.');
  withExamples(withJson(command), [
    { line: 'dsec fncall pools', what: 'how many containers are ready, and how many calls wait' },
  ]).action(async ({ json }: JsonOption) => {
    const pools = await sandboxClient(context).ask<PoolRow[]>('GET', '/v1/fncall/pools');
    if (json) return output.json(pools);
    if (pools.length === 0) return output.note('no pools yet');
    const right = (title: string) => ({ title, right: true });
    await output.table(
      [
        { title: 'POOL' },
        { title: 'IMAGE' },
        right('READY'),
        right('BUSY'),
        right('STARTING'),
        right('WAITING'),
        right('CEILING'),
        right('TASKS'),
        right('REFUSED'),
        right('REPLACED'),
      ],
      pools.map((one) => [
        one.edge === undefined ? one.name : `${one.edge}/${one.name}`,
        one.image,
        ...[one.ready, one.busy, one.starting, one.waiting, one.ceiling, one.tasks, one.refused, one.replaced].map(
          String,
        ),
      ]),
    );
    for (const { name, problem } of pools) if (problem !== undefined) output.note(`${name}: ${problem}`);
  });
}

function addPool(command: Sub, context: Context): void {
  const { output } = context;
  command.description(
    'Makes a pool, or changes one of that name: what runs in it ends in it. It is kept over restarts of the service. In a cluster on every node; needs node.drain there.',
  );
  withExamples(withPoolOptions(withJson(command)), [
    {
      line: 'dsec fncall pool judge --image judge --floor 4 --ceiling 64',
      what: 'four containers that wait, up to 64 when many call',
    },
  ])
    .argument('<name>', 'small letters, digits, . _ and -')
    .requiredOption('--image <name>', 'what tasks run in')
    .action(async (name: string, { json, ...options }: PoolFlags & JsonOption) => {
      const asked: PoolAsked = poolAsked(options, 'dsec fncall pool');
      const made = await sandboxClient(context).ask<PoolRow | PoolRow[]>(
        'PUT',
        `/v1/fncall/pools/${encodeURIComponent(name)}`,
        asked,
      );
      if (json) return output.json(made);
      await output.line(name);
    });
}

function addRemove(command: Sub, context: Context): void {
  const { output } = context;
  command.description('Removes pools. Tasks that run in them are ended.');
  withExamples(withJson(command), [{ line: 'dsec fncall rm judge', what: 'with its containers' }])
    .argument('<names...>', 'as `dsec fncall pools` shows them')
    .action(async (names: string[], { json }: JsonOption) => {
      const client = sandboxClient(context);
      for (const name of names) {
        await client.ask('DELETE', `/v1/fncall/pools/${encodeURIComponent(name)}`);
        if (!json) await output.line(name);
      }
      if (json) await output.json({ removed: names });
    });
}

function addLanguages(command: Sub, context: Context): void {
  const { output } = context;
  command.description('Lists the languages of the table: whether one can be used is up to the programs of the image.');
  withExamples(withJson(command), [{ line: 'dsec fncall languages', what: 'how each is compiled and run' }]).action(
    async ({ json }: JsonOption) => {
      if (json) return output.json(LANGUAGES);
      await output.table(
        ['LANGUAGE', 'FILE', 'COMPILE', 'RUN'].map((title) => ({ title })),
        Object.entries(LANGUAGES).map(([name, { file, compile, run }]) => [
          name,
          file,
          (compile ?? []).join(' '),
          run.join(' '),
        ]),
      );
    },
  );
}
