/**
 * Memory of another process: what it has mapped, and advice to the kernel about it (process_madvise, Linux 5.10; WILLNEED 5.13). Advice is
 * a hint: a range that cannot take it (locked, of a device) is passed over.
 */
import { closeSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { type Call, callInPool, type NumberedCall, syscall } from './libc.ts';

const PIDFD_OPEN: NumberedCall = { name: 'pidfd_open', number: 434, args: ['int', 'uint'] };
/** By number: not every C library has it. */
const PROCESS_MADVISE: Call = {
  name: 'syscall',
  result: 'long',
  args: ['long', 'int', 'void*', 'size_t', 'int', 'uint'],
};
const PROCESS_MADVISE_NUMBER = 440;
const ADVICE = { willneed: 3, pageout: 21 } as const;
/** Of one call: the kernel takes 1024 ranges, and nothing stops a call that has begun. */
const MAX_RANGES = 1024;
const BATCH_BYTES = 16 << 20;

export interface MemoryRange {
  readonly from: number;
  readonly bytes: number;
  /** Of it, in swap; known only where it was asked for. */
  readonly swappedBytes: number;
}

/** Empty for a process that has gone. `swap`: asks the kernel for more, which costs a walk through its page tables. */
export async function mappingsOf(pid: number, { swap = false } = {}): Promise<MemoryRange[]> {
  let text: string;
  try {
    text = await readFile(`/proc/${pid}/${swap ? 'smaps' : 'maps'}`, 'latin1');
  } catch {
    return [];
  }
  const ranges: { from: number; bytes: number; swappedBytes: number }[] = [];
  let last: (typeof ranges)[number] | undefined;
  for (const line of text.split('\n')) {
    const head = /^([0-9a-f]+)-([0-9a-f]+) /.exec(line);
    if (head !== null) {
      const [from, to] = [Number.parseInt(head[1]!, 16), Number.parseInt(head[2]!, 16)];
      // Above that is the kernel's own page ([vsyscall]), which no number holds exactly.
      last = to <= Number.MAX_SAFE_INTEGER ? { from, bytes: to - from, swappedBytes: 0 } : undefined;
      if (last !== undefined) ranges.push(last);
      continue;
    }
    const swapped = /^Swap: +(\d+) kB/.exec(line);
    if (swapped !== null && last !== undefined) last.swappedBytes = Number(swapped[1]) * 1024;
  }
  return ranges;
}

/** In a thread of the pool, some megabytes at a time, until `signal`. Resolves to the bytes that the advice was taken for; 0 in a kernel without it. */
export async function adviseProcess(
  pid: number,
  given: readonly MemoryRange[],
  advice: keyof typeof ADVICE,
  signal?: AbortSignal,
): Promise<number> {
  const ranges = [...split(given)];
  let process: number;
  try {
    process = syscall(PIDFD_OPEN, [pid, 0], `pid ${pid}`);
  } catch {
    return 0;
  }
  try {
    let done = 0;
    for (let at = 0; at < ranges.length && signal?.aborted !== true; ) {
      const batch = batchFrom(ranges, at);
      const vector = Buffer.alloc(16 * batch.length);
      for (const [index, { from, bytes }] of batch.entries()) {
        vector.writeBigUInt64LE(BigInt(from), 16 * index);
        vector.writeBigUInt64LE(BigInt(bytes), 16 * index + 8);
      }
      const args = [PROCESS_MADVISE_NUMBER, process, vector, batch.length, ADVICE[advice], 0];
      const taken = await callInPool(PROCESS_MADVISE, args);
      done += Math.max(0, taken);
      // It ends at the first range that it does not take.
      let left = Math.max(0, taken);
      let passed = 0;
      while (passed < batch.length && left >= batch[passed]!.bytes) left -= batch[passed++]!.bytes;
      at += passed === batch.length ? passed : passed + 1;
    }
    return done;
  } finally {
    closeSync(process);
  }
}

function* split(ranges: readonly MemoryRange[]): Generator<MemoryRange> {
  for (const { from, bytes, swappedBytes } of ranges) {
    for (let at = 0; at < bytes; at += BATCH_BYTES) {
      yield { from: from + at, bytes: Math.min(BATCH_BYTES, bytes - at), swappedBytes };
    }
  }
}

/** At least one. */
function batchFrom(ranges: readonly MemoryRange[], at: number): MemoryRange[] {
  const batch: MemoryRange[] = [];
  let bytes = 0;
  for (const range of ranges.slice(at, at + MAX_RANGES)) {
    if (batch.length > 0 && bytes + range.bytes > BATCH_BYTES) break;
    batch.push(range);
    bytes += range.bytes;
  }
  return batch;
}
