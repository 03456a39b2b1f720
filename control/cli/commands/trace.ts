/** `dsec trace`: records what a start of an image reads, and shows and removes what was recorded. */
import { createHash } from 'node:crypto';
import { basename } from 'node:path';
import { humanSize } from '#base';
import {
  type BlobStore,
  checkTraceName,
  type Image,
  keepTrace,
  keptTraces,
  listTraces,
  openImage,
  readTrace,
  removeTrace,
  type Trace,
  type TraceRow,
  tracedBytes,
  traceJson,
  traceOf,
} from '#imagesvc';
import { reclaimTraces, traceRun } from '#runtime';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { counted } from '../counted.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { shown } from '../output.ts';
import { checkSandboxOptions, type SandboxOptions, sandboxOptionsOf, withSandboxOptions } from '../sandbox-options.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption, SandboxOptions {
  readonly as?: string;
  readonly stopAfter?: string;
  readonly anyStatus?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Runs a command in a sandbox, as `dsec run` does, on lazy mounts and caches of its own, and records which chunks of the image’s data that reads, ' +
    'and which files. The trace is kept in the store with the image: the next lazy `dsec mount` or `dsec run` of the image fetches those chunks in a ' +
    'few large reads, ahead of whoever reads them. An image may have several traces, which are used as one. What workspace and toolkits read is kept ' +
    'with them, under the same name. Standard streams and the exit status pass through; a command that fails leaves no trace, unless --any-status is ' +
    'given. Needs root, FUSE, and crun or runc.',
  examples: [
    { line: 'dsec trace web:1 -- node -e \'require("./app")\'', what: 'a start that ends by itself' },
    { line: 'dsec trace web:1 --stop-after 20s --as serve', what: "the image's own command, ended after 20 seconds" },
    { line: 'dsec trace show web:1', what: 'which files it read, in order' },
    { line: 'dsec convert oci:web:1 --name web:1-laid --profile web:1', what: 'the same image, those files together' },
  ],
  json:
    'an object as the last line of stderr: `exitCode`, `stopped`, `traces` (`image`, and the rest as ls); ls: an array: `image`, `name`, `digest`, `chunks`, `bytes`, `files` (how many), ' +
    '`command`; show: the trace: `format`, `version`, `image`, `command`, `truncated`, `blobs`, `chunks`, `files`; rm: an object: `image`, `removed`',
  configure(command, context) {
    const { output } = context;
    // Options behind `ls` are its own.
    const recording = withStore(command)
      .enablePositionalOptions()
      .usage('[options] <image> [-- command...]')
      .argument('<image>', 'the base: name or digest')
      .argument('[command...]', 'what to run, after --');
    withSandboxOptions(recording)
      .option('--network <mode>', 'none: loopback alone; host: that of this machine', 'none')
      .option(
        '--as <name>',
        "what the trace is called (default: made of the command, so that the same one's is replaced)",
      )
      .option('--stop-after <time>', 'end the command this long after it started: 20s, 1m')
      .option('--any-status', 'keep the trace of a command that fails, too')
      .option('--json', 'print what was recorded as the last line on stderr')
      .action((name: string, args: string[], options: Options) => record(name, args, options, context));

    const ls = withExamples(command.command('ls').description('Lists traces, of one image or of all.'), [
      { line: 'dsec trace ls', what: 'all that the store has' },
      { line: 'dsec trace ls web:1 --json', what: 'those of one image' },
    ]);
    withJson(withStore(ls))
      .argument('[image]', 'name or digest')
      .action(async (name: string | undefined, options: StoreOption & JsonOption) => {
        const rows = await rowsOf(await openChosenStore(options), name);
        if (options.json) return output.json(rows);
        if (rows.length === 0) return output.note(name === undefined ? 'there are no traces' : `${name} has no traces`);
        await output.table(
          [
            { title: 'IMAGE' },
            { title: 'TRACE' },
            { title: 'CHUNKS', right: true },
            { title: 'SIZE', right: true },
            { title: 'FILES', right: true },
            { title: 'COMMAND' },
          ],
          rows.map(({ image, name, chunks, bytes, files, command }) => [
            image,
            name,
            chunks === undefined ? '' : String(chunks),
            bytes === undefined ? '' : humanSize(bytes),
            files === undefined ? '' : String(files),
            (command ?? []).join(' '),
          ]),
        );
      });

    const show = withExamples(
      command
        .command('show')
        .description(
          'Shows a trace: the files that were read, in order, with the time since the first read, and how much of each. Without a name, all traces of ' +
            'the image as one, as they are used. With --json the whole trace, a file that `dsec convert --profile` takes.',
        ),
      [
        { line: 'dsec trace show web:1', what: 'all its traces as one' },
        { line: 'dsec trace show web:1 serve --json > serve.trace', what: 'one of them, into a file' },
      ],
    );
    withJson(withStore(show))
      .argument('<image>', 'name or digest')
      .argument('[trace]', 'its name')
      .action(async (name: string, traceName: string | undefined, options: StoreOption & JsonOption) => {
        const store = await openChosenStore(options);
        const image = await openImage(store, name);
        const trace = traceName === undefined ? await traceOf(store, image) : await readTrace(store, image, traceName);
        if (options.json) return output.json(traceJson(trace));
        await showTrace(trace, context);
      });

    const rm = withExamples(command.command('rm').description('Removes traces of an image, by name or all of them.'), [
      { line: 'dsec trace rm web:1 serve', what: 'one' },
      { line: 'dsec trace rm web:1 --all', what: 'all of them' },
    ]);
    withJson(withStore(rm))
      .argument('<image>', 'name or digest')
      .argument('[traces...]', 'their names')
      .option('--all', 'all of them')
      .action(async (name: string, names: string[], options: StoreOption & JsonOption & { readonly all?: boolean }) => {
        if ((names.length === 0) === (options.all !== true)) {
          throw fail('CLI_USAGE', { problem: 'name traces, or give --all', program: 'dsec trace rm' });
        }
        const store = await openChosenStore(options);
        const image = await openImage(store, name);
        const all = options.all ? (await keptTraces(store, image.manifestDigest)).map((kept) => kept.name) : names;
        const removed = [...new Set(all)];
        for (const one of removed) {
          await removeTrace(store, image, one);
          if (!options.json) await output.line(`${image.name}: ${one}: removed`);
        }
        if (options.json) await output.json({ image: image.name, removed });
      });
  },
};

