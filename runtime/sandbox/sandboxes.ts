/**
 * The sandboxes of this node: listing, looking one up, removing, and putting right what killed processes have left.
 *
 * A sandbox is in use while its lock is held. A record that says `running` under a free lock tells of a process that was
 * killed: what it ran is ended, its mount taken away, and its upper removed, unless it was to be kept.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { isDsecError, messageOf } from '#base';
import { type FileLock, isAlive, lock, tryLock } from '#linux';
import type { Backend } from '../backend/backend.ts';
import { backendNamed } from '../backend/choose-backend.ts';
import { attachDisk, detachDisk, isAttached } from '../disk/sandbox-disk.ts';
import { fail } from '../errors.ts';
import type { SandboxEnd } from '../sandbox-api/sandbox.ts';
import { withUpperOf } from '../vm/disk/read-upper.ts';
import { removeMoments } from '../vm/fork/moment.ts';
import { dismantle, keepEnded, markKept, releaseAndForget, removeAside, removeFolder } from './end-sandbox.ts';
import { removeTree } from './remove-tree.ts';
import { reclaimIds } from './sandbox-ids.ts';
import { checkSandboxName, readRecord, type SandboxRecord } from './sandbox-record.ts';
import {
  type RuntimeFolders,
  runtimeFolders,
  type SandboxFolders,
  sandboxesFolder,
  sandboxFolders,
} from './state-folders.ts';

export interface KeptSandbox extends SandboxRecord {
  /** All that it changed. */
  readonly upper: string;
}

export interface SandboxReclaim {
  /** Names of sandboxes whose process had been killed: ended and removed. */
  readonly removed: readonly string[];
  /** The same, but they were to be kept. */
  readonly kept: readonly string[];
  /** `name: why`: left alone, or not wholly put right. */
  readonly problems: readonly string[];
}

/** The backend that a record names: they keep their state apart. */
export type BackendFor = (name: string) => Backend;

export function backendFor(folders: RuntimeFolders): BackendFor {
  return (name) => backendNamed(name, folders.runDir);
}

