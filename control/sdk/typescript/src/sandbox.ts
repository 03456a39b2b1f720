/** One sandbox. Its state is the service's: nothing here has to live for it to go on. */
import { randomUUID } from 'node:crypto';
import { type CollectOptions, Command, type CommandView } from './command.ts';
import type { CommandResult } from './command-result.ts';
import { DSecError, SandboxGone } from './errors.ts';
import { SandboxFiles } from './files.ts';
import { milliseconds, type NetworkPolicy, type NetworkRules, policyOf, type SandboxLimits } from './run-args.ts';
import type {
  LimitChanges,
  NetworkView,
  PackedImage,
  PauseReport,
  SandboxUsage,
  SandboxView,
} from './sandbox-views.ts';
import { SandboxScreen } from './screen.ts';
import { type ShellOptions, ShellSession } from './shell.ts';
import { type CallOptions, type Transport, undoable } from './transport.ts';

export interface ExecOptions extends CallOptions {
  readonly env?: Readonly<Record<string, string>> | readonly string[];
  readonly cwd?: string;
  readonly user?: string;
  /** Whether it has input, by `write` and `closeStdin`; else it finds its end at once. */
  readonly stdin?: boolean;
  readonly terminal?: { readonly rows: number; readonly columns: number };
  /** In the sandbox: then it is ended with all that it started. `timeoutMs` is for the call. */
  readonly commandTimeoutMs?: number;
  /** It does not keep an idle sandbox, and has no default time-out. */
  readonly background?: boolean;
  /** The same one gives the same command. */
  readonly requestId?: string;
}

export interface RunOptions
  extends Omit<ExecOptions, 'stdin' | 'terminal' | 'timeoutMs' | 'commandTimeoutMs' | 'background'> {
  /** Then the command is ended with all that it started, and the result says `timedOut`. */
  readonly timeoutMs?: number;
  readonly check?: boolean;
  readonly input?: string | Uint8Array | AsyncIterable<Uint8Array>;
  readonly outputLimitBytes?: CollectOptions['outputLimitBytes'];
  readonly onOutput?: CollectOptions['onOutput'];
  /** Of `runShell`: /bin/sh. */
  readonly shell?: string;
}

export interface StopOptions extends CallOptions {
  /** Between SIGTERM and SIGKILL. */
  readonly graceMs?: number;
  /** What it changed stays on its node until `remove`. */
  readonly keep?: boolean;
}

export class Sandbox implements AsyncDisposable {
  readonly id: string;
  readonly files: SandboxFiles;
  /** Of a full machine. */
  readonly screen: SandboxScreen;
  private readonly transport: Transport;
  private readonly path: string;
  private readonly commandTimeoutMs: number | undefined;
  private known: SandboxView | undefined;

  /** Made by DSecClient. */
  constructor(transport: Transport, id: string, known?: SandboxView, commandTimeoutMs?: number) {
    this.transport = transport;
    this.id = id;
    this.known = known;
    this.commandTimeoutMs = commandTimeoutMs;
    this.path = `/v1/sandboxes/${encodeURIComponent(id)}`;
    this.files = new SandboxFiles(transport, this.path);
    this.screen = new SandboxScreen(transport, this.path);
  }

  get name(): string {
    return this.id.slice(0, this.id.lastIndexOf('.'));
  }
  get edge(): string {
    return this.id.slice(this.id.lastIndexOf('.') + 1);
  }
  /** As it was told last; `view` asks. */
  get info(): SandboxView | undefined {
    return this.known;
  }

  /** @throws SandboxGone */
  async view(options: CallOptions = {}): Promise<SandboxView> {
    this.known = await this.transport.json<SandboxView>('GET', this.path, options);
    return this.known;
  }

