/** `dsec sandbox create`, `exec`, `shell`, `cp` and `logs`: sandboxes that stay, kept by the runtime service. */
import type { Readable } from 'node:stream';
import type { Command } from 'commander';
import { isDsecError } from '#base';
import type { ExecResult, OutputPart } from '#runtime';
import { fail } from '../../errors.ts';
import type { CommandClient } from '../../runtime-service/own-commands.ts';
import { throwRemote } from '../../runtime-service/sandbox-client.ts';
import { runsWordsAfter } from '../command-words.ts';
import { type Context, NotServed } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { variables } from '../variables.ts';
import { addCopy } from './sandbox-copy.ts';
import { addCreate, addSandboxRun } from './sandbox-create.ts';
import { addPackDiff } from './sandbox-pack.ts';
import { addPauseCommands } from './sandbox-pause.ts';

export interface ExecCommand extends JsonOption {
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly tty?: boolean;
  readonly stdin: boolean;
  readonly timeout?: string;
  readonly detach?: boolean;
  readonly requestId?: string;
}

/** For whoever waits for each of them. */
export const residentParts = { create: addCreate, exec: addExec } as const;

export function addResidentCommands(command: Command, context: Context): void {
  addCreate(command, context);
  addSandboxRun(command, context);
  addExec(command, context);
  addShell(command, context);
  addCopy(command, context);
  addLogs(command, context);
  addPauseCommands(command, context);
  addPackDiff(command, context);
}

function addExec(command: Command, context: Context): void {
  const exec = withExamples(
    command
      .command('exec')
      .description(
        'Runs a command in a sandbox made by `dsec sandbox create`. Standard streams and the exit status pass through, signals too. When this command is killed ' +
          'the one inside goes on: `dsec sandbox logs` shows it. Exit status of its own: 125 when it failed before the command ran, or the sandbox ended under it, 126 when the command cannot be ' +
          'executed, 127 when it is not found, 124 when --timeout ended it, 2 for wrong usage.',
      )
      .usage('[options] <name> [--] <command...>'),
    [
      { line: 'dsec sandbox exec work -- npm test', what: 'a command' },
      { line: "dsec sandbox exec work --timeout 30s -- sh -c 'make | tee log'", what: 'ended with all its children' },
      { line: 'dsec sandbox exec work --detach -- ./server', what: 'in the background; prints its number' },
      { line: 'dsec sandbox exec work -t -- vi notes', what: 'on this terminal' },
    ],
  );
  withCommandOptions(runsWordsAfter(1, exec))
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument('<command...>', 'what to run; options behind its first word are its own')
    .option('-t, --tty', 'on this terminal')
    .option('-i, --interactive', 'pass standard input on; that is done without it too')
    .option('-n, --no-stdin', 'it finds its input at its end')
    .option('--timeout <time>', 'then it is ended, with all that it has started')
    .option('-d, --detach', 'print the number of the command, and do not wait for it')
    .option('--request-id <id>', 'asked for again with the same id, the same command is the answer')
    .option('--json', 'print how it ended as the last line on stderr; with --detach, on stdout')
    .action(async (name: string, args: string[], options: ExecCommand) => {
      await execIn(name, args, options, context);
    });
}

function addShell(command: Command, context: Context): void {
  const shell = withExamples(
    command
      .command('shell')
      .description(
        'A shell on this terminal, in a sandbox made by `dsec sandbox create`: bash where it has one, else sh.',
      ),
    [{ line: 'dsec sandbox shell work', what: 'until it is left' }],
  );
  withCommandOptions(shell)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .action(async (name: string, options: ExecCommand) => {
      const script = 'command -v bash >/dev/null 2>&1 && exec bash; exec sh -i';
      if (context.caller === undefined && !process.stdin.isTTY) {
        const problem = `standard input is no terminal; without one: dsec sandbox exec ${name} -- sh -c 'COMMANDS'`;
        throw fail('CLI_USAGE', { problem, program: 'dsec sandbox shell' });
      }
      await execIn(name, ['sh', '-c', script], { ...options, tty: true, stdin: true }, context);
    });
}

