/**
 * What a sandbox in a virtual machine has changed, as a folder of this machine: its disk copied into a file, holes left out, and mounted. The disk itself is
 * read through an index that is frozen at one moment, so that it goes on meanwhile.
 */
import { rmSync } from 'node:fs';
import { join } from 'node:path';
import { exportRaw, openDisk, type StackedDisk } from '#ublk-daemon';
import { attachDiskImage, detachDiskImage } from '../../disk/disk-image.ts';
import { removeMountPoints } from '../../sandbox/mount-points.ts';
import type { SandboxRecord } from '../../sandbox/sandbox-record.ts';
import type { SandboxFolders } from '../../sandbox/state-folders.ts';
import { upperDiskFolder } from './upper-disk.ts';

/** Whose file system nobody writes to meanwhile. */
export async function exportUpper(disk: StackedDisk, places: SandboxFolders, signal?: AbortSignal): Promise<void> {
  await forgetUpper(places);
  await exportRaw(disk, places.diskImage, signal);
}

/** @param mountPoints What only mounts needed is no change. @returns the folder */
export function attachUpper(places: SandboxFolders, mountPoints: readonly string[]): string {
  attachDiskImage(places);
  const upper = join(places.disk, 'upper');
  removeMountPoints(upper, mountPoints);
  return upper;
}

/** Twice is no error. @throws while somebody uses it */
export async function forgetUpper(places: SandboxFolders): Promise<void> {
  if (!(await detachDiskImage(places))) throw new Error(`${places.disk} is in use`);
  rmSync(places.diskImage, { force: true });
}

/** Of one that has ended. */
export async function withUpperOf<T>(
  record: Pick<SandboxRecord, 'mountPoints'>,
  places: SandboxFolders,
  work: (upper: string) => Promise<T>,
): Promise<T> {
  const { disk } = await openDisk(upperDiskFolder(places.folder));
  try {
    await exportUpper(disk, places);
    return await work(attachUpper(places, record.mountPoints));
  } finally {
    await disk.close();
    await forgetUpper(places);
  }
}
