/**
 * A moment of a microVM that runs: nothing is asked of it, its commands and then its processors stand still, its memory and devices are stored, its
 * disks are held as they are. Then it goes on, while the disks are copied. Whatever fails, it goes on as before, and nothing of the moment stays.
 */
import { randomUUID } from 'node:crypto';
import { mkdir, rm } from 'node:fs/promises';
import { failPoint } from '#base';
import type { StackedDisk } from '#ublk-daemon';
import { copyRunning } from '../../aether/copy-commands.ts';
import { fail } from '../../errors.ts';
import { readMachineRecord } from '../qemu/machine-process.ts';
import type { RunningVm } from '../vm-driver.ts';
import { commandsOf, diskLayerOf, type Moment, machineOf, newMomentFolder } from './moment.ts';

export interface MomentSource {
  readonly name: string;
  /** Of the sandbox. */
  readonly folder: string;
  readonly commands: string;
  /** By the names that its machine has them by. */
  readonly disks: readonly { readonly name: string; readonly disk: StackedDisk }[];
  /** `save` while its commands and processors stand still, and nothing is asked of it or heard; they go on when that has ended. */
  halted<T>(save: (vm: RunningVm) => Promise<T>): Promise<T>;
  stoodMs(): number;
  readonly signal: AbortSignal;
}

type Facts = Pick<Moment, 'networkNumber' | 'vm' | 'mountPoints'>;

/** @throws VM_SNAPSHOT, VM_GUEST_SILENT, RUNTIME_PAUSE_STUCK, RUNTIME_SANDBOX_GONE */
export async function takeMoment(
  source: MomentSource,
  facts: Facts,
  forget: (snapshot: string) => void,
): Promise<Moment> {
  const { name, disks, signal } = source;
  const folder = newMomentFolder(source.folder);
  const discard = async () => {
    forget(machineOf(folder));
    await rm(folder, { recursive: true, force: true });
  };
  const copies: Promise<unknown>[] = [];
  try {
    await mkdir(folder, { mode: 0o700 });
    const taken = await source.halted(async (vm) => {
      const spec = readMachineRecord(vm.folder)?.spec;
      if (spec === undefined) throw fail('VM_SNAPSHOT', { id: name, folder, reason: 'its record has gone' });
      await vm.snapshot(machineOf(folder), { signal });
      failPoint('moment-saved');
      const times = { atMs: Date.now(), stoodMs: source.stoodMs() };
      // What it has told is on record before it may tell more.
      await copyRunning(source.commands, commandsOf(folder));
      await Promise.all(disks.map((one) => held(one, folder, copies, signal)));
      return { spec, ...times };
    });
    await Promise.all(copies);
    failPoint('moment-taken');
    return { ...facts, ...taken, folder, discard };
  } catch (error) {
    // They write there.
    await Promise.allSettled(copies);
    await discard().catch(() => {});
    throw error;
  }
}

/** Resolves when what is written to it from now on is not in its copy, which goes on. */
function held(
  { name, disk }: MomentSource['disks'][number],
  folder: string,
  copies: Promise<unknown>[],
  signal: AbortSignal,
): Promise<void> {
  return new Promise((resolve, reject) => {
    // It is written to again before its copy is there.
    const wish = { uuid: randomUUID(), quiet: false, signal, onFrozen: () => resolve() };
    const copy = disk.commitAbove(0, diskLayerOf(folder, name), wish);
    copy.catch(reject);
    copies.push(copy);
  });
}
