/** One sandbox that stays: its agent while it runs, why it ended afterwards. What has to be undone is undone here, once. */
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf } from '#base';
import { AgentLink } from '../aether/agent-link.ts';
import { commandGroupsOf, outOfMemoryCount } from '../aether/command-group.ts';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import type { KeptCommand } from '../aether/kept-command.ts';
import type { SpoolLimits } from '../aether/output-spool.ts';
import { OwnShell } from '../aether/shell-session.ts';
import { cgroupsOf, membersOf } from '../backend/cgroup-cleanup.ts';
import { OWN_BACKEND, openOwnBackend } from '../backend/own-backend.ts';
import { fail } from '../errors.ts';
import { dismantle, markKept } from '../sandbox/end-sandbox.ts';
import { type SandboxRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import type { Capability } from '../sandbox-api/capabilities.ts';
import type { ExecHandle, ExecSpec } from '../sandbox-api/exec.ts';
import type { SandboxFiles } from '../sandbox-api/files.ts';
import type { EndReason, Sandbox, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { ShellOptions, ShellSession } from '../sandbox-api/shell.ts';

export const OWN_FEATURES: ReadonlySet<Capability> = new Set<Capability>([
  'resident',
  'terminal',
  'sessions',
  'files',
  'memory-limit',
  'pids-limit',
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
  readonly spoolLimits?: SpoolLimits;
  /** Told when it has ended and all is undone. */
  readonly onEnd?: (sandbox: ResidentSandbox) => void;
}

export class ResidentSandbox implements Sandbox {
  readonly name: string;
  readonly backend = { name: OWN_BACKEND, features: OWN_FEATURES };
  readonly ended: Promise<SandboxEnd>;
  /** Its agent has answered. */
  readonly ready: Promise<void>;
  private readonly parts: ResidentParts;
  private record: SandboxRecord;
  private readonly link: AgentLink;
  private readonly shells = new Map<number, OwnShell>();
  private ending: SandboxEnd | undefined;
  private stopping: Promise<SandboxEnd> | undefined;
  private overdue = false;
  private timer: NodeJS.Timeout | undefined;
  private readonly noteEnd: (end: SandboxEnd) => void;
  private noteReady!: { resolve(): void; reject(error: Error): void };

  constructor(parts: ResidentParts) {
    this.parts = parts;
    this.record = parts.record;
    this.name = parts.record.name;
    const { record, places, keeper, keptId, spoolLimits } = parts;
    this.link = new AgentLink({
      name: record.name,
      keeper,
      keptId,
      commands: places.commands,
      defaults: record.resident!.defaults,
      groups: commandGroupsOf(record.id),
      cgroups: cgroupsOf(record.id),
      spoolLimits,
    });
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
      started: () => this.noteReady.resolve(),
      ended: (status) => this.hasEnded(this.endOf(status)),
      failed: (error) => {
        this.noteReady.reject(error);
        this.hasEnded(endNow('failed', messageOf(error)));
      },
      frame: (kind, about, payload) => this.link.receive(kind, about, payload),
      lost: (error) => {
        this.noteReady.reject(error);
        this.hasEnded(endNow('lost', 'the process that kept it has died'));
      },
    });
  }

  get state(): Sandbox['state'] {
    return this.ending === undefined ? 'running' : 'ended';
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

  /** It ran before this process did. */
  async resume(): Promise<void> {
    this.noteReady.resolve();
    await this.link.reconcile();
  }

  /** It ended while nobody looked. `status` as waitpid has it. */
  noteEnded(status: number): void {
    this.hasEnded(this.endOf(status));
  }

  exec(spec: ExecSpec): Promise<KeptCommand> {
    return this.link.start(spec);
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
    if (timeMs === 0) this.parts.keeper.cancel(this.parts.keptId);
    this.stopping ??= this.stopIn(timeMs);
    return this.stopping;
  }

  /** Whoever comes after us shall know why it ended. */
  private noteStop(): void {
    if (this.ending !== undefined || this.record.resident?.stopAsked === true) return;
    this.record = { ...this.record, resident: { ...this.record.resident!, stopAsked: true } };
    try {
      writeRecord(this.parts.places.record, this.record, false);
    } catch {
      // On a full disk it ends all the same.
    }
  }

  private async stopIn(timeMs: number): Promise<SandboxEnd> {
    const deadline = Date.now() + timeMs;
    if (this.ending === undefined && timeMs > 0 && this.hasProcesses()) {
      this.link.signalAll(SIGTERM);
      while (this.ending === undefined && this.hasProcesses() && Date.now() < deadline) await delay(10);
    }
    if (this.ending === undefined) this.parts.keeper.cancel(this.parts.keptId);
    return this.ended;
  }

  /** Beside the agent. */
  private hasProcesses(): boolean {
    const found = new Set(cgroupsOf(this.record.id).flatMap((group) => membersOf(group)));
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
        this.parts.keeper.cancel(this.parts.keptId);
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
    this.link.end(fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: end.detail }), end.detail);
    this.undo(end).finally(() => {
      this.noteEnd(end);
      this.parts.onEnd?.(this);
    });
  }

  private async undo(end: SandboxEnd): Promise<void> {
    const { places, folders, keeper, keptId } = this.parts;
    failPoint('end-begun');
    try {
      await dismantle(this.record, places, folders, openOwnBackend(undefined));
      failPoint('end-dismantled');
      this.record = markKept(this.record, places, undefined, end);
    } catch {
      // It is on record as running under a lock that goes now: the next command tries again.
    }
    keeper.forget(keptId);
  }
}

const SIGTERM = 15;
const MAX_TIMER_MS = 2 ** 31 - 1;

export function endNow(reason: EndReason, detail: string): SandboxEnd {
  return { reason, detail, at: new Date().toISOString() };
}
