/**
 * What --inline-limit costs and saves: the size of the metadata image (all of it local before a mount), of the data blob (half
 * a block is lost at the end of every file that is not inlined), of both. The measurement behind the converter's default.
 */
import { DEFAULT_INLINE_LIMIT_BYTES } from '#converter';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { lineChart } from './figures/svg.ts';
import { printTable, saveFigure } from './results.ts';
import { someTrees } from './trees.ts';
import { unpackTree } from './unpacked-tree.ts';
import { withScratch } from './work-folder.ts';

const LIMITS = [0, 512, 1024, 2048, 3072, 4000];
const MIB = 2 ** 20;
/**
 * The default is to be chosen by this measurement: of all limits none may make the whole smaller by more than a hundredth, and the
 * last step up to it must have saved more data than it added metadata.
 */
const TARGET = 1.01;

export const benchmark: Benchmark = {
  name: 'inline-limit',
  about: 'metadata and data size for each --inline-limit, on two trees',
  run: () => withScratch('inline-limit', measure),
};

async function measure(folder: string): Promise<Result> {
  const dsec = new DsecCommand(folder);
  const trees = [];
  for (const tree of someTrees()) {
    const unpacked = await unpackTree(tree, folder);
    const sweep = [];
    for (const limit of LIMITS) {
      const { image } = await dsec.convert(`dir:${unpacked.folder}`, `${tree.name}:${limit}`, [
        '--inline-limit',
        String(limit),
      ]);
      const { metaBytes, dataBytes } = image;
      sweep.push({ limit, metaBytes, dataBytes, totalBytes: metaBytes + dataBytes });
      await dsec.emptyStore();
    }
    trees.push({ name: tree.name, members: unpacked.members, sweep });
  }
  for (const { name, members, sweep } of trees) {
    console.log(`${name}, ${members} members`);
    printTable([
      ['limit', 'metadata MiB', 'data MiB', 'total MiB', 'data saved for each further byte of metadata'],
      ...sweep.map(({ limit, metaBytes, dataBytes, totalBytes }, i) => [
        String(limit),
        (metaBytes / MIB).toFixed(2),
        (dataBytes / MIB).toFixed(2),
        (totalBytes / MIB).toFixed(2),
        i === 0 ? '' : round((sweep[i - 1]!.dataBytes - dataBytes) / (metaBytes - sweep[i - 1]!.metaBytes)),
      ]),
    ]);
  }
  const figure = saveFigure(
    'inline-limit',
    lineChart({
      title: 'Size against --inline-limit',
      xLabel: 'ends of files up to this size are in the metadata (bytes)',
      yLabel: 'MiB',
      series: trees.flatMap(({ name, sweep }) => [
        { label: `${name}: metadata`, points: sweep.map((at) => [at.limit, at.metaBytes / MIB] as const) },
        { label: `${name}: total`, points: sweep.map((at) => [at.limit, at.totalBytes / MIB] as const) },
      ]),
    }),
  );
  // For the line of results, on the worse of the trees.
  const chosen = trees.map(({ sweep }) => {
    const at = sweep.findIndex(({ limit }) => limit === DEFAULT_INLINE_LIMIT_BYTES);
    const [before, here] = [sweep[at - 1]!, sweep[at]!];
    return {
      ofLeast: here.totalBytes / Math.min(...sweep.map(({ totalBytes }) => totalBytes)),
      ofNone: here.totalBytes / sweep[0]!.totalBytes,
      saved: (before.dataBytes - here.dataBytes) / (here.metaBytes - before.metaBytes),
    };
  });
  const ratio = round4(Math.max(...chosen.map(({ ofLeast }) => ofLeast)));
  const savedForEachByte = round(Math.min(...chosen.map(({ saved }) => saved)));
  const totals = trees.map(({ sweep }) => sweep[0]!.totalBytes);
  return {
    ratio,
    target: `<= ${TARGET}`,
    met: atMost(TARGET, ratio).met && savedForEachByte > 1,
    against: `the least total size of all limits, with the default of ${DEFAULT_INLINE_LIMIT_BYTES}`,
    n: LIMITS.length,
    p50: Math.min(...totals),
    p99: Math.max(...totals),
    unit: 'bytes',
    ofNoneInlined: round(Math.max(...chosen.map(({ ofNone }) => ofNone))),
    savedForEachByte,
    trees,
    figure,
  };
}

/** A hundredth is what it is about. */
function round4(value: number): number {
  return Number(value.toPrecision(4));
}
