/** One sandbox that stays: its agent while it runs, why it ended afterwards. What has to be undone is undone here, once. */
import { once } from 'node:events';
import { mkdirSync, rmSync } from 'node:fs';
import type { Duplex } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf } from '#base';
import { AgentLink } from '../aether/agent-link.ts';
import { commandGroupsOf, outOfMemoryCount } from '../aether/command-group.ts';
import { commandProcesses } from '../aether/freeze.ts';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import type { KeptCommand } from '../aether/kept-command.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import { OwnShell } from '../aether/shell-session.ts';
import { allMembersOf, cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { backendNamed } from '../backend/choose-backend.ts';
import { fail } from '../errors.ts';
import type { NodeNetwork } from '../network/node-network.ts';
import { dismantle, keepEnded, removeAside } from '../sandbox/end-sandbox.ts';
import { type ResidentFacts, type SandboxRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import { asideOf } from '../sandbox/sandboxes.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import type { Capability, Capable } from '../sandbox-api/capabilities.ts';
import type { ExecHandle, ExecSpec } from '../sandbox-api/exec.ts';
import type { SandboxFiles, SandboxPath } from '../sandbox-api/files.ts';
import type { AllLimits, LimitChanges } from '../sandbox-api/limits.ts';
import type { EndReason, PauseReport, Sandbox, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { ShellOptions, ShellSession } from '../sandbox-api/shell.ts';
import type { SandboxUsage } from '../sandbox-api/usage.ts';
import type { FileWatch, WatchOptions } from '../sandbox-api/watch.ts';
import { IdleWatch } from './idle-watch.ts';
import { type OpenFile, openForWriting } from './open-files.ts';
import { Pausing } from './pausing.ts';
import { startFailure } from './resident-launch.ts';
import { ResidentLimits } from './resident-limits.ts';
import { ResidentNetwork } from './resident-network.ts';
import { applyClass } from './service-class.ts';

export const OWN_FEATURES: ReadonlySet<Capability> = new Set<Capability>([
  'resident',
  'terminal',
  'sessions',
  'files',
  'ports',
  'pause',
  'fork',
  'classes',
  'cpu-limit',
  'memory-limit',
  'pids-limit',
  'io-limit',
  'disk-limit',
  'update',
  'usage',
  'network-policy',
]);

/** Status of an agent whose time was up (runtime/agent/src/aether.rs). */
const LIFETIME_OVER = 99;
const STOP_TIME_MS = 10_000;
/** What its agent has to end by itself when the time is up. */
const OVERDUE_MS = 3_000;

export interface ResidentParts {
  readonly record: SandboxRecord;
  readonly places: SandboxFolders;
  readonly folders: RuntimeFolders;
  readonly keeper: KeeperChannel;
  readonly keptId: number;
  readonly network: NodeNetwork;
  readonly spoolLimits?: SpoolLimits;
  /** Told when it has ended and all is undone. */
  readonly onEnd?: (sandbox: ResidentSandbox) => void;
  readonly onNote?: (text: string) => void;
}

/** Of a sandbox whose commands stand still. */
export interface StandsStill {
  readonly record: SandboxRecord;
  /** Its changes, as they are now. */
  readonly upper: string;
  /** Those of its files that are open for writing. */
  readonly openFiles: readonly OpenFile[];
  /** It may go on. */
  done(): void;
  /** It is being ended, and what is read from now on may be half done. */
  readonly signal: AbortSignal;
}

export class ResidentSandbox implements Sandbox {
  readonly name: string;
  readonly backend: Capable;
  readonly ended: Promise<SandboxEnd>;
  /** Its agent has answered. */
  readonly ready: Promise<void>;
  readonly network: ResidentNetwork;
  private readonly parts: ResidentParts;
  private record: SandboxRecord;
  private readonly link: AgentLink;
  private readonly limits: ResidentLimits;
  private readonly pausing: Pausing;
  private readonly idle: IdleWatch | undefined;
  /** Requests that reach no command, as connections to its ports. */
  private uses = 0;
  private readonly shells = new Map<number, OwnShell>();
  private ending: SandboxEnd | undefined;
  private stopping: Promise<SandboxEnd> | undefined;
  private overdue = false;
  /** It has ended, and not all of it could be undone. */
  leftSomething = false;
  /** Nobody wants to have its changes. */
  private unwanted = false;
  private timer: NodeJS.Timeout | undefined;
  private readonly noteEnd: (end: SandboxEnd) => void;
  private noteReady!: { resolve(): void; reject(error: Error): void };

  constructor(parts: ResidentParts) {
    this.parts = parts;
    this.record = parts.record;
    this.name = parts.record.name;
    this.backend = { name: parts.record.backend, features: OWN_FEATURES };
    const { record, places, keeper, keptId, spoolLimits } = parts;
    const { pausedAt, stoodMs } = record.resident!;
    const groups = commandGroupsOf(record.id);
    const cgroups = cgroupsOf(record.id);
    this.link = new AgentLink({
      name: record.name,
      keeper,
      keptId,
      commands: places.commands,
      defaults: record.resident!.defaults,
      groups,
      cgroups,
      spoolLimits,
      stoodMs,
      stoodSinceMs: pausedAt === undefined ? undefined : Date.parse(pausedAt),
      onWanted: () => this.pausing.wake(),
      onUsed: () => this.idle?.used(),
    });
    const host = {
      name: record.name,
      link: this.link,
      groups,
      cgroups,
      refuseEnded: () => this.refuseEnded(),
      note: (change: Partial<ResidentFacts>) => this.note(change),
    };
    this.pausing = new Pausing(host, pausedAt);
    this.limits = new ResidentLimits({
      places,
      record: () => this.record,
      noteLimits: (limits) => this.note({}, { limits }),
      enterGroup: (folder) => this.link.enterGroup(folder),
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
    this.ready = new Promise((yes, no) => {
      this.noteReady = { resolve: yes, reject: no };
    });
    this.ready.catch(() => {});
    this.armTimer();
    keeper.listen(keptId, {
      started: (pid) => void this.hasStarted(pid),
      ended: (status) => this.hasEnded(this.endOf(status)),
      failed: (error) => {
        const reason = startFailure(error, record.backend, places.bundle, parts.folders.runDir);
        this.noteReady.reject(reason);
        this.hasEnded(endNow('failed', messageOf(reason)));
      },
      frame: (kind, about, payload) => this.link.receive(kind, about, payload),
      lost: (error) => {
        this.noteReady.reject(error);
        this.hasEnded(endNow('lost', 'the process that kept it has died'));
      },
    });
  }

  get state(): Sandbox['state'] {
    if (this.ending !== undefined) return 'ended';
    return this.pausing.isPaused ? 'paused' : 'running';
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

  /** It ran before this process did; `pid`: its first process. */
  async takeUp(pid: number): Promise<void> {
    await this.hasStarted(pid, true);
    await this.link.reconcile();
    await this.pausing.takeUp();
  }

  /** It goes on, and is another process's. */
  leave(): void {
    this.idle?.stop();
  }

  pause(): Promise<PauseReport> {
    return this.pausing.pause();
  }

  resume(): Promise<void> {
    return this.pausing.resume();
  }

  /** `work` while no command of it moves; see `Pausing.whileStill`. */
  whileStill<T>(work: (still: StandsStill) => Promise<T>): Promise<T> {
    const { upper } = this.parts.places;
    return this.pausing.whileStill((done, signal) => {
      const groups = commandGroupsOf(this.record.id);
      const processes = groups === undefined ? [] : commandProcesses(groups);
      return work({ record: this.record, upper, openFiles: openForWriting(upper, processes), done, signal });
    });
  }

  /** While `work` goes on it is in use, and not paused when that begins. */
  async use<T>(work: () => Promise<T>): Promise<T> {
    this.uses++;
    try {
      this.refuseEnded();
      if (this.pausing.isPaused) await this.pausing.resume();
      return await work();
    } finally {
      this.uses--;
      this.idle?.used();
    }
  }

  /** While it runs. @returns the limits that hold then. @throws RUNTIME_LIMIT_*; then they are as they were */
  async update(changes: LimitChanges): Promise<AllLimits> {
    this.refuseEnded();
    try {
      return await this.limits.change(changes);
    } catch (error) {
      // It may have ended meanwhile, and its groups with it.
      this.refuseEnded();
      throw error;
    }
  }

  /** What it uses now, and has used so far. @throws RUNTIME_SANDBOX_GONE */
  async usage(options?: { readonly disk?: boolean }): Promise<SandboxUsage> {
    this.refuseEnded();
    const usage = await this.limits.usage(options);
    if (usage === undefined) throw fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: 'it is being ended' });
    return usage;
  }

  /** It ended while nobody looked. `status` as waitpid has it. */
  noteEnded(status: number): void {
    this.hasEnded(this.endOf(status));
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

  /** One that was opened here. @throws RUNTIME_EXEC_NOT_FOUND */
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

  /** Ends it at once; nothing of it stays. */
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

  private note(change: Partial<ResidentFacts>, also: Partial<SandboxRecord> = {}): void {
    // Its record is another one by then.
    if (this.ending !== undefined) return;
    const record = { ...this.record, ...also, resident: { ...this.record.resident!, ...change } };
    writeRecord(this.parts.places.record, record, false);
    this.record = record;
  }

  /** @param before It ran before this process did, and goes on with the network that the kernel has for it. */
  private async hasStarted(pid: number, before = false): Promise<void> {
    try {
      this.limits.begin();
      const { id, resident } = this.record;
      if ((resident?.class ?? 'ls') !== 'ls') applyClass(resident!.class!, pid, cgroupsOf(id));
      await this.network.begin(pid).catch((error) => {
        if (!before) throw error;
        this.parts.onNote?.(messageOf(error));
      });
      this.noteReady.resolve();
    } catch (error) {
      this.noteReady.reject(error as Error);
      this.kill();
    }
  }

  private watchIdle(): IdleWatch | undefined {
    const { idleMs, idleAction = 'stop' } = this.record.resident!;
    if (idleMs === undefined) return undefined;
    mkdirSync(this.parts.places.commands, { recursive: true, mode: 0o700 });
    return new IdleWatch({
      idleMs,
      marker: this.parts.places.commands,
      isInUse: () => this.uses > 0 || this.link.isInUse || [...this.shells.values()].some(({ isBusy }) => isBusy),
      isOff: () => this.state !== 'running',
      act: () => {
        if (idleAction === 'pause') return this.pause();
        this.noteStop(true);
        return this.stop();
      },
    });
  }

  private refuseEnded(): void {
    if (this.ending !== undefined) throw fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: this.ending.detail });
  }

  /** SIGKILL to its first process, and with it to all; also to those that stand still. */
  private kill(): void {
    this.parts.keeper.cancel(this.parts.keptId);
    this.pausing.end();
  }

  private async stopIn(timeMs: number): Promise<SandboxEnd> {
    // What stands still gets no signal. What reads its changes has no use for what comes now.
    this.pausing.interrupt();
    await this.pausing.resume().catch(() => {});
    const deadline = Date.now() + timeMs;
    if (this.ending === undefined && timeMs > 0 && this.hasProcesses()) {
      this.link.signalAll(SIGTERM);
      while (this.ending === undefined && this.hasProcesses() && Date.now() < deadline) await delay(10);
    }
    if (this.ending === undefined) this.kill();
    return this.ended;
  }

  /** Beside the agent. */
  private hasProcesses(): boolean {
    const found = new Set(cgroupsOf(this.record.id).flatMap((group) => allMembersOf(group)));
    return found.size > 1;
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

  private endOf(status: number): SandboxEnd {
    const expiresAt = this.record.resident?.expiresAt;
    if (this.overdue) return endNow('expired', `its time was up at ${expiresAt}`);
    if (status >> 8 === LIFETIME_OVER && (status & 0x7f) === 0)
      return endNow('expired', `its time was up at ${expiresAt}`);
    if (this.record.resident?.idledOut === true) return endNow('idle', 'nobody had used it for as long as --idle says');
    if (this.record.resident?.stopAsked === true) return endNow('stopped', 'it was stopped');
    const { broken } = this.link;
    if (broken !== undefined) return endNow('failed', `its agent broke the protocol: ${broken}`);
    const signal = status & 0x7f;
    if (signal !== 0) {
      if (outOfMemoryCount(cgroupsOf(this.record.id)) > 0 && this.link.ranOutOfMemory()) {
        return endNow('out-of-memory', 'memory ran out, and the kernel chose its agent');
      }
      return endNow('killed', `its agent was ended by signal ${signal}`);
    }
    return endNow('failed', `its agent exited with ${(status >> 8) & 0xff}`);
  }

  private hasEnded(end: SandboxEnd): void {
    if (this.ending !== undefined) return;
    this.ending = end;
    clearTimeout(this.timer);
    this.idle?.stop();
    this.pausing.end();
    this.link.end(fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: end.detail }), end.detail);
    this.undo(end).finally(() => {
      this.noteEnd(end);
      this.parts.onEnd?.(this);
    });
  }

  private async undo(end: SandboxEnd): Promise<void> {
    const { places, folders, keeper, keptId } = this.parts;
    try {
      failPoint('end-begun');
      const released = this.network.end().catch(() => {});
      await dismantle(this.record, places, folders, backendNamed(this.record.backend, folders.runDir));
      await released;
      failPoint('end-dismantled');
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
    keeper.forget(keptId);
  }
}

const SIGTERM = 15;
const MAX_TIMER_MS = 2 ** 31 - 1;

export function endNow(reason: EndReason, detail: string): SandboxEnd {
  return { reason, detail, at: new Date().toISOString() };
}
