/**
 * Many sandboxes get the same workspace and toolkits, and then make the same tool calls: by unpacking tar.gz archives into each of them,
 * against layers that are there once (figure 11 of the paper, cut down to this machine). Reported are when each sandbox is done, what the
 * node wrote to its disk, and processor time.
 *
 * The archives lie in a read-only layer that all sandboxes share, so unpacking waits for no network and copies nothing before it begins.
 */
import { linkSync, mkdirSync } from 'node:fs';
import { basename, join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart, lineChart } from './figures/svg.ts';
import { type LayoutLayer, writeLayout } from './image-layout.ts';
import { NodeDisk } from './node-disk.ts';
import { hasFlag, numberOption } from './options.ts';
import { PACKAGE_BYTES, packageLayer } from './package-image.ts';
import { printTable, saveFigure } from './results.ts';
import { median, quantile } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { settle } from './settle.ts';
import { busyboxLayer } from './small-image.ts';
import { missingTool } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 2 ** 20;
const FASTER = 1.76;
const FEWER_BYTES = 5.5;
const AT_ONCE = 4;
const APPLETS = ['sh', 'cat', 'echo', 'grep', 'gzip', 'head', 'ls', 'sha256sum', 'sleep', 'sort', 'tar', 'true', 'wc'];
/** Packages of each. */
const PARTS = { workspace: 14, 'toolkit-a': 10, 'toolkit-b': 10 } as const;
type Part = keyof typeof PARTS;
const THINK_SECONDS = 0.5;

export const benchmark: Benchmark = {
  name: 'sandbox-provision',
  about: 'sandboxes with a workspace and toolkits: layers, against unpacking tar.gz into each; --full for more of them',
  needs: () => sandboxesMissing() ?? missingTool({ 'mkfs.ext4': 'e2fsprogs' }),
  run: () => withScratch('provision', measure),
};

interface Measured {
  /** Seconds from the beginning to the end of each sandbox's last tool call, in order. */
  readonly doneAt: readonly number[];
  readonly writtenBytes: number;
  readonly cpuSeconds: number;
  readonly outputs: ReadonlySet<string>;
}

type SideName = 'layers' | 'unpacked';

async function measure(folder: string): Promise<Result> {
  const [count, times] = hasFlag('full') ? [40, 3] : [12, 1];
  const partBytes = Object.values(PARTS).reduce((sum, packages) => sum + packages, 0) * times * PACKAGE_BYTES;
  needSpace(folder, partBytes * (count + 4) + 512 * MIB);
  const store = new DsecCommand(folder);
  const names = (part: Part) => Array.from({ length: PARTS[part] * times }, (_, i) => `/opt/${part}-${pad(i)}`);
  const archives = await makeImages(folder, store, names);
  const diskBytes = Math.ceil(partBytes * (count + 2) + 512 * MIB);
  const run = (side: SideName, number: number) =>
    measureSide(join(folder, `${side}-${number}`), store, diskBytes, count, side, archives);
  const n = numberOption('n', 1);
  const runs: Record<SideName, Measured[]> = { layers: [], unpacked: [] };
  for (let i = 0; i < n; i++) {
    for (const side of ['layers', 'unpacked'] as const) {
      const measured = await run(side, i);
      runs[side].push(measured);
      console.log(
        `${side}: all done after ${measured.doneAt.at(-1)!.toFixed(1)} s, ${mibOf(measured.writtenBytes)} MiB written, ${measured.cpuSeconds.toFixed(1)} s of processor time`,
      );
    }
  }
  return report(runs, count, partBytes, n);
}

