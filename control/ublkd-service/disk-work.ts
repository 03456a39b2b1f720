/**
 * Work on a disk of this machine, by whoever has it: this process where nobody does, else the block service that has it attached. Opening is
 * tried first, so that there is no moment between asking and doing.
 */
import { DsecError, isDsecError } from '#base';
import {
  DiskTable,
  disksFolder,
  type OpenDisk,
  type OpenDiskOptions,
  openNamedDisk,
  removeDisk,
  ublkDaemonErrors,
} from '#ublk-daemon';
import { fail } from '../errors.ts';
import { type DiskServiceClient, serviceOf } from './client.ts';
import { serviceFolders } from './folders.ts';

export interface DiskWork<T> {
  here(opened: OpenDisk): Promise<T>;
  there(service: DiskServiceClient): Promise<T>;
}

export async function onDisk<T>(
  name: string,
  { here, there }: DiskWork<T>,
  { signal, ...options }: OpenDiskOptions & { readonly signal?: AbortSignal } = {},
): Promise<T> {
  let opened: OpenDisk;
  try {
    opened = await openNamedDisk(name, options);
  } catch (error) {
    if (!isDsecError(error) || error.code !== 'DISK_BUSY') throw error;
    const found = await serviceOf(name, disksFolder(), signal);
    if (found === undefined) throw error;
    return there(found.client);
  }
  try {
    return await here(opened);
  } finally {
    await opened.disk.close();
  }
}

/** An attached one is named as such, and stays. @throws UBLKD_REMOVE_ATTACHED */
export async function removeUnattached(name: string): Promise<void> {
  const at = await attachedAt(name);
  if (at !== undefined) throw fail('UBLKD_REMOVE_ATTACHED', { name, at });
  try {
    await removeDisk(name);
  } catch (error) {
    if (!isDsecError(error) || error.code !== 'DISK_BUSY') throw error;
    const found = await serviceOf(name, disksFolder());
    if (found === undefined) throw error;
    throw fail('UBLKD_REMOVE_ATTACHED', { name, at: found.disk.at }, error);
  }
}

/** What lies beyond a smaller size is gone: not while a device of it waits for a service. @throws UBLKD_SHRINK */
export async function refuseShrinkAttached(name: string): Promise<void> {
  if ((await attachedAt(name)) !== undefined) {
    throw new DsecError('UBLKD_SHRINK', ublkDaemonErrors.UBLKD_SHRINK, { name });
  }
}

/** By the table: also while no service runs, when users of a device wait for the next one. */
async function attachedAt(name: string): Promise<string | undefined> {
  const rows = await new DiskTable(serviceFolders().stateDir).read();
  return rows.find((row) => row.kind === 'disk' && row.name === name)?.at;
}
