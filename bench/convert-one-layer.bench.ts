/**
 * One gzip layer of 300 MB or more: `dsec convert` against mkfs.erofs on the same file, uncompressed and with lz4. dsec also
 * checks the layer's two digests, hashes every blob, writes chunk digests and publishes durably; its peer does none of it.
 */
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { writeLayout } from './image-layout.ts';
import { type MachineLayer, machineLayers, warmLayers } from './machine-layers.ts';
import { mkfsCommand, runMkfs } from './mkfs-run.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { inTurn, median, summary } from './sample.ts';
import { settle } from './settle.ts';
import { findMkfsErofs, MKFS_MISSING, type MkfsErofs } from './tool.ts';
import { withScratch } from './work-folder.ts';

const MIB = 2 ** 20;

interface Way {
  readonly name: string;
  readonly dsec: readonly string[];
  readonly mkfs: readonly string[];
  readonly target: number;
}

const WAYS: readonly Way[] = [
  { name: 'uncompressed', dsec: [], mkfs: [], target: 1.3 },
  { name: 'lz4', dsec: ['--compress', 'lz4'], mkfs: ['-zlz4'], target: 1 },
];

export const benchmark: Benchmark = {
  name: 'convert-one-layer',
  about: 'one gzip layer of 300 MB or more to EROFS, against mkfs.erofs',
  needs: () => (findMkfsErofs() === undefined ? MKFS_MISSING : undefined),
  async run() {
    const mkfs = findMkfsErofs()!;
    // The promise is in decimal megabytes of compressed layer; MiB are a little more.
    const [layer] = await machineLayers(1, numberOption('mb', 300));
    return withScratch('one-layer', (folder) => measure(folder, layer!, mkfs));
  },
};

async function measure(folder: string, layer: MachineLayer, mkfs: MkfsErofs): Promise<Result> {
  const dsec = new DsecCommand(folder);
  const source = `oci:${writeLayout(`${folder}/layout`, 'one', [layer])}`;
  warmLayers([layer]);
  await dsec.warmUp();
  const n = numberOption('n', 5);
  const rows = [];
  for (const way of WAYS) {
    const sizes = { ours: 0, theirs: 0 };
    const cpu = { ours: [] as number[], theirs: [] as number[] };
    const pairs = await inTurn(
      n,
      async () => {
        const { ms, cpuMs, image } = await dsec.convert(source, 'one:1', way.dsec);
        cpu.ours.push(cpuMs);
        sizes.ours = image.sizeBytes;
        await dsec.emptyStore();
        return ms;
      },
      async () => {
        const { ms, cpuMs, imageBytes } = await runMkfs(mkfs, layer.path, folder, way.mkfs);
        cpu.theirs.push(cpuMs);
        sizes.theirs = imageBytes;
        return ms;
      },
      settle,
    );
    const sizeRatio = round(sizes.ours / sizes.theirs);
    const speed = atLeast(way.target, pairs.ratio);
    rows.push({
      name: way.name,
      ratio: pairs.ratio,
      ...speed,
      dsec: summary(pairs.ours),
      mkfs: summary(pairs.theirs),
      cpuMs: { dsec: median(cpu.ours), mkfs: median(cpu.theirs) },
      against: mkfsCommand(mkfs, way.mkfs),
      ourBytes: sizes.ours,
      theirBytes: sizes.theirs,
      sizeRatio,
      sizeMet: sizeRatio <= 1,
    });
  }
  printTable([
    ['', 'dsec s', 'mkfs s', 'ratio', 'target', 'dsec cpu s', 'mkfs cpu s', 'dsec MiB', 'mkfs MiB'],
    ...rows.map((row) => [
      row.name,
      (row.dsec.p50 / 1000).toFixed(2),
      (row.mkfs.p50 / 1000).toFixed(2),
      row.ratio,
      row.target,
      (row.cpuMs.dsec / 1000).toFixed(2),
      (row.cpuMs.mkfs / 1000).toFixed(2),
      (row.ourBytes / MIB).toFixed(1),
      (row.theirBytes / MIB).toFixed(1),
    ]),
  ]);
  const [plain] = rows;
  const figure = saveFigure(
    'convert-one-layer',
    barChart({
      title: `One gzip layer of ${Math.round(layer.sizeBytes / 1e6)} MB to EROFS: median seconds`,
      unit: 's',
      series: ['dsec convert', `mkfs.erofs ${mkfs.version}`],
      groups: rows.map((row) => ({ label: row.name, values: [row.dsec.p50 / 1000, row.mkfs.p50 / 1000] })),
    }),
  );
  return {
    ratio: plain!.ratio,
    target: plain!.target,
    met: rows.every((row) => row.met && row.sizeMet),
    against: plain!.against,
    n,
    p50: plain!.dsec.p50,
    p99: plain!.dsec.p99,
    unit: 'ms',
    layer: { gzipBytes: layer.sizeBytes, tarBytes: layer.tarBytes, members: layer.members },
    ways: rows,
    figure,
  };
}