function report(runs: Record<SideName, Measured[]>, count: number, partBytes: number, n: number): Result {
  const outputs = new Set(Object.values(runs).flatMap((side) => side.flatMap((measured) => [...measured.outputs])));
  if (outputs.size !== 1) throw new Error('the tool calls did not say the same in all sandboxes');
  const of = (side: SideName, value: (measured: Measured) => number) => median(runs[side].map(value));
  const total = (side: SideName) => of(side, ({ doneAt }) => doneAt.at(-1)!);
  const written = (side: SideName) => of(side, ({ writtenBytes }) => writtenBytes);
  const cpu = (side: SideName) => of(side, ({ cpuSeconds }) => cpuSeconds);
  const sides = ['layers', 'unpacked'] as const;
  printTable([
    ['', 'all done', 'written', 'processor time'],
    ...sides.map((side) => [
      side,
      `${total(side).toFixed(1)} s`,
      `${mibOf(written(side))} MiB`,
      `${cpu(side).toFixed(1)} s`,
    ]),
  ]);
  const faster = total('unpacked') / total('layers');
  const fewer = written('unpacked') / written('layers');
  const shape = `${count} sandboxes, ${mibOf(partBytes)} MiB in each, ${AT_ONCE} at a time`;
  const figures = [
    saveFigure(
      'sandbox-provision-completion',
      lineChart({
        title: `Sandboxes that have made their tool calls: ${shape}`,
        xLabel: 'seconds',
        yLabel: 'sandboxes',
        series: sides.map((side) => ({ label: side, points: completion(runs[side][0]!.doneAt) })),
      }),
    ),
    saveFigure(
      'sandbox-provision-disk',
      barChart({
        title: `Written to the node’s disk: ${shape}`,
        unit: 'MiB',
        series: ['bytes written'],
        groups: sides.map((side) => ({ label: side, values: [mibOf(written(side))] })),
      }),
    ),
    saveFigure(
      'sandbox-provision-cpu',
      barChart({
        title: `Processor time: ${shape}`,
        unit: 's',
        series: ['processor time'],
        groups: sides.map((side) => ({ label: side, values: [round(cpu(side))] })),
      }),
    ),
  ];
  const ms = runs.layers.flatMap(({ doneAt }) => doneAt.map((seconds) => seconds * 1000));
  const first = atLeast(FASTER, faster);
  return {
    ratio: round(faster),
    target: `${first.target}; fewer bytes >= ${FEWER_BYTES}`,
    met: first.met && fewer >= FEWER_BYTES,
    against: 'tar -xz of the same files into each sandbox, from archives in a shared layer',
    n,
    p50: round(median(ms)),
    p99: round(quantile(ms, 0.99)),
    unit: 'ms',
    timesFewerBytes: round(fewer),
    timesLessCpu: round(cpu('unpacked') / cpu('layers')),
    sandboxes: count,
    bytesEach: partBytes,
    atOnce: AT_ONCE,
    totalSeconds: { layers: round(total('layers')), unpacked: round(total('unpacked')) },
    writtenBytes: { layers: written('layers'), unpacked: written('unpacked') },
    cpuSeconds: { layers: round(cpu('layers')), unpacked: round(cpu('unpacked')) },
    figures,
  };
}

/** Base, workspace, toolkits, and the archives of those three as one more; the names of the archives inside. */
async function makeImages(folder: string, dsec: DsecCommand, names: (part: Part) => string[]): Promise<string[]> {
  const layout = (name: string, layer: LayoutLayer) =>
    `oci:${writeLayout(join(folder, `${name}-layout`), name, [layer])}`;
  await dsec.convert(layout('base', await busyboxLayer(folder, APPLETS)), 'base:1');
  const inside = join(folder, 'archives');
  mkdirSync(inside);
  for (const part of Object.keys(PARTS) as Part[]) {
    const layer = await packageLayer(join(folder, `${part}.tar`), part, names(part));
    const kind = part === 'workspace' ? 'workspace' : 'toolkit';
    await dsec.convert(layout(part, layer), `${part}:1`, ['--kind', kind]);
    linkSync(layer.path, join(inside, basename(layer.path)));
  }
  await dsec.convert(`dir:${inside}`, 'archives:1', ['--kind', 'toolkit', '--prefix', '/archives']);
  return Object.keys(PARTS).map((part) => `/archives/${part}.tar.gz`);
}

