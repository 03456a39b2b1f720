/** `dsec sandbox create`, `exec`, `shell`, `cp` and `logs`: sandboxes that stay, kept by the runtime service. */
import { resolve } from 'node:path';
import type { Readable } from 'node:stream';
import type { Command } from 'commander';
import { isDsecError } from '#base';
import {
  type ExecResult,
  IDLE_ACTIONS,
  type IdleAction,
  type OutputPart,
  RUNTIME_NAMES,
  SERVICE_CLASSES,
} from '#runtime';
import { fail } from '../../errors.ts';
import { fetchFile, sendFile } from '../../runtime-service/file-transfer.ts';
import { SandboxClient, throwRemote } from '../../runtime-service/sandbox-client.ts';
import { choice } from '../choice.ts';
import { type Context, NotServed } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { refuseInexactVariables } from '../exact-text.ts';
import { withExamples } from '../examples.ts';
import { type LimitOptions, limitsOf, withLimitOptions } from '../limit-options.ts';
import { type NetworkOptions, networkOf, withNetworkOptions } from '../network-options.ts';
import { repeated } from '../repeated.ts';
import { USERNS_HELP, usernsOf } from '../sandbox-options.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { addPauseCommands } from './sandbox-pause.ts';

interface CreateCommand extends StoreOption, JsonOption, LimitOptions, NetworkOptions {
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly name?: string;
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly ttl?: string;
  readonly idle?: string;
  readonly idleAction?: string;
  readonly class: string;
  readonly userns?: string;
  readonly runtime: string;
  readonly requestId?: string;
  readonly lazy?: boolean;
  readonly prefetch: boolean;
}

interface ExecCommand extends JsonOption {
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly tty?: boolean;
  readonly stdin: boolean;
  readonly timeout?: string;
  readonly detach?: boolean;
  readonly requestId?: string;
}

export function addResidentCommands(command: Command, context: Context): void {
  addCreate(command, context);
  addExec(command, context);
  addShell(command, context);
  addCopy(command, context);
  addLogs(command, context);
  addPauseCommands(command, context);
}

function addCreate(command: Command, context: Context): void {
  const { output } = context;
  const create = withExamples(
    command
      .command('create')
      .description(
        'Makes a sandbox that stays and waits for commands; what the image would run is not run. It lives until it is stopped or its time is up, ' +
          'also when the runtime service ends and starts again. Its network is loopback alone unless options open it. Prints its name. Needs `dsec serve runtime`.',
      ),
    [
      { line: 'dsec sandbox create alpine:3.20 --name work', what: 'one to work in' },
      {
        line: 'dsec sandbox create base:1 --workspace repo:1 --toolkit node:20 --memory 2GiB --ttl 1h',
        what: 'composed of three images, with limits',
      },
      {
        line: 'dsec sandbox create base:1 --allow @pypi --allow git.corp:443',
        what: 'that reaches these and nothing else',
      },
    ],
  );
  withNetworkOptions(withLimitOptions(withJson(withStore(create)), ' (4096)'))
    .argument('<image>', 'the base: name or digest')
    .option('--workspace <image>', 'an image of kind workspace, above the base')
    .option('--toolkit <image>', 'an image of kind toolkit, above that; may be given several times', repeated)
    .option('--name <name>', 'what it is called; a random name by default')
    .option('-e, --env <variable>', 'NAME=VALUE, or NAME to pass on what it is here, for all its commands', repeated)
    .option('-u, --user <user>', 'of its commands, unless they say otherwise: name, uid, name:group or uid:gid')
    .option('-w, --workdir <folder>', 'where its commands start')
    .option('--ttl <time>', 'it ends after so long, whatever runs in it, paused or not')
    .option(
      '--idle <time>',
      'when nobody has used it for so long: no request, and no command but those of exec --detach',
    )
    .option('--idle-action <what>', `what happens then: ${IDLE_ACTIONS.join(' or ')}`, 'stop')
    .option('--class <class>', 'ls, latency-sensitive, or be, best effort: it runs when no other wants to', 'ls')
    .option('--userns <mode>', USERNS_HELP)
    .option('--runtime <name>', 'what starts it: dsec, crun or runc', 'dsec')
    .option('--request-id <id>', 'asked for again with the same id, the same sandbox is the answer')
    .option('--lazy', 'fetch data when it is read, also from a store that is a folder')
    .option('--no-prefetch', 'do not fetch ahead what the traces of the images say that a start reads')
    .action(async (image: string, options: CreateCommand) => {
      context.caller?.begin({ store: options.store, runtime: OWN });
      const { workspace, toolkit, name, user, workdir, ttl, requestId, lazy, prefetch } = options;
      const created = await new SandboxClient().create({
        store: (await openChosenStore(options)).url,
        image,
        workspace,
        toolkits: toolkit,
        name,
        env: variables('dsec sandbox create', options.env, context),
        user,
        workdir,
        ttlMs: ttl === undefined ? undefined : parseDuration('--ttl', ttl),
        ...idleOf(options),
        class: choice('--class', options.class, SERVICE_CLASSES),
        userns: usernsOf(options),
        runtime: choice('--runtime', options.runtime, RUNTIME_NAMES),
        ...limitsOf(options, 'dsec sandbox create'),
        network: networkOf(options, 'dsec sandbox create'),
        requestId,
        lazy,
        prefetch,
      });
      if (options.json) await output.json(created);
      else await output.line(created.name);
    });
}

