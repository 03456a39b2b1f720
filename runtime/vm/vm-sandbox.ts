/**
 * A sandbox that stays in a virtual machine of its own: the same agent behind the guest's link, commands in the guest's control groups, changes on a disk
 * that this process serves. The machine outlives this process; its guest waits for its disk until the next one is there.
 */
import { rmSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf } from '#base';
import { sandboxHierarchies } from '../backend/sandbox-cgroups.ts';
import { sandboxUsage } from '../backend/sandbox-usage.ts';
import { fail } from '../errors.ts';
import { AgentSandbox, type AgentSandboxParts, endNow } from '../node/agent-sandbox.ts';
import type { StandsStill } from '../node/node-sandbox.ts';
import { LIFETIME_OVER } from '../node/resident-sandbox.ts';
import { dismantle } from '../sandbox/end-sandbox.ts';
import { featuresOf } from '../sandbox-api/backend-table.ts';
import type { Capability } from '../sandbox-api/capabilities.ts';
import { type AllLimits, changedLimits, type LimitChanges } from '../sandbox-api/limits.ts';
import type { PauseReport, SandboxEnd } from '../sandbox-api/sandbox.ts';
import type { SandboxUsage } from '../sandbox-api/usage.ts';
import { attachUpper, checkUpper, exportUpper, forgetUpper } from './disk/read-upper.ts';
import type { ServedDisks } from './disk/upper-disk.ts';
import { becomeFork, type ForkIdentity } from './fork/begin-fork.ts';
import { type Moment, removeMoments } from './fork/moment.ts';
import { type MomentSource, takeMoment } from './fork/take-moment.ts';
import { thawCommands } from './guest/freeze-commands.ts';
import { GUEST_COMMANDS, guestTrees, guestUsage } from './guest/guest-groups.ts';
import { GuestLink } from './guest/guest-link.ts';
import { guestWork } from './guest/guest-order.ts';
import { limitMachine } from './machine-groups.ts';
import { vmBackend } from './vm-backend.ts';
import type { RunningVm, VmEnd } from './vm-driver.ts';
import type { SandboxVmDriver } from './vm-drivers.ts';
import { VmPausing } from './vm-pausing.ts';
import type { VmPlaces } from './vm-places.ts';

export const MICROVM_FEATURES: ReadonlySet<Capability> = featuresOf('microvm');

/** Until its guest has put away its disk. */
const POWER_OFF_MS = 20_000;
const BOOT_MS = 300_000;
/** It writes first what is in memory alone. */
const FREEZE_MS = 120_000;

export interface VmSandboxParts extends AgentSandboxParts {
  readonly driver: SandboxVmDriver;
  readonly machine: VmPlaces;
  /** Undefined: it is paused, and no process of it is there. */
  readonly vm: RunningVm | undefined;
  readonly disks: ServedDisks;
  /** Of one that is new: what its guest is to be. */
  readonly order?: Buffer;
  /** Of one that was made of a moment of another. */
  readonly fork?: ForkIdentity;
  /** Its name is anybody's. */
  readonly release: () => void;
}

export class VmSandbox extends AgentSandbox {
  private readonly vmParts: VmSandboxParts;
  private readonly guest: GuestLink;
  private readonly pausing: VmPausing;
  private vm: RunningVm | undefined;
  private status: number | undefined;
  private broken: string | undefined;
  private changing: Promise<unknown> = Promise.resolve();
  private killing = false;
  private isStarted = false;
  /** Copies of its changes, one after the other. */
  private packing: Promise<unknown> = Promise.resolve();
  private readonly over = new AbortController();
  private readonly bootTimer: NodeJS.Timeout | undefined;

