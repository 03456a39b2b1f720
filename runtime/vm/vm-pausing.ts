/**
 * A virtual machine that is paused: its memory and state in a folder of its sandbox, no process. The record says what is meant, in this order: a pause is on
 * record before anything is done; it has happened when the snapshot is whole (and a process that is still there is ended by whoever comes). A resume is on
 * record before the machine's processors run again: from then on its disk may change, and the snapshot is of no use any more.
 */
import { existsSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint } from '#base';
import type { AgentLink } from '../aether/agent-link.ts';
import { fail } from '../errors.ts';
import type { ResidentFacts } from '../sandbox/sandbox-record.ts';
import type { PauseReport } from '../sandbox-api/sandbox.ts';
import { freezeCommands, thawCommands } from './guest/freeze-commands.ts';
import { answeredWithin, type GuestLink } from './guest/guest-link.ts';
import { guestWork } from './guest/guest-order.ts';
import { readMachineRecord } from './qemu/machine-process.ts';
import { RECORD } from './snapshot/snapshot-folder.ts';
import type { RunningVm, VmSpec } from './vm-driver.ts';
import type { SandboxVmDriver } from './vm-drivers.ts';
import type { VmPlaces } from './vm-places.ts';

export interface VmPausingHost {
  readonly name: string;
  readonly driver: SandboxVmDriver;
  readonly machine: VmPlaces;
  /** Folder of the sandbox. */
  readonly snapshots: string;
  readonly link: AgentLink;
  readonly guest: GuestLink;
  /** Of one that has no process. */
  readonly pausedAt: string | undefined;
  vm(): RunningVm | undefined;
  /** Its process ends, and the sandbox does not. */
  leaves(): void;
  comes(vm: RunningVm): void;
  refuseEnded(): void;
  note(change: Partial<ResidentFacts>): void;
}

export function snapshotFolder(sandboxFolder: string): string {
  return join(sandboxFolder, 'vm-paused');
}

/** Whole, so that it can be resumed. */
export function hasSnapshot(sandboxFolder: string): boolean {
  return existsSync(join(snapshotFolder(sandboxFolder), RECORD));
}

/** Nobody resumes it any more, however far this comes. */
export function forgetSnapshot(sandboxFolder: string): void {
  const folder = snapshotFolder(sandboxFolder);
  rmSync(join(folder, RECORD), { force: true });
  for (const one of [folder, `${folder}.part`]) rmSync(one, { recursive: true, force: true });
}

function specPath(sandboxFolder: string): string {
  return join(sandboxFolder, 'vm-machine.json');
}

function readSpec(sandboxFolder: string): VmSpec | undefined {
  try {
    return JSON.parse(readFileSync(specPath(sandboxFolder), 'utf8')) as VmSpec;
  } catch {
    return undefined;
  }
}

export class VmPausing {
  private readonly host: VmPausingHost;
  private turn: Promise<unknown> = Promise.resolve();
  private pausedAt: string | undefined;
  private report: PauseReport | undefined;
  private spec: VmSpec | undefined;
  private waking: Promise<void> | undefined;
  private saving = false;

  constructor(host: VmPausingHost) {
    this.host = host;
    this.pausedAt = host.pausedAt;
  }

  get isPaused(): boolean {
    return this.pausedAt !== undefined;
  }

  /** Its memory is being written: its processors are not to be let run. */
  get isSaving(): boolean {
    return this.saving;
  }

  /** Resolves when its memory is on disk and its process gone. When that fails it runs on. @throws VM_SNAPSHOT, VM_GUEST_SILENT, RUNTIME_SANDBOX_GONE */
  pause(): Promise<PauseReport> {
    return this.inTurn(() => this.pauseNow());
  }

  private async pauseNow(): Promise<PauseReport> {
    const { host } = this;
    host.refuseEnded();
    const vm = host.vm();
    if (this.pausedAt !== undefined || vm === undefined) {
      return this.report ?? { pausedAt: this.pausedAt ?? '', beforeBytes: 0, afterBytes: 0 };
    }
    const pausedAt = new Date().toISOString();
    const folder = snapshotFolder(host.snapshots);
    // Before the record says that it is paused: an older one is of a disk that has changed since.
    this.forget();
    this.saving = true;
    try {
      host.note({ pausedAt });
      failPoint('pause-recorded');
      await this.stand();
      await host.guest.settled();
      this.spec = readMachineRecord(host.machine.folder)?.spec;
      if (this.spec === undefined) throw fail('VM_SNAPSHOT', { id: host.name, folder, reason: 'its record has gone' });
      // Its own record goes with its process.
      writeFileSync(specPath(host.snapshots), JSON.stringify(this.spec));
      await vm.snapshot(folder);
      host.refuseEnded();
    } catch (error) {
      this.saving = false;
      await this.goOn(vm);
      throw error;
    }
    failPoint('vm-snapshot-taken');
    this.pausedAt = pausedAt;
    const beforeBytes = this.spec.memoryBytes;
    host.guest.disconnect();
    host.leaves();
    await vm.kill().finally(() => {
      this.saving = false;
    });
    rmSync(host.machine.memoryFile, { force: true });
    failPoint('vm-paused');
    this.report = { pausedAt, beforeBytes, afterBytes: 0 };
    return this.report;
  }

