/**
 * Our ublk device against a loop device over the same raw file on tmpfs, in the kernel lab, since machines for development often have
 * no ublk: random 4 KiB (alone and 16 at once) and sequential 1 MiB, reads and writes, past the page cache. Where the lab is emulated
 * only the ratio says anything, and that in favour of neither: the kernel and JavaScript are slowed down alike, threads most of all.
 */
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { closeSync, mkdtempSync, openSync, rmSync, writeSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { attachLoop } from '#linux';
import { openFileTarget, serveUblk } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { projectRoot } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, type Pairs, summary } from './sample.ts';
import { missingTool, needsRoot } from './tool.ts';

const MIB = 1024 * 1024;
const TARGET = 0.8;

const LOADS = [
  { name: 'random 4 KiB read', rw: 'randread', bs: '4k', depth: 1, mib: 8 },
  { name: 'random 4 KiB read, 16 at once', rw: 'randread', bs: '4k', depth: 16, mib: 16 },
  { name: 'sequential 1 MiB read, 4 at once', rw: 'read', bs: '1m', depth: 4, mib: 256 },
  { name: 'random 4 KiB write', rw: 'randwrite', bs: '4k', depth: 1, mib: 8 },
  { name: 'random 4 KiB write, 16 at once', rw: 'randwrite', bs: '4k', depth: 16, mib: 16 },
  { name: 'sequential 1 MiB write, 4 at once', rw: 'write', bs: '1m', depth: 4, mib: 256 },
] as const;
type Load = (typeof LOADS)[number];

/** The line with which the lab's side ends. */
interface Measured {
  readonly kernel: string;
  readonly loads: readonly Pairs[];
}
const MARK = 'ublk-loop: ';
const LAB_UNAVAILABLE = 125;

export const benchmark: Benchmark = {
  name: 'ublk-loop',
  about: 'reads and writes through ublk against a loop device over the same file on tmpfs, in the kernel lab',
  needs() {
    const obstacle = needsRoot() ?? missingTool({ fio: 'fio' });
    if (obstacle !== undefined) return obstacle;
    const tried = spawnSync(lab(), ['true'], { encoding: 'utf8', cwd: projectRoot() });
    return tried.status === LAB_UNAVAILABLE ? tried.stderr.trim() : undefined;
  },
  run: measure,
};

const lab = () => join(projectRoot(), 'bench/lab/run');

async function measure(): Promise<Result> {
  const n = numberOption('n', 5);
  const sizeBytes = numberOption('mb', 256) * MIB;
  const { kernel, loads } = await measuredInLab(n, sizeBytes);
  const rows: string[][] = [['', 'ublk', 'loop', 'ratio']];
  const details: Record<string, unknown> = {};
  for (const [i, load] of LOADS.entries()) {
    const pairs = loads[i]!;
    const [ours, loop] = [summary(pairs.ours), summary(pairs.theirs)];
    const rate = (ms: number) =>
      load.bs === '1m' ? `${((load.mib / ms) * 1000).toFixed(0)} MiB/s` : `${((load.mib * 256) / ms).toFixed(2)} k/s`;
    details[load.name] = { ratio: pairs.ratio, ublk: rate(ours.p50), loop: rate(loop.p50) };
    rows.push([load.name, rate(ours.p50), rate(loop.p50), String(pairs.ratio)]);
  }
  printTable(rows);
  const worst = Math.min(...loads.map(({ ratio }) => ratio));
  const first = summary(loads[0]!.ours);
  return {
    ratio: round(worst),
    ...atLeast(TARGET, worst),
    against: `a loop device (buffered) of Linux ${kernel}, fio libaio, O_DIRECT, in the lab`,
    n,
    p50: first.p50,
    p99: first.p99,
    unit: 'ms',
    sizeBytes,
    loads: details,
  };
}

async function measuredInLab(n: number, sizeBytes: number): Promise<Measured> {
  const module = join(dirname(fileURLToPath(import.meta.url)), 'ublk-loop.bench.mjs');
  const script = `import(${JSON.stringify(module)}).then((bench) => bench.inLab(${n}, ${sizeBytes}))`;
  const child = spawn(lab(), ['--memory', '3072', '--timeout', '2400', '--', process.execPath, '-e', script], {
    cwd: projectRoot(),
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (more: string) => {
    text += more;
  });
  const [status] = await once(child, 'close');
  const line = text.split('\n').find((one) => one.startsWith(MARK));
  if (status !== 0 || line === undefined) throw new Error(`the lab ended with ${status}\n${text}`);
  return JSON.parse(line.slice(MARK.length));
}

/** The lab's side: what runs there. */
export async function inLab(n: number, sizeBytes: number): Promise<void> {
  execFileSync('modprobe', ['ublk_drv']);
  const folder = mkdtempSync('/dev/shm/dsec-bench-');
  const file = join(folder, 'disk.raw');
  const fd = openSync(file, 'w');
  for (let at = 0; at < sizeBytes; at += MIB) writeSync(fd, randomBytes(MIB));
  closeSync(fd);
  const target = await openFileTarget(file);
  const device = await serveUblk({ target });
  const loop = attachLoop(file, { readOnly: false });
  const loads: Pairs[] = [];
  for (const load of LOADS) {
    for (const path of [device.path, loop.path]) await fio(path, load, sizeBytes, Math.min(load.mib, 4));
    loads.push(
      await inTurn(
        n,
        () => fio(device.path, load, sizeBytes, load.mib),
        () => fio(loop.path, load, sizeBytes, load.mib),
      ),
    );
  }
  const measured: Measured = { kernel: execFileSync('uname', ['-r'], { encoding: 'utf8' }).trim(), loads };
  loop.close();
  await device.stop();
  await target.close();
  rmSync(folder, { recursive: true });
  console.log(MARK + JSON.stringify(measured));
}

/** Milliseconds that fio's job took. */
async function fio(path: string, { rw, bs, depth }: Load, sizeBytes: number, mib: number): Promise<number> {
  const child = spawn(
    'fio',
    [
      ...['--name=load', '--thread', '--ioengine=libaio', '--direct=1', `--filename=${path}`, `--size=${sizeBytes}`],
      ...[`--io_size=${mib * MIB}`, `--rw=${rw}`, `--bs=${bs}`, `--iodepth=${depth}`],
      ...['--randrepeat=0', '--norandommap', '--output-format=json'],
    ],
    { stdio: ['ignore', 'pipe', 'inherit'] },
  );
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (more: string) => {
    text += more;
  });
  const [status] = await once(child, 'close');
  if (status !== 0) throw new Error(`fio ended with ${status}`);
  const [job] = JSON.parse(text.slice(text.indexOf('{'))).jobs;
  if (job.error !== 0) throw new Error(`fio: error ${job.error}`);
  const side = rw.endsWith('read') ? job.read : job.write;
  return (side.total_ios / side.iops) * 1000;
}
