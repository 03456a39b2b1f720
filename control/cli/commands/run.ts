/**
 * `dsec run`: a command in a sandbox of its own, on top of images.
 *
 * Its own failures end with 125, 126 or 127, as container engines have it, so that a script can tell them from those of the
 * command. A wrong command line stays 2.
 */
import { isDsecError } from '#base';
import { type Image, openImage } from '#imagesvc';
import { runContainer } from '#runtime';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { refuseInexactVariables } from '../exact-text.ts';
import { repeated } from '../repeated.ts';
import { reportOf, reportText } from '../report-error.ts';
import { type JsonOption, openChosenStore, type StoreOption, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly name?: string;
  readonly keep?: boolean;
  readonly replace?: boolean;
  readonly lazy?: boolean;
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly entrypoint?: string;
  readonly tty?: boolean;
  readonly network: string;
}

export const definition: CommandDefinition = {
  description:
    "Runs a command in a sandbox: the base image's layers at the bottom, then the workspace, then the toolkits, the last one topmost, and " +
    'above them a writable folder of its own. Without a command it runs what the image says. Standard streams and the exit status pass through. ' +
    'Signals too: one that the command has no handler for ends it, with 128 + the number of the signal. The sandbox and its changes are removed at the ' +
    'end, unless --keep is given; then `dsec pack-diff` makes an image of the changes. Needs root and crun or runc. ' +
    'Exit status of its own: 125 when dsec failed before the command ran (no such image, name taken, no root), 126 when the command cannot be ' +
    'executed, 127 when it is not found, 2 for wrong usage.',
  examples: [
    { line: "dsec run alpine:3.20 -- sh -c 'echo hello'", what: 'a command' },
    {
      line: 'dsec run base:1 --workspace repo:1 --toolkit node:20 --name work --keep -- npm test',
      what: 'composed of three images, its changes kept',
    },
    { line: 'dsec run -t alpine:3.20 -- sh', what: 'a shell on this terminal' },
  ],
  json: 'an object as the last line of stderr: `exitCode`, `signal`, `name`, `upper`, `problem`, `layers` (how many), `timings`',
  configure(command, context) {
    withStore(command)
      .usage('[options] <image> [-- command...]')
      .argument('<image>', 'the base: name or digest')
      .argument('[command...]', 'what to run, after --')
      .option('--workspace <image>', 'an image of kind workspace, above the base')
      .option('--toolkit <image>', 'an image of kind toolkit, above that; may be given several times', repeated)
      .option('--name <name>', 'what the sandbox is called; a random name by default')
      .option('--keep', 'keep its changes when the command has ended')
      .option('--replace', 'first remove a kept sandbox of the same name')
      .option('--lazy', 'fetch data when it is read, also from a store that is a folder')
      .option(
        '-e, --env <variable>',
        'NAME=VALUE, or NAME to pass on what it is here; may be given several times',
        repeated,
      )
      .option('-u, --user <user>', 'name, uid, name:group or uid:gid')
      .option('-w, --workdir <folder>', 'where the command starts')
      .option('--entrypoint <program>', "in place of the image's")
      .option('-t, --tty', 'give it this terminal')
      .option('--network <mode>', 'none: loopback alone; host: that of this machine', 'none')
      .option('--json', 'print what came of it as the last line on stderr')
      .action(async (name: string, args: string[], options: Options) => {
        try {
          await run(name, args, options, context);
        } catch (error) {
          // What ended it early is a signal then, whose status main.ts knows.
          if (context.signal.aborted) throw error;
          const exit = exitOf(error);
          if (exit === USAGE) throw error;
          const as = { json: options.json ?? false, debug: process.env.DSEC_DEBUG === '1' };
          context.output.note(reportText(reportOf(error), as).trimEnd());
          context.exitCode = exit;
        }
      });
  },
};

const USAGE = 2;
const NOT_STARTED = 125;

/** Wrong whatever the images hold. */
const USAGE_CODES: ReadonlySet<string> = new Set([
  'CLI_NOT_UTF8',
  'CLI_USAGE',
  'RUNTIME_COMMAND_MISSING',
  'RUNTIME_ENV',
  'RUNTIME_NO_TERMINAL',
  'RUNTIME_SANDBOX_NAME',
  'STORE_NAME',
  'STORE_SCHEME',
  'STORE_URL',
]);

function exitOf(error: unknown): number {
  if (!isDsecError(error)) return NOT_STARTED;
  if (USAGE_CODES.has(error.code)) return USAGE;
  return error.exit === 126 || error.exit === 127 ? error.exit : NOT_STARTED;
}

async function run(name: string, args: string[], options: Options, context: Context): Promise<void> {
  const { network } = options;
  if (network !== 'none' && network !== 'host') {
    throw fail('CLI_USAGE', { problem: `--network ${network}: it is none or host`, program: 'dsec run' });
  }
  // Those that are asked for by name; others never reach the sandbox.
  refuseInexactVariables(
    'dsec run',
    (options.env ?? []).filter((entry) => !entry.includes('=')),
  );
  const store = await openChosenStore(options);
  const workspace = options.workspace === undefined ? undefined : await openImage(store, options.workspace);
  noteKind(workspace, context);
  const result = await runContainer({
    store,
    base: await openImage(store, name),
    workspace,
    toolkits: await Promise.all((options.toolkit ?? []).map((toolkit) => openImage(store, toolkit))),
    name: options.name,
    keep: options.keep ?? false,
    replace: options.replace ?? false,
    lazy: options.lazy,
    command: args,
    entrypoint: options.entrypoint === undefined ? undefined : [options.entrypoint],
    env: options.env,
    user: options.user,
    workdir: options.workdir,
    terminal: options.tty ?? false,
    network,
    signal: context.signal,
    takeSignals: context.takeSignals,
  });
  if (!options.json && result.problem !== undefined) context.output.note(`dsec: ${result.problem}`);
  if (options.json) context.output.note(JSON.stringify(result));
  else if (result.upper !== undefined) {
    context.output.note(
      `dsec: kept as ${result.name}; dsec pack-diff ${result.name} --name NAME:TAG makes an image of its changes`,
    );
  }
  context.exitCode = result.exitCode;
}

/** An image of another kind works too, but its files may lie elsewhere than meant, and all of its layers go above the base's. */
function noteKind(workspace: Image | undefined, context: Context): void {
  if (workspace === undefined || (workspace.kind !== 'base' && workspace.kind !== 'toolkit')) return;
  context.output.note(
    `dsec: --workspace ${workspace.name}: an image of kind ${workspace.kind}; a folder becomes a workspace with: ` +
      'dsec convert dir:FOLDER --prefix /workspace --name NAME:TAG --kind workspace',
  );
}
