/**
 * Ends a running sandbox from another process: the signal goes to its first process, as `dsec run` itself would pass it on;
 * what does not end in time gets SIGKILL. Undoing everything stays with the process that runs it; this waits for that, and
 * does it itself where that process was killed.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError } from '#base';
import { fail } from '../errors.ts';
import { readRecord, type SandboxRecord } from './sandbox-record.ts';
import { backendFor, reclaimSandboxes, refuseOfPool, removeSandbox, sandboxNamed } from './sandboxes.ts';
import { type RuntimeFolders, runtimeFolders } from './state-folders.ts';

export interface StopOptions {
  /** How long it may take after SIGTERM; 0: SIGKILL at once. 10 s by default. */
  readonly timeMs?: number;
  readonly folders?: Partial<RuntimeFolders>;
}

export interface StopResult {
  readonly name: string;
  /** `ended`: it ran until now. `not-running`: it had ended before. */
  readonly was: 'ended' | 'not-running';
  /** It did not end in time, and got SIGKILL. */
  readonly killed: boolean;
  /** Its changes are still there: it was run with `keep`. */
  readonly kept: boolean;
}

export const STOP_TIME_MS = 10_000;

/** How long undoing the mounts may take once nothing runs any more. */
const UNDO_MS = 30_000;
const PAUSE_MS = 20;

/** @throws RUNTIME_SANDBOX_NOT_FOUND, RUNTIME_SANDBOX_NAME, RUNTIME_SANDBOX_RECORD, RUNTIME_SANDBOX_OF_POOL, RUNTIME_SANDBOX_STUCK */
export async function stopSandbox(name: string, options: StopOptions = {}): Promise<StopResult> {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_NEEDS_ROOT');
  const folders = runtimeFolders(options.folders);
  const places = sandboxNamed(name, folders);
  const record = readRecord(places.record);
  if (record === undefined) throw fail('RUNTIME_SANDBOX_NOT_FOUND', { name });
  if (record.state === 'kept') return { name, was: 'not-running', killed: false, kept: true };
  // Of a process that was killed there is nobody who would undo it.
  await reclaimSandboxes(folders);
  refuseOfPool(readRecord(places.record));
  const now = () => (isSame(readRecord(places.record), record) ? 'running' : 'ended');
  const backend = backendFor(folders)(record.backend);
  const { timeMs = STOP_TIME_MS } = options;
  const deadline = performance.now() + timeMs;
  let asked = false;
  let killed = false;
  // It may not have been launched yet: then the signal waits for it.
  while (now() === 'running') {
    const late = performance.now() >= deadline;
    if (late) killed = backend.signal(record.id, places.bundle, 'SIGKILL') || killed;
    else if (!asked) asked = backend.signal(record.id, places.bundle, 'SIGTERM');
    if (performance.now() > deadline + UNDO_MS) throw fail('RUNTIME_SANDBOX_STUCK', { name });
    await delay(PAUSE_MS);
  }
  const kept = readRecord(places.record);
  return { name, was: 'ended', killed, kept: kept?.id === record.id };
}

/** Ends it with SIGKILL if it runs, and removes its changes. @throws as `stopSandbox` and `removeSandbox` */
export async function forceRemoveSandbox(name: string, given: Partial<RuntimeFolders> = {}): Promise<void> {
  const { kept } = await stopSandbox(name, { timeMs: 0, folders: given });
  if (!kept) return;
  try {
    await removeSandbox(name, given);
  } catch (error) {
    // Somebody was quicker.
    if (!isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND')) throw error;
  }
}

/** The same run of it, and it is not over. */
function isSame(current: SandboxRecord | undefined, record: SandboxRecord): boolean {
  return current?.id === record.id && current.state === 'running';
}