/** @throws CLI_USAGE, CLI_DURATION */
function idleOf({ idle, idleAction }: CreateCommand): { idleMs?: number; idleAction?: IdleAction } {
  const action = choice('--idle-action', idleAction, IDLE_ACTIONS);
  if (idle === undefined) return {};
  const idleMs = parseDuration('--idle', idle);
  if (idleMs < 1000)
    throw fail('CLI_USAGE', { problem: `--idle ${idle}: at least 1s`, program: 'dsec sandbox create' });
  return { idleMs, idleAction: action };
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
      .usage('[options] <name> -- <command...>'),
    [
      { line: 'dsec sandbox exec work -- npm test', what: 'a command' },
      { line: "dsec sandbox exec work --timeout 30s -- sh -c 'make | tee log'", what: 'ended with all its children' },
      { line: 'dsec sandbox exec work --detach -- ./server', what: 'in the background; prints its number' },
      { line: 'dsec sandbox exec work -t -- vi notes', what: 'on this terminal' },
    ],
  );
  withCommandOptions(exec)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument('<command...>', 'what to run, after --')
    .option('-t, --tty', 'on this terminal')
    .option('-n, --no-stdin', 'it finds its input at its end')
    .option('--timeout <time>', 'then it is ended, with all that it has started')
    .option('-d, --detach', 'print the number of the command, and do not wait for it')
    .option('--request-id <id>', 'asked for again with the same id, the same command is the answer')
    .option('--json', 'print how it ended as the last line on stderr; with --detach, on stdout')
    .action((name: string, args: string[], options: ExecCommand) => run(name, args, options, context));
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
      await run(name, ['sh', '-c', script], { ...options, tty: true, stdin: true }, context);
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

