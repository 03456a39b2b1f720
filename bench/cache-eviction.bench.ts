/**
 * Which chunks to give up: the chunk cache's policy (the very code) against LRU, CLOCK and SIEVE, by the misses of a made-up trace, for
 * several sizes of the cache, without scans and with. The measurement behind the choice; no clock is read.
 */
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { chunkCachePolicy, clock, lru, sieve } from './eviction/policies.ts';
import { makeTrace } from './eviction/trace.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';

const IMAGES = 300;
const CHUNKS_PER_IMAGE = 400;
const STARTS = 4000;
/** Size of the cache as a part of all images. */
const SIZES = [0.01, 0.03, 0.1];
const SCAN_PARTS = [0, 0.02, 0.1];
const CHUNK_BYTES = 256 * 1024;

export const benchmark: Benchmark = {
  name: 'cache-eviction',
  about: 'hit ratio of the chunk cache’s eviction against LRU, CLOCK and SIEVE, with and without scans',
  run,
};

async function run(): Promise<Result> {
  const total = IMAGES * CHUNKS_PER_IMAGE;
  const rows = [];
  for (const scanPart of SCAN_PARTS) {
    const trace = [
      ...makeTrace({ images: IMAGES, chunksPerImage: CHUNKS_PER_IMAGE, starts: STARTS, scanPart, seed: 11 }),
    ];
    for (const size of SIZES) {
      const capacity = Math.round(total * size);
      const caches = [lru(capacity), clock(capacity), sieve(capacity), chunkCachePolicy(capacity, total)];
      const missRatios = caches.map(
        (cache) => trace.reduce((sum, key) => sum + Number(!cache.visit(key)), 0) / trace.length,
      );
      rows.push({ scanPart, size, visits: trace.length, names: caches.map(({ name }) => name), missRatios });
    }
  }
  printTable([
    ['scans', 'cache', ...rows[0]!.names.map((name) => `hits, ${name}`)],
    ...rows.map(({ scanPart, size, missRatios }) => [
      `${scanPart * 100} %`,
      `${size * 100} %`,
      ...missRatios.map((misses) => `${((1 - misses) * 100).toFixed(1)} %`),
    ]),
  ]);
  const againstLru = rows.map(({ missRatios }) => missRatios[3]! / missRatios[0]!);
  const ratio = round(Math.max(...againstLru));
  const fetched = rows.map(({ missRatios, visits }) => Math.round(missRatios[3]! * visits * CHUNK_BYTES));
  return {
    ratio,
    ...atMost(1, ratio),
    against: 'misses of LRU on the same trace, on the worst of the settings',
    n: rows.length,
    p50: median(fetched),
    p99: quantile(fetched, 0.99),
    unit: 'bytes',
    rows,
  };
}