async function measureSide(
  folder: string,
  store: DsecCommand,
  diskBytes: number,
  count: number,
  side: SideName,
  archives: readonly string[],
): Promise<Measured> {
  mkdirSync(folder);
  const disk = NodeDisk.make(join(folder, 'n'), diskBytes);
  const dsec = new DsecCommand(disk.mountPoint);
  dsec.env.DSEC_STORE = store.env.DSEC_STORE;
  // Mount points and sockets: a tmpfs on a real node.
  dsec.env.DSEC_RUN = join(folder, 'run');
  try {
    const host = await SandboxHost.start(dsec);
    try {
      // What the service does once is not what is compared.
      await host.remove(await host.create('base:1'));
      settle();
      const writtenBefore = disk.syncedWrites().bytes;
      const cpuBefore = host.cpuMs();
      const doneAt: number[] = [];
      const outputs = new Set<string>();
      const names: string[] = [];
      let left = count;
      const from = performance.now();
      const work = async () => {
        while (left-- > 0) {
          const name = await provisioned(host, side, archives);
          names.push(name);
          let output = '';
          for (const script of TOOL_CALLS) output += await host.exec(name, ['sh', '-c', script]);
          outputs.add(output);
          doneAt.push((performance.now() - from) / 1000);
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, work));
      const writtenBytes = disk.syncedWrites().bytes - writtenBefore;
      // What they have used is known when they have ended.
      for (const name of names) await host.remove(name);
      return { doneAt, writtenBytes, cpuSeconds: (host.cpuMs() - cpuBefore) / 1000, outputs };
    } finally {
      await host.stop();
    }
  } finally {
    disk.remove();
  }
}

async function provisioned(host: SandboxHost, side: SideName, archives: readonly string[]): Promise<string> {
  if (side === 'layers') {
    return host.create('base:1', { workspace: 'workspace:1', toolkits: ['toolkit-a:1', 'toolkit-b:1'] });
  }
  const name = await host.create('base:1', { toolkits: ['archives:1'] });
  for (const archive of archives) await host.exec(name, ['tar', '-xzf', archive, '-C', '/']);
  return name;
}

/** As an agent has them: looks around, reads, searches, edits, builds, and thinks in between. */
const TOOL_CALLS: readonly string[] = [
  'ls -R /opt | sort | sha256sum',
  'cat /opt/workspace-003/* | sha256sum',
  'grep -l function_of /opt/workspace-00*/module-0[0-3] | sort | sha256sum',
  `sleep ${THINK_SECONDS}`,
  'echo "# a change" >> /opt/workspace-001/module-02; cat /opt/workspace-001/module-02 | sha256sum',
  'cat /opt/toolkit-a-002/* /opt/toolkit-a-007/* | gzip -1 | head -c 300000 > /tmp/built; wc -c < /tmp/built',
  `sleep ${THINK_SECONDS}`,
  'sha256sum /opt/toolkit-b-005/* | sha256sum',
  'mkdir -p /tmp/out 2> /dev/null; for i in 1 2 3 4 5; do head -c 20000 /opt/workspace-01$i/module-05 2> /dev/null; done | sha256sum',
  'grep -c other /opt/workspace-002/module-09; echo "# tested" > /opt/workspace-002/report; cat /opt/workspace-002/report',
];

/** From none at 0 s, a step at each sandbox. */
function completion(doneAt: readonly number[]): [number, number][] {
  const points: [number, number][] = [[0, 0]];
  doneAt.forEach((at, i) => {
    points.push([at, i], [at, i + 1]);
  });
  return points;
}

function mibOf(bytes: number): number {
  return Math.round(bytes / MIB);
}

function pad(number: number): string {
  return String(number).padStart(3, '0');
}