function addCopy(command: Command, _context: Context): void {
  const copy = withExamples(
    command
      .command('cp')
      .description(
        'Copies a file or a folder into a sandbox or out of it, with modes, times, links and holes. A folder that is there is gone into, as cp does. ' +
          'Nothing in the sandbox leads the copy out of it; out of it, owners are yours, and set-user-id bits go. With --verify one file, which goes on where it was when the ' +
          'runtime service is started again meanwhile or the command is, and is at its place only when its sha256 is right.',
      ),
    [
      { line: 'dsec sandbox cp ./src work:/workspace/src', what: 'in' },
      { line: 'dsec sandbox cp work:/workspace/report.html .', what: 'out' },
      { line: 'dsec sandbox cp --verify model.bin work:/workspace/', what: 'a large file, whole or not at all' },
    ],
  );
  copy
    .argument('<from>', 'PATH, or NAME:PATH in a sandbox')
    .argument('<to>', 'the other of the two')
    .option('--verify', 'one file, checked at both ends, and gone on with after a break')
    .action(async (from: string, to: string, { verify }: { readonly verify?: boolean }) => {
      const [inside, target] = [placeOf(from), placeOf(to)];
      const client = new SandboxClient();
      if (inside !== undefined && target === undefined) {
        const path = await hostTarget(to, inside.path);
        if (verify) return fetchFile(client, inside.name, inside.path, path);
        return client.copy(inside.name, 'download', inside.path, path);
      }
      if (inside === undefined && target !== undefined) {
        const source = resolve(from);
        const into = await isFolder(client, target.name, target.path);
        const path = into ? `${target.path.replace(/\/+$/, '')}/${lastName(source)}` : target.path;
        if (verify) return sendFile(client, target.name, source, path);
        return client.copy(target.name, 'upload', source, path);
      }
      throw fail('SANDBOX_COPY', { from, to });
    });
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
      const client = new SandboxClient();
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

async function run(name: string, args: readonly string[], options: ExecCommand, context: Context): Promise<void> {
  const { output } = context;
  const terminal = options.tty === true;
  // A terminal is for a process of its own.
  if (terminal && context.caller !== undefined) throw new NotServed();
  context.caller?.begin({ runtime: OWN });
  if (terminal && !process.stdin.isTTY)
    throw fail('CLI_USAGE', { problem: 'with -t, standard input has to be a terminal', program: 'dsec sandbox exec' });
  const env = variables('dsec sandbox exec', options.env, context);
  const timeoutMs = options.timeout === undefined ? undefined : parseDuration('--timeout', options.timeout);
  const stdin = options.stdin && options.detach !== true;
  const size = terminal ? sizeOf(process.stdout) : undefined;
  const client = new SandboxClient();
  const { user, workdir: cwd, requestId } = options;
  try {
    const background = options.detach;
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
      return;
    }
    const result = await attach(client, name, started.id, { stdin, terminal }, context);
    if (options.json) output.note(JSON.stringify({ id: started.id, ...result }));
    else if (result.timedOut) output.note(`dsec: ended after --timeout ${options.timeout}`);
    else if (result.outOfMemory) output.note('dsec: the sandbox ran out of memory, and the kernel ended this command');
    context.exitCode = result.timedOut ? TIMED_OUT : result.exitCode;
  } catch (error) {
    if (context.signal.aborted || !isDsecError(error) || USAGE_CODES.has(error.code)) throw error;
    const exit = error.exit === 126 || error.exit === 127 ? error.exit : NOT_RUN;
    output.note(`dsec: ${error.message}${error.hint === undefined ? '' : `\n      ${error.hint}`}`);
    context.exitCode = exit;
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
  client: SandboxClient,
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

function variables(program: string, given: readonly string[] | undefined, { caller }: Context): string[] | undefined {
  if (given === undefined) return undefined;
  refuseInexactVariables(
    program,
    given.filter((entry) => !entry.includes('=')),
  );
  return given.flatMap((entry) => {
    if (entry.includes('=')) return [entry];
    const value = (caller?.env ?? process.env)[entry];
    return value === undefined ? [] : [`${entry}=${value}`];
  });
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

/** `NAME:PATH`. A path of this machine with a colon in it is written with a slash before that. */
function placeOf(text: string): { readonly name: string; readonly path: string } | undefined {
  const match = /^([a-z0-9][a-z0-9_.-]{0,62}):(.+)$/s.exec(text);
  return match === null ? undefined : { name: match[1]!, path: match[2]!.startsWith('/') ? match[2]! : `/${match[2]}` };
}

function lastName(path: string): string {
  return path.replace(/\/+$/, '').split('/').at(-1)!;
}

async function isFolder(client: SandboxClient, name: string, path: string): Promise<boolean> {
  if (path.endsWith('/')) return true;
  try {
    return (await client.stat(name, path)).kind === 'directory';
  } catch (error) {
    if (isDsecError(error, 'RUNTIME_FILE')) return false;
    throw error;
  }
}

async function hostTarget(to: string, from: string): Promise<string> {
  const { stat } = await import('node:fs/promises');
  const folder = await stat(to).then(
    (found) => found.isDirectory(),
    () => to.endsWith('/'),
  );
  return folder ? resolve(to, lastName(from)) : resolve(to);
}
