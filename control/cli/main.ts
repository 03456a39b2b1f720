/**
 * The command line: finds the command, loads it alone, runs it, and turns whatever happens into output and an exit status.
 *
 * Exit status: 0 done, 1 general, 2 usage, 3 bad input, 4 not found, 5 missing privilege or feature, 6 remote;
 * 129, 130, 143 ended by SIGHUP, SIGINT, SIGTERM; 141 the reader of stdout has gone. `run` passes on its command's.
 */
import { constants } from 'node:os';
import { Command, CommanderError } from 'commander';
import { isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { CommandDefinition } from './command.ts';
import { type CommandEntry, commandTable } from './command-table.ts';
import { separated } from './command-words.ts';
import type { Cleanup, Context } from './context.ts';
import { endProcess } from './end-process.ts';
import { exactArguments, refuseInexact, refuseInexactVariables } from './exact-text.ts';
import { withExamples } from './examples.ts';
import { Output } from './output.ts';
import { progressOn } from './progress-line.ts';
import { failureOf } from './report-error.ts';
import { projectVersion } from './version.ts';

/** How long a command may take to stop after the first signal. */
const STOP_MS = 10_000;

/** What started this process. */
export interface Starter {
  /** Whether the sources are still those that run here: a service outlives edits of them. */
  isFresh(): boolean;
}

/** Runs `given`, the arguments (without node and script), and ends the process. */
export async function main(given: readonly string[], starter?: Starter): Promise<never> {
  const argv = exactArguments(given);
  const lines = progressOn(process.stderr);
  const ending = new AbortController();
  const cleanups: Cleanup[] = [];
  let endedBy: number | undefined;
  let signalHandler: ((signal: NodeJS.Signals) => void) | undefined;

  let finishing: Promise<never> | undefined;
  // What is being cleaned up is not interrupted by what fails meanwhile.
  const finish = (status: number): Promise<never> => {
    finishing ??= cleanUpAndExit(status);
    return finishing;
  };
  const cleanUpAndExit = async (status: number): Promise<never> => {
    lines.end();
    for (let cleanup = cleanups.pop(); cleanup !== undefined; cleanup = cleanups.pop()) {
      try {
        await cleanup();
      } catch (error) {
        process.stderr.write(`dsec: while cleaning up: ${messageOf(error)}\n`);
      }
    }
    endProcess(status);
  };
  const end = (status: number) => {
    endedBy ??= status;
    ending.abort();
    setTimeout(() => finish(status), STOP_MS).unref();
  };
  const failed = (error: unknown): Promise<never> => {
    if (finishing !== undefined) return finishing;
    if (endedBy !== undefined) return finish(endedBy);
    lines.end();
    const { text, exit } = failureOf(error, argv);
    process.stderr.write(text);
    return finish(exit);
  };

  const output = new Output(
    process.stdout,
    process.stderr,
    () => end(128 + constants.signals.SIGPIPE),
    () => lines.clear(),
  );
  const context: Context = {
    signal: ending.signal,
    output,
    progress: lines.progress,
    defer: (cleanup) => cleanups.push(cleanup),
    takeSignals: (handler) => {
      signalHandler = handler;
    },
    isFresh: () => starter?.isFresh() ?? true,
    exitCode: 0,
  };
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.on(signal, () => {
      if (signalHandler !== undefined) signalHandler(signal);
      // A second one: whoever sends it does not want to wait for the command any longer, a third one not for cleaning up.
      else if (finishing !== undefined) endProcess(128 + constants.signals[signal]);
      else if (endedBy !== undefined) finish(endedBy);
      else end(128 + constants.signals[signal]);
    });
  }
  process.on('SIGQUIT', () => {
    if (signalHandler !== undefined) signalHandler('SIGQUIT');
    else endProcess(128 + constants.signals.SIGQUIT);
  });
  process.on('uncaughtException', failed);
  process.on('unhandledRejection', failed);

  try {
    await runCommandLine(argv, context);
    return await finish(endedBy === 128 + constants.signals.SIGPIPE ? endedBy : context.exitCode);
  } catch (error) {
    return await failed(error);
  }
}