  /** After a pause that came to nothing. */
  private async goOn(vm: RunningVm): Promise<void> {
    const { host } = this;
    await vm.cont().catch(() => {});
    host.guest.work(guestWork.clock()).catch(() => {});
    host.link.go();
    try {
      host.note({ pausedAt: undefined });
    } catch {
      // On a full disk. Without a whole snapshot whoever comes next finds that it runs.
    }
    this.forget();
  }

  private async stand(): Promise<void> {
    await answeredWithin(this.host.link.stand());
  }

  /** Of one that is not paused: nothing. @throws VM_START, RUNTIME_SANDBOX_GONE */
  resume(): Promise<void> {
    return this.inTurn(() => this.resumeNow());
  }

  private async resumeNow(): Promise<void> {
    const { host } = this;
    host.refuseEnded();
    if (this.pausedAt === undefined) return;
    const folder = snapshotFolder(host.snapshots);
    const spec = this.spec ?? readSpec(host.snapshots);
    if (spec === undefined) throw fail('VM_START', { id: host.name, reason: 'its record has gone' });
    rmSync(host.machine.memoryFile, { force: true });
    const vm = await host.driver.restore(spec, folder);
    failPoint('vm-restored');
    try {
      host.refuseEnded();
      host.note({ pausedAt: undefined, stoodMs: Math.round(host.link.stoodMs()) });
    } catch (error) {
      // It has not run: it is paused as before, or has ended.
      await vm.kill().catch(() => {});
      throw error;
    }
    this.pausedAt = undefined;
    this.report = undefined;
    host.comes(vm);
    try {
      await vm.cont();
    } catch (error) {
      // It may have run: there is nothing to go back to.
      await vm.kill().catch(() => {});
      throw error;
    }
    host.guest.reconnect();
    // Time went on, and what is random must be nobody else's.
    await Promise.all([host.guest.work(guestWork.clock()), host.guest.work(guestWork.entropy())]).catch(() => {});
    host.link.go();
    this.forget();
    failPoint('vm-resumed');
  }

  /** `work` while nothing is asked of its guest and nothing else becomes of it. One that is paused runs meanwhile, and is paused again. */
  still(work: () => Promise<void>): Promise<void> {
    return this.inTurn(async () => {
      this.host.refuseEnded();
      const wasPaused = this.isPaused;
      if (wasPaused) await this.resumeNow();
      try {
        await this.stand();
        await work();
      } finally {
        this.host.link.go();
        if (wasPaused && this.host.vm() !== undefined) await this.pauseNow();
      }
    });
  }

  /** `save` while its commands, and in the end its processors, stand still as well: they do when `save` has stored their state. They go on when it has ended. */
  async halted<T>(save: (vm: RunningVm) => Promise<T>): Promise<T> {
    const { host } = this;
    let saved!: T;
    await this.still(async () => {
      const vm = host.vm();
      if (vm === undefined)
        throw fail('RUNTIME_SANDBOX_GONE', { name: host.name, reason: 'its machine is being ended' });
      await freezeCommands(host.guest, host.name);
      this.saving = true;
      try {
        await host.guest.settled();
        // What its agent tells then is on record when all that was before is stored.
        host.guest.holdBack();
        saved = await save(vm);
        host.refuseEnded();
      } finally {
        host.guest.hear();
        this.saving = false;
        await vm.cont().catch(() => {});
        await thawCommands(host.guest).catch(() => {});
        host.guest.work(guestWork.clock()).catch(() => {});
      }
    });
    return saved;
  }

  /** Somebody wants something of it, and is told when it cannot be had. */
  wake(): void {
    this.waking ??= this.resume()
      .catch((error: Error) => this.host.link.refuse(error))
      .finally(() => {
        this.waking = undefined;
      });
  }

  /** What is under way is over. */
  async settle(): Promise<void> {
    await this.turn;
  }

  forget(): void {
    forgetSnapshot(this.host.snapshots);
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work);
    this.turn = done.catch(() => {});
    return done;
  }
}
