/**
 * The way back, the same for a run that ends, one that fails and one whose process was killed: the backend's things, the
 * mount, then the folder. Each step may find its work done already.
 */
import { execFile } from 'node:child_process';
import { renameSync, rmSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { promisify } from 'node:util';
import { failPoint, isDsecError } from '#base';
import { unmount } from '#imagesvc';
import { type FileLock, mountsAt } from '#linux';
import type { Backend } from '../backend/backend.ts';
import type { SandboxEnd } from '../sandbox-api/sandbox.ts';
import { removeMountPoints } from './mount-points.ts';
import { type SandboxRecord, writeRecord } from './sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from './state-folders.ts';

const execFileAsync = promisify(execFile);

/** Ends what runs and takes the mount away. The upper stays. */
export async function dismantle(
  record: SandboxRecord,
  places: SandboxFolders,
  folders: RuntimeFolders,
  backend: Backend,
): Promise<void> {
  await backend.remove(record.id);
  if (mountsAt(places.root).length > 0) removeMountPoints(places.root, record.mountPoints);
  await unmountRoot(places.root, folders);
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
): SandboxRecord {
  const kept: SandboxRecord = { ...record, state: 'kept', exitCode, end };
  // First, because on a full disk this may make the room that the record needs.
  for (const path of [places.bundle, places.root]) rmSync(path, { recursive: true, force: true });
  writeRecord(places.record, kept, true);
  return kept;
}

/** The record goes last: until then the next command finds it and tries again. */
export async function removeFolder(places: SandboxFolders): Promise<void> {
  // Never through a mount: that would delete in what is mounted.
  if (mountsAt(places.root).length > 0) throw new Error(`${places.root} is still mounted`);
  for (const path of [places.upper, places.work, places.root, places.bundle, places.commands]) await removeTree(path);
  await removeTree(places.folder);
}

/**
 * Takes the name away at once, which needs no space on a full disk, and then all that it had. Were we killed half way, the
 * next command goes on with what lies at `aside`.
 */
export async function removeAside(places: SandboxFolders, aside: string): Promise<void> {
  if (mountsAt(places.root).length > 0) throw new Error(`${places.root} is still mounted`);
  renameSync(places.folder, aside);
  failPoint('sandbox-aside');
  await removeTree(aside);
}

export async function removeTree(path: string): Promise<void> {
  try {
    await rm(path, { recursive: true, force: true });
  } catch {
    // A sandbox can make paths that are too long to name; rm(1) goes through them step by step.
    await execFileAsync('rm', ['-rf', '--one-file-system', '--', path]);
  }
}

/** Lock files are gone with their sandboxes: the lock is on the name as long as it is held. */
export function releaseAndForget(lock: FileLock): void {
  rmSync(lock.path, { force: true });
  lock.release();
}
