/**
 * What a sandbox may use at most, all its commands together. What is not named is not limited, but for processes (4096). The agent of a
 * sandbox that stays is in none of these limits: it answers whatever its commands use up.
 */
import { fail } from '../errors.ts';
import type { Capability } from './capabilities.ts';

export interface SandboxLimits {
  /** Processors' worth of time: 1.5 is one and a half. */
  readonly cpus?: number;
  readonly memoryBytes?: number;
  /** Memory and swap together; twice `memoryBytes` by default. */
  readonly memorySwapBytes?: number;
  /** Processes and threads. */
  readonly pids?: number;
  /** Of the device that has the sandbox's changes, in a second. */
  readonly ioReadBps?: number;
  readonly ioWriteBps?: number;
  readonly ioReadIops?: number;
  readonly ioWriteIops?: number;
}

export interface DiskLimits {
  /** What the sandbox may change on its disk, in bytes. */
  readonly diskBytes?: number;
  /** Files and folders that it may make; with `diskBytes`. */
  readonly inodes?: number;
}

export interface AllLimits extends SandboxLimits, DiskLimits {}

type Collected = { -readonly [K in keyof AllLimits]: AllLimits[K] };

/** A change: null takes the limit away. */
export type LimitChanges = { readonly [K in keyof AllLimits]?: number | null };

export const IO_LIMITS = ['ioReadBps', 'ioWriteBps', 'ioReadIops', 'ioWriteIops'] as const;
const CONTROL_LIMITS = ['cpus', 'memoryBytes', 'memorySwapBytes', 'pids', ...IO_LIMITS] as const;
export const LIMIT_NAMES = [...CONTROL_LIMITS, 'diskBytes', 'inodes'] as const;

const MIB = 1 << 20;

/** The least that can work, and the most that the kernel takes. */
const RANGES: { readonly [K in keyof Required<AllLimits>]: readonly [least: number, most: number, text: string] } = {
  cpus: [0.01, 4096, 'between 0.01 and 4096'],
  memoryBytes: [MIB, Number.MAX_SAFE_INTEGER, 'at least 1 MiB'],
  memorySwapBytes: [MIB, Number.MAX_SAFE_INTEGER, 'at least 1 MiB'],
  pids: [1, 4_194_304, 'between 1 and 4194304'],
  ioReadBps: [4096, Number.MAX_SAFE_INTEGER, 'at least 4 KiB'],
  ioWriteBps: [4096, Number.MAX_SAFE_INTEGER, 'at least 4 KiB'],
  ioReadIops: [1, 2 ** 32 - 2, 'at least 1'],
  ioWriteIops: [1, 2 ** 32 - 2, 'at least 1'],
  diskBytes: [16 * MIB, 2 ** 44, 'between 16 MiB and 16 TiB'],
  inodes: [64, 2 ** 32 - 2, 'at least 64'],
};

/** Those that are limits, each in its range, in one order. @throws RUNTIME_LIMIT */
export function checkedLimits(given: AllLimits): AllLimits {
  const limits: Collected = {};
  for (const name of LIMIT_NAMES) {
    const value = given[name];
    if (value === undefined) continue;
    const [least, most, text] = RANGES[name];
    const whole = name === 'cpus' || Number.isInteger(value);
    if (!(value >= least && value <= most && whole)) {
      throw fail('RUNTIME_LIMIT', {
        limit: name,
        problem: `${value}: it has to be ${text}${whole ? '' : ', a whole number'}`,
      });
    }
    limits[name] = value;
  }
  const { memoryBytes, memorySwapBytes, diskBytes, inodes } = limits;
  if (memorySwapBytes !== undefined && (memoryBytes === undefined || memorySwapBytes < memoryBytes)) {
    const problem = 'it is for memory and swap together: it needs memoryBytes, and is at least that';
    throw fail('RUNTIME_LIMIT', { limit: 'memorySwapBytes', problem });
  }
  if (inodes !== undefined && diskBytes === undefined) {
    throw fail('RUNTIME_LIMIT', { limit: 'inodes', problem: 'it needs diskBytes too' });
  }
  return limits;
}

/** What a backend has to have for them. */
export function capabilitiesFor(limits: AllLimits): Capability[] {
  const has = (...names: (keyof AllLimits)[]) => names.some((name) => limits[name] !== undefined);
  const needed: Capability[] = [];
  if (has('cpus')) needed.push('cpu-limit');
  if (has('memoryBytes', 'memorySwapBytes')) needed.push('memory-limit');
  if (has('pids')) needed.push('pids-limit');
  if (has(...IO_LIMITS)) needed.push('io-limit');
  if (has('diskBytes', 'inodes')) needed.push('disk-limit');
  return needed;
}

/** The limits after a change. @throws RUNTIME_LIMIT */
export function changedLimits(before: AllLimits, changes: LimitChanges): AllLimits {
  const merged: Collected = { ...before };
  for (const name of LIMIT_NAMES) {
    const value = changes[name];
    if (value !== undefined) merged[name] = value ?? undefined;
  }
  // One that was said for more memory than there is now to say anything about.
  if (changes.memoryBytes === null && changes.memorySwapBytes === undefined) merged.memorySwapBytes = undefined;
  return checkedLimits(merged);
}
