/**
 * Staging folders: `tmp/<boot>-<pid>-<random>/`, each with a `lock` file that its process holds with flock.
 *
 * A folder whose lock is free belongs to a dead process and is removed by the next command. On a file system that
 * several nodes share, flock may not reach across them; so the lock file also has a heartbeat (its mtime), and a folder
 * made under another boot id counts as alive until that is an hour old.
 *
 * Making one races with sweeping: a sweeper may find the folder before its lock is taken. Both take the lock before they
 * go on, and a lock is only had while its path still leads to the locked file (linux/lock.ts): one of them yields.
 */
import { randomBytes } from 'node:crypto';
import { fchmodSync, futimes, readFileSync, writeSync } from 'node:fs';
import { chmod, mkdir, readdir, readFile, rm, rmdir, stat, unlink } from 'node:fs/promises';
import { join } from 'node:path';
import { systemCode } from '#base';
import type { Staging } from './blob-store.ts';
import { ensureFolder, FILE_MODE, FOLDER_MODE } from './durable-file.ts';
import { type FileLock, tryLock } from './file-lock.ts';

const LOCK = 'lock';
const HEARTBEAT_MS = 60_000;
/** Without a heartbeat for this long, a folder of another node is a dead process's. */
const SILENT_MS = 3600_000;

/** Begins the names of this machine's folders, so that a free lock can be believed. */
const boot = bootId();

function bootId(): string {
  try {
    return readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').slice(0, 8);
  } catch {
    return 'unknown0';
  }
}

/** A new, locked staging folder in `tmp`. `tmp` is made where it is missing. */
export async function makeStaging(tmp: string): Promise<Staging> {
  for (;;) {
    const path = join(tmp, `${boot}-${process.pid}-${randomBytes(6).toString('hex')}`);
    let lock: FileLock | undefined;
    try {
      await mkdir(path);
      lock = await tryLock(join(path, LOCK), 'exclusive');
    } catch (error) {
      if (systemCode(error) === 'ENOENT') {
        await ensureFolder(tmp);
        continue;
      }
      await rmdir(path).catch(() => {});
      throw error;
    }
    if (lock === undefined) continue; // A sweeper was faster.
    try {
      await chmod(path, FOLDER_MODE);
      fchmodSync(lock.fd, FILE_MODE);
      writeSync(lock.fd, `${JSON.stringify({ pid: process.pid, startedMs: Date.now() })}\n`);
    } catch (error) {
      // A full disk: nothing may stay behind.
      await removeLocked(path, lock).catch(() => {});
      throw error;
    }
    return held(path, lock);
  }
}

function held(path: string, lock: FileLock): Staging {
  const heartbeat = setInterval(() => {
    const now = new Date();
    futimes(lock.fd, now, now, () => {});
  }, HEARTBEAT_MS);
  heartbeat.unref();
  let removed: Promise<void> | undefined;
  return {
    path,
    remove() {
      clearInterval(heartbeat);
      removed ??= removeLocked(path, lock);
      return removed;
    },
  };
}

/** The lock goes last: as long as something else is there, a later sweep knows whose it is. */
async function removeLocked(path: string, lock: FileLock): Promise<void> {
  try {
    for (const name of await readdir(path)) {
      if (name !== LOCK) await rm(join(path, name), { recursive: true, force: true });
    }
    await unlink(join(path, LOCK));
    await rmdir(path);
  } catch (error) {
    // Gone already, or another sweeper is at it: it found the folder in the moment between lock and rmdir.
    if (!['ENOENT', 'ENOTEMPTY', 'EEXIST'].includes(systemCode(error) ?? '')) throw error;
  } finally {
    lock.release();
  }
}

/** Removes what dead processes left in `tmp`. Returns how many folders went. */
export async function sweepFolders(tmp: string, nowMs = Date.now()): Promise<number> {
  let swept = 0;
  for (const name of await foldersIn(tmp)) {
    const path = join(tmp, name);
    const lock = await deadLock(path, name, nowMs);
    if (lock === undefined) continue;
    await removeLocked(path, lock);
    swept++;
  }
  return swept;
}

async function foldersIn(tmp: string): Promise<string[]> {
  try {
    const entries = await readdir(tmp, { withFileTypes: true });
    return entries.filter((entry) => entry.isDirectory()).map((entry) => entry.name);
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw error;
  }
}

/** The lock of a folder whose process is dead, now held by us; undefined when it lives, or someone else sweeps it. */
async function deadLock(path: string, name: string, nowMs: number): Promise<FileLock | undefined> {
  if (!ofThisBoot(name) && !(await silent(path, nowMs))) return undefined;
  try {
    return await tryLock(join(path, LOCK), 'exclusive');
  } catch (error) {
    // Another user's: whoever may look at it will.
    if (['ENOENT', 'EACCES', 'EPERM'].includes(systemCode(error) ?? '')) return undefined;
    throw error;
  }
}

function ofThisBoot(name: string): boolean {
  return name.startsWith(`${boot}-`);
}

async function silent(path: string, nowMs: number): Promise<boolean> {
  try {
    const { mtimeMs } = await stat(join(path, LOCK)).catch(() => stat(path));
    return nowMs - mtimeMs > SILENT_MS;
  } catch {
    return false;
  }
}

/** When the oldest staging of a live process began; undefined when there is none. */
export async function oldestLiveStaging(tmp: string): Promise<number | undefined> {
  let oldest: number | undefined;
  const nowMs = Date.now();
  for (const name of await foldersIn(tmp)) {
    const path = join(tmp, name);
    const lock = await deadLock(path, name, nowMs);
    if (lock !== undefined) {
      await removeLocked(path, lock);
      continue;
    }
    const startedMs = await startOf(path);
    if (startedMs !== undefined && (oldest === undefined || startedMs < oldest)) oldest = startedMs;
  }
  return oldest;
}

async function startOf(path: string): Promise<number | undefined> {
  try {
    const { startedMs } = JSON.parse(await readFile(join(path, LOCK), 'utf8')) as { startedMs?: unknown };
    if (typeof startedMs === 'number') return startedMs;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
  }
  // Its maker is between taking the lock and writing it.
  const { birthtimeMs, ctimeMs } = await stat(path).catch(() => ({ birthtimeMs: undefined, ctimeMs: undefined }));
  return birthtimeMs || ctimeMs;
}
