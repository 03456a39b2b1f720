/** What of a sandbox's virtual machine is on its record: how large it is and what keeps it small, so that the same machine can be made again. */
import { availableParallelism, totalmem } from 'node:os';
import { fail } from '../errors.ts';
import { MACHINE_SIZES } from '../sandbox-api/backends.ts';
import type { AllLimits } from '../sandbox-api/limits.ts';
import type { MemoryOptions } from '../sandbox-api/memory-options.ts';
import { LEAST_DISK_BYTES } from './disk/upper-disk.ts';
import { type GuestMemory, guestMemory } from './guest-memory.ts';
import type { VmDriver } from './vm-driver.ts';

export interface VmFacts {
  /** Its guest has come to life: before that it is half made. */
  readonly isReady?: true;
  readonly driver: VmDriver['name'];
  readonly cpus: number;
  readonly memoryBytes: number;
  readonly memory: GuestMemory;
  /** Of a disk of its own at /var/lib/docker. */
  readonly dockerDiskBytes?: number;
}

const MIB = 1024 * 1024;
const STEP = 2 * MIB;
/** The guest's kernel takes some 80 MiB of it. */
export const LEAST_MEMORY_BYTES = 128 * MIB;
const DEFAULT = MACHINE_SIZES.microvm;

export interface VmWish {
  readonly memory?: MemoryOptions;
  readonly dockerDiskBytes?: number;
  /** Its layers are fetched when they are read. */
  readonly lazy: boolean;
}

/** @throws RUNTIME_LIMIT, RUNTIME_LIMIT_UNAVAILABLE, RUNTIME_UNSUPPORTED */
export function vmFacts(driver: VmDriver, limits: AllLimits, wish: VmWish): VmFacts {
  const { cpus, memoryBytes, memorySwapBytes, inodes } = limits;
  const unavailable = (limit: string, reason: string) => fail('RUNTIME_LIMIT_UNAVAILABLE', { limit, reason });
  if (memorySwapBytes !== undefined) throw unavailable('memorySwapBytes', 'a virtual machine has no swap of the host');
  if (inodes !== undefined)
    throw unavailable('inodes', 'a virtual machine has a disk of its own: its size is the limit');
  if (memoryBytes !== undefined && memoryBytes < LEAST_MEMORY_BYTES) {
    const problem = `${memoryBytes}: a virtual machine takes at least 128 MiB`;
    throw fail('RUNTIME_LIMIT', { limit: 'memoryBytes', problem });
  }
  const { memory: asked, lazy, dockerDiskBytes } = wish;
  if (dockerDiskBytes !== undefined && dockerDiskBytes < LEAST_DISK_BYTES) {
    throw fail('RUNTIME_LIMIT', { limit: 'dockerDiskBytes', problem: `${dockerDiskBytes}: at least 16 MiB` });
  }
  // Pages of a layer that is fetched when it is read cannot be memory of the host.
  const wanted = lazy && asked?.pmem === undefined ? { ...asked, pmem: false } : asked;
  return {
    driver: driver.name,
    cpus: cpus === undefined ? Math.min(DEFAULT.cpus, availableParallelism()) : Math.max(1, Math.ceil(cpus)),
    memoryBytes: Math.ceil((memoryBytes ?? Math.min(DEFAULT.memoryBytes, totalmem() / 4)) / STEP) * STEP,
    memory: guestMemory(wanted, driver),
    dockerDiskBytes,
  };
}
