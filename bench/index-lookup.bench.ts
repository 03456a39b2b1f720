/**
 * How fast a read finds where its bytes are: lookups in an index of a million segments, one core, spread at random over the device and
 * in order. The target is what the C++ index does (5.6 million a second plain).
 */
import { IndexBuilder, mergeIndexes, Pieces, type SegmentIndex } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';

const SEGMENTS = 1_000_000;
const LOOKUPS = 2_000_000;
const TARGET_PER_SECOND = 5.6e6;

export const benchmark: Benchmark = {
  name: 'index-lookup',
  about: 'lookups a second in an index of 1,000,000 segments, against the C++ figure',
  run,
};

async function run(): Promise<Result> {
  const index = makeIndex(1);
  const layers = mergeIndexes(Array.from({ length: 16 }, (_, layer) => makeIndex(16, layer)));
  const cases: [string, SegmentIndex, Float64Array][] = [
    ['random', index, positions(index, 'random')],
    ['in order', index, positions(index, 'in order')],
    ['random, 16 layers merged', layers, positions(layers, 'random')],
  ];
  const rows = [];
  for (const [name, over, where] of cases) {
    const times: number[] = [];
    const n = numberOption('n', 7);
    // CPU time: others may be at work on this machine.
    for (let at = -2; at < n; at++) {
      const before = process.cpuUsage();
      sweep(over, where);
      const { user, system } = process.cpuUsage(before);
      if (at >= 0) times.push((user + system) / 1000);
    }
    rows.push({ name, segments: over.count, times, perSecond: (LOOKUPS / median(times)) * 1000 });
  }
  printTable([
    ['lookups', 'segments', 'million a second'],
    ...rows.map(({ name, segments, perSecond }) => [name, String(segments), (perSecond / 1e6).toFixed(1)]),
  ]);
  const first = rows[0]!;
  const ratio = round(first.perSecond / TARGET_PER_SECOND);
  return {
    ratio,
    ...atLeast(1, ratio),
    against: '5.6 million lookups a second, the C++ figure for 1,000,000 segments (not run here)',
    n: first.times.length,
    p50: round(median(first.times)),
    p99: round(quantile(first.times, 0.99)),
    unit: 'ms',
    lookups: LOOKUPS,
    millionsPerSecond: Object.fromEntries(rows.map(({ name, perSecond }) => [name, round(perSecond / 1e6)])),
  };
}

/** As a layer that was written at random has it: runs of 8 to 64 sectors with holes of the same sizes between them. */
function makeIndex(parts: number, layer = 0): SegmentIndex {
  const builder = new IndexBuilder(SEGMENTS);
  let state = 7 + layer;
  const next = () => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return state / 0x7fffffff;
  };
  let sector = 0;
  let moffset = 8;
  for (let at = 0; at < SEGMENTS / parts; at++) {
    sector += 8 * (1 + Math.floor(next() * 8 * parts));
    const length = 8 * (1 + Math.floor(next() * 8));
    builder.add(sector, sector + length, moffset, false, layer);
    sector += length;
    moffset += length;
  }
  return builder.build();
}

function positions(index: SegmentIndex, order: 'random' | 'in order'): Float64Array {
  const end = Math.floor(index.end(index.count - 1) / 8);
  const where = Float64Array.from({ length: LOOKUPS }, (_, at) =>
    order === 'random' ? 8 * Math.floor(Math.random() * end) : 8 * Math.floor((at / LOOKUPS) * end),
  );
  return where;
}

/** Reads of 4 KiB. */
function sweep(index: SegmentIndex, where: Float64Array): number {
  const pieces = new Pieces();
  let found = 0;
  for (let at = 0; at < where.length; at++) {
    pieces.clear();
    const start = where[at]!;
    index.lookup(start, start + 8, pieces);
    found += pieces.moffsets[0]!;
  }
  return found;
}
