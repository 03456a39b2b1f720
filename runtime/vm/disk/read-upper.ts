/**
 * What a sandbox in a virtual machine has changed, as a folder of this machine: its disk copied into a file, holes left out, and mounted. The disk itself is
 * read through an index that is frozen at one moment, so that it goes on meanwhile.
 */
import { execFile } from 'node:child_process';
import { lstatSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { exportRaw, openDisk, type StackedDisk } from '#ublk-daemon';
import { attachDiskImage, detachDiskImage, findTool } from '../../disk/disk-image.ts';
import { fail } from '../../errors.ts';
import { removeMountPoints } from '../../sandbox/mount-points.ts';
import type { SandboxRecord } from '../../sandbox/sandbox-record.ts';
import type { SandboxFolders } from '../../sandbox/state-folders.ts';
import { upperDiskFolder } from './upper-disk.ts';

const execFileAsync = promisify(execFile);
/** Of e2fsck's exit status: below it all is well, or was put right. */
const NOT_CORRECTED = 4;

/** Whose file system nobody writes to meanwhile. */
export async function exportUpper(disk: StackedDisk, places: SandboxFolders, signal?: AbortSignal): Promise<void> {
  await forgetUpper(places);
  await exportRaw(disk, places.diskImage, signal);
}

/**
 * A guest may have written anything; this machine's kernel mounts only what e2fsck finds whole. What an end at any moment leaves (a journal) it puts
 * right in the copy. @throws RUNTIME_DISK
 */
export async function checkUpper(
  { diskImage }: Pick<SandboxFolders, 'diskImage'>,
  signal?: AbortSignal,
): Promise<void> {
  const refuse = (reason: string, cause?: unknown) => fail('RUNTIME_DISK', { path: diskImage, reason }, cause);
  const e2fsck = findTool('e2fsck');
  if (e2fsck === undefined) throw refuse('e2fsck is missing: apt-get install e2fsprogs');
  try {
    await execFileAsync(e2fsck, ['-p', '-f', diskImage], { signal });
  } catch (error) {
    const { code, stdout } = error as { code?: unknown; stdout?: string };
    if (typeof code === 'number' && code < NOT_CORRECTED) return;
    signal?.throwIfAborted();
    const said = stdout?.trim().split('\n').at(-1) ?? '';
    throw refuse(
      `the guest has left a file system that is damaged${said === '' ? '' : `: ${said.slice(0, 200)}`}`,
      error,
    );
  }
}

/**
 * Whatever a guest's root has put on its disk: a link in the folder's place would lead to files of this machine.
 * @param mountPoints What only mounts needed is no change. @returns the folder
 * @throws RUNTIME_DISK
 */
export function attachUpper(places: SandboxFolders, mountPoints: readonly string[]): string {
  attachDiskImage(places);
  const upper = join(places.disk, 'upper');
  if (lstatSync(upper, { throwIfNoEntry: false })?.isDirectory() !== true) {
    throw fail('RUNTIME_DISK', { path: places.diskImage, reason: 'the guest has left no folder /upper on it' });
  }
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
    await checkUpper(places);
    return await work(attachUpper(places, record.mountPoints));
  } finally {
    await disk.close();
    await forgetUpper(places);
  }
}
