/**
 * An image of four large gzip layers and a fifth of small files, as most images end with: one `dsec convert` against the
 * sum of mkfs.erofs runs, one for each layer. Collapsed (one EROFS layer comes out) and with `--collapse-limit 0` (one for each).
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fromText } from '#base';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { writeLayout } from './image-layout.ts';
import { type MachineLayer, machineLayers, warmLayers, writeLayer } from './machine-layers.ts';
import { mkfsCommand, runMkfs } from './mkfs-run.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { inTurn, median, summary } from './sample.ts';
import { settle } from './settle.ts';
import { findMkfsErofs, MKFS_MISSING, type MkfsErofs } from './tool.ts';
import { withScratch } from './work-folder.ts';

const LAYERS = 4;
const TARGET = 2;

const WAYS = [
  { name: 'collapsed', args: [] },
  { name: 'one EROFS layer each', args: ['--collapse-limit', '0'] },
] as const;

export const benchmark: Benchmark = {
  name: 'convert-many-layers',
  about: 'five gzip layers to EROFS at once, against the sum of mkfs.erofs runs',
  needs: () => (findMkfsErofs() === undefined ? MKFS_MISSING : undefined),
  async run() {
    const mkfs = findMkfsErofs()!;
    const layers = await machineLayers(LAYERS, numberOption('mb', 90));
    return withScratch('many-layers', async (folder) => measure(folder, [...layers, await smallFiles(folder)], mkfs));
  },
};

async function smallFiles(folder: string): Promise<MachineLayer> {
  const tree = join(folder, 'small');
  mkdirSync(join(tree, 'app'), { recursive: true });
  for (let i = 0; i < 500; i++) writeFileSync(join(tree, 'app', `module-${i}.js`), `export default ${i};\n`.repeat(i));
  const names = Array.from({ length: 500 }, (_, i) => fromText(join(tree, 'app', `module-${i}.js`)));
  return writeLayer(names, join(folder, 'small.tar.gz'));
}

async function measure(folder: string, layers: readonly MachineLayer[], mkfs: MkfsErofs): Promise<Result> {
  const dsec = new DsecCommand(folder);
  const source = `oci:${writeLayout(`${folder}/layout`, 'many', layers)}`;
  warmLayers(layers);
  await dsec.warmUp();
  const n = numberOption('n', 5);
  const rows = [];
  for (const way of WAYS) {
    let erofsLayers = 0;
    const cpu = { ours: [] as number[], theirs: [] as number[] };
    const pairs = await inTurn(
      n,
      async () => {
        const { ms, cpuMs, image } = await dsec.convert(source, 'many:1', way.args);
        cpu.ours.push(cpuMs);
        erofsLayers = image.layers;
        await dsec.emptyStore();
        return ms;
      },
      async () => {
        const sum = { ms: 0, cpuMs: 0 };
        for (const layer of layers) {
          const { ms, cpuMs } = await runMkfs(mkfs, layer.path, folder);
          sum.ms += ms;
          sum.cpuMs += cpuMs;
        }
        cpu.theirs.push(sum.cpuMs);
        return sum.ms;
      },
      settle,
    );
    rows.push({
      name: way.name,
      ratio: pairs.ratio,
      ...atLeast(TARGET, pairs.ratio),
      erofsLayers,
      dsec: summary(pairs.ours),
      mkfs: summary(pairs.theirs),
      cpuMs: { dsec: median(cpu.ours), mkfs: median(cpu.theirs) },
    });
  }
  printTable([
    ['', 'EROFS layers', 'dsec s', 'mkfs s', 'ratio', 'target', 'dsec cpu s', 'mkfs cpu s'],
    ...rows.map((row) => [
      row.name,
      row.erofsLayers,
      (row.dsec.p50 / 1000).toFixed(2),
      (row.mkfs.p50 / 1000).toFixed(2),
      row.ratio,
      row.target,
      (row.cpuMs.dsec / 1000).toFixed(2),
      (row.cpuMs.mkfs / 1000).toFixed(2),
    ]),
  ]);
  const figure = saveFigure(
    'convert-many-layers',
    barChart({
      title: `${layers.length} gzip layers, ${Math.round(total(layers, 'sizeBytes') / 1e6)} MB, to EROFS: median seconds`,
      unit: 's',
      series: ['dsec convert', `mkfs.erofs ${mkfs.version}, sum`],
      groups: rows.map((row) => ({ label: row.name, values: [row.dsec.p50 / 1000, row.mkfs.p50 / 1000] })),
    }),
  );
  const [first] = rows;
  return {
    ratio: first!.ratio,
    target: first!.target,
    met: rows.every((row) => row.met),
    against: `the sum of ${layers.length} runs of ${mkfsCommand(mkfs, [])}`,
    n,
    p50: first!.dsec.p50,
    p99: first!.dsec.p99,
    unit: 'ms',
    layers: { count: layers.length, gzipBytes: total(layers, 'sizeBytes'), tarBytes: total(layers, 'tarBytes') },
    ways: rows,
    figure,
  };
}

function total(layers: readonly MachineLayer[], what: 'sizeBytes' | 'tarBytes'): number {
  return layers.reduce((sum, layer) => sum + layer[what], 0);
}