/** Runs one command in this process; what it throws is the caller's. */
export async function runCommandLine(argv: readonly string[], context: Context): Promise<void> {
  const args = argv[0] === 'help' ? [...argv.slice(1, 2), '--help'] : argv.length === 0 ? ['--help'] : [...argv];
  const texts: string[] = [];
  // Of a group whose command is missing: its help. Of wrong usage: what `usageProblem` takes from the error itself.
  const errorTexts: string[] = [];
  const program = new Command('dsec')
    .description(
      'Converts OCI images to EROFS, mounts them at once, runs them, and packs what changed into new layers.',
    )
    .version(projectVersion(), '-V, --version', 'print the version')
    .helpOption('-h, --help', 'show this help')
    .helpCommand('help [command]', 'show the help of a command')
    // What stands behind a command's name is that command's.
    .enablePositionalOptions()
    .exitOverride()
    .configureOutput({ writeOut: (text) => texts.push(text), writeErr: (text) => errorTexts.push(text) })
    .addHelpText('after', PROGRAM_HELP);
  // The others are for help, and for guessing what was meant.
  const named = commandTable.find(({ name }) => name === args[0]);
  for (const entry of named === undefined ? commandTable : [named]) {
    const command = program.command(entry.name).summary(entry.summary);
    if (entry !== named) continue;
    const definition = await definitionOf(entry);
    describe(command, definition);
    const part = Object.hasOwn(definition.parts ?? {}, args[1] ?? '') ? definition.parts?.[args[1]!] : undefined;
    if (part === undefined) definition.configure(command, context);
    else part(command, context);
    program.hook('preAction', (_program, called) => {
      refuseInexact(called, helpful(program, args), definition.exactPaths);
      // A client's are looked at before it gets here.
      if (context.caller === undefined) refuseInexactVariables(helpful(program, args), []);
    });
  }
  try {
    await program.parseAsync(withSeparator(program, args), { from: 'user' });
  } catch (error) {
    // What parses an option does not know whose it is.
    if (isDsecError(error, 'CLI_USAGE')) throw fail('CLI_USAGE', { ...error.params, program: helpful(program, args) });
    if (!(error instanceof CommanderError)) throw error;
    if (error.code === 'commander.help') texts.push(...errorTexts);
    else if (error.exitCode !== 0) {
      throw fail('CLI_USAGE', { problem: usageProblem(error), program: helpful(program, args) });
    }
  }
  for (const text of texts) await context.output.write(text);
}

const definitions = new Map<CommandEntry, CommandDefinition>();

/** Loaded once: a service runs the same command again and again. */
async function definitionOf(entry: CommandEntry): Promise<CommandDefinition> {
  const known = definitions.get(entry);
  if (known !== undefined) return known;
  const { definition } = await entry.load();
  definitions.set(entry, definition);
  return definition;
}

/** The command whose help explains these arguments: `dsec convert`, `dsec sandbox rm`. */
function helpful(program: Command, args: readonly string[]): string {
  const command = program.commands.find((known) => known.name() === args[0]);
  if (command === undefined) return 'dsec';
  const part = command.commands.find((known) => known.name() === args[1]);
  return ['dsec', command.name(), ...(part === undefined ? [] : [part.name()])].join(' ');
}

/** With a `--` before the words of a command that is to be run. */
function withSeparator(program: Command, args: readonly string[]): readonly string[] {
  const command = program.commands.find((known) => known.name() === args[0]);
  const part = command?.commands.find((known) => known.name() === args[1]);
  const called = part ?? command;
  if (called === undefined) return args;
  const names = part === undefined ? 1 : 2;
  return [...args.slice(0, names), ...separated(called, args.slice(names))];
}

const PROGRAM_HELP = `
Examples:
  dsec convert docker://docker.io/library/alpine:3.20 --name alpine:3.20
  dsec run alpine:3.20 -- /bin/sh -c 'echo hello'

Stores: --store URL, else $DSEC_STORE, else /var/lib/dsec/store for root and ~/.local/share/dsec/store for others.
\`dsec COMMAND --help\` explains a command and shows examples.`;

function describe(command: Command, definition: CommandDefinition): void {
  withExamples(command.description(definition.description), definition.examples);
}

/** commander's text on one line, without its own prefix. */
function usageProblem(error: CommanderError): string {
  return error.message
    .replace(/^error: /, '')
    .replace(/\s*\n\s*/g, ' ')
    .trim();
}
