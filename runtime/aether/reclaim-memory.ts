/**
 * Memory of a sandbox that stands still, given back to the machine and fetched again.
 *
 * cgroup v2: memory.reclaim of its group. v1: process_madvise(PAGEOUT) on each process, which leaves alone what other sandboxes have mapped too;
 * what is left then (memory shared by a fork, /dev/shm) goes by memory.force_empty, which takes cached files with it. Nothing is
 * reclaimed without swap: then only cached files could go, and those the kernel drops by itself when it needs room.
 */
import { existsSync, readFileSync } from 'node:fs';
import { writeFile } from 'node:fs/promises';
import { systemCode } from '#base';
import { adviseProcess, type MemoryRange, mappingsOf, swapSpace } from '#linux';
import type { PauseReport } from '../sandbox-api/sandbox.ts';
import type { CommandGroups } from './command-group.ts';
import { commandProcesses } from './freeze.ts';

export type Reclaimed = Omit<PauseReport, 'pausedAt'>;

/** Not worth a reclaim: about what an agent has. */
const LITTLE_BYTES = 2 << 20;
const STEP_BYTES = 64 << 20;
/** Without progress it is tried so often: what was just used is spared at first. */
const ATTEMPTS = 3;

/** One sandbox at a time: it keeps a processor and a thread of the pool busy. */
let queue: Promise<unknown> = Promise.resolve();

export function reclaimMemory(
  cgroups: readonly string[],
  groups: CommandGroups,
  signal: AbortSignal,
): Promise<Reclaimed> {
  const done = queue.then(() => reclaimNow(cgroups, groups, signal));
  queue = done.catch(() => {});
  return done;
}

async function reclaimNow(cgroups: readonly string[], groups: CommandGroups, signal: AbortSignal): Promise<Reclaimed> {
  const memory = memoryGroup(cgroups);
  if (memory === undefined) return { beforeBytes: 0, afterBytes: 0, reason: 'no memory controller' };
  const beforeBytes = memory.own();
  const report = (reason?: Reclaimed['reason']): Reclaimed => ({ beforeBytes, afterBytes: memory.own(), reason });
  if (swapSpace().freeBytes === 0) return report('no swap');
  const isLeft = () => memory.own() > LITTLE_BYTES && !signal.aborted;
  if (memory.version === 1) {
    for (const pid of isLeft() ? commandProcesses(groups) : []) {
      if (signal.aborted) break;
      await adviseProcess(pid, await mappingsOf(pid), 'pageout', signal);
    }
    if (isLeft()) await attempt(`${memory.folder}/memory.force_empty`, '1');
    return report();
  }
  for (let misses = 0; isLeft() && misses < ATTEMPTS; ) {
    const had = memory.own();
    const path = `${memory.folder}/memory.reclaim`;
    const bytes = String(Math.min(had, STEP_BYTES));
    // Cached files stay where the kernel can be told so (Linux 6.9).
    if ((await attempt(path, `${bytes} swappiness=200`)) === 'EINVAL') await attempt(path, bytes);
    misses = memory.own() < had ? 0 : misses + 1;
  }
  return report();
}

/** Less than was asked for is told as an error too (EAGAIN); how much it was is looked at. */
async function attempt(path: string, text: string): Promise<string | undefined> {
  return writeFile(path, text).then(
    () => undefined,
    (error: unknown) => systemCode(error) ?? 'unknown',
  );
}

interface MemoryGroup {
  readonly folder: string;
  readonly version: 1 | 2;
  /** What is in no file: cached files go by themselves when the machine needs room. */
  own(): number;
}

function memoryGroup(cgroups: readonly string[]): MemoryGroup | undefined {
  for (const folder of cgroups) {
    const version = existsSync(`${folder}/memory.current`) ? 2 : existsSync(`${folder}/memory.force_empty`) ? 1 : 0;
    if (version === 0) continue;
    const names = version === 2 ? ['anon', 'shmem'] : ['total_rss', 'total_shmem'];
    const own = () => {
      const text = read(`${folder}/memory.stat`);
      return names.reduce((sum, name) => sum + Number(new RegExp(`^${name} (\\d+)$`, 'm').exec(text)?.[1] ?? 0), 0);
    };
    return { folder, version, own };
  }
  return undefined;
}

function read(path: string): string {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return '';
  }
}

/** More than that is read back as it is touched. */
const PREFETCH_BYTES = 64 << 20;
const PREFETCH_PROCESSES = 64;

/** Has what it had in swap read back, the smaller ranges first: stacks and libraries' data before the large heaps. */
export async function prefetchMemory(groups: CommandGroups, signal: AbortSignal): Promise<void> {
  if (swapSpace().places.length === 0) return;
  let left = PREFETCH_BYTES;
  for (const pid of membersOfFirst(groups)) {
    const swapped = (await mappingsOf(pid, { swap: true })).filter((range) => range.swappedBytes > 0);
    const chosen: MemoryRange[] = [];
    for (const range of swapped.sort((a, b) => a.swappedBytes - b.swappedBytes)) {
      if (left <= 0) break;
      // Of a large one the beginning: nobody knows what of it is used first.
      const bytes = range.swappedBytes <= left ? range.bytes : pages(left);
      chosen.push({ ...range, bytes });
      left -= Math.min(range.swappedBytes, bytes);
    }
    if (signal.aborted) return;
    await adviseProcess(pid, chosen, 'willneed', signal);
    if (left <= 0) return;
  }
}

function membersOfFirst(groups: CommandGroups): number[] {
  return commandProcesses(groups).slice(0, PREFETCH_PROCESSES);
}

function pages(bytes: number): number {
  return Math.max(4096, bytes - (bytes % 4096));
}