  /**
   * Starts a command: a program and its arguments, no shell. Given up while it is being started, it is ended.
   * @throws CommandNotStarted, SandboxGone
   */
  async exec(args: readonly string[], options: ExecOptions = {}): Promise<Command> {
    const { env, cwd, user, stdin = false, terminal, background, requestId = randomUUID() } = options;
    const timeoutMs = options.commandTimeoutMs ?? (background === true ? undefined : this.commandTimeoutMs);
    const listed =
      env === undefined || Array.isArray(env) ? env : Object.entries(env).map(([key, value]) => `${key}=${value}`);
    const body = { args, env: listed, cwd, user, stdin, terminal, background, requestId, timeoutMs };
    const begin = async (stop: AbortSignal | undefined) => {
      const view = await this.transport.begin<CommandView>(`${this.path}/commands`, body, { stop });
      return new Command(this.transport, this.path, view.id, view.result);
    };
    return undoable(options, begin, (command) => command.kill());
  }

  /** Runs a command to its end. Given up (`signal`), it is ended too. @throws CommandFailed with `check`, CommandNotStarted, SandboxGone */
  async run(args: readonly string[], options: RunOptions = {}): Promise<CommandResult> {
    const { timeoutMs, check, input, outputLimitBytes, onOutput, shell: _, ...rest } = options;
    const command = await this.exec(args, { ...rest, stdin: input !== undefined, commandTimeoutMs: timeoutMs });
    const feeding = input === undefined ? undefined : feed(command, input, options.signal);
    try {
      const result = await command.collect({ check, outputLimitBytes, onOutput, signal: options.signal });
      return result;
    } catch (error) {
      if (command.result === undefined && !(error instanceof SandboxGone)) await endQuietly(command);
      throw error;
    } finally {
      feeding?.stop();
    }
  }

  /** `/bin/sh -c`. A status that is not 0 is in the result; with `check` it throws. */
  async runShell(command: string, options: RunOptions = {}): Promise<CommandResult> {
    return this.run([options.shell ?? '/bin/sh', '-c', command], options);
  }

  /** One that was started before, by its id. */
  command(id: number): Command {
    return new Command(this.transport, this.path, id);
  }

  async commands(options: CallOptions = {}): Promise<CommandView[]> {
    return this.transport.json('GET', `${this.path}/commands`, options);
  }

  /** A shell that does command after command and keeps folder, variables and functions between them. */
  async openShell(options: ShellOptions & CallOptions = {}): Promise<ShellSession> {
    const { shell, env, cwd, user, terminal } = options;
    const listed =
      env === undefined || Array.isArray(env) ? env : Object.entries(env).map(([key, value]) => `${key}=${value}`);
    const body = { shell, env: listed, cwd, user, terminal };
    const begin = async (stop: AbortSignal | undefined) => {
      const { id } = await this.transport.begin<{ id: number }>(`${this.path}/shells`, body, { stop });
      return new ShellSession(this.transport, this.path, id);
    };
    return undoable(options, begin, (session) => session.close());
  }

  /** Where what listens at this port inside is reached, with `client.headers`; WebSockets too. */
  getUrl(port: number, path = '/'): string {
    return `${this.transport.url}${this.path}/ports/${port}/${path.replace(/^\//, '')}`;
  }

  async pause(options: CallOptions = {}): Promise<PauseReport> {
    return this.transport.json('POST', `${this.path}/pause`, options);
  }

  /** Beforehand: whatever is asked of a paused sandbox resumes it. */
  async resume(options: CallOptions = {}): Promise<void> {
    this.known = await this.transport.json<SandboxView>('POST', `${this.path}/resume`, options);
  }

  /** An image of what it has changed. @param name `NAME:TAG` */
  async packDiff(
    name: string,
    options: CallOptions & {
      readonly kind?: 'snapshot' | 'workspace' | 'toolkit';
      readonly exclude?: readonly string[];
      readonly policy?: boolean;
      readonly compress?: string;
      readonly store?: string;
    } = {},
  ): Promise<PackedImage> {
    const { signal, timeoutMs, ...rest } = options;
    return this.transport.json('POST', `${this.path}/pack-diff`, { signal, timeoutMs, body: { name, ...rest } });
  }

