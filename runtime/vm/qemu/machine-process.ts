/**
 * The process of a machine: started so that it outlives us, found again, ended. Whether it is there is told by a lock alone, which is open in that
 * process from before it is QEMU until it is gone, however it goes; a pid would be reused, and a file with one is written too late.
 *
 * In the folder: `machine.json`, written before the process is there; `lock`.
 */
import { spawn } from 'node:child_process';
import {
  existsSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf, systemCode } from '#base';
import { tryLock } from '#linux';
import { fail } from '../../errors.ts';
import { applyClass } from '../../node/service-class.ts';
import type { VmSpec } from '../vm-driver.ts';

/** Where the lock is in the process: its standard input, for Firecracker's jailer closes whatever comes after the first three. */
const LOCK_FD = 0;
const MAX_COMPLAINTS = 8 * 1024;
const GONE_MS = 60_000;
/** Groups first, so that nothing of it is counted elsewhere. */
const ENTER = 'n=$1; shift; while [ $n -gt 0 ]; do echo 0 > "$1" || exit 96; shift; n=$((n-1)); done; exec "$@"';

export interface MachineRecord {
  readonly version: 1;
  readonly spec: VmSpec;
  /** Its memory is a snapshot's, and pages of its own where it wrote. */
  readonly privateMemory: boolean;
}

export interface MachineProcess {
  readonly pid: number;
  /** What it said last on its standard error; nothing of one that we found. */
  complaints(): string;
}

export interface ProcessOptions {
  readonly cwd?: string;
  /** A file that takes all it says; then there are no complaints to hear. */
  readonly output?: number;
  readonly privateMemory?: boolean;
  /** After the record, before the process: what the record is enough to take away again. */
  readonly prepare?: (spec: VmSpec) => void;
}

const recordPath = (folder: string) => join(folder, 'machine.json');
const lockPath = (folder: string) => join(folder, 'lock');

/** The record first, then what `prepare` makes, then the process. @throws VM_START when the folder has a machine */
export function startProcess(
  program: string,
  args: readonly string[],
  spec: VmSpec,
  { cwd = '/', output, privateMemory = false, prepare }: ProcessOptions = {},
): MachineProcess {
  const lock = tryLock(lockPath(spec.folder));
  if (lock === undefined) throw fail('VM_START', { id: spec.id, reason: `${spec.folder} has one that runs` });
  try {
    writeRecord({ version: 1, spec, privateMemory });
    failPoint('vm-recorded');
    prepare?.(spec);
    const groups = spec.cgroups ?? [];
    const words = ['-c', ENTER, 'sh', String(groups.length), ...groups, program, ...args];
    const child = spawn('/bin/sh', words, {
      cwd,
      env: { PATH: process.env.PATH ?? '/usr/bin:/bin' },
      detached: true,
      // A pipe, not a file: what a guest makes it say has no bound. Without us it says it to nobody.
      stdio: [lock.fd, output ?? 'ignore', output ?? 'pipe'],
    });
    failPoint('vm-spawned');
    let said = '';
    child.on('error', (error) => {
      said += messageOf(error);
    });
    child.stderr?.setEncoding('utf8').on('data', (text: string) => {
      said = (said + text).slice(-MAX_COMPLAINTS);
    });
    child.stderr?.on('error', () => {});
    (child.stderr as unknown as { unref(): void } | null)?.unref();
    child.unref();
    if (child.pid === undefined) throw fail('VM_START', { id: spec.id, reason: '/bin/sh cannot be run' });
    classify(spec, child.pid, groups);
    return { pid: child.pid, complaints: () => said.trim() };
  } finally {
    lock.release();
  }
}

/** What it becomes and all its threads inherit it. */
function classify({ serviceClass = 'ls' }: VmSpec, pid: number, groups: readonly string[]): void {
  try {
    applyClass(serviceClass, pid, [...new Set(groups.map((file) => dirname(file)))]);
  } catch (error) {
    // One that has ended already says so by itself.
    if (systemCode(error) !== 'ESRCH') throw error;
  }
}

/** What is on record, whether it runs or not. */
export function readMachineRecord(folder: string): MachineRecord | undefined {
  try {
    const record = JSON.parse(readFileSync(recordPath(folder), 'utf8')) as MachineRecord;
    return record.version === 1 && typeof record.spec === 'object' ? record : undefined;
  } catch {
    return undefined;
  }
}

/** The process that holds the folder's lock. */
export function findProcess(folder: string): number | undefined {
  const path = lockPath(folder);
  const file = statSync(path, { throwIfNoEntry: false });
  if (file === undefined || !isHeld(folder)) return undefined;
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    if (hasOpen(name, file)) return Number(name);
  }
  return undefined;
}

function hasOpen(pid: string, file: Stats): boolean {
  try {
    const open = statSync(`/proc/${pid}/fd/${LOCK_FD}`);
    return open.ino === file.ino && open.dev === file.dev;
  } catch {
    // It has gone, or is somebody's whose files are not for us to see.
    return false;
  }
}

function isHeld(folder: string): boolean {
  const lock = tryLock(lockPath(folder));
  lock?.release();
  return lock === undefined;
}

/** Ends it, waits until it is gone, and takes its memory and its record away. @throws VM_GONE when it does not go */
export async function endProcess(folder: string): Promise<void> {
  if (!existsSync(lockPath(folder))) {
    forgetProcess(folder);
    return;
  }
  for (let waited = 0, pause = 2; isHeld(folder); waited += pause, pause = Math.min(50, pause * 2)) {
    const pid = findProcess(folder);
    if (pid !== undefined) kill(pid);
    if (waited > GONE_MS)
      throw fail('VM_START', { id: folder, reason: `process ${pid ?? '?'} got SIGKILL and does not go` });
    await delay(pause);
  }
  forgetProcess(folder);
}

/** Resolves when no process holds the folder. */
export async function processGone(folder: string): Promise<void> {
  for (let pause = 2; existsSync(lockPath(folder)) && isHeld(folder); pause = Math.min(50, pause * 2))
    await delay(pause);
}

/** Of one that has gone. */
export function forgetProcess(folder: string): void {
  const memory = readMachineRecord(folder)?.spec.memoryFile;
  if (memory !== undefined) rmSync(memory, { force: true });
  rmSync(recordPath(folder), { force: true });
}

function kill(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // It has gone meanwhile.
  }
}

function writeRecord(record: MachineRecord): void {
  const path = recordPath(record.spec.folder);
  writeFileSync(`${path}.new`, JSON.stringify(record), { mode: 0o600 });
  renameSync(`${path}.new`, path);
}
