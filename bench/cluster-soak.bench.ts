/**
 * A cluster with real sandboxes under faults for ten minutes (`--full`; a minute by default, `--n=SECONDS`): for two thirds of it a service is killed or
 * stands still in each cycle, then none, so that what grows can be seen in processes that live. What must hold is cluster-soak.ts's to say.
 */
import { findAgent } from '#runtime';
import type { Benchmark, Result } from './benchmark.ts';
import { atMost, round } from './benchmark.ts';
import { type Sample, soak } from './cluster-soak.ts';
import { hasFlag, numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';
import { withScratch } from './work-folder.ts';

const FULL_SECONDS = 600;
const SHORT_SECONDS = 60;
const MOST_GROWTH = 1.25;
/** Until code is compiled and caches are full. */
const WARM_UP = 3;

export const benchmark: Benchmark = {
  name: 'cluster-soak',
  about: 'a cluster with real sandboxes under faults: what is left, what grows',
  needs: () => {
    if (process.getuid?.() !== 0) return 'it needs root';
    return findAgent() === undefined ? 'there is no dsec-agent' : undefined;
  },
  run: () => withScratch('soak', measure),
};

async function measure(folder: string): Promise<Result> {
  const seconds = numberOption('n', hasFlag('full') ? FULL_SECONDS : SHORT_SECONDS);
  const from = Date.now();
  const share = () => (Date.now() - from) / 1000 / seconds;
  const soaked = await soak({
    folder,
    clients: 4,
    sandboxes: 24,
    next: () => (share() < 1 ? { fault: share() < 2 / 3 } : undefined),
    onCycle: ({ cycle, fault, seconds: took, mounts, files, residentBytes, descriptors }) => {
      const mib = (bytes: number) => Math.round(bytes / 2 ** 20);
      const services = Object.entries(residentBytes).map(([name, bytes]) => `${name} ${mib(bytes)} MiB`);
      const open = Object.values(descriptors).join(' ');
      console.log(
        `${cycle}: ${took.toFixed(1)} s ${fault || '-'}; ${mounts} mounts, ${files} files, descriptors ${open}; ${services.join(', ')}`,
      );
    },
  });
  const { samples, made, kills, errors, cpuSeconds } = soaked;
  const calm = samples.filter(({ fault }) => fault === '').slice(WARM_UP);
  const growth = growthOf(calm, ({ residentBytes }) =>
    Object.values(residentBytes).reduce((sum, bytes) => sum + bytes, 0),
  );
  const files = growthOf(samples.slice(WARM_UP), (sample) => sample.files);
  const descriptors = growthOf(calm, (sample) =>
    Object.values(sample.descriptors).reduce((sum, count) => sum + count, 0),
  );
  printTable([
    ['sandboxes', 'faults', 'errors seen', 'CPU s', 'memory', 'descriptors', 'files'],
    [made, kills, errors, cpuSeconds, growth, descriptors, files].map((value) => round(value).toString()),
  ]);
  const times = samples.map(({ seconds: took }) => took * 1000);
  const most = Math.max(growth, files, descriptors);
  return {
    ratio: round(most),
    ...atMost(MOST_GROWTH, most),
    against: 'what there was after the first cycles',
    n: samples.length,
    p50: round(median(times)),
    p99: round(quantile(times, 0.99)),
    unit: 'ms',
    seconds,
    made,
    kills,
    errors,
    cpuSeconds: round(cpuSeconds),
    memoryGrowth: round(growth),
    descriptorGrowth: round(descriptors),
    fileGrowth: round(files),
    databaseBytes: samples.at(-1)?.databaseBytes,
    residentBytes: samples.at(-1)?.residentBytes,
  };
}

/** The last third against the first. */
function growthOf(samples: readonly Sample[], read: (sample: Sample) => number): number {
  const third = Math.ceil(samples.length / 3);
  if (third === 0) return 1;
  const mean = (some: readonly Sample[]) => median(some.map(read));
  return mean(samples.slice(-third)) / Math.max(1, mean(samples.slice(0, third)));
}
