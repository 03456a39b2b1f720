/**
 * The limit on what a sandbox changes on its disk: a project quota where the file system of the state folder keeps them, else an image of
 * its own (disk-image.ts). Without a limit there is nothing of either.
 *
 * Which of the two is on record before anything is made; whoever finds the record can undo it. The limit of a sandbox that was
 * kept stays until it is removed: what it changed is what is counted.
 */
import { execFile } from 'node:child_process';
import { randomInt } from 'node:crypto';
import { chmodSync, existsSync, mkdirSync } from 'node:fs';
import { promisify } from 'node:util';
import { messageOf } from '#base';
import {
  CAPABILITY,
  dropEffective,
  limitProject,
  mountsAt,
  type ProjectUsage,
  projectUsage,
  readMountInfo,
  setProject,
} from '#linux';
import { fail } from '../errors.ts';
import type { SandboxFolders } from '../sandbox/state-folders.ts';
import type { DiskLimits } from '../sandbox-api/limits.ts';
import type { DiskUsage } from '../sandbox-api/usage.ts';
import { holdsPath } from './block-device.ts';
import {
  attachDiskImage,
  detachDiskImage,
  diskImageUsage,
  findTool,
  growDiskImage,
  makeDiskImage,
} from './disk-image.ts';

const execFileAsync = promisify(execFile);

export type DiskFacts =
  | { readonly way: 'image' }
  /** `project`: of the file system's quotas. */
  | { readonly way: 'quota'; readonly project: number };

/** What holds disk limits in `folder`: the way, or why there is none. */
export function diskWay(folder: string): { readonly way?: DiskFacts['way']; readonly detail: string } {
  const row = holdsPath(folder);
  const options = row?.superOptions.split(',') ?? [];
  if (options.some((option) => option === 'prjquota' || option === 'pquota')) {
    try {
      projectUsage(folder, 0);
      return { way: 'quota', detail: `project quotas of ${row!.type}` };
    } catch {
      // Mounted with them, and the kernel keeps none.
    }
  }
  const missing = ['mkfs.ext4', 'resize2fs'].filter((name) => findTool(name) === undefined);
  if (missing.length > 0)
    return { detail: `no project quotas, and no ${missing.join(', ')}: apt-get install e2fsprogs` };
  return { way: 'image', detail: `no project quotas on ${row?.type ?? 'its file system'}: an ext4 image a sandbox` };
}

/** Numbers that nobody gives by hand. */
const PROJECTS = [0x4000_0000, 0x7fff_ffff] as const;

/** For the record. @throws RUNTIME_LIMIT_UNAVAILABLE */
export function planDisk({ diskBytes }: DiskLimits, stateDir: string): DiskFacts | undefined {
  if (diskBytes === undefined) return undefined;
  mkdirSync(stateDir, { recursive: true, mode: 0o755 });
  const { way, detail } = diskWay(stateDir);
  if (way === undefined) throw fail('RUNTIME_LIMIT_UNAVAILABLE', { limit: 'diskBytes', reason: detail });
  if (way === 'image') return { way };
  for (let attempt = 0; ; attempt++) {
    const project = randomInt(...PROJECTS);
    const { usedBytes, usedInodes, limitBytes, limitInodes } = usageOf(stateDir, project);
    const isFree = usedBytes + usedInodes + limitBytes + limitInodes === 0;
    if (isFree || attempt === 100) return { way, project };
  }
}

/** One that no file has ever been of is not known. */
function usageOf(folder: string, project: number): ProjectUsage {
  try {
    return projectUsage(folder, project);
  } catch {
    return { usedBytes: 0, usedInodes: 0, limitBytes: 0, limitInodes: 0 };
  }
}

/** upper, work, four that OverlayFS makes in that, what it keeps there of a removed file, and places to mount at that an image may lack. */
const OWN_INODES = 16;

function limitTo(project: number, places: SandboxFolders, { diskBytes = 0, inodes }: DiskLimits): void {
  limitProject(places.folder, project, diskBytes, inodes === undefined ? 0 : inodes + OWN_INODES);
}