  /**
   * New sandboxes with its files as they are now; all or none. `memory`: of a virtual machine, what runs in it goes on in each; a container throws
   * UnsupportedError.
   */
  async fork(
    options: CallOptions & {
      readonly count?: number;
      readonly memory?: boolean;
      readonly snapshot?: string;
      readonly ttlSeconds?: number;
      readonly requestId?: string;
    } = {},
  ): Promise<Sandbox[]> {
    const { count, memory, snapshot, ttlSeconds, requestId = randomUUID() } = options;
    const body = { count, memory, snapshot, requestId, ttlMs: milliseconds(ttlSeconds) };
    const begin = async (stop: AbortSignal | undefined) => {
      const forked = await this.transport.begin<{ sandboxes: SandboxView[] }>(`${this.path}/fork`, body, { stop });
      return forked.sandboxes.map((view) => new Sandbox(this.transport, this.idOf(view), view, this.commandTimeoutMs));
    };
    return undoable(options, begin, (all) => Promise.allSettled(all.map((one) => one.remove({ force: true }))));
  }

  /** Limits that change; null takes one away. @returns those that hold then */
  async updateLimits(changes: LimitChanges, options: CallOptions = {}): Promise<SandboxLimits> {
    return this.transport.json('PUT', `${this.path}/limits`, { ...options, body: changes });
  }

  async network(options: CallOptions = {}): Promise<NetworkView> {
    return this.transport.json('GET', `${this.path}/network`, options);
  }

  /** All that it may reach, from now on. */
  async setNetworkPolicy(policy: NetworkPolicy, options: CallOptions = {}): Promise<NetworkView> {
    return this.transport.json('PUT', `${this.path}/network`, { ...options, body: { policy } });
  }

  async setNetworkRules(rules: NetworkRules, options: CallOptions = {}): Promise<NetworkView> {
    return this.setNetworkPolicy(policyOf(rules), options);
  }

  async networkCounters(options: CallOptions = {}): Promise<Readonly<Record<string, unknown>>> {
    return this.transport.json('GET', `${this.path}/network/counters`, options);
  }

  /** Attempts that the policy denied, oldest first. */
  async networkDenied(options: CallOptions & { readonly limit?: number } = {}): Promise<readonly object[]> {
    const { limit, ...rest } = options;
    return this.transport.json('GET', `${this.path}/network/denied`, { ...rest, query: { limit } });
  }

  /** `disk`: what it changed is counted where no limit does. */
  async usage(options: CallOptions & { readonly disk?: boolean } = {}): Promise<SandboxUsage> {
    const { disk, ...rest } = options;
    return this.transport.json('GET', `${this.path}/usage`, { ...rest, query: { disk } });
  }

  /** Ends it, and removes what it changed unless `keep`; no error when it has ended. */
  async stop({ graceMs, keep, ...options }: StopOptions = {}): Promise<void> {
    await ignoringGone(this.transport.json('POST', `${this.path}/stop`, { ...options, body: { timeMs: graceMs } }));
    if (keep !== true) await this.remove(options);
  }

  /** One that has ended, or any with `force`: with what it changed. */
  async remove({ force, ...options }: CallOptions & { readonly force?: boolean } = {}): Promise<void> {
    await ignoringGone(this.transport.json('DELETE', this.path, { ...options, query: { force } }));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  /** Of another sandbox of the same edge. */
  private idOf({ id, name }: SandboxView): string {
    return id.startsWith(`${name}.`) ? id : `${name}.${this.edge}`;
  }
}

async function ignoringGone(work: Promise<unknown>): Promise<void> {
  await work.catch((error: unknown) => {
    if (!(error instanceof SandboxGone)) throw error;
  });
}

async function endQuietly(command: Command): Promise<void> {
  await command.kill({ timeoutMs: 15_000 }).catch(() => {});
}

/** Input beside its output; a command that ends before it has read all is no error. */
function feed(command: Command, input: NonNullable<RunOptions['input']>, signal: AbortSignal | undefined) {
  const end = new AbortController();
  const either = signal === undefined ? end.signal : AbortSignal.any([signal, end.signal]);
  const work = async () => {
    await command.write(input, { signal: either });
    await command.closeStdin({ signal: either });
  };
  work().catch((error: unknown) => {
    // The source itself has failed: the command must not wait for more.
    if (!either.aborted && !(error instanceof DSecError)) void endQuietly(command);
  });
  return { stop: () => end.abort() };
}
