/**
 * Work on a disk of this machine, by whoever has it: this process where nobody does, else the block service that has it attached. Opening is
 * tried first, so that there is no moment between asking and doing.
 */
import { isDsecError } from '#base';
import { disksFolder, type OpenDisk, type OpenDiskOptions, openNamedDisk, removeDisk } from '#ublk-daemon';
import { fail } from '../errors.ts';
import { type DiskServiceClient, serviceOf } from './client.ts';

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
  try {
    await removeDisk(name);
  } catch (error) {
    if (!isDsecError(error) || error.code !== 'DISK_BUSY') throw error;
    const found = await serviceOf(name, disksFolder());
    if (found === undefined) throw error;
    throw fail('UBLKD_REMOVE_ATTACHED', { name, at: found.disk.at }, error);
  }
}