  constructor(parts: VmSandboxParts) {
    const { driver, machine } = parts;
    const guest = new GuestLink(driver.agentChannel(machine.folder, machine.agentSocket), {
      started: (made) => this?.hasStarted(made),
      failed: (error) =>
        this?.hasFailed(fail('RUNTIME_START_FAILED', { runtime: 'microvm', reason: error.message }, error)),
      ended: (status) => {
        if (this !== undefined) this.status = status;
      },
      frame: (kind, about, payload) => this?.link.receive(kind, about, payload),
      broken: (problem) => this?.hasBroken(problem),
    });
    super(parts, MICROVM_FEATURES, guest, guestTrees(guest));
    this.vmParts = parts;
    this.guest = guest;
    this.pausing = new VmPausing({
      name: this.name,
      driver: parts.driver,
      machine: parts.machine,
      snapshots: parts.places.folder,
      link: this.link,
      guest,
      pausedAt: parts.vm === undefined ? parts.record.resident!.pausedAt : undefined,
      vm: () => this.vm,
      leaves: () => {
        this.vm = undefined;
        // Its end, which nobody hears of now, was what was waited for.
        if (this.killing) this.hasStopped();
      },
      comes: (vm) => this.watchMachine(vm),
      refuseEnded: () => this.refuseEnded(),
      note: (change) => this.note(change),
    });
    if (parts.vm !== undefined) this.watchMachine(parts.vm);
    if (parts.order !== undefined) {
      guest.launch(parts.order);
      this.bootTimer = setTimeout(() => {
        const said = this.vm?.console.recent().toString('latin1').trim().slice(-500) ?? '';
        const reason = `its guest has not come to life in ${BOOT_MS / 1000} s${said === '' ? '' : `; it said: ${said}`}`;
        this.hasFailed(fail('RUNTIME_START_FAILED', { runtime: 'microvm', reason }));
      }, BOOT_MS).unref();
    }
    if (parts.fork !== undefined) {
      this.isStarted = true;
      this.hold();
      this.link.stand().catch(() => {});
      this.become(parts.vm!, parts.fork).then(
        () => this.noteReady.resolve(),
        (error) =>
          this.hasFailed(fail('RUNTIME_START_FAILED', { runtime: 'microvm', reason: messageOf(error) }, error)),
      );
    }
  }

  private async become(vm: RunningVm, own: ForkIdentity): Promise<void> {
    await vm.cont();
    await becomeFork(this.guest, this.link, own);
    failPoint('fork-become');
  }

  override async markReady(): Promise<void> {
    this.refuseEnded();
    if (!this.isHeld || this.record.vm!.isReady === true) return;
    this.note({ stoodMs: Math.round(this.link.stoodMs()) }, { vm: { ...this.record.vm!, isReady: true } });
  }

  override async goOn(): Promise<void> {
    await this.markReady();
    if (!this.isHeld) return;
    await Promise.all([this.guest.work(guestWork.clock()), thawCommands(this.guest)]);
    this.link.go();
    this.letGo();
  }

  protected override async takeMomentNow(): Promise<Moment> {
    const { places, disks, driver } = this.vmParts;
    this.refuseEnded();
    const { vm, mountPoints, network } = this.record;
    const { isReady: _isReady, ...size } = vm!;
    const source: MomentSource = {
      name: this.name,
      folder: places.folder,
      commands: places.commands,
      disks: disks.named,
      halted: (save) => this.pausing.halted(save),
      stoodMs: () => this.link.stoodMs(),
      signal: this.over.signal,
    };
    const networkNumber = network?.mode === 'policy' ? network.number : undefined;
    return takeMoment(source, { vm: size, mountPoints, networkNumber }, (snapshot) => driver.forgetSnapshot(snapshot));
  }

  /** It ran before this process did, or is paused. What its guest answers to this is not waited for: it may hang. */
  async takeUp(): Promise<void> {
    this.noteReady.resolve();
    await removeMoments(this.vmParts.places.folder).catch(() => {});
    if (this.vm === undefined) return;
    if ((await this.vm.state()) === 'stopped') await this.vm.cont();
    // It was to be paused, which has come to nothing.
    this.link.go();
    if (this.record.resident?.pausedAt !== undefined) this.note({ pausedAt: undefined });
    // Whoever was reading its disk, or making forks of it, may have been killed at it.
    for (const work of [guestWork.thaw(), guestWork.clock(), guestWork.entropy()])
      this.guest.work(work).catch(() => {});
    thawCommands(this.guest).catch(() => {});
    this.link.reconcile().catch((error) => this.parts.onNote?.(`${this.name}: ${messageOf(error)}`));
  }

  pause(): Promise<PauseReport> {
    return this.whenFree(() => this.pausing.pause());
  }

  resume(): Promise<void> {
    return this.pausing.resume();
  }

