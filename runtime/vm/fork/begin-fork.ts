/**
 * A machine out of a moment of another: its memory is that one's, its disks, its network and its name are its own. Its commands stand still when it comes,
 * so nothing in it has run before it is told that it is another one, and that nothing of what was random is any more.
 */
import type { AgentLink } from '../../aether/agent-link.ts';
import { fail } from '../../errors.ts';
import type { GuestLink } from '../guest/guest-link.ts';
import { type GuestMessage, guestWork } from '../guest/guest-order.ts';
import type { RunningVm, VmDriver, VmSpec } from '../vm-driver.ts';
import { type Moment, machineOf } from './moment.ts';

/** What its guest is told to be. */
export interface ForkIdentity {
  readonly hostname: string;
  /** For its kernel, in place of the network that it knows; empty: it has none. */
  readonly network: readonly GuestMessage[];
  /** 0: without end. */
  readonly lifetimeMs: number;
}

type OwnSpec = Pick<
  VmSpec,
  'id' | 'folder' | 'memoryFile' | 'drives' | 'network' | 'ports' | 'cgroups' | 'serviceClass'
>;

/** It stands still. @throws VM_START, VM_SNAPSHOT_DAMAGED */
export function restoreMoment(
  driver: Pick<VmDriver, 'restore'>,
  { spec, folder }: Moment,
  own: OwnSpec,
): Promise<RunningVm> {
  if (spec === undefined) throw fail('VM_START', { id: own.id, reason: 'the moment is that of a full machine' });
  // Those of the same names: layers are where they are now, disks its own.
  const drives = spec.drives.map((drive) => {
    const same = own.drives.find(({ id }) => id === drive.id);
    if (same === undefined) throw fail('VM_START', { id: own.id, reason: `there is no drive ${drive.id} for it` });
    return { ...drive, source: same.source };
  });
  return driver.restore({ ...spec, ...own, drives }, machineOf(folder), { memory: memoryOf(spec) });
}

/** Reported pages are punched out of the memory's file, which has to be its own for that; else all forks share one. */
export function memoryOf({ balloon }: Pick<VmSpec, 'balloon'>): 'copied' | 'private' {
  return balloon?.freePageReporting === true ? 'copied' : 'private';
}

/** Its agent answers then; its commands stand still. @throws VM_GUEST_SILENT, GuestFailure, what the link was closed with */
export async function becomeFork(guest: GuestLink, link: AgentLink, own: ForkIdentity): Promise<void> {
  const told = [guestWork.entropy(), guestWork.clock(), guestWork.hostName(own.hostname)];
  if (own.network.length > 0) told.push(guestWork.network(own.network));
  await Promise.all(told.map((work) => guest.work(work)));
  link.setLifetime(own.lifetimeMs);
  await link.reconcile();
}
