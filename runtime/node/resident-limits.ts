/**
 * The limits of one sandbox that stays: put in force when its agent runs, changed while it runs, and what of them is used. The record has
 * them before they are in force, so that a process that comes later puts in force what is on record.
 */
import { existsSync } from 'node:fs';
import { failPoint } from '#base';
import { applyLimits, madeCommandGroups, makeCommandGroups } from '../backend/command-limits.ts';
import { CONTROLLERS, type Controller } from '../backend/limit-writes.ts';
import { sandboxHierarchies } from '../backend/sandbox-cgroups.ts';
import { sandboxUsage } from '../backend/sandbox-usage.ts';
import { blockDeviceOf, sandboxDevice } from '../disk/block-device.ts';
import { changeDisk, countUpper, diskUsage } from '../disk/sandbox-disk.ts';
import type { SandboxRecord } from '../sandbox/sandbox-record.ts';
import type { SandboxFolders } from '../sandbox/state-folders.ts';
import { type AllLimits, changedLimits, IO_LIMITS, type LimitChanges } from '../sandbox-api/limits.ts';
import type { SandboxUsage } from '../sandbox-api/usage.ts';

export interface LimitedParts {
  readonly places: SandboxFolders;
  record(): SandboxRecord;
  /** On disk when it returns. */
  noteLimits(limits: AllLimits): void;
  /** Commands from now on enter it. */
  enterGroup(folder: string): void;
}

/** Which limits a controller holds. */
const HELD_BY: Readonly<Record<Controller, readonly (keyof AllLimits)[]>> = {
  cpu: ['cpus'],
  memory: ['memoryBytes', 'memorySwapBytes'],
  pids: ['pids'],
  io: IO_LIMITS,
};

export class ResidentLimits {
  private readonly parts: LimitedParts;
  private changing: Promise<unknown> = Promise.resolve();

  constructor(parts: LimitedParts) {
    this.parts = parts;
  }

  /** Its agent runs; it may have run before this process did. Then what is on record is put in force again: a change may have been half done. */
  begin(): void {
    const { id, limits = {} } = this.parts.record();
    const before = madeCommandGroups(id);
    for (const folder of before ?? makeCommandGroups(id, limits, this.device(limits))) this.parts.enterGroup(folder);
    if (before === undefined) return;
    const { places } = this.parts;
    const device = blockDeviceOf(existsSync(places.disk) ? places.disk : places.folder);
    // Whatever is changed from now on comes after it.
    this.changing = applyLimits(id, limits, device).catch(() => {});
  }

  /** @returns those that hold then. @throws RUNTIME_LIMIT, RUNTIME_LIMIT_REFUSED, RUNTIME_LIMIT_UNAVAILABLE; then they are as they were */
  change(changes: LimitChanges): Promise<AllLimits> {
    const changed = this.changing.then(() => this.changeNow(changes));
    this.changing = changed.catch(() => {});
    return changed;
  }

  private async changeNow(changes: LimitChanges): Promise<AllLimits> {
    const { places } = this.parts;
    const { id, disk, limits: before = {} } = this.parts.record();
    const after = changedLimits(before, changes);
    const touched = CONTROLLERS.filter((controller) =>
      HELD_BY[controller].some((name) => before[name] !== after[name]),
    );
    const apply = (limits: AllLimits) => applyLimits(id, limits, this.device({ ...before, ...after }), touched);
    this.parts.noteLimits(after);
    failPoint('limits-recorded');
    try {
      await apply(after);
      failPoint('limits-applied');
      await changeDisk(disk, places, before, after);
    } catch (error) {
      this.parts.noteLimits(before);
      try {
        await apply(before);
      } catch {
        // What could not be tightened may not be loosened either; what is on record is put in force again later.
      }
      throw error;
    }
    return after;
  }

  /** Undefined where nothing of it is left. `disk`: counted file by file where nothing else counts it. */
  async usage({ disk: counted = false }: { readonly disk?: boolean } = {}): Promise<SandboxUsage | undefined> {
    const { places } = this.parts;
    const { id, disk, limits = {} } = this.parts.record();
    const used = diskUsage(disk, places) ?? (counted ? await countUpper(places) : undefined);
    const found = sandboxUsage(id, sandboxHierarchies());
    return found && { ...found, limits, disk: used };
  }

  private device(limits: AllLimits): string | undefined {
    return sandboxDevice(limits, this.parts.places);
  }
}