function withCommandOptions(command: Command): Command {
  return command
    .option(
      '-e, --env <variable>',
      'NAME=VALUE, or NAME to pass on what it is here; may be given several times',
      repeated,
    )
    .option('-u, --user <user>', 'name, uid, name:group or uid:gid')
    .option('-w, --workdir <folder>', 'where it starts');
}

function addLogs(command: Command, context: Context): void {
  const logs = withExamples(
    command
      .command('logs')
      .description(
        'Shows the commands of a running sandbox, or the output of one of them, from its beginning or from an offset.',
      ),
    [
      { line: 'dsec sandbox logs work', what: 'its commands, and how they ended' },
      { line: 'dsec sandbox logs work 3 --follow', what: 'what command 3 wrote, and writes until it ends' },
    ],
  );
  withJson(logs)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument('[command]', 'its number')
    .option('-f, --follow', 'until the command has ended')
    .option('--stdout-from <offset>', 'bytes of standard output to leave out', '0')
    .option('--stderr-from <offset>', 'the same of standard error', '0')
    .action(async (name: string, id: string | undefined, options: LogsCommand) => {
      const { output, signal } = context;
      const client = sandboxClient(context);
      if (id === undefined) {
        const commands = await client.commands(name);
        if (options.json) return output.json(commands);
        return output.table(
          [{ title: 'COMMAND', right: true }, { title: 'ENDED' }, { title: 'STARTED' }, { title: 'ARGUMENTS' }],
          commands.map((one) => [
            String(one.id),
            one.result === undefined ? 'runs' : endText(one.result),
            new Date(one.startedMs ?? 0).toISOString(),
            (one.args ?? []).join(' '),
          ]),
        );
      }
      const program = 'dsec sandbox logs';
      const from = {
        stdout: numberOf('--stdout-from', options.stdoutFrom, program),
        stderr: numberOf('--stderr-from', options.stderrFrom, program),
        follow: options.follow ?? false,
      };
      for await (const news of client.output(name, numberOf('command', id, program), from, signal)) {
        if ('part' in news) await show(news.part, context);
        if ('error' in news) throwRemote(news.error);
      }
    });
}

interface LogsCommand extends JsonOption {
  readonly follow?: boolean;
  readonly stdoutFrom: string;
  readonly stderrFrom: string;
}

/** Of whoever made the sandbox for this command. */
export interface ExecMore {
  /** Whose sandbox it is, when that does not hang on the API in force. */
  readonly client?: CommandClient;
  /** The sandbox is in use as long as somebody follows the command, not as long as it runs. */
  readonly followed?: boolean;
}

/** Runs a command in a sandbox, with this process's streams and signals; sets the exit status. @returns undefined: it never ran, or is not waited for */
export async function execIn(
  name: string,
  args: readonly string[],
  options: ExecCommand & ExecMore,
  context: Context,
): Promise<ExecResult | undefined> {
  const { output } = context;
  const terminal = options.tty === true;
  // A terminal is for a process of its own.
  if (terminal && context.caller !== undefined) throw new NotServed();
  const remote = options.client ?? sandboxClient(context);
  const client: CommandClient = context.caller?.commands ?? remote;
  context.caller?.begin({ runtime: OWN });
  if (terminal && !process.stdin.isTTY)
    throw fail('CLI_USAGE', { problem: 'with -t, standard input has to be a terminal', program: 'dsec sandbox exec' });
  const env = variables('dsec sandbox exec', options.env, context);
  const timeoutMs = options.timeout === undefined ? undefined : parseDuration('--timeout', options.timeout);
  // Of /dev/null there is nothing to pass on.
  const stdin = options.stdin && options.detach !== true && context.caller?.stdinIsNull !== true;
  const size = terminal ? sizeOf(process.stdout) : undefined;
  const { user, workdir: cwd, requestId } = options;
  try {
    const background = options.detach || options.followed ? true : undefined;
    const started = await client.exec(name, {
      args,
      env,
      user,
      cwd,
      stdin,
      terminal: size,
      timeoutMs,
      background,
      requestId,
    });
    if (options.detach) {
      if (options.json) await output.json(started);
      else await output.line(String(started.id));
      return undefined;
    }
    const result = await attach(client, name, started.id, { stdin, terminal }, context);
    if (options.json) output.note(JSON.stringify({ id: started.id, ...result }));
    else if (result.timedOut) output.note(`dsec: ended after --timeout ${options.timeout}`);
    else if (result.outOfMemory) output.note('dsec: the sandbox ran out of memory, and the kernel ended this command');
    context.exitCode = result.timedOut ? TIMED_OUT : result.exitCode;
    return result;
  } catch (error) {
    if (context.signal.aborted || !isDsecError(error) || USAGE_CODES.has(error.code)) throw error;
    const exit = error.exit === 126 || error.exit === 127 ? error.exit : NOT_RUN;
    output.note(`dsec: ${error.message}${error.hint === undefined ? '' : `\n      ${error.hint}`}`);
    context.exitCode = exit;
    return undefined;
  }
}

