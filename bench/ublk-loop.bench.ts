/**
 * Our ublk device against a loop device over the same raw file on tmpfs, in the kernel lab, since machines for development often have
 * no ublk: random 4 KiB (alone and 16 at once) and sequential 1 MiB, reads and writes, past the page cache. Where the lab is emulated
 * only the ratio says anything, and that in favour of neither: the kernel and JavaScript are slowed down alike, threads most of all.
 */
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { attachLoop } from '#linux';
import { openFileTarget, serveUblk } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { BLOCK_LOADS, runLoad, writeNoise } from './block-loads.ts';
import { projectRoot } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, type Pairs, summary } from './sample.ts';
import { missingTool, needsRoot } from './tool.ts';

const MIB = 1024 * 1024;
const TARGET = 0.8;

/** What a load moves, in MiB: emulated, it takes long. */
const MOVED = [8, 16, 256, 8, 16, 256];

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
  for (const [i, load] of BLOCK_LOADS.entries()) {
    const mib = MOVED[i]!;
    const pairs = loads[i]!;
    const [ours, loop] = [summary(pairs.ours), summary(pairs.theirs)];
    const rate = (ms: number) =>
      load.bs === '1m' ? `${((mib / ms) * 1000).toFixed(0)} MiB/s` : `${((mib * 256) / ms).toFixed(2)} k/s`;
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
  writeNoise(file, sizeBytes);
  const target = await openFileTarget(file);
  const device = await serveUblk({ target });
  const loop = attachLoop(file, { readOnly: false });
  const loads: Pairs[] = [];
  for (const [i, load] of BLOCK_LOADS.entries()) {
    const run = (path: string, mib: number) =>
      runLoad(['--thread', '--ioengine=libaio', '--direct=1', `--filename=${path}`], load, sizeBytes, mib * MIB);
    const mib = MOVED[i]!;
    for (const path of [device.path, loop.path]) await run(path, Math.min(mib, 4));
    loads.push(
      await inTurn(
        n,
        () => run(device.path, mib),
        () => run(loop.path, mib),
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
