/**
 * Limits as what is written to files of control groups, v1 and v2. A limit that is not there any more is written as none, where
 * it is said that it was there before.
 *
 * - Swap: where only memory is limited, as much again may go to swap, as container engines have it: without that a sandbox could
 *   fill the machine's swap for all.
 * - v2's memory.oom.group is not used: the kernel ends the largest process, and a sandbox with a command that asked for too much goes on.
 * - v1 throttles what reaches the device in the name of the group: reads, and writes past the page cache. What is written back later is
 *   nobody's there; v2 knows whose it was.
 */
import { IO_LIMITS, type SandboxLimits } from '../sandbox-api/limits.ts';

export type GroupWrite = readonly [file: string, value: string];
export type Controller = 'cpu' | 'memory' | 'pids' | 'io';

export const CONTROLLERS: readonly Controller[] = ['cpu', 'memory', 'pids', 'io'];

/** As v1 calls them. */
export const V1_NAMES: Readonly<Record<Controller, string>> = {
  cpu: 'cpu',
  memory: 'memory',
  pids: 'pids',
  io: 'blkio',
};

const PERIOD_US = 100_000;

export interface WriteOptions {
  /** `major:minor` of the device that I/O is limited for. */
  readonly device?: string;
  /** The machine counts swap. */
  readonly swap: boolean;
  /** It was limited before: then what is not limited now is said too. */
  readonly changing?: boolean;
}

/** Which controllers have a limit. */
export function limitedControllers(limits: SandboxLimits): Controller[] {
  const limited: Record<Controller, boolean> = {
    cpu: limits.cpus !== undefined,
    memory: limits.memoryBytes !== undefined,
    pids: limits.pids !== undefined,
    io: IO_LIMITS.some((name) => limits[name] !== undefined),
  };
  return CONTROLLERS.filter((controller) => limited[controller]);
}

export function writesV1(controller: Controller, limits: SandboxLimits, options: WriteOptions): GroupWrite[] {
  const { device = '', swap, changing = false } = options;
  const { cpus, memoryBytes, pids } = limits;
  switch (controller) {
    case 'cpu':
      if (cpus === undefined) return changing ? [['cpu.cfs_quota_us', '-1']] : [];
      return [
        ['cpu.cfs_period_us', String(PERIOD_US)],
        ['cpu.cfs_quota_us', String(Math.round(cpus * PERIOD_US))],
      ];
    case 'memory': {
      const writes: GroupWrite[] = [];
      // Memory may never be above memory and swap: that goes out of the way first.
      if (changing && swap) writes.push(['memory.memsw.limit_in_bytes', '-1']);
      if (memoryBytes !== undefined || changing) writes.push(['memory.limit_in_bytes', String(memoryBytes ?? -1)]);
      const both = withSwap(limits);
      if (both !== undefined && swap) writes.push(['memory.memsw.limit_in_bytes', String(both)]);
      return writes;
    }
    case 'pids':
      return pids === undefined && !changing ? [] : [['pids.max', String(pids ?? 'max')]];
    case 'io':
      return V1_IO.filter(([name]) => limits[name] !== undefined || changing).map(
        ([name, file]): GroupWrite => [`blkio.throttle.${file}_device`, `${device} ${limits[name] ?? 0}`],
      );
  }
}

const V1_IO = [
  ['ioReadBps', 'read_bps'],
  ['ioWriteBps', 'write_bps'],
  ['ioReadIops', 'read_iops'],
  ['ioWriteIops', 'write_iops'],
] as const;

export function writesV2(controller: Controller, limits: SandboxLimits, options: WriteOptions): GroupWrite[] {
  const { device = '', swap, changing = false } = options;
  const { cpus, memoryBytes, pids } = limits;
  switch (controller) {
    case 'cpu':
      if (cpus === undefined && !changing) return [];
      return [['cpu.max', `${cpus === undefined ? 'max' : Math.round(cpus * PERIOD_US)} ${PERIOD_US}`]];
    case 'memory': {
      if (memoryBytes === undefined && !changing) return [];
      const both = withSwap(limits);
      const swapText = both === undefined ? 'max' : String(both - memoryBytes!);
      return [['memory.max', String(memoryBytes ?? 'max')], ...(swap ? [['memory.swap.max', swapText] as const] : [])];
    }
    case 'pids':
      return pids === undefined && !changing ? [] : [['pids.max', String(pids ?? 'max')]];
    case 'io': {
      const values = V2_IO.filter(([name]) => limits[name] !== undefined || changing);
      if (values.length === 0) return [];
      return [['io.max', [device, ...values.map(([name, key]) => `${key}=${limits[name] ?? 'max'}`)].join(' ')]];
    }
  }
}

const V2_IO = [
  ['ioReadBps', 'rbps'],
  ['ioWriteBps', 'wbps'],
  ['ioReadIops', 'riops'],
  ['ioWriteIops', 'wiops'],
] as const;

function withSwap({ memoryBytes, memorySwapBytes }: SandboxLimits): number | undefined {
  return memoryBytes === undefined
    ? undefined
    : (memorySwapBytes ?? Math.min(2 * memoryBytes, Number.MAX_SAFE_INTEGER));
}