const OWN = 'dsec';
/** About our own terminal and process: no business of the command's. */
const OWN_SIGNALS: ReadonlySet<NodeJS.Signals> = new Set<NodeJS.Signals>(['SIGWINCH', 'SIGCONT']);
/** As timeout(1) has it. */
const TIMED_OUT = 124;
const NOT_RUN = 125;
const USAGE_CODES: ReadonlySet<string> = new Set([
  'CLI_USAGE',
  'CLI_NOT_UTF8',
  'SANDBOX_BAD_REQUEST',
  'RUNTIME_ENV',
  'RUNTIME_USER',
]);

async function attach(
  client: CommandClient,
  name: string,
  id: number,
  { stdin, terminal }: { readonly stdin: boolean; readonly terminal: boolean },
  context: Context,
): Promise<ExecResult> {
  const ignore = () => {};
  context.takeSignals((signal) => {
    if (!OWN_SIGNALS.has(signal)) client.signal(name, id, signal).catch(ignore);
  });
  const input: Readable & { setRawMode?(mode: boolean): unknown } = context.caller?.stdin ?? process.stdin;
  const resized = () => void client.resize(name, id, sizeOf(process.stdout)).catch(ignore);
  if (terminal) {
    input.setRawMode?.(true);
    process.on('SIGWINCH', resized);
  }
  if (stdin) client.input(name, id, input).catch(ignore);
  try {
    for await (const news of client.output(name, id, {}, context.signal)) {
      if ('part' in news) await show(news.part, context);
      else if ('result' in news) return news.result;
      else throwRemote(news.error);
    }
    throw fail('SANDBOX_PROTOCOL', { problem: 'the output ended without saying how the command did' });
  } finally {
    if (terminal) {
      process.off('SIGWINCH', resized);
      input.setRawMode?.(false);
    }
    // It keeps this process waiting otherwise.
    if (stdin) input.destroy();
  }
}

async function show(part: OutputPart, { output }: Context): Promise<void> {
  if (part.bytes === undefined) {
    output.note(`dsec: ${part.missingBytes} bytes of ${part.stream} were dropped here, from offset ${part.offset} on`);
    return;
  }
  const stream = part.stream === 'stdout' ? output.stdout : output.stderr;
  if (!stream.write(part.bytes)) await new Promise((done) => stream.once('drain', done));
}

function sizeOf(stream: { readonly rows?: number; readonly columns?: number }) {
  return { rows: stream.rows || 24, columns: stream.columns || 80 };
}

function numberOf(what: string, text: string, program: string): number {
  if (!/^\d{1,15}$/.test(text)) throw fail('CLI_USAGE', { problem: `${what} ${text}: it is no number`, program });
  return Number(text);
}

function endText({ exitCode, signal, timedOut, outOfMemory }: ExecResult): string {
  if (timedOut) return 'time-out';
  if (outOfMemory) return 'out of memory';
  return signal ?? String(exitCode);
}
