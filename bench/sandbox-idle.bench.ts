/**
 * What an idle sandbox that stays costs in memory, all in: what the machine has less of with so many of them, divided by how many there are.
 * Half of them are made first, so that what the service needs once (code, the first layers) is in neither figure. Beside it: what its processes
 * hold, what the control group counts, and what the service and the keeper have grown by.
 */
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { hasFlag, numberOption } from './options.ts';
import { printTable } from './results.ts';
import { summary } from './sample.ts';
import { type SandboxHost, sandboxesMissing, withSmallImage } from './sandbox-host.ts';
import { settle } from './settle.ts';
import { withScratch } from './work-folder.ts';

const MIB = 2 ** 20;
const TARGET_MIB = 1;
const AT_ONCE = 4;
const LEAST = 100;

export const benchmark: Benchmark = {
  name: 'sandbox-idle',
  about: 'memory of an idle sandbox that stays, all in; --full for 2,000 of them',
  needs: sandboxesMissing,
  run: () => withScratch('idle', (folder) => withSmallImage(folder, measure)),
};

async function measure(host: SandboxHost): Promise<Result> {
  // Of fewer, what else the machine does hides what they take.
  const n = Math.max(LEAST, numberOption('n', hasFlag('full') ? 2000 : 300));
  const ms: number[] = [];
  const make = async (count: number) => {
    let left = count;
    const work = async () => {
      while (left-- > 0) {
        const startedAt = performance.now();
        const name = await host.create('small:1');
        // As one that has worked and waits: its pages and its records are there.
        await host.exec(name, ['/bin/true']);
        ms.push(performance.now() - startedAt);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  };
  await make(Math.ceil(n / 2));
  const before = await resting(host);
  await make(Math.floor(n / 2));
  const after = await resting(host);
  const each = (what: keyof Usage) =>
    round((before[what] - after[what]) / Math.floor(n / 2) / MIB) * (what === 'available' ? 1 : -1);
  const measured = each('available');
  const parts = each('kernel') + each('processes') + each('service') + each('keeper');
  // Less than its parts: somebody else has freed memory meanwhile.
  const used = round(Math.max(measured, parts));
  printTable([
    ['MiB of each', ''],
    ['the machine has less', measured],
    ['sum of the parts', round(parts)],
    ['kernel: slab, page tables, stacks', round(each('kernel'))],
    ['of it not reclaimable', round(each('fixed'))],
    ['its processes (PSS)', round(each('processes'))],
    ['the service', round(each('service'))],
    ['the keeper', round(each('keeper'))],
  ]);
  const all = summary(ms);
  return {
    ratio: used,
    ...atMost(TARGET_MIB, used),
    against: `${TARGET_MIB} MiB each`,
    n,
    p50: all.p50,
    p99: all.p99,
    unit: 'ms',
    measuredMib: measured,
    partsMib: round(parts),
    kernelMib: each('kernel'),
    fixedKernelMib: each('fixed'),
    processesMib: each('processes'),
    serviceMib: each('service'),
    keeperMib: each('keeper'),
    firstHundredMs: summary(ms.slice(0, 100)).p50,
    lastHundredMs: summary(ms.slice(-100)).p50,
  };
}

interface Usage {
  readonly available: number;
  readonly kernel: number;
  readonly fixed: number;
  readonly processes: number;
  readonly service: number;
  readonly keeper: number;
}

/** When nothing is left to write, and what can be had back without loss was had back: page cache, dentries and inodes that nobody holds. */
async function resting(host: SandboxHost): Promise<Usage> {
  await host.rest();
  settle();
  writeFileSync('/proc/sys/vm/drop_caches', '3');
  const memory = fieldsOf('/proc/meminfo');
  const of = (...names: string[]) => names.reduce((sum, name) => sum + (memory.get(name) ?? 0), 0);
  return {
    available: of('MemFree', 'Buffers', 'Cached', 'SReclaimable') - of('Shmem'),
    kernel: of('Slab', 'PageTables', 'KernelStack', 'Percpu'),
    fixed: of('SUnreclaim', 'PageTables', 'KernelStack', 'Percpu'),
    processes: childrenOf(host.keeperPid).reduce((sum, pid) => sum + pssOf(pid), 0),
    service: fieldsOf(`/proc/${host.pid}/status`).get('VmRSS') ?? 0,
    keeper: fieldsOf(`/proc/${host.keeperPid}/status`).get('VmRSS') ?? 0,
  };
}

/** `Name: 12 kB`, in bytes. */
function fieldsOf(path: string): Map<string, number> {
  const lines = readFileSync(path, 'utf8').matchAll(/^(\w+):\s+(\d+) kB$/gm);
  return new Map([...lines].map(([, name, kib]) => [name!, Number(kib) * 1024]));
}

function pssOf(pid: number): number {
  try {
    return fieldsOf(`/proc/${pid}/smaps_rollup`).get('Pss') ?? 0;
  } catch {
    return 0;
  }
}

function childrenOf(pid: number): number[] {
  return readdirSync(`/proc/${pid}/task`).flatMap((thread) =>
    readFileSync(`/proc/${pid}/task/${thread}/children`, 'utf8').split(' ').filter(Boolean).map(Number),
  );
}
