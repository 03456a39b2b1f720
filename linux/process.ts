/**
 * Which process, exactly: a pid alone is reused. Pid, start time (clock ticks after boot) and boot id together never are.
 */
import { readFileSync } from 'node:fs';

export interface ProcessIdentity {
  readonly pid: number;
  /** Clock ticks after boot, as text: /proc/PID/stat, field 22. */
  readonly startTime: string;
  readonly bootId: string;
}

let boot: string | undefined;

export function bootId(): string {
  boot ??= readFileSync('/proc/sys/kernel/random/boot_id', 'latin1').trim();
  return boot;
}

let own: ProcessIdentity | undefined;

/** Undefined when there is no such process. A zombie is one that has ended. */
export function processIdentity(pid: number = process.pid): ProcessIdentity | undefined {
  // Worker threads have their own copy of this, and the same process.
  if (pid === process.pid) own ??= readIdentity(pid);
  return pid === process.pid ? own : readIdentity(pid);
}

function readIdentity(pid: number): ProcessIdentity | undefined {
  let stat: string;
  try {
    stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
  } catch {
    return undefined;
  }
  // The second field is the program's name in parentheses and may hold anything, parentheses and spaces too.
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  const state = fields[0];
  const startTime = fields[19];
  if (startTime === undefined || state === 'Z' || state === 'X') return undefined;
  return { pid, startTime, bootId: bootId() };
}

/** Whether the very process still runs. */
export function isAlive(identity: ProcessIdentity): boolean {
  if (identity.bootId !== bootId()) return false;
  const now = processIdentity(identity.pid);
  return now !== undefined && now.startTime === identity.startTime;
}