  /**
   * `work` on a copy of its changes as they were at one moment: its disk stands still only while that is made. A paused one runs for that long.
   * Which files were open for writing nobody has looked up.
   */
  whileStill<T>(work: (still: StandsStill) => Promise<T>): Promise<T> {
    return this.whenFree(() => {
      const packed = this.packing.then(() => this.packNow(work));
      this.packing = packed.catch(() => {});
      return packed;
    });
  }

  private async packNow<T>(work: (still: StandsStill) => Promise<T>): Promise<T> {
    const { places, disks } = this.vmParts;
    const { signal } = this.over;
    try {
      await this.pausing.still(async () => {
        try {
          await this.guest.work(guestWork.freeze(), FREEZE_MS);
          failPoint('pack-frozen');
          await exportUpper(disks.upper.disk, places, signal);
        } finally {
          await this.guest.work(guestWork.thaw()).catch(() => {});
        }
      });
      this.refuseEnded();
      await checkUpper(places, signal);
      const upper = attachUpper(places, this.record.mountPoints);
      return await work({ record: this.record, upper, openFiles: [], done() {}, signal });
    } finally {
      await forgetUpper(places);
    }
  }

  /** Of those that a machine can be given while it runs: processors and processes. */
  update(changes: LimitChanges): Promise<AllLimits> {
    const changed = this.changing.then(() => this.updateNow(changes));
    this.changing = changed.catch(() => {});
    return changed;
  }

  private async updateNow(changes: LimitChanges): Promise<AllLimits> {
    this.refuseEnded();
    const before = this.record.limits ?? {};
    const after = changedLimits(before, changes);
    for (const limit of Object.keys(after) as (keyof AllLimits)[]) {
      if (limit === 'cpus' || limit === 'pids' || before[limit] === after[limit]) continue;
      throw fail('RUNTIME_LIMIT_REFUSED', { limit, reason: 'a virtual machine keeps the size that it was made with' });
    }
    const machineCpus = this.record.vm!.cpus;
    if (after.cpus !== undefined && after.cpus > machineCpus) {
      throw fail('RUNTIME_LIMIT_REFUSED', {
        limit: 'cpus',
        reason: `the virtual machine has ${machineCpus} processors`,
      });
    }
    this.note({}, { limits: after });
    try {
      await this.use(() => this.applyLimits(after));
    } catch (error) {
      this.note({}, { limits: before });
      await this.applyLimits(before).catch(() => {});
      this.refuseEnded();
      throw error;
    }
    return after;
  }

  private async applyLimits({ cpus, pids }: AllLimits): Promise<void> {
    limitMachine(this.record.id, { cpus });
    await this.guest.work(guestWork.write(`${GUEST_COMMANDS}/pids.max`, String(pids ?? 'max')));
  }

