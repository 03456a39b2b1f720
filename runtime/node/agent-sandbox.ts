/**
 * What a sandbox that stays is in every backend: its agent's link, commands, sessions, ports and watches, its time, its idleness, why it ended. What
 * it lives in (control groups of this machine, a virtual machine), and how that is started, ended and undone, is a subclass's.
 */
import { once } from 'node:events';
import { mkdirSync, rmSync } from 'node:fs';
import type { Duplex } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import type { AgentChannel, CommandTrees } from '../aether/agent-channel.ts';
import { AgentLink } from '../aether/agent-link.ts';
import type { KeptCommand } from '../aether/kept-command.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import { OwnShell } from '../aether/shell-session.ts';
import { fail } from '../errors.ts';
import type { NodeNetwork } from '../network/node-network.ts';
import { keepEnded, removeAside } from '../sandbox/end-sandbox.ts';
import { tellingOfFullDisk } from '../sandbox/full-disk.ts';
import { type ResidentFacts, type SandboxRecord, type SandboxTag, writeRecord } from '../sandbox/sandbox-record.ts';
import { asideOf } from '../sandbox/sandboxes.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import { type Capability, type Capable, unsupported } from '../sandbox-api/capabilities.ts';
import type { ExecHandle, ExecSpec } from '../sandbox-api/exec.ts';
import type { SandboxFiles, SandboxPath } from '../sandbox-api/files.ts';
import type { AllLimits, LimitChanges } from '../sandbox-api/limits.ts';
import type { EndReason, PauseReport, Sandbox, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { ShellOptions, ShellSession } from '../sandbox-api/shell.ts';
import type { SandboxUsage } from '../sandbox-api/usage.ts';
import type { FileWatch, WatchOptions } from '../sandbox-api/watch.ts';
import type { Moment } from '../vm/fork/moment.ts';
import { IdleWatch } from './idle-watch.ts';
import type { NodeSandbox, StandsStill } from './node-sandbox.ts';
import { ResidentNetwork } from './resident-network.ts';

const STOP_TIME_MS = 10_000;
/** What its agent has to end by itself when the time is up. */
const OVERDUE_MS = 3_000;

export interface AgentSandboxParts {
  readonly record: SandboxRecord;
  readonly places: SandboxFolders;
  readonly folders: RuntimeFolders;
  readonly network: NodeNetwork;
  readonly spoolLimits?: SpoolLimits;
  /** Told when it has ended and all is undone. */
  readonly onEnd?: (sandbox: NodeSandbox) => void;
  readonly onNote?: (text: string) => void;
}

export abstract class AgentSandbox implements NodeSandbox {
  readonly name: string;
  readonly backend: Capable;
  readonly ended: Promise<SandboxEnd>;
  readonly ready: Promise<void>;
  readonly network: ResidentNetwork;
  protected readonly parts: AgentSandboxParts;
  protected record: SandboxRecord;
  protected readonly link: AgentLink;
  private readonly idle: IdleWatch | undefined;
  /** Requests that reach no command, as connections to its ports. */
  private uses = 0;
  private readonly shells = new Map<number, OwnShell>();
  private ending: SandboxEnd | undefined;
  private stopping: Promise<SandboxEnd> | undefined;
  private overdue = false;
  /** Of a fork that has yet to go on; `over`: it does, or has ended. */
  private held: { readonly over: Promise<void>; end(): void } | undefined;
  leftSomething = false;
  /** Nobody wants to have its changes. */
  private unwanted: boolean;
  protected get nobodyWantsIt(): boolean {
    return this.unwanted;
  }
  private timer: NodeJS.Timeout | undefined;
  private readonly noteEnd: (end: SandboxEnd) => void;
  protected readonly noteReady: { resolve(): void; reject(error: Error): void };

  constructor(parts: AgentSandboxParts, features: ReadonlySet<Capability>, channel: AgentChannel, trees: CommandTrees) {
    this.parts = parts;
    this.record = parts.record;
    this.name = parts.record.name;
    this.backend = { name: parts.record.backend, features };
    const { record, places, spoolLimits } = parts;
    const { pausedAt, stoodMs, defaults, removeAtEnd = false } = record.resident!;
    this.unwanted = removeAtEnd;
    this.link = new AgentLink({
      name: record.name,
      channel,
      commands: places.commands,
      defaults,
      trees,
      spoolLimits,
      stoodMs,
      stoodSinceMs: pausedAt === undefined ? undefined : Date.parse(pausedAt),
      accounts: () => this.accountsState(),
      onWanted: () => this.wake(),
      onUsed: () => this.idle?.used(),
    });
    this.network = new ResidentNetwork({
      node: parts.network,
      record: () => this.record,
      refuseEnded: () => this.refuseEnded(),
      note: (network) => this.note({}, { network }),
    });
    this.idle = this.watchIdle();
    let resolve!: (end: SandboxEnd) => void;
    this.ended = new Promise((done) => {
      resolve = done;
    });
    this.noteEnd = resolve;
    let ready!: { resolve(): void; reject(error: Error): void };
    this.ready = new Promise((yes, no) => {
      ready = { resolve: yes, reject: no };
    });
    this.noteReady = ready;
    this.ready.catch(() => {});
    this.armTimer();
  }

  get state(): Sandbox['state'] {
    if (this.ending !== undefined) return 'ended';
    return this.isPaused ? 'paused' : 'running';
  }
  get end(): SandboxEnd | undefined {
    return this.ending;
  }
  get facts(): SandboxRecord {
    return this.record;
  }
  get files(): SandboxFiles {
    return this.link.files;
  }
  get runningCommands(): number {
    return this.link.running;
  }

  abstract pause(): Promise<PauseReport>;
  abstract resume(): Promise<void>;
  abstract whileStill<T>(work: (still: StandsStill) => Promise<T>): Promise<T>;
  abstract update(changes: LimitChanges): Promise<AllLimits>;
  abstract usage(options?: { readonly disk?: boolean }): Promise<SandboxUsage>;

  protected abstract get isPaused(): boolean;
  /** It stands still, and somebody wants something of it. */
  protected abstract wake(): void;
  /** Another text whenever its accounts may have changed; undefined: they have to be read each time. */
  protected accountsState(): string | undefined {
    return undefined;
  }
  /** Ends it at once, also when it stands still. */
  protected abstract kill(): void;
  /** It is to end, in a moment; no later than `timeMs`. */
  protected abstract prepareStop(timeMs: number): Promise<void>;
  /** Beside the agent. */
  protected abstract hasProcesses(): boolean | Promise<boolean>;
  /** It has ended: before its agent's link is told. */
  protected abstract whenEnded(): void;
  /** What runs, its mounts, its network. @throws then whoever reclaims tries again */
  protected abstract dismantle(): Promise<void>;
  /** Last of all: its name is anybody's. */
  protected abstract release(): void;

  leave(): void | Promise<void> {
    this.idle?.stop();
  }

  use<T>(work: () => Promise<T>): Promise<T> {
    return this.useAsItIs(async () => {
      this.refuseEnded();
      if (this.isPaused) await this.resume();
      return work();
    });
  }

  async useAsItIs<T>(work: () => Promise<T>): Promise<T> {
    this.uses++;
    try {
      return await work();
    } finally {
      this.uses--;
      this.idle?.used();
    }
  }

  takeMoment(): Promise<Moment> {
    const { folders } = this.parts;
    return this.useAsItIs(() => this.whenFree(() => tellingOfFullDisk(folders, () => this.takeMomentNow())));
  }

  protected takeMomentNow(): Promise<Moment> {
    return Promise.reject(unsupported(this.backend.name, 'fork-memory'));
  }

  async markReady(): Promise<void> {}

  async goOn(): Promise<void> {}

  protected get isHeld(): boolean {
    return this.held !== undefined;
  }

  /** It is a fork that stands still until `letGo`: it is in use, and what would have it go on waits. */
  protected hold(): void {
    let end!: () => void;
    const over = new Promise<void>((resolve) => {
      end = resolve;
    });
    this.held = { over, end };
  }

  protected letGo(): void {
    this.held?.end();
    this.held = undefined;
  }

  /** `work` when it is held no more, or has ended: it looks for that itself. */
  protected whenFree<T>(work: () => Promise<T>): Promise<T> {
    return this.held === undefined ? work() : this.held.over.then(work);
  }

  exec(spec: ExecSpec): Promise<KeptCommand> {
    return this.link.start(spec);
  }

  /** While the connection is open it is in use. */
  connect(port: number, { signal }: { readonly signal?: AbortSignal } = {}): Promise<Duplex> {
    return new Promise((resolve, reject) => {
      this.use(async () => {
        const connection = await this.link.connect(port, signal);
        const closed = once(connection, 'close').catch(() => {});
        resolve(connection);
        await closed;
      }).catch(reject);
    });
  }

  /** Whoever only looks does not use it. */
  watch(path: SandboxPath, options: WatchOptions = {}): Promise<FileWatch> {
    return this.link.watch(Buffer.from(path), options);
  }

  command(id: number): ExecHandle {
    const found = this.link.get(id);
    if (found === undefined) throw fail('RUNTIME_EXEC_NOT_FOUND', { name: this.name, id });
    return found;
  }

  commands(): KeptCommand[] {
    return this.link.list();
  }

  async openShell(options: ShellOptions = {}): Promise<ShellSession> {
    const shell = await OwnShell.open(this.link, options);
    this.shells.set(shell.id, shell);
    return shell;
  }

  shell(id: number): ShellSession {
    const found = this.shells.get(id);
    if (found === undefined) throw fail('RUNTIME_EXEC_NOT_FOUND', { name: this.name, id });
    return found;
  }

  stop({ timeMs = STOP_TIME_MS }: { readonly timeMs?: number } = {}): Promise<SandboxEnd> {
    this.noteStop();
    if (timeMs === 0) this.kill();
    this.stopping ??= this.stopIn(timeMs);
    return this.stopping;
  }

  async destroy(): Promise<void> {
    this.unwanted = true;
    // On record nothing changes: it goes with all the rest, and were we killed before that, nobody had an answer.
    if (this.ending === undefined) {
      this.record = { ...this.record, resident: { ...this.record.resident!, stopAsked: true } };
    }
    await this.stop({ timeMs: 0 });
  }

  /** Whoever comes after us shall know why it ended. */
  private noteStop(idledOut?: true): void {
    if (this.ending !== undefined || this.record.resident?.stopAsked === true) return;
    try {
      this.note({ stopAsked: true, idledOut });
    } catch {
      // On a full disk it ends all the same.
      this.record = { ...this.record, resident: { ...this.record.resident!, stopAsked: true, idledOut } };
    }
  }

  retag(tag: SandboxTag): void {
    this.note({ tag });
  }

  protected note(change: Partial<ResidentFacts>, also: Partial<SandboxRecord> = {}): void {
    // Its record is another one by then.
    if (this.ending !== undefined) return;
    const record = { ...this.record, ...also, resident: { ...this.record.resident!, ...change } };
    writeRecord(this.parts.places.record, record, false);
    this.record = record;
  }

  private watchIdle(): IdleWatch | undefined {
    const { idleMs, idleAction = 'stop' } = this.record.resident!;
    if (idleMs === undefined) return undefined;
    mkdirSync(this.parts.places.commands, { recursive: true, mode: 0o700 });
    return new IdleWatch({
      idleMs,
      marker: this.parts.places.commands,
      isInUse: () =>
        this.isHeld || this.uses > 0 || this.link.isInUse || [...this.shells.values()].some(({ isBusy }) => isBusy),
      isOff: () => this.state !== 'running',
      act: () => {
        if (idleAction === 'pause') return this.pause();
        this.noteStop(true);
        return this.stop();
      },
    });
  }

  protected refuseEnded(): void {
    const { ending, name } = this;
    if (ending !== undefined) throw fail('RUNTIME_SANDBOX_GONE', { name, reason: ending.detail, ended: ending.reason });
  }

  private async stopIn(timeMs: number): Promise<SandboxEnd> {
    await this.prepareStop(timeMs);
    const deadline = Date.now() + timeMs;
    if (this.ending === undefined && timeMs > 0 && (await this.hasProcesses())) {
      this.link.signalAll(SIGTERM);
      while (this.ending === undefined && (await this.hasProcesses()) && Date.now() < deadline) await delay(10);
    }
    if (this.ending === undefined) this.kill();
    return this.ended;
  }

  /** Its agent keeps the time; root inside can starve that, so it is kept here as well. */
  private armTimer(): void {
    const expiresAt = this.record.resident?.expiresAt;
    if (expiresAt === undefined || this.ending !== undefined) return;
    const leftMs = Date.parse(expiresAt) + OVERDUE_MS - Date.now();
    // setTimeout takes no more than 24 days.
    this.timer = setTimeout(
      () => {
        if (leftMs > MAX_TIMER_MS) return this.armTimer();
        this.overdue = true;
        this.kill();
      },
      Math.min(Math.max(0, leftMs), MAX_TIMER_MS),
    );
    this.timer.unref();
  }

  /** Why it ended, where that has nothing to do with how its agent did. `expired`: its agent says that its time was up. */
  protected knownEnd(expired: boolean): SandboxEnd | undefined {
    const { expiresAt, idledOut, stopAsked } = this.record.resident!;
    if (this.overdue || expired) return endNow('expired', `its time was up at ${expiresAt}`);
    if (idledOut === true) return endNow('idle', 'nobody had used it for as long as --idle says');
    if (stopAsked === true) return endNow('stopped', 'it was stopped');
    const { broken } = this.link;
    return broken === undefined ? undefined : endNow('failed', `its agent broke the protocol: ${broken}`);
  }

  protected hasEnded(end: SandboxEnd): void {
    if (this.ending !== undefined) return;
    this.ending = end;
    clearTimeout(this.timer);
    this.idle?.stop();
    this.letGo();
    this.whenEnded();
    const { detail: reason, reason: ended } = end;
    this.link.end(fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason, ended }), reason);
    this.undo(end).finally(() => {
      this.noteEnd(end);
      this.parts.onEnd?.(this);
    });
  }

  private async undo(end: SandboxEnd): Promise<void> {
    const { places, folders } = this.parts;
    try {
      await this.dismantle();
      if (this.unwanted) {
        await removeAside(places, asideOf(this.name, folders), this.record);
        rmSync(places.lock, { force: true });
      } else {
        this.record = keepEnded(this.record, places, end);
      }
    } catch {
      // It is on record as running under a lock that goes now: whoever reclaims tries again.
      this.leftSomething = true;
    }
    this.release();
  }
}

const SIGTERM = 15;
const MAX_TIMER_MS = 2 ** 31 - 1;

export function endNow(reason: EndReason, detail: string): SandboxEnd {
  return { reason, detail, at: new Date().toISOString() };
}
