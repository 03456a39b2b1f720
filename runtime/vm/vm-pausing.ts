/**
 * A virtual machine that is paused: its memory and state in a folder of its sandbox, no process. The record says what is meant, in this order: a pause is on
 * record before anything is done; it has happened when the snapshot is whole (and a process that is still there is ended by whoever comes). A resume is on
 * record before the machine's processors run again: from then on its disk may change, and the snapshot is of no use any more.
 */
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint } from '#base';
import type { AgentLink } from '../aether/agent-link.ts';
import { fail } from '../errors.ts';
import type { ResidentFacts } from '../sandbox/sandbox-record.ts';
import type { PauseReport } from '../sandbox-api/sandbox.ts';
import type { GuestLink } from './guest/guest-link.ts';
import { guestWork } from './guest/guest-order.ts';
import { readMachineRecord } from './qemu/machine-process.ts';
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

  constructor(host: VmPausingHost) {
    this.host = host;
    this.pausedAt = host.pausedAt;
  }

  get isPaused(): boolean {
    return this.pausedAt !== undefined;
  }

  /** Resolves when its memory is on disk and its process gone. When that fails it runs on. @throws VM_SNAPSHOT, RUNTIME_SANDBOX_GONE */
  pause(): Promise<PauseReport> {
    return this.inTurn(async () => {
      const { host } = this;
      host.refuseEnded();
      const vm = host.vm();
      if (this.pausedAt !== undefined || vm === undefined) {
        return this.report ?? { pausedAt: this.pausedAt ?? '', beforeBytes: 0, afterBytes: 0 };
      }
      const pausedAt = new Date().toISOString();
      const folder = snapshotFolder(host.snapshots);
      host.note({ pausedAt });
      failPoint('pause-recorded');
      try {
        rmSync(folder, { recursive: true, force: true });
        await host.link.stand();
        await host.guest.settled();
        this.spec = readMachineRecord(host.machine.folder)?.spec;
        if (this.spec === undefined) throw fail('VM_SNAPSHOT', { id: host.name, reason: 'its record has gone' });
        // Its own record goes with its process.
        writeFileSync(specPath(host.snapshots), JSON.stringify(this.spec));
        await vm.snapshot(folder);
      } catch (error) {
        await vm.cont().catch(() => {});
        host.link.go();
        host.note({ pausedAt: undefined });
        throw error;
      }
      failPoint('vm-snapshot-taken');
      this.pausedAt = pausedAt;
      const beforeBytes = this.spec.memoryBytes;
      host.guest.disconnect();
      host.leaves();
      await vm.kill();
      rmSync(host.machine.memoryFile, { force: true });
      failPoint('vm-paused');
      this.report = { pausedAt, beforeBytes, afterBytes: 0 };
      return this.report;
    });
  }

  /** Of one that is not paused: nothing. @throws VM_START, RUNTIME_SANDBOX_GONE */
  resume(): Promise<void> {
    return this.inTurn(async () => {
      const { host } = this;
      host.refuseEnded();
      if (this.pausedAt === undefined) return;
      const folder = snapshotFolder(host.snapshots);
      const spec = this.spec ?? readSpec(host.snapshots);
      if (spec === undefined) throw fail('VM_START', { id: host.name, reason: 'its record has gone' });
      rmSync(host.machine.memoryFile, { force: true });
      const vm = await host.driver.restore(spec, folder);
      failPoint('vm-restored');
      host.note({ pausedAt: undefined, stoodMs: Math.round(host.link.stoodMs()) });
      this.pausedAt = undefined;
      this.report = undefined;
      host.comes(vm);
      await vm.cont();
      host.guest.reconnect();
      // Time went on, and what is random must be nobody else's.
      await Promise.all([host.guest.work(guestWork.clock()), host.guest.work(guestWork.entropy())]).catch(() => {});
      host.link.go();
      this.forget();
      failPoint('vm-resumed');
    });
  }

  /** `work` while nothing is asked of its guest and nothing else becomes of it. One that is paused runs meanwhile, and is paused again. */
  async still(work: () => Promise<void>): Promise<void> {
    const wasPaused = this.isPaused;
    if (wasPaused) await this.resume();
    await this.inTurn(async () => {
      this.host.refuseEnded();
      await this.host.link.stand();
      try {
        await work();
      } finally {
        this.host.link.go();
      }
    });
    if (wasPaused) await this.pause();
  }

  /** Somebody wants something of it. */
  wake(): void {
    this.waking ??= this.resume()
      .catch(() => {})
      .finally(() => {
        this.waking = undefined;
      });
  }

  /** What is under way is over. */
  async settle(): Promise<void> {
    await this.turn;
  }

  forget(): void {
    rmSync(snapshotFolder(this.host.snapshots), { recursive: true, force: true });
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work);
    this.turn = done.catch(() => {});
    return done;
  }
}
