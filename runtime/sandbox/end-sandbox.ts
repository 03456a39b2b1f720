/**
 * The way back, the same for a run that ends, one that fails and one whose process was killed: the backend's things, the
 * mount, then the folder. Each step may find its work done already.
 */
import { renameSync, rmSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { failPoint, isDsecError } from '#base';
import { unmount } from '#imagesvc';
import { type FileLock, isMountPoint, syncFileSystem } from '#linux';
import type { Backend } from '../backend/backend.ts';
import { releaseRange } from '../backend/id-ranges.ts';
import { detachDisk, forgetDisk } from '../disk/sandbox-disk.ts';
import { removeTapOf } from '../network/sandbox-link.ts';
import type { SandboxEnd } from '../sandbox-api/sandbox.ts';
import { forgetUpper } from '../vm/disk/read-upper.ts';
import { endProcess } from '../vm/qemu/machine-process.ts';
import { removeMountPoints } from './mount-points.ts';
import { removeTree } from './remove-tree.ts';
import { readRecord, type SandboxRecord, writeRecord } from './sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from './state-folders.ts';

/** Ends what runs and takes the mount away. The upper stays. */
export async function dismantle(
  record: SandboxRecord,
  places: SandboxFolders,
  folders: RuntimeFolders,
  backend: Backend,
): Promise<void> {
  await backend.remove(record.id);
  if (record.machine !== undefined) await endProcess(join(places.folder, 'machine'));
  // A link with a process at its other end goes with nobody.
  const isVirtual = record.vm !== undefined || record.machine !== undefined;
  if (isVirtual && record.network?.mode === 'policy') removeTapOf(record.network.number, record.id, folders.runDir);
  // Those of a machine's guest are on its own disk.
  const hasPoints = record.mountPoints.length > 0 && record.vm === undefined;
  if (hasPoints && isMountPoint(places.root)) removeMountPoints(places.root, record.mountPoints);
  await unmountRoot(places.root, folders);
  await detachDisk(record.disk, places);
  // A copy that somebody was reading.
  if (record.vm !== undefined) await forgetUpper(places);
  if (record.idBase !== undefined) releaseRange(folders.stateDir, record.name, record.idBase);
}

async function unmountRoot(root: string, folders: RuntimeFolders): Promise<void> {
  try {
    await unmount(root, folders);
  } catch (error) {
    if (isDsecError(error, 'MOUNT_NOT_FOUND')) return;
    if (!isDsecError(error, 'MOUNT_BUSY')) throw error;
    // Somebody looks around in there. The sandbox has ended; its mount goes when they do.
    await unmount(root, { ...folders, lazy: true });
  }
}

/** @throws RUNTIME_RECORD_WRITE; then the record says `running`, and the next command tries again */
export function markKept(
  record: SandboxRecord,
  places: SandboxFolders,
  exitCode: number | undefined,
  end?: SandboxEnd,
  durable = true,
): SandboxRecord {
  const kept: SandboxRecord = { ...record, state: 'kept', idBase: undefined, exitCode, end };
  // First, because on a full disk this may make the room that the record needs.
  for (const path of [places.bundle, places.root]) rmSync(path, { recursive: true, force: true });
  writeRecord(places.record, kept, durable);
  return kept;
}

/**
 * As `markKept`, for one whose changes were not written out when its mount went (`volatile`): they are on disk, with the record, some time
 * after this returned. Nobody waits for it: what is written out is all of a file system, others' changes too.
 * @throws RUNTIME_RECORD_WRITE
 */
export function keepEnded(record: SandboxRecord, places: SandboxFolders, end: SandboxEnd): SandboxRecord {
  const kept = markKept(record, places, undefined, end, false);
  writeOut(dirname(places.folder));
  return kept;
}

/** Folders whose file systems are to be written out; the first of them is, now. */
const waiting: string[] = [];

function writeOut(folder: string): void {
  // Of the one under way nobody knows how far it is.
  if (waiting.indexOf(folder, 1) > 0 || waiting.push(folder) > 1) return;
  const next = async (): Promise<void> => {
    for (; waiting[0] !== undefined; waiting.shift()) await syncFileSystem(waiting[0]).catch(() => {});
  };
  next();
}

/** Nothing is deleted through a mount: that would delete in what is mounted. */
async function makeRemovable(places: SandboxFolders, disk: SandboxRecord['disk']): Promise<void> {
  if (isMountPoint(places.root)) throw new Error(`${places.root} is still mounted`);
  await forgetDisk(disk, places);
}

function diskOf(places: SandboxFolders): SandboxRecord['disk'] {
  try {
    return readRecord(places.record)?.disk;
  } catch {
    // A damaged one: what it had goes with its folder.
    return undefined;
  }
}

/** The record goes last: until then the next command finds it and tries again. */
export async function removeFolder(places: SandboxFolders): Promise<void> {
  await makeRemovable(places, diskOf(places));
  for (const path of [places.upper, places.work, places.root, places.bundle, places.commands]) await removeTree(path);
  await removeTree(places.folder);
}

/**
 * Takes the name away at once, which needs no space on a full disk, and then all that it had. Were we killed half way, the
 * next command goes on with what lies at `aside`.
 */
export async function removeAside(
  places: SandboxFolders,
  aside: string,
  { disk }: Pick<SandboxRecord, 'disk'>,
): Promise<void> {
  await makeRemovable(places, disk);
  renameSync(places.folder, aside);
  failPoint('sandbox-aside');
  await removeTree(aside);
}

/** Lock files are gone with their sandboxes: the lock is on the name as long as it is held. */
export function releaseAndForget(lock: FileLock): void {
  rmSync(lock.path, { force: true });
  lock.release();
}
