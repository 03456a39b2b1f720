/** Processor time of a process and all that it started, and which process that is. */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';

/** With those that have ended and were waited for; in steps of 10 ms. */
export function treeCpuMs(pid: number): number {
  const rows = pids().flatMap((one) => {
    try {
      const text = readFileSync(`/proc/${one}/stat`, 'latin1');
      const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
      const ticks = fields.slice(11, 15).reduce((sum, each) => sum + Number(each), 0);
      return [{ pid: one, parent: Number(fields[1]), ms: ticks * 10 }];
    } catch {
      // It has ended.
      return [];
    }
  });
  const below = (parent: number): number =>
    rows.filter((row) => row.parent === parent).reduce((sum, row) => sum + row.ms + below(row.pid), 0);
  return (rows.find((row) => row.pid === pid)?.ms ?? 0) + below(pid);
}

/** Who listens on a port of IPv4, in the network namespace of this process. @throws Error */
export function listenerOf(port: number): number {
  const hex = port.toString(16).toUpperCase().padStart(4, '0');
  const rows = readFileSync('/proc/net/tcp', 'latin1')
    .split('\n')
    .map((line) => line.trim().split(/\s+/));
  const LISTEN = '0A';
  const inode = rows.find(([, local, , state]) => local?.endsWith(`:${hex}`) && state === LISTEN)?.[9];
  const found = inode === undefined ? undefined : pids().find((pid) => holds(pid, `socket:[${inode}]`));
  if (found === undefined) throw new Error(`nobody here listens on port ${port}`);
  return found;
}

function holds(pid: number, what: string): boolean {
  try {
    return readdirSync(`/proc/${pid}/fd`).some((fd) => readlinkSync(`/proc/${pid}/fd/${fd}`) === what);
  } catch {
    // It has ended, or this descriptor has.
    return false;
  }
}

function pids(): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number);
}
