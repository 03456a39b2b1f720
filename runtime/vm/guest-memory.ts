/**
 * What keeps many machines small on one host: read-only layers on virtio-pmem, read in place (DAX), so that the host's page cache holds them once for all
 * machines; free pages told to the host by the balloon (free page reporting); and file pages that the guest has not read for a while given up (DAMON), so
 * that there are free pages to tell of. Each is switched per machine.
 *
 * This is the guest's side as data: words of the kernel's command line, and files to write in a guest that runs. DAMON is driven through its sysfs
 * (since Linux 5.18): DAMON_RECLAIM, which is meant for this, does nothing in 6.12, where it starts without its scheme.
 */
import { fail } from '../errors.ts';
import type { MemoryOptions } from '../sandbox-api/memory-options.ts';
import type { VmFeatures } from './vm-driver.ts';

export type GuestMemory = Required<MemoryOptions>;

/** As a file of the guest is written. */
export interface GuestWrite {
  readonly path: string;
  readonly value: string;
}

/**
 * All three: the layers of base and toolkits are read-only and shared, and what the guest writes is on a disk of its own, whose cached pages only DAMON and
 * reporting bring back.
 */
export const DEFAULT_GUEST_MEMORY: GuestMemory = { pmem: true, reporting: true, damon: true };

/** A file page that was not read for so long is cold. Longer than a build's pauses, shorter than a sandbox waits for its model. */
export const COLD_AFTER_MS = 30_000;
/**
 * Nothing was read of it in so many intervals; each has so many samples. A sample looks at one page of each region, for all that was read of it since the last one:
 * 75 pages before a region is cold. More of them find no more, and are what DAMON costs.
 */
const COLD_INTERVALS = 15;
const SAMPLES = 5;
/** Of pages that are looked at for reclaim; a bound in time would leave nothing where guests are emulated. */
const QUOTA_BYTES_PER_S = 64 * 2 ** 20;
const LEAST_REGIONS = 64;
const MOST_REGIONS = 1000;
const GIB = 2 ** 30;
/**
 * log2 of the pages of a block that is reported: 64 KiB. The default, 2 MiB, leaves nearly all of what DAMON gives up unreported, for cold pages lie
 * between warm ones.
 */
export const REPORTING_ORDER = 4;

/**
 * What a machine gets: what was asked for, else the default where the driver has it.
 * @throws RUNTIME_UNSUPPORTED when something was asked for that the driver lacks
 */
export function guestMemory(
  asked: MemoryOptions | undefined,
  driver: { readonly name: string; readonly features: Pick<VmFeatures, 'pmem' | 'freePageReporting'> },
): GuestMemory {
  const has: GuestMemory = { pmem: driver.features.pmem, reporting: driver.features.freePageReporting, damon: true };
  const choose = (name: keyof GuestMemory, what: string) => {
    const wanted = asked?.[name];
    if (wanted && !has[name]) throw fail('RUNTIME_UNSUPPORTED', { backend: driver.name, capability: what });
    return wanted ?? (DEFAULT_GUEST_MEMORY[name] && has[name]);
  };
  return {
    pmem: choose('pmem', 'virtio-pmem'),
    reporting: choose('reporting', 'free page reporting'),
    damon: choose('damon', 'DAMON'),
  };
}

/**
 * Words for the kernel's command line. No bounce buffers: where there may be memory above 4 GiB, as with pmem, the kernel would set 64 MiB aside for them, and write to
 * all of it; virtio devices reach all memory, and there are no others.
 */
export function memoryKernelArguments(memory: GuestMemory): string[] {
  const reporting = memory.reporting ? [`page_reporting.page_reporting_order=${REPORTING_ORDER}`] : [];
  return ['swiotlb=noforce', ...reporting];
}

/**
 * Files of the guest, in this order, when it boots. What its kernel lacks it is done without. Nothing is set where DAMON is off. (Reporting is a feature of
 * the balloon, which the machine has or has not.)
 */
export function memoryGuestWrites(
  memory: GuestMemory,
  memoryBytes: number,
  coldAfterMs: number = COLD_AFTER_MS,
): GuestWrite[] {
  if (!memory.damon) return [];
  const interval = Math.max(1000, Math.round((coldAfterMs * 1000) / COLD_INTERVALS));
  const context = '0/contexts/0';
  const scheme = `${context}/schemes/0`;
  const regions = memoryRegions(memoryBytes);
  const files: [file: string, value: number | string | bigint][] = [
    ['nr_kdamonds', 1],
    ['0/contexts/nr_contexts', 1],
    [`${context}/operations`, 'paddr'],
    [`${context}/monitoring_attrs/intervals/sample_us`, Math.max(100, Math.round(interval / SAMPLES))],
    [`${context}/monitoring_attrs/intervals/aggr_us`, interval],
    [`${context}/monitoring_attrs/nr_regions/min`, LEAST_REGIONS],
    [`${context}/monitoring_attrs/nr_regions/max`, MOST_REGIONS],
    [`${context}/targets/nr_targets`, 1],
    [`${context}/targets/0/regions/nr_regions`, regions.length],
    ...regions.flatMap(([start, end], at): [string, number][] => [
      [`${context}/targets/0/regions/${at}/start`, start],
      [`${context}/targets/0/regions/${at}/end`, end],
    ]),
    [`${context}/schemes/nr_schemes`, 1],
    [`${scheme}/action`, 'pageout'],
    [`${scheme}/access_pattern/sz/min`, 4096],
    [`${scheme}/access_pattern/sz/max`, ANY],
    [`${scheme}/access_pattern/nr_accesses/min`, 0],
    [`${scheme}/access_pattern/nr_accesses/max`, 0],
    [`${scheme}/access_pattern/age/min`, COLD_INTERVALS],
    [`${scheme}/access_pattern/age/max`, 2 ** 32 - 1],
    [`${scheme}/quotas/bytes`, QUOTA_BYTES_PER_S],
    [`${scheme}/quotas/reset_interval_ms`, 1000],
    // At work however much is free: it is the host that is short, not the guest.
    [`${scheme}/watermarks/metric`, 'none'],
    // Memory of programs would need swap in the guest.
    [`${scheme}/filters/nr_filters`, 1],
    [`${scheme}/filters/0/type`, 'anon'],
    [`${scheme}/filters/0/matching`, 'Y'],
    ['0/state', 'on'],
  ];
  return files.map(([file, value]) => ({ path: `${DAMON}/${file}`, value: String(value) }));
}

const DAMON = '/sys/kernel/mm/damon/admin/kdamonds';
const ANY = 2n ** 64n - 1n;

/** Where a PC's memory lies: below the devices, at 3 GiB at most, and from 4 GiB on. What is not memory in there is passed over. */
function memoryRegions(memoryBytes: number): [start: number, end: number][] {
  if (memoryBytes <= 2 * GIB) return [[0, memoryBytes]];
  return [
    [0, 3 * GIB],
    [4 * GIB, 2 * GIB + memoryBytes],
  ];
}
