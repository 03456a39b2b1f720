/**
 * One sandbox's agent, from the host: starts commands, carries what is for them and what comes of them, asks for files. Whatever the
 * agent sends that makes no sense ends this sandbox, and no other.
 */
import { randomInt } from 'node:crypto';
import type { Duplex } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import { getSystemErrorMap } from 'node:util';
import { failPoint, failPointSent, isDsecError, messageOf } from '#base';
import { AGENT_FRAME, PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { STAGE_EXEC, stageText } from '../backend/launch-order.ts';
import { fail } from '../errors.ts';
import { environmentOf } from '../sandbox/environment.ts';
import { type ImageUser, userFrom } from '../sandbox/user-lookup.ts';
import type { ExecSpec } from '../sandbox-api/exec.ts';
import type { FileWatch, WatchOptions } from '../sandbox-api/watch.ts';
import type { AgentChannel, CommandTrees } from './agent-channel.ts';
import { AgentFiles } from './agent-files.ts';
import { AgentStreams } from './agent-streams.ts';
import { CommandJournal, shownArgs } from './command-journal.ts';
import { watchFiles } from './file-watch.ts';
import { type CommandHost, KeptCommand, WINDOW_BYTES } from './kept-command.ts';
import type { SpoolLimits } from './output-spool.ts';
import { connectPort } from './port-connection.ts';
import { Standing } from './standing.ts';

/** What commands have unless they say otherwise. */
export interface CommandDefaults {
  /** `NAME=VALUE`: the image's, and what was given at the creation. */
  readonly env: readonly string[];
  readonly user: string;
  readonly cwd: string;
}

export interface LinkOptions {
  readonly name: string;
  readonly channel: AgentChannel;
  /** Folder for commands' records and output. */
  readonly commands: string;
  readonly defaults: CommandDefaults;
  readonly trees: CommandTrees;
  readonly spoolLimits?: SpoolLimits;
  /** What it has stood still in its life so far; `stoodSinceMs`: it stands still now. */
  readonly stoodMs?: number;
  readonly stoodSinceMs?: number;
  /** Another text whenever the sandbox's accounts may have changed; undefined when that cannot be told. */
  readonly accounts?: () => string | undefined;
  /** It stands still, and somebody wants something of it. */
  readonly onWanted?: () => void;
  /** Somebody uses it. */
  readonly onUsed?: () => void;
}

/** A shell session's command, too. */
export interface StartSpec extends ExecSpec {
  readonly script?: boolean;
  readonly silent?: boolean;
  /** What is on record instead of its arguments: they are those of a program that runs it. */
  readonly shownArgs?: ExecSpec['args'];
}

/** What clients ask for: it waits while the sandbox stands still. Other frames are our own. */
const WANTED: ReadonlySet<number> = new Set([
  AGENT_FRAME.exec,
  AGENT_FRAME.file,
  AGENT_FRAME.stdin,
  AGENT_FRAME.stdinClose,
  AGENT_FRAME.script,
  AGENT_FRAME.kill,
  AGENT_FRAME.resize,
  AGENT_FRAME.send,
  AGENT_FRAME.sendEnd,
]);

/** Of those that have ended so many are kept, and dropped some at a time: to look for them after each one costs more than to drop it. */
const KEPT_COMMANDS = 256;
const DROPPED_AT_ONCE = 16;
/** Of one state of the accounts. */
const KEPT_USERS = 64;
const ACCOUNT_FILE_BYTES = 4 << 20;
const MAX_EXEC_BYTES = 4 << 20;

export class AgentLink implements CommandHost {
  readonly name: string;
  readonly commands: string;
  readonly files: AgentFiles;
  readonly journal: CommandJournal;
  private readonly options: LinkOptions;
  private readonly streams = new AgentStreams((kind, id, payload) => this.send(kind, id, payload));
  private readonly all = new Map<number, KeptCommand>();
  private readonly byRequest = new Map<string, KeptCommand>();
  private readonly asked = new Map<number, { resolve(answer: Buffer): void; reject(error: Error): void }>();
  private nextRequest = randomInt(1, 2 ** 30);
  private lastCommand: number;
  private outOfMemorySeen: number;
  private gone: Error | undefined;
  /** Of those that are being started, and of requests without an answer. */
  private underWay = 0;
  private readonly standing: Standing;
  /** Who was looked up in the accounts as they are while `key` stays what it is. */
  private users: { readonly key: string | undefined; readonly found: Map<string, ImageUser> } = {
    key: undefined,
    found: new Map(),
  };

  constructor(options: LinkOptions) {
    this.options = options;
    this.name = options.name;
    this.commands = options.commands;
    this.journal = new CommandJournal(this.commands);
    this.lastCommand = this.journal.lastId;
    this.outOfMemorySeen = options.trees.outOfMemoryCount();
    this.standing = new Standing(options.stoodMs ?? 0);
    if (options.stoodSinceMs !== undefined) this.standing.stand(options.stoodSinceMs);
    this.files = new AgentFiles((payload) => this.ask(payload));
    for (const record of this.journal.records()) this.adopt(new KeptCommand(this, record, options.spoolLimits));
  }

  /**
   * After a restart: which of the commands on record the agent knows; of the others nobody knows how they ended. Whoever stood still goes on,
   * unless it has been told to stand (`stand`).
   */
  async reconcile(): Promise<void> {
    // It may have ended while it was taken over.
    this.refuseGone();
    if (!this.standing.isStanding) this.options.trees.thaw();
    this.streams.closeUnknown();
    for (const command of this.all.values()) {
      if (command.isOver) continue;
      command.resume();
      // Whoever fed it has gone, and what it had been fed.
      if (command.record.session) this.killTree(command.id).catch(() => {});
    }
    // Those that are started from now on it may not know yet.
    const before = [...this.all.values()];
    const payload = await new Promise<Buffer>((resolve, reject) => {
      const id = this.nextRequest++;
      this.asked.set(id, { resolve, reject });
      this.send(AGENT_FRAME.which, id);
    });
    const reader = new PayloadReader(payload);
    const known = new Set(reader.list(() => reader.u32()));
    for (const command of before) {
      if (command.isOver || known.has(command.id)) continue;
      const reason =
        'the runtime service was restarted while the command was being started, or its end was not recorded';
      command.lose(fail('RUNTIME_SANDBOX_GONE', { name: `${this.name}, command ${command.id},`, reason }), reason);
    }
    // Of whoever its memory is from: they had ended, and nobody asks for them here.
    for (const id of known) if (!this.all.has(id)) this.send(AGENT_FRAME.drop, id);
  }

  /** In place of the time that its agent was started with, from now on. 0: without end. */
  setLifetime(lifetimeMs: number): void {
    const payload = new PayloadWriter().u64(BigInt(Math.max(0, Math.round(lifetimeMs)))).done();
    this.send(AGENT_FRAME.lifetime, NO_COMMAND, payload);
  }

  async start(spec: StartSpec): Promise<KeptCommand> {
    this.refuseGone();
    const again = spec.requestId === undefined ? undefined : this.byRequest.get(spec.requestId);
    if (again !== undefined) return again;
    if (spec.args.length === 0) throw fail('RUNTIME_COMMAND_MISSING', { image: this.name });
    const { defaults } = this.options;
    const user = await this.user(spec.user ?? defaults.user);
    while (this.standing.isStanding) await this.wanted();
    const repeated = spec.requestId === undefined ? undefined : this.byRequest.get(spec.requestId);
    if (repeated !== undefined) return repeated;
    this.refuseGone();
    const payload = this.execPayload(spec, user);
    const id = ++this.lastCommand;
    const startedMs = Date.now();
    const record = {
      id,
      args: shownArgs(spec.shownArgs ?? spec.args),
      requestId: spec.requestId,
      terminal: spec.terminal !== undefined,
      session: spec.script === true,
      background: spec.background === true ? true : undefined,
      startedMs,
      deadlineMs: spec.timeoutMs === undefined ? undefined : startedMs + spec.timeoutMs - this.stoodMs(),
    };
    this.journal.begin(record);
    failPoint('exec-recorded');
    const command = new KeptCommand(this, record, this.options.spoolLimits);
    this.adopt(command);
    const { channel, trees } = this.options;
    channel.toAgent(AGENT_FRAME.exec, id, payload, trees.groupOf(id));
    this.options.onUsed?.();
    this.underWay++;
    try {
      await failPointSent('exec-sent');
      await command.whenStarted();
    } catch (error) {
      if (this.gone === undefined) this.forget(command);
      throw error;
    } finally {
      this.underWay--;
    }
    return command;
  }

  /** To a port inside. @throws RUNTIME_PORT_CLOSED */
  async connect(port: number, signal?: AbortSignal): Promise<Duplex> {
    this.refuseGone();
    while (this.standing.isStanding) await this.wanted();
    this.options.onUsed?.();
    return connectPort(this.streams, { sandbox: this.name, port, signal });
  }

  /** @throws RUNTIME_FILE, RUNTIME_WATCH_LIMIT */
  async watch(path: Buffer, options: WatchOptions): Promise<FileWatch> {
    this.refuseGone();
    return watchFiles(this.streams, path, options);
  }

  get(id: number): KeptCommand | undefined {
    return this.all.get(id);
  }
  list(): KeptCommand[] {
    return [...this.all.values()].sort((a, b) => a.id - b.id);
  }
  get running(): number {
    return [...this.all.values()].filter((command) => !command.isOver).length;
  }

  /** Somebody may be waiting for one of them. */
  get isInUse(): boolean {
    return [...this.all.values()].some((command) => command.isFollowed || (!command.isOver && command.isForeground));
  }

  /** Resolves when nothing that was asked for is on its way any more; what is asked for from now on waits for `go`. */
  async stand(): Promise<void> {
    this.standing.stand();
    while (this.underWay > 0 && this.gone === undefined && this.standing.isStanding) await delay(1);
  }

  /** What waited is done, in its order. */
  go(): void {
    this.standing.go();
  }

  /** It stands on, and whoever waits is told why. */
  refuse(error: Error): void {
    this.standing.refuse(error);
  }

  stoodMs(): number {
    return this.standing.stoodMs();
  }

  /** So long, not counting what it stood still. */
  async patience(ms: number, signal: AbortSignal): Promise<void> {
    const end = Date.now() + ms - this.stoodMs();
    for (;;) {
      const leftMs = end + this.stoodMs() - Date.now();
      if (leftMs <= 0) return;
      await delay(leftMs, undefined, { signal });
    }
  }

  /** Commands from now on enter it too; the same one again is no error. Should that not be possible the sandbox ends: they would have no limits. */
  enterGroup(folder: string): void {
    const key = new PayloadWriter().bytes(folder).done();
    this.options.channel.toAgent(AGENT_FRAME.group, NO_COMMAND, key, folder);
  }

  /** To everything in the sandbox but the agent. */
  signalAll(number: number): void {
    this.send(AGENT_FRAME.kill, 0, new PayloadWriter().u32(number).u8(1).done());
  }

  /** A frame of the agent. Never throws. */
  receive(kind: number, about: number, payload: Buffer): void {
    try {
      this.handle(kind, about, payload);
    } catch (error) {
      this.broken ??= messageOf(error);
      this.options.channel.cancel();
    }
  }
  /** What was wrong with what the agent sent. */
  broken: string | undefined;

  /** The sandbox has ended. */
  end(error: Error, reason: string): void {
    this.gone = error;
    this.standing.end(error);
    for (const { reject } of this.asked.values()) reject(error);
    this.asked.clear();
    this.streams.lose(error);
    for (const command of this.all.values()) command.lose(error, reason);
    for (const command of this.all.values()) command.dispose();
    this.journal.close();
  }

  // For commands.

  send(kind: number, about: number, payload?: Buffer): void {
    if (this.gone !== undefined) return;
    if (WANTED.has(kind)) {
      this.options.onUsed?.();
      const again = () => this.send(kind, about, payload);
      if (this.standing.postpone(again)) {
        this.options.onWanted?.();
        return;
      }
    }
    this.options.channel.toAgent(kind, about, payload);
  }

  killTree(id: number): Promise<void> {
    return this.options.trees.killAll(id);
  }

  /** SIGKILL to all that a command has started, but not to itself. */
  async killOthers(id: number): Promise<void> {
    const pid = this.all.get(id)?.pid;
    if (pid !== undefined) await this.options.trees.killOthers(id, pid);
  }

  ranOutOfMemory(): boolean {
    const count = this.options.trees.outOfMemoryCount();
    const ran = count > this.outOfMemorySeen;
    this.outOfMemorySeen = count;
    return ran;
  }

  over(command: KeptCommand): void {
    this.options.onUsed?.();
    // Of one that was killed it was asked already. Now: the next one that is killed is not to have what was this one's.
    if (command.result?.signal !== 'SIGKILL') this.ranOutOfMemory();
    // Whoever waits for it has the answer first.
    setImmediate(() => this.tidy(command));
  }

  private tidy({ id }: KeptCommand): void {
    if (this.gone !== undefined) return;
    this.options.trees.remove(id);
    if (this.all.size <= KEPT_COMMANDS + DROPPED_AT_ONCE) return;
    // Those that began first come first.
    const over = [...this.all.values()].filter(({ isOver }) => isOver);
    for (const one of over.slice(0, Math.max(0, over.length - KEPT_COMMANDS))) {
      this.send(AGENT_FRAME.drop, one.id);
      this.forget(one);
    }
  }

  private handle(kind: number, about: number, payload: Buffer): void {
    if (this.streams.receive(kind, about, payload)) return;
    const reader = new PayloadReader(payload);
    switch (kind) {
      case AGENT_FRAME.fileDone:
      case AGENT_FRAME.these:
        this.asked.get(about)?.resolve(payload);
        this.asked.delete(about);
        return;
      case AGENT_FRAME.fileFailed:
        this.asked.get(about)?.reject(new SystemFailure(reader.i32()));
        this.asked.delete(about);
        return;
      case AGENT_FRAME.refused: {
        const command = this.all.get(about);
        const [stage, errno] = [reader.u8(), reader.i32()];
        if (about === NO_COMMAND) throw new Error(`a group with its limits cannot be entered: errno ${errno}`);
        command?.refuse(startError(command.record.args[0]!, stage, errno));
        return;
      }
      default:
        // Of one that was forgotten: nobody wants it.
        this.all.get(about)?.receive(kind, payload);
    }
  }

  private async ask(payload: Buffer): Promise<Buffer> {
    this.refuseGone();
    while (this.standing.isStanding) await this.wanted();
    const id = this.nextRequest++;
    this.underWay++;
    try {
      return await new Promise((resolve, reject) => {
        this.asked.set(id, { resolve, reject });
        this.send(AGENT_FRAME.file, id, payload);
      });
    } finally {
      this.underWay--;
    }
  }

  /** Resolves when it goes, which may be over by then. @throws what it ended with */
  private wanted(): Promise<void> {
    this.options.onWanted?.();
    return this.standing.gone();
  }

  private refuseGone(): void {
    if (this.gone !== undefined) throw this.gone;
  }

  private adopt(command: KeptCommand): void {
    this.all.set(command.id, command);
    const { requestId } = command.record;
    if (requestId !== undefined) this.byRequest.set(requestId, command);
  }

  private forget(command: KeptCommand): void {
    command.dispose();
    this.all.delete(command.id);
    if (command.record.requestId !== undefined) this.byRequest.delete(command.record.requestId);
    this.journal.forget(command.id);
  }

  /** By the accounts that the sandbox has now, read by the agent: no link in it leads out. */
  private async user(spec: string): Promise<ImageUser> {
    const key = this.options.accounts?.();
    if (key === undefined || key !== this.users.key) this.users = { key, found: new Map() };
    const { found } = this.users;
    const known = found.get(spec);
    if (known !== undefined) return known;
    // What went wrong once need not the next time.
    let isKnown = key !== undefined;
    const text = async (path: string) => {
      try {
        return (await this.files.read(path, ACCOUNT_FILE_BYTES)).toString('utf8');
      } catch (error) {
        this.refuseGone();
        isKnown &&= isDsecError(error, 'RUNTIME_FILE') && error.params.code === 'ENOENT';
        return '';
      }
    };
    const [passwd, group] = await Promise.all([text('/etc/passwd'), text('/etc/group')]);
    const user = userFrom(passwd, group, spec);
    if (isKnown && found.size < KEPT_USERS) found.set(spec, user);
    return user;
  }

  private execPayload(spec: StartSpec, user: ImageUser): Buffer {
    const { defaults, trees } = this.options;
    const given = (spec.env ?? []).filter((entry): entry is string => typeof entry === 'string');
    const exact = (spec.env ?? []).filter((entry): entry is Buffer => typeof entry !== 'string');
    const terminal = spec.terminal !== undefined;
    // It is what stands in the sandbox's /etc/passwd.
    const home = user.home.includes('\0') ? '/' : user.home;
    const env = environmentOf({ image: defaults.env, given, host: {}, home, hostname: this.name, terminal });
    const names = exact.map((entry) => entry.subarray(0, entry.indexOf('=') + 1).toString('latin1'));
    const kept = env.filter((entry) => !names.some((name) => entry.startsWith(name)));
    const out = new PayloadWriter();
    const inGroup = trees.groupOf(1) !== undefined;
    const flags = [terminal, spec.stdin === true, inGroup, spec.script === true, spec.silent === true];
    out.u8(flags.reduce((bits, flag, index) => bits | (flag ? 1 << index : 0), 0));
    out.u16(spec.terminal?.rows ?? 0).u16(spec.terminal?.columns ?? 0);
    const cwd = spec.cwd ?? defaults.cwd;
    out.bytes(cwd.startsWith('/') ? cwd : `/${cwd}`);
    for (const part of [...spec.args, ...kept, ...exact, cwd]) {
      if (part.includes('\0')) {
        const reason = 'an argument, variable or folder holds a NUL byte';
        throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command: String(spec.args[0]), path: 'PATH', reason });
      }
    }
    out.list(spec.args, (arg) => out.bytes(arg));
    out.list([...kept, ...exact], (entry) => out.bytes(entry));
    out.u32(user.uid).u32(user.gid);
    out.list(user.additionalGids, (gid) => out.u32(gid));
    out.u32(0o022).u32(WINDOW_BYTES);
    const payload = out.done();
    if (payload.length > MAX_EXEC_BYTES) {
      const reason = `arguments and environment take ${payload.length} bytes; Linux takes some two million`;
      throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command: String(spec.args[0]), path: 'PATH', reason });
    }
    return payload;
  }
}

const NO_COMMAND = 0;
const STAGE_CWD = 20;

/** errno of an operation that the agent could not do. */
export class SystemFailure extends Error {
  /** `ENOENT`, ... */
  readonly code: string;

  constructor(errno: number) {
    const [code, text] = getSystemErrorMap().get(-errno) ?? [`errno ${errno}`, `error ${errno}`];
    super(text);
    this.code = code;
  }
}

function startError(command: string, stage: number, errno: number): Error {
  const { code, message } = new SystemFailure(errno);
  if (stage === STAGE_EXEC) {
    if (code === 'ENOENT' || code === 'ENOTDIR') return fail('RUNTIME_COMMAND_NOT_FOUND', { command, reason: message });
    return fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: command, reason: message });
  }
  const reason = `${stageText(stage)}: ${message}`;
  if (stage === STAGE_CWD) return fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: 'PATH', reason });
  return fail('RUNTIME_START_FAILED', { runtime: 'dsec', reason });
}