/** Puts right what killed processes have left. Every command that works with sandboxes does it first. */
export async function reclaimSandboxes(given: Partial<RuntimeFolders> = {}): Promise<SandboxReclaim> {
  const folders = runtimeFolders(given);
  const removed: string[] = [];
  const kept: string[] = [];
  const problems: string[] = [];
  await removeLeft(folders).catch((error) => problems.push(messageOf(error)));
  const names = namesIn(folders);
  reclaimIds(folders, names);
  const reclaim = async (name: string): Promise<void> => {
    const places = sandboxFolders(folders, name);
    // Without the lock first: it is not taken, not even for a moment, from whoever wants to work with a kept one.
    const before = recordOf(places);
    if (before?.state === 'kept' && !isAttached(before.disk, places)) return;
    const held = tryLock(places.lock);
    if (held === undefined) return;
    let gone = false;
    try {
      const record = readRecord(places.record);
      if (record?.state === 'kept') {
        // Whoever packed it was killed at it.
        await detachDisk(record.disk, places);
        return;
      }
      gone = (await putRight(record, places, folders)) === undefined;
      if (record !== undefined) (gone ? removed : kept).push(name);
    } catch (error) {
      problems.push(`${name}: ${messageOf(error)}`);
    } finally {
      if (gone) releaseAndForget(held);
      else held.release();
    }
  };
  // Much of it waits for the kernel. Those that were killed together are reclaimed together.
  const work = async () => {
    for (let name = names.shift(); name !== undefined; name = names.shift()) await reclaim(name);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return { removed, kept, problems };
}

const AT_ONCE = 8;

function recordOf(places: SandboxFolders): SandboxRecord | undefined {
  try {
    return readRecord(places.record);
  } catch {
    return undefined;
  }
}

/**
 * Ends what a killed process left under a lock that we hold now. The record of what stays.
 * @param unrecorded It is enough to know that it stays; the record may go on saying `running`.
 */
async function putRight(
  record: SandboxRecord | undefined,
  places: SandboxFolders,
  folders: RuntimeFolders,
  unrecorded = false,
): Promise<SandboxRecord | undefined> {
  if (record !== undefined) {
    await dismantle(record, places, folders, backendFor(folders)(record.backend));
    // Whoever made forks of it is gone, and all its memory is in there.
    await removeMoments(places.folder);
    try {
      const end = lostEnd(record);
      if (end !== undefined) return keepEnded(record, places, end);
      if (record.keep) return markKept(record, places, undefined);
    } catch (error) {
      // A full disk keeps nobody from packing or removing it: the lock says that it is not running.
      if (!unrecorded || !isDsecError(error, 'RUNTIME_RECORD_WRITE')) throw error;
      return { ...record, state: 'kept' };
    }
  }
  // Without a record nothing has happened yet, or all is undone but the folder.
  await removeFolder(places);
  return undefined;
}

/** Of one that stays: nobody holds it any more. */
function lostEnd(record: SandboxRecord): SandboxEnd | undefined {
  if (record.resident === undefined) return undefined;
  const at = new Date().toISOString();
  // It ends by itself when its time is up, whoever else has died.
  if (record.resident.expiresAt !== undefined && record.resident.expiresAt <= at) {
    return { reason: 'expired', detail: 'its time was up', at: record.resident.expiresAt };
  }
  return { reason: 'lost', detail: 'the process that kept it has died, or the machine was restarted', at };
}

/** Sorted by name; `running` are those in use or not yet put right. Damaged records are left out. */
export function listSandboxes(given: Partial<RuntimeFolders> = {}): SandboxRecord[] {
  const folders = runtimeFolders(given);
  const records: SandboxRecord[] = [];
  for (const name of namesIn(folders)) {
    try {
      const record = readRecord(sandboxFolders(folders, name).record);
      if (record !== undefined) records.push(record);
    } catch {
      // Told by whoever asks for it by name.
    }
  }
  return records;
}

/**
 * Runs `work` with a kept sandbox, which nobody else runs, packs or removes meanwhile.
 * @throws RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_RUNNING, RUNTIME_SANDBOX_BUSY, RUNTIME_SANDBOX_RECORD
 */
export async function withKeptSandbox<T>(
  name: string,
  work: (sandbox: KeptSandbox) => Promise<T>,
  given: Partial<RuntimeFolders> = {},
): Promise<T> {
  const folders = runtimeFolders(given);
  return locked(name, folders, 'pack', async (record, places) => {
    if (record.vm !== undefined) return withUpperOf(record, places, (upper) => work({ ...record, upper }));
    attachDisk(record.disk, places);
    try {
      return await work({ ...record, upper: places.upper });
    } finally {
      await detachDisk(record.disk, places);
    }
  });
}

/** Removes a kept sandbox with all that it changed. @throws as `withKeptSandbox` */
export async function removeSandbox(name: string, given: Partial<RuntimeFolders> = {}): Promise<void> {
  const folders = runtimeFolders(given);
  const work = (record: SandboxRecord, places: SandboxFolders) => removeAside(places, asideOf(name, folders), record);
  await locked(name, folders, 'remove', work, true);
}

/** Begins the names of folders that are being removed; the sandbox's name and eight digits follow. */
const ASIDE = '.removing-';

/** For `removeAside`, under the lock on the name: what is left there in a crash is removed by the next command. */
export function asideOf(name: string, folders: RuntimeFolders): string {
  return join(sandboxesFolder(folders), `${ASIDE}${name}-${randomBytes(4).toString('hex')}`);
}

/** Finishes removals that were killed half way. */
async function removeLeft(folders: RuntimeFolders): Promise<void> {
  for (const entry of entriesIn(folders)) {
    const name = /^(.+)-[0-9a-f]{8}$/.exec(entry.slice(ASIDE.length))?.[1];
    if (!entry.startsWith(ASIDE) || name === undefined) continue;
    const places = sandboxFolders(folders, name);
    // Whoever removes it holds the lock.
    const held = tryLock(places.lock);
    if (held === undefined) continue;
    try {
      await removeTree(join(sandboxesFolder(folders), entry));
    } finally {
      if (existsSync(places.folder)) held.release();
      else releaseAndForget(held);
    }
  }
}

async function locked<T>(
  name: string,
  folders: RuntimeFolders,
  purpose: LockPurpose,
  work: (record: SandboxRecord, places: SandboxFolders) => Promise<T>,
  forget = false,
): Promise<T> {
  const places = sandboxNamed(name, folders);
  const held = await lockName(name, places, purpose);
  let gone = false;
  try {
    const found = readRecord(places.record);
    // Whoever ran it was killed: it is what that leaves.
    const record = found?.state === 'kept' ? found : await putRight(found, places, folders, true);
    if (record === undefined) {
      gone = true;
      throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
    }
    const result = await work(record, places);
    gone = forget;
    return result;
  } finally {
    if (gone) releaseAndForget(held);
    else held.release();
  }
}

/** Somebody who puts right what others left holds a lock for a moment; that is worth a short wait. */
const LOCK_PATIENCE_MS = 500;

export type LockPurpose = 'run' | 'pack' | 'remove';

/** @throws RUNTIME_SANDBOX_BUSY, RUNTIME_SANDBOX_RUNNING, RUNTIME_SANDBOX_OF_POOL */
export async function lockName(name: string, places: SandboxFolders, purpose: LockPurpose): Promise<FileLock> {
  try {
    return await lock(places.lock, { timeoutMs: LOCK_PATIENCE_MS });
  } catch (error) {
    if (!isDsecError(error, 'LINUX_LOCK_TIMEOUT')) throw error;
    const running = runningUnder(places);
    if (running === undefined) {
      const remedy = purpose === 'run' ? 'wait for it to end, or choose another --name' : 'wait for it to end';
      throw fail('RUNTIME_SANDBOX_BUSY', { name, remedy });
    }
    if (purpose !== 'run') refuseOfPool(running);
    throw fail('RUNTIME_SANDBOX_RUNNING', { name, remedy: remedyOf(running, purpose) });
  }
}

/** What a pool has is the pool's to end, while there is one. @throws RUNTIME_SANDBOX_OF_POOL */
export function refuseOfPool(record: SandboxRecord | undefined): void {
  if (record?.pool !== undefined && record.state === 'running' && isAlive(record.owner)) {
    throw fail('RUNTIME_SANDBOX_OF_POOL', { name: record.name, pool: record.pool });
  }
}

function runningUnder(places: SandboxFolders): SandboxRecord | undefined {
  try {
    const record = readRecord(places.record);
    return record?.state === 'running' ? record : undefined;
  } catch {
    return undefined;
  }
}

function remedyOf({ name, keep }: SandboxRecord, purpose: LockPurpose): string {
  const stop = `\`dsec sandbox stop ${name}\` ends it`;
  if (purpose === 'run') return `choose another --name; ${stop}`;
  if (purpose === 'remove') return `${stop}; \`dsec sandbox rm --force ${name}\` ends and removes it`;
  return keep
    ? `wait for its command to end; ${stop}, and its changes stay`
    : 'it was run without --keep, so its changes go when it ends: run it again with --keep';
}

/** @throws RUNTIME_SANDBOX_NAME, RUNTIME_SANDBOX_NOT_FOUND */
export function sandboxNamed(name: string, folders: RuntimeFolders): SandboxFolders {
  const places = sandboxFolders(folders, checkSandboxName(name));
  if (!namesIn(folders).includes(name)) throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
  return places;
}

function namesIn(folders: RuntimeFolders): string[] {
  return entriesIn(folders)
    .filter((name) => !name.startsWith('.'))
    .sort();
}

function entriesIn(folders: RuntimeFolders): string[] {
  try {
    return readdirSync(sandboxesFolder(folders));
  } catch {
    return [];
  }
}
