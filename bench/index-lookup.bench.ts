/**
 * How fast a read finds where its bytes are: lookups in an index of a million segments, one core, spread at random over the device and
 * in order. The target is what the plain C++ index does: in the same run where $OVERLAYBD_SOURCE has it, else the 5.6 million a
 * second that its authors measured on a machine of theirs.
 */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { IndexBuilder, mergeIndexes, Pieces, type SegmentIndex } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { buildCppLookup } from './lookup-program.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';
import { withScratch } from './work-folder.ts';

const SEGMENTS = 1_000_000;
const LOOKUPS = 2_000_000;
const PUBLISHED_PER_SECOND = 5.6e6;

export const benchmark: Benchmark = {
  name: 'index-lookup',
  about: 'lookups a second in an index of 1,000,000 segments, against the C++ figure',
  run,
};

async function run(): Promise<Result> {
  const index = makeIndex(1);
  const layers = mergeIndexes(Array.from({ length: 16 }, (_, layer) => makeIndex(16, layer)));
  const random = positions(index, 'random');
  const cases: [string, SegmentIndex, Float64Array][] = [
    ['random', index, random],
    ['in order', index, positions(index, 'in order')],
    ['random, 16 layers merged', layers, positions(layers, 'random')],
  ];
  const n = numberOption('n', 7);
  const rows = [];
  let peer: { plain: number[]; merged: number[] } | undefined;
  for (const [name, over, where] of cases) {
    for (let warm = 0; warm < 2; warm++) cpuMs(() => sweep(over, where));
    if (where !== random) {
      const times = Array.from({ length: n }, () => cpuMs(() => sweep(over, where)).ms);
      rows.push({ name, segments: over.count, times });
      continue;
    }
    const { times, theirs } = await withScratch('index-lookup', (scratch) => besideCpp(scratch, over, where, n));
    rows.push({ name, segments: over.count, times });
    peer = theirs;
  }
  const millions = (times: readonly number[]) => round(LOOKUPS / median(times) / 1000);
  const cpp = Object.entries(peer ?? {}).map(([name, times]) => ({ name: `C++, ${name}`, segments: SEGMENTS, times }));
  printTable([
    ['lookups', 'segments', 'million a second'],
    ...[...rows, ...cpp].map(({ name, segments, times }) => [name, String(segments), String(millions(times))]),
  ]);
  const first = rows[0]!;
  const ofPublished = round((millions(first.times) * 1e6) / PUBLISHED_PER_SECOND);
  const ratioOver = (theirs: readonly number[]) => round(median(first.times.map((ms, at) => theirs[at]! / ms)));
  const ratio = peer === undefined ? ofPublished : ratioOver(peer.plain);
  return {
    ratio,
    ...atLeast(1, ratio),
    against:
      peer === undefined
        ? '5.6 million lookups a second, the published C++ figure for 1,000,000 segments (not run here: OVERLAYBD_SOURCE)'
        : 'the plain C++ index of containerd/overlaybd, the same lookups in the same run',
    n,
    p50: round(median(first.times)),
    p99: round(quantile(first.times, 0.99)),
    unit: 'ms',
    lookups: LOOKUPS,
    millionsPerSecond: Object.fromEntries([...rows, ...cpp].map(({ name, times }) => [name, millions(times)])),
    ratioToPublished: ofPublished,
    ...(peer === undefined ? {} : { ratioToMergedCpp: ratioOver(peer.merged) }),
    bytesPerSegment: round(index.memoryBytes / index.count),
  };
}

/** CPU time: others may be at work on this machine. */
function cpuMs(work: () => number): { ms: number; sum: number } {
  const before = process.cpuUsage();
  const sum = work();
  const { user, system } = process.cpuUsage(before);
  return { ms: (user + system) / 1000, sum };
}

/** The C++ program looks up the same in the same segments, in turn with us. */
async function besideCpp(scratch: string, index: SegmentIndex, where: Float64Array, n: number) {
  const segments = join(scratch, 'segments');
  const sectors = join(scratch, 'positions');
  const cpp = buildCppLookup(scratch);
  if (cpp === undefined) return { times: Array.from({ length: n }, () => cpuMs(() => sweep(index, where)).ms) };
  writeFileSync(segments, asEntries(index));
  writeFileSync(sectors, new Uint8Array(where.buffer));
  const theirs = { plain: [] as number[], merged: [] as number[] };
  const times: number[] = [];
  for (let at = 0; at < n; at++) {
    const ours = cpuMs(() => sweep(index, where));
    const { plainMs, mergedMs, sum } = cpp(segments, sectors);
    if (sum !== ours.sum) throw new Error(`the C++ index found ${sum}, ours ${ours.sum}`);
    times.push(ours.ms);
    theirs.plain.push(plainMs);
    theirs.merged.push(mergedMs);
  }
  return { times, theirs };
}

/** As they are in a file. */
function asEntries(index: SegmentIndex): Buffer {
  const entries = Buffer.alloc(index.count * 16);
  for (let at = 0; at < index.count; at++) {
    const start = index.start(at);
    entries.writeBigUInt64LE(BigInt(start) | (BigInt(index.end(at) - start) << 50n), at * 16);
    entries.writeBigUInt64LE(BigInt(index.moffset(at)), at * 16 + 8);
  }
  return entries;
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
    // One that begins at 0 is what the C++ tree asks for.
    if (at > 0) sector += 8 * (1 + Math.floor(next() * 8 * parts));
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
    if (pieces.layers[0]! >= 0) found += pieces.moffsets[0]!;
  }
  return found;
}
