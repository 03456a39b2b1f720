/**
 * `dsec run`: a command in a sandbox of its own, on top of images.
 *
 * Its own failures end with 125, 126 or 127, as container engines have it, so that a script can tell them from those of the
 * command. A wrong command line stays 2.
 */
import { isDsecError } from '#base';
import { runContainer } from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { runsWordsAfter } from '../command-words.ts';
import { type Context, NotServed } from '../context.ts';
import { type LimitOptions, limitsOf, withLimitOptions } from '../limit-options.ts';
import { type NetworkOptions, networkOf, withNetworkOptions } from '../network-options.ts';
import { reportOf, reportText } from '../report-error.ts';
import { checkSandboxOptions, type SandboxOptions, sandboxOptionsOf, withSandboxOptions } from '../sandbox-options.ts';
import { type JsonOption, openChosenStore, type StoreOption, withStore } from '../store-option.ts';
import { runWithPolicy } from './run-with-policy.ts';

interface Options extends StoreOption, JsonOption, SandboxOptions, LimitOptions, NetworkOptions {
  readonly name?: string;
  readonly keep?: boolean;
  readonly replace?: boolean;
  readonly lazy?: boolean;
  readonly prefetch: boolean;
}

export const definition: CommandDefinition = {
  description:
    "Runs a command in a sandbox: the base image's layers at the bottom, then the workspace, then the toolkits, the last one topmost, and " +
    'above them a writable folder of its own. Without a command it runs what the image says. Standard streams and the exit status pass through. ' +
    'Signals too: one that the command has no handler for ends it, with 128 + the number of the signal. The sandbox and its changes are removed at the ' +
    'end, unless --keep is given; then `dsec pack-diff` makes an image of the changes. Needs root; dsec-agent starts it where that is built, else crun or runc. Where `dsec serve runtime` runs, that does it; ' +
    'a network with rules (--allow, --deny, --policy) needs it. ' +
    'Exit status of its own: 125 when dsec failed before the command ran (no such image, name taken, no root), 126 when the command cannot be ' +
    'executed, 127 when it is not found, 2 for wrong usage.',
  examples: [
    { line: "dsec run alpine:3.20 -- sh -c 'echo hello'", what: 'a command' },
    {
      line: 'dsec run base:1 --workspace repo:1 --toolkit node:20 --name work --keep -- npm test',
      what: 'composed of three images, its changes kept',
    },
    { line: 'dsec run -t alpine:3.20 -- sh', what: 'a shell on this terminal' },
    { line: 'dsec run base:1 --allow @pypi -- pip install requests', what: 'that reaches this and nothing else' },
  ],
  json: 'an object as the last line of stderr: `exitCode`, `signal`, `outOfMemory`, `name`, `upper`, `problem`, `layers` (how many), `timings`',
  configure(command, context) {
    const composed = withStore(runsWordsAfter(1, command))
      .usage('[options] <image> [--] [command...]')
      .argument('<image>', 'the base: name or digest')
      .argument('[command...]', 'what to run; options behind its first word are its own');
    withNetworkOptions(withLimitOptions(withSandboxOptions(composed)))
      .option('--name <name>', 'what the sandbox is called; a random name by default')
      .option('--keep', 'keep its changes when the command has ended')
      .option('--replace', 'first remove a kept sandbox of the same name')
      .option('--lazy', 'fetch data when it is read, also from a store that is a folder')
      .option('--no-prefetch', 'do not fetch ahead what the traces of the images say that a start reads')
      .option('--json', 'print what came of it as the last line on stderr')
      .action(async (name: string, args: string[], options: Options) => {
        try {
          await run(name, args, options, context);
        } catch (error) {
          // What ended it early is a signal then, whose status main.ts knows.
          if (context.signal.aborted || error instanceof NotServed) throw error;
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
  'CLI_NETWORK_POLICY',
  'CLI_NOT_UTF8',
  'CLI_USAGE',
  'RUNTIME_COMMAND_MISSING',
  'CLI_SIZE',
  'RUNTIME_ENV',
  'RUNTIME_LIMIT',
  'RUNTIME_NETWORK_POLICY',
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
  checkSandboxOptions(options, 'dsec run');
  const limits = limitsOf(options, 'dsec run');
  const { mode = 'none', policy } = networkOf(options, 'dsec run') ?? {};
  if (mode === 'policy') return runWithPolicy(name, args, options, limits, policy, context);
  context.caller?.begin(options);
  const store = await openChosenStore(options);
  const result = await runContainer({
    ...(await sandboxOptionsOf(store, name, args, options, 'dsec run', context)),
    ...limits,
    name: options.name,
    keep: options.keep ?? false,
    replace: options.replace ?? false,
    lazy: options.lazy,
    prefetch: options.prefetch,
  });
  if (!options.json && result.problem !== undefined) context.output.note(`dsec: ${result.problem}`);
  if (!options.json && result.outOfMemory) {
    context.output.note('dsec: memory ran out at --memory, and the kernel ended a process of the sandbox');
  }
  if (options.json) context.output.note(JSON.stringify(result));
  else if (result.upper !== undefined) {
    context.output.note(
      `dsec: kept as ${result.name}; dsec pack-diff ${result.name} --name NAME:TAG makes an image of its changes`,
    );
  }
  context.exitCode = result.exitCode;
}
