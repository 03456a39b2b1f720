/** A sandbox that stays in a container of this machine: the keeper's child, in control groups, on a mount. */
import { failPoint, messageOf } from '#base';
import { cgroupTrees, keptChannel } from '../aether/agent-channel.ts';
import { commandGroupsOf, outOfMemoryCount } from '../aether/command-group.ts';
import { commandProcesses } from '../aether/freeze.ts';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import { allMembersOf, cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { backendNamed } from '../backend/choose-backend.ts';
import { fail } from '../errors.ts';
import { accountsState } from '../sandbox/accounts-state.ts';
import { dismantle } from '../sandbox/end-sandbox.ts';
import type { ResidentFacts } from '../sandbox/sandbox-record.ts';
import { featuresOf } from '../sandbox-api/backend-table.ts';
import type { Capability } from '../sandbox-api/capabilities.ts';
import type { AllLimits, LimitChanges } from '../sandbox-api/limits.ts';
import type { PauseReport, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { SandboxUsage } from '../sandbox-api/usage.ts';
import { AgentSandbox, type AgentSandboxParts, endNow } from './agent-sandbox.ts';
import type { StandsStill } from './node-sandbox.ts';
import { openForWriting } from './open-files.ts';
import { Pausing } from './pausing.ts';
import { startFailure } from './resident-launch.ts';
import { ResidentLimits } from './resident-limits.ts';
import { applyClass } from './service-class.ts';

export const OWN_FEATURES: ReadonlySet<Capability> = featuresOf('container');

/** Status of an agent whose time was up (runtime/agent/src/aether.rs). */
export const LIFETIME_OVER = 99;

export interface ResidentParts extends AgentSandboxParts {
  readonly keeper: KeeperChannel;
  readonly keptId: number;
}

export class ResidentSandbox extends AgentSandbox {
  private readonly keeper: KeeperChannel;
  private readonly keptId: number;
  private readonly limits: ResidentLimits;
  private readonly pausing: Pausing;

  constructor(parts: ResidentParts) {
    const { record, places, keeper, keptId } = parts;
    const groups = commandGroupsOf(record.id, record.resident?.class);
    const cgroups = cgroupsOf(record.id);
    const channel = keptChannel(keeper, keptId);
    super(parts, OWN_FEATURES, channel, cgroupTrees(groups, cgroups, channel));
    this.keeper = keeper;
    this.keptId = keptId;
    const host = {
      name: record.name,
      link: this.link,
      groups,
      cgroups,
      refuseEnded: () => this.refuseEnded(),
      note: (change: Partial<ResidentFacts>) => this.note(change),
    };
    this.pausing = new Pausing(host, record.resident!.pausedAt);
    this.limits = new ResidentLimits({
      places,
      record: () => this.record,
      noteLimits: (limits) => this.note({}, { limits }),
      enterGroup: (folder) => this.link.enterGroup(folder),
    });
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

  /** It ran before this process did; `pid`: its first process. */
  async takeUp(pid: number): Promise<void> {
    await this.hasStarted(pid, true);
    await this.link.reconcile();
    await this.pausing.takeUp();
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
      const groups = commandGroupsOf(this.record.id, this.record.resident?.class);
      const processes = groups === undefined ? [] : commandProcesses(groups);
      return work({ record: this.record, upper, openFiles: openForWriting(upper, processes), done, signal });
    });
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

  protected get isPaused(): boolean {
    return this.pausing.isPaused;
  }

  protected override accountsState(): string | undefined {
    return accountsState(this.parts.places.root);
  }

  protected wake(): void {
    this.pausing.wake();
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

  /** SIGKILL to its first process, and with it to all; also to those that stand still. */
  protected kill(): void {
    this.keeper.cancel(this.keptId);
    this.pausing.end();
  }

  /** What stands still gets no signal. What reads its changes has no use for what comes now. */
  protected async prepareStop(): Promise<void> {
    this.pausing.interrupt();
    await this.pausing.resume().catch(() => {});
  }

  protected hasProcesses(): boolean {
    const found = new Set(cgroupsOf(this.record.id).flatMap((group) => allMembersOf(group)));
    return found.size > 1;
  }

  protected whenEnded(): void {
    this.pausing.end();
  }

  private endOf(status: number): SandboxEnd {
    const signal = status & 0x7f;
    const known = this.knownEnd(status >> 8 === LIFETIME_OVER && signal === 0);
    if (known !== undefined) return known;
    if (signal !== 0) {
      if (outOfMemoryCount(cgroupsOf(this.record.id)) > 0 && this.link.ranOutOfMemory()) {
        return endNow('out-of-memory', 'memory ran out, and the kernel chose its agent');
      }
      return endNow('killed', `its agent was ended by signal ${signal}`);
    }
    return endNow('failed', `its agent exited with ${(status >> 8) & 0xff}`);
  }

  protected async dismantle(): Promise<void> {
    const { places, folders } = this.parts;
    failPoint('end-begun');
    const released = this.network.end().catch(() => {});
    await dismantle(this.record, places, folders, backendNamed(this.record.backend, folders.runDir));
    await released;
    failPoint('end-dismantled');
  }

  protected release(): void {
    this.keeper.forget(this.keptId);
  }
}