/** Before anything is in the upper. @throws RUNTIME_LIMIT_UNAVAILABLE, RUNTIME_DISK */
export async function makeDisk(disk: DiskFacts | undefined, places: SandboxFolders, limits: DiskLimits): Promise<void> {
  if (disk === undefined) return;
  if (disk.way === 'image') return makeDiskImage(places, limits);
  // OverlayFS writes to the upper as whoever mounted it, and whoever has this is above ext4's quotas. For as long as this process lives: it needs it for nothing.
  dropEffective(CAPABILITY.SYS_RESOURCE);
  try {
    limitTo(disk.project, places, limits);
    for (const [folder, mode] of [
      [places.upper, 0o755],
      [places.work, 0o700],
    ] as const) {
      mkdirSync(folder, { mode });
      chmodSync(folder, mode);
      setProject(folder, disk.project);
    }
  } catch (error) {
    throw fail('RUNTIME_DISK', { path: places.folder, reason: messageOf(error) }, error);
  }
}

/** What was made is there again, for who reads the upper of one that has ended. @throws RUNTIME_DISK */
export function attachDisk(disk: DiskFacts | undefined, places: SandboxFolders): void {
  if (disk?.way === 'image') attachDiskImage(places);
}

/** The upper stays. Twice is no error. */
export async function detachDisk(disk: DiskFacts | undefined, places: SandboxFolders): Promise<void> {
  if (disk?.way === 'image') await detachDiskImage(places);
}

/** Before the sandbox's folder is removed. @throws when it is in use */
export async function forgetDisk(disk: DiskFacts | undefined, places: SandboxFolders): Promise<void> {
  if (existsSync(places.disk) && !(await detachDiskImage(places))) throw new Error(`${places.disk} is in use`);
  // What is left over after a crash is no more than a number that nothing counts for.
  if (disk?.way !== 'quota') return;
  try {
    limitProject(places.folder, disk.project, 0, 0);
  } catch {
    // No quotas are kept any more, and none of this one.
  }
}

/** While it runs. @throws RUNTIME_LIMIT_REFUSED */
export async function changeDisk(
  disk: DiskFacts | undefined,
  places: SandboxFolders,
  before: DiskLimits,
  after: DiskLimits,
): Promise<void> {
  if (before.diskBytes === after.diskBytes && before.inodes === after.inodes) return;
  const refuse = (limit: string, reason: string) => fail('RUNTIME_LIMIT_REFUSED', { limit, reason });
  if (disk === undefined) throw refuse('diskBytes', 'it has to be there when the sandbox is created');
  if (disk.way === 'image') {
    if (after.diskBytes === undefined) throw refuse('diskBytes', 'a disk that is an image always has a size');
    if (before.inodes !== after.inodes) throw refuse('inodes', 'an ext4 image has the number that it was made with');
    return growDiskImage(places, after);
  }
  limitTo(disk.project, places, after);
}

/** Undefined where nothing counts it. */
export function diskUsage(disk: DiskFacts | undefined, places: SandboxFolders): DiskUsage | undefined {
  if (disk === undefined) return undefined;
  if (disk.way === 'image') return mountsAt(places.disk).length > 0 ? diskImageUsage(places) : undefined;
  const { usedBytes, usedInodes, limitBytes, limitInodes } = usageOf(places.folder, disk.project);
  return {
    usedBytes,
    usedInodes: Math.max(0, usedInodes - OWN_INODES),
    limitBytes: limitBytes === 0 ? undefined : limitBytes,
    limitInodes: limitInodes === 0 ? undefined : limitInodes - OWN_INODES,
  };
}

/** Of kept sandboxes: whether somebody who read the upper was killed at it. */
export function isAttached(disk: DiskFacts | undefined, places: SandboxFolders): boolean {
  return disk?.way === 'image' && mountsAt(places.disk, readMountInfo()).length > 0;
}

const COUNT_TIME_MS = 60_000;

/** Of an upper that nothing counts: file by file, by a process that gives way to others. @throws RUNTIME_DISK */
export async function countUpper(places: SandboxFolders): Promise<DiskUsage> {
  const count = async (...how: string[]) => {
    const args = ['-n', '19', 'du', '--summarize', '--one-file-system', ...how, '--', places.upper];
    const { stdout } = await execFileAsync('nice', args, { timeout: COUNT_TIME_MS });
    return Number(/^\d+/.exec(stdout)?.[0]);
  };
  try {
    return { usedBytes: await count('--block-size=1'), usedInodes: await count('--inodes') };
  } catch (error) {
    throw fail('RUNTIME_DISK', { path: places.upper, reason: messageOf(error) }, error);
  }
}