interface Row extends TraceRow {
  readonly image: string;
}

async function rowsOf(store: BlobStore, name: string | undefined): Promise<Row[]> {
  if (name !== undefined) {
    const image = await openImage(store, name);
    return (await listTraces(store, image.manifestDigest)).map((row) => ({ image: image.name, ...row }));
  }
  const traced = new Set((await keptTraces(store)).map(({ manifest }) => manifest));
  const rows: Row[] = [];
  for (const ref of await store.listRefs()) {
    if (!traced.has(ref.manifest.digest)) continue;
    for (const row of await listTraces(store, ref.manifest.digest)) rows.push({ image: ref.name, ...row });
  }
  return rows;
}

async function record(name: string, args: string[], options: Options, context: Context): Promise<void> {
  const { output } = context;
  checkSandboxOptions(options, 'dsec trace');
  choice('--network', options.network, ['none', 'host']);
  const as = options.as === undefined ? nameOf(args, options) : checkTraceName(options.as);
  const stopAfterMs = options.stopAfter === undefined ? undefined : parseDuration('--stop-after', options.stopAfter);
  const store = await openChosenStore(options);
  const sandbox = await sandboxOptionsOf(store, name, args, options, 'dsec trace', context);
  for (const problem of await reclaimTraces()) output.note(`dsec: ${problem}`);
  // A store that takes nothing says so before the command has run, not after.
  await (await store.stage()).remove();
  const { result, stopped, traces } = await traceRun({ ...sandbox, stopAfterMs });
  const exitCode = stopped ? 0 : result.exitCode;
  context.exitCode = exitCode;
  if (exitCode !== 0 && options.anyStatus !== true) {
    output.note(`dsec: the command ended with ${exitCode}: no trace is kept (--any-status keeps it)`);
    return;
  }
  const kept: Row[] = [];
  for (const { image, trace } of traces) {
    // What a workspace or toolkit read nothing of has nothing to be said about.
    if (image !== sandbox.base && trace.chunks.length === 0) continue;
    kept.push({ image: image.name, ...(await keepTrace(store, image, as, trace)) });
    if (!options.json) output.note(`dsec: ${image.name}: trace ${as}: ${totals(image, trace)}`);
  }
  if (options.json) output.note(JSON.stringify({ exitCode, stopped, traces: kept }));
}

function totals(image: Image, trace: Trace): string {
  const data = image.layers.flatMap(({ devices }) => devices).reduce((sum, { blob }) => sum + blob.size, 0);
  const bytes = tracedBytes(trace);
  const share = data === 0 ? '' : ` (${((bytes / data) * 100).toFixed(1)} % of the data)`;
  const more = trace.truncated === true ? '; the end did not fit' : '';
  return `${counted(trace.chunks.length, 'chunk')}, ${humanSize(bytes)}${share}, of ${counted(trace.files.length, 'file')}${more}`;
}

/** Of the program's name and all that makes it another start: the same command replaces its own trace. */
function nameOf(
  args: readonly string[],
  { workspace, toolkit, entrypoint, user, workdir, env }: SandboxOptions,
): string {
  const what = JSON.stringify([args, entrypoint, workspace, toolkit, user, workdir, env]);
  const program = basename(entrypoint ?? args[0] ?? 'start')
    .toLowerCase()
    .replaceAll(/[^a-z0-9]+/g, '-')
    .replaceAll(/^-+|-+$/g, '')
    .slice(0, 40);
  return `${program === '' ? 'start' : program}-${createHash('sha256').update(what).digest('hex').slice(0, 8)}`.replaceAll(
    '--',
    '-',
  );
}

async function showTrace(trace: Trace, { output }: Context): Promise<void> {
  const { command, chunks, files, truncated } = trace;
  if (command.length > 0) await output.line(`command  ${command.join(' ')}`);
  await output.line(
    `chunks   ${chunks.length}, ${humanSize(tracedBytes(trace))}${truncated ? ', the end did not fit' : ''}`,
  );
  await output.line(`files    ${files.length}`);
  if (files.length === 0) return;
  await output.line();
  await output.table(
    [{ title: 'MS', right: true }, { title: 'READ', right: true }, { title: 'OF', right: true }, { title: 'FILE' }],
    files.map(({ path, ms, sizeBytes, ranges }) => [
      ms.toFixed(1),
      humanSize(ranges.reduce((sum, [, length]) => sum + length, 0)),
      humanSize(sizeBytes),
      shown(path),
    ]),
  );
}
