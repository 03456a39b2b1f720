/**
 * Who uses a block device: mounts, other devices on top, swap, processes that have it open. The device is opened by another process to
 * see: opening may make the kernel read it, and a process that waits for itself can neither answer nor be killed.
 */
import { existsSync } from 'node:fs';
import { readdir, readFile, readlink } from 'node:fs/promises';
import { basename } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { carryOut } from '../target/file/device-order.ts';

/** A device that does not answer is in use, as far as can be told. */
const OPEN_MS = 5000;

/** For people; undefined: nobody. @param own Processes that do not count, beside this one. */
export async function usersOfBlockDevice(path: string, own: readonly number[] = []): Promise<string | undefined> {
  return (await mountOf(path)) ?? (await openOf(path, new Set([process.pid, ...own]))) ?? (await claimOf(path));
}

export async function mountOf(path: string): Promise<string | undefined> {
  const name = basename(path);
  const numbers = new Map<string, string>();
  const parts = await readdir(`/sys/class/block/${name}`).catch(() => []);
  for (const part of [name, ...parts.filter((entry) => entry.startsWith(name))]) {
    const number = await readFile(`/sys/class/block/${part}/dev`, 'latin1').catch(() => undefined);
    if (number !== undefined) numbers.set(number.trim(), part);
  }
  for (const line of (await readFile('/proc/self/mountinfo', 'latin1')).split('\n')) {
    const [, , number, , at] = line.split(' ');
    if (number !== undefined && numbers.has(number)) return `mounted at ${at}`;
  }
  return undefined;
}

/** Of root, all processes; of others, those that may be looked at. */
export async function openOf(path: string, own: ReadonlySet<number>): Promise<string | undefined> {
  const isPart = (link: string) => link.startsWith(path) && /^(p?\d+)?$/.test(link.slice(path.length));
  for (const pid of await readdir('/proc')) {
    if (!/^\d+$/.test(pid) || own.has(Number(pid))) continue;
    for (const fd of await readdir(`/proc/${pid}/fd`).catch(() => [])) {
      const link = await readlink(`/proc/${pid}/fd/${fd}`).catch(() => '');
      if (isPart(link)) return `open in process ${pid}`;
    }
  }
  return undefined;
}

/** Mounts of other namespaces, swap, device mapper: each holds it for itself. */
export async function claimOf(path: string): Promise<string | undefined> {
  const late = new AbortController();
  const claimed = carryOut({ do: 'claim', path }, ['EBUSY', ...GONE]);
  claimed.catch(() => {});
  try {
    const free = await Promise.race([claimed, delay(OPEN_MS, 'late', { signal: late.signal })]);
    if (free === 'late') return 'it does not answer';
    return free === undefined && existsSync(path) ? 'held by another device, a mount or swap' : undefined;
  } finally {
    late.abort();
  }
}

const GONE = ['ENOENT', 'ENXIO'];