  /** Processor time and memory are the machine's as this one sees it; processes and what reaches the disk the guest's. */
  async usage(): Promise<SandboxUsage> {
    this.refuseEnded();
    const host = sandboxUsage(this.record.id, sandboxHierarchies());
    if (host === undefined) throw fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: 'it is being ended' });
    const limits = this.record.limits ?? {};
    if (this.isPaused) return { ...host, pids: 0, limits };
    const inside = await guestUsage(this.guest);
    return {
      ...host,
      // With its agent.
      pids: inside.pids + 1,
      memory: { ...host.memory, outOfMemory: inside.outOfMemory },
      io: inside.io,
      limits,
    };
  }

  protected get isPaused(): boolean {
    return this.pausing.isPaused;
  }

  protected wake(): void {
    this.pausing.wake();
  }

  private hasStarted(made: readonly string[]): void {
    // A guest may say so as often as it likes.
    if (this.isStarted || this.record.vm!.isReady === true) return;
    this.isStarted = true;
    clearTimeout(this.bootTimer);
    // What it was told is of before it booted.
    this.guest.work(guestWork.clock()).catch(() => {});
    const { mountPoints } = this.record;
    const { cwd } = this.record.resident!.defaults;
    this.prepare(made, mountPoints, cwd).then(
      () => this.noteReady.resolve(),
      (error: Error) => {
        this.noteReady.reject(error);
        this.kill();
      },
    );
  }

  private async prepare(made: readonly string[], before: readonly string[], cwd: string): Promise<void> {
    await this.link.files.mkdir(cwd, { parents: true });
    const mountPoints = made.length > 0 ? made : before;
    this.note({}, { mountPoints, vm: { ...this.record.vm!, isReady: true } });
  }

  private hasFailed(error: Error): void {
    this.noteReady.reject(error);
    this.hasEnded(endNow('failed', messageOf(error)));
  }

  private hasBroken(problem: string): void {
    this.broken = problem;
    this.hasEnded(endNow('failed', `its guest broke the protocol: ${problem}`));
  }

  private watchMachine(vm: RunningVm): void {
    this.vm = vm;
    vm.ended.then(
      (end) => {
        // Another process has its place, or none: it is paused.
        if (this.vm === vm) this.machineEnded(end);
      },
      () => {},
    );
  }

  private machineEnded(end: VmEnd): void {
    const ended = this.endOf(end);
    this.noteReady.reject(fail('RUNTIME_START_FAILED', { runtime: 'microvm', reason: ended.detail }));
    this.hasEnded(ended);
  }

  private endOf({ reason, detail }: VmEnd): SandboxEnd {
    const { status } = this;
    const signal = status === undefined ? 0 : status & 0x7f;
    const known = this.knownEnd(status !== undefined && status >> 8 === LIFETIME_OVER && signal === 0);
    if (known !== undefined) return known;
    if (this.broken !== undefined) return endNow('failed', `its guest broke the protocol: ${this.broken}`);
    if (status === undefined) {
      if (reason === 'guest') return endNow('failed', `its virtual machine has switched itself off (${detail})`);
      return endNow('killed', `its virtual machine has gone: ${detail}`);
    }
    if (signal !== 0) return endNow('killed', `its agent was ended by signal ${signal}`);
    return endNow('failed', `its agent exited with ${(status >> 8) & 0xff}`);
  }

  /** The guest ends its commands and puts its disk away; should it not, the machine is switched off. */
  protected kill(): void {
    if (this.killing) return;
    this.killing = true;
    const { vm } = this;
    if (vm === undefined) {
      this.hasStopped();
      return;
    }
    const off = () => vm.kill().catch(() => {});
    if (this.nobodyWantsIt || this.pausing.isSaving) {
      off();
      return;
    }
    // One that stands still hears nothing.
    vm.cont().catch(() => {});
    this.guest.cancel();
    const timer = setTimeout(off, POWER_OFF_MS);
    timer.unref();
    vm.ended.finally(() => clearTimeout(timer)).catch(() => {});
  }

  private hasStopped(): void {
    this.hasEnded(this.knownEnd(false) ?? endNow('stopped', 'it was stopped'));
  }

  protected async prepareStop(timeMs: number): Promise<void> {
    await Promise.race([this.pausing.settle(), delay(timeMs, undefined, { ref: false })]);
  }

  protected async hasProcesses(): Promise<boolean> {
    // What is on disk gets no signal.
    if (this.vm === undefined || this.isPaused) return false;
    try {
      const answered = guestUsage(this.guest).then(({ pids }) => pids > 0);
      return await Promise.race([answered, delay(POWER_OFF_MS, false, { ref: false })]);
    } catch {
      return false;
    }
  }

  protected whenEnded(): void {
    clearTimeout(this.bootTimer);
    this.over.abort(fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: 'it was ended meanwhile' }));
    this.guest.close();
  }

  protected async dismantle(): Promise<void> {
    const { places, folders, disks } = this.vmParts;
    failPoint('end-begun');
    await this.vm?.kill().catch(() => {});
    // Of a resume that was under way.
    await this.pausing.settle();
    await this.vm?.kill().catch(() => {});
    await disks.close();
    await this.packing;
    const released = this.network.end().catch(() => {});
    await dismantle(this.record, places, folders, vmBackend(folders.runDir));
    await released;
    this.pausing.forget();
    if (this.nobodyWantsIt) rmSync(places.bundle, { recursive: true, force: true });
    failPoint('end-dismantled');
  }

  protected release(): void {
    this.vmParts.release();
  }

  /** Nothing of the disk is left in this process; the machine waits for the next one. */
  override async leave(): Promise<void> {
    await super.leave();
    this.guest.close();
    this.vm?.detach?.();
    await this.vmParts.disks.leave();
  }
}
