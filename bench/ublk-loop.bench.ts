/**
 * Our ublk device against a loop device over the same raw file on tmpfs, in the kernel lab, since machines for development often have
 * no ublk: random 4 KiB (alone and 16 at once) and sequential 1 MiB, reads and writes, past the page cache. Where the lab is emulated
 * only the ratio says anything, and that in favour of neither: the kernel and JavaScript are slowed down alike, threads most of all.
 *
 * Beside it the least that a server in C can be, over the same file in the same boot: what ublk itself allows there. And a disk of layers with the
 * same bytes, which is answered by the thread that owns it. For both of ours: the processor time that a request takes here.
 *
 * What is measured is a server that has been at work: the first few thousand requests of a thread cost ten times as much, while V8 finds out what
 * to compile, and emulated that takes as long as the whole measurement.
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { attachLoop } from '#linux';
import { type BlockTarget, createDisk, openDisk, openFileTarget, serveUblk } from '#ublk-daemon';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { BLOCK_LOADS, runLoad, writeNoise } from './block-loads.ts';
import { projectRoot } from './dsec-command.ts';
import { hasFlag, numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, summary } from './sample.ts';
import { missingTool, needsRoot } from './tool.ts';
import { buildUblkServer } from './ublk-program.ts';
import { withScratch } from './work-folder.ts';

const MIB = 1024 * 1024;
const TARGET = 0.8;

/** What a load moves, in MiB: emulated, it takes long. */
const MOVED = [8, 16, 256, 8, 16, 256];
/** What is moved before, so that it is: 12,288 requests of 4 KiB, 16 at once. */
const WARM = { moved: 48, depth: 16 };

/** The line with which the lab's side ends. */
interface Measured {
  readonly kernel: string;
  /** Milliseconds of each run, by side, in the order of BLOCK_LOADS. */
  readonly loads: readonly Readonly<Record<Side, readonly number[]>>[];
  /** Microseconds of the server's processor time a request, in each run. */
  readonly cpu: readonly Readonly<Record<Ours, readonly number[]>>[];
}
type Ours = 'ublk' | 'disk';
type Side = Ours | 'loop' | 'c';
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
  const { kernel, loads, cpu } = await withScratch('ublk-loop', (folder) =>
    measuredInLab(n, sizeBytes, buildUblkServer(folder)),
  );
  const rows: string[][] = [
    ['', 'ublk', 'loop', 'C server', 'ublk/loop', 'C/loop', 'ublk/C', 'of layers', 'us CPU', 'of layers'],
  ];
  const details: Record<string, unknown> = {};
  const ratios: number[] = [];
  for (const [i, load] of BLOCK_LOADS.entries()) {
    const mib = MOVED[i]!;
    const { ublk, loop, c, disk } = loads[i]!;
    const rate = (sample: readonly number[]) => {
      if (sample.length === 0) return '-';
      const { p50: ms } = summary(sample);
      return load.bs === '1m' ? `${((mib / ms) * 1000).toFixed(0)} MiB/s` : `${((mib * 256) / ms).toFixed(2)} k/s`;
    };
    const ratio = faster(ublk, loop);
    ratios.push(ratio);
    const cServer =
      c.length === 0 ? {} : { cServer: rate(c), cServerRatio: faster(c, loop), ofCServer: faster(ublk, c) };
    const cpuUs = { ublk: round(median(cpu[i]!.ublk)), disk: round(median(cpu[i]!.disk)) };
    details[load.name] = { ratio, ublk: rate(ublk), loop: rate(loop), ...cServer, ofLayers: rate(disk), cpuUs };
    const others = c.length === 0 ? ['-', '-'] : [String(faster(c, loop)), String(faster(ublk, c))];
    const layers = [rate(disk), String(cpuUs.ublk), String(cpuUs.disk)];
    rows.push([load.name, rate(ublk), rate(loop), rate(c), String(ratio), ...others, ...layers]);
  }
  printTable(rows);
  const worst = Math.min(...ratios);
  const first = summary(loads[0]!.ublk);
  return {
    ratio: round(worst),
    ...atLeast(TARGET, worst),
    against: `a loop device (buffered) of Linux ${kernel}, fio libaio, O_DIRECT, in the lab${hasFlag('count') ? ', by instructions' : ''}`,
    n,
    p50: first.p50,
    p99: first.p99,
    unit: 'ms',
    sizeBytes,
    loads: details,
  };
}

/** How many times as fast as the other, by the median of neighbours. */
function faster(one: readonly number[], other: readonly number[]): number {
  return round(median(one.map((ms, run) => other[run]! / ms)));
}

async function measuredInLab(n: number, sizeBytes: number, server: string | undefined): Promise<Measured> {
  const module = join(dirname(fileURLToPath(import.meta.url)), 'ublk-loop.bench.mjs');
  const script = `import(${JSON.stringify(module)}).then((bench) => bench.inLab(${n}, ${sizeBytes}, ${JSON.stringify(server)}))`;
  const how = [...(hasFlag('count') ? ['--count'] : []), '--memory', '3072', '--timeout', '3600'];
  const child = spawn(lab(), [...how, '--', process.execPath, '-e', script], {
    cwd: projectRoot(),
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (more: string) => {
    text += more;
    // How far it is: emulated, on a busy machine, it takes half an hour.
    for (const [, progress] of more.matchAll(/^(.*: measured)\r?$/gm)) console.error(progress);
  });
  const [status] = await once(child, 'close');
  const line = text.split('\n').find((one) => one.startsWith(MARK));
  if (status !== 0 || line === undefined) throw new Error(`the lab ended with ${status}\n${text}`);
  return JSON.parse(line.slice(MARK.length));
}

/** The lab's side: what runs there. */
export async function inLab(n: number, sizeBytes: number, server?: string): Promise<void> {
  execFileSync('modprobe', ['ublk_drv']);
  const folder = mkdtempSync('/dev/shm/dsec-bench-');
  const file = join(folder, 'disk.raw');
  writeNoise(file, sizeBytes);
  const target = await openFileTarget(file);
  const layers = await diskOf(file, join(folder, 'layers'));
  const device = await serveUblk({ target });
  const ofLayers = await serveUblk({ target: layers });
  const loop = attachLoop(file, { readOnly: false });
  const c = server === undefined ? undefined : await startServer(server, file);
  const paths: [Side, string][] = [
    ['ublk', device.path],
    ['loop', loop.path],
    ['disk', ofLayers.path],
  ];
  if (c !== undefined) paths.push(['c', c.path]);
  const loads: Record<Side, number[]>[] = [];
  const cpu: Record<Ours, number[]>[] = [];
  for (const [i, load] of BLOCK_LOADS.entries()) {
    const run = (path: string, mib: number, depth: number = load.depth) => {
      const where = ['--thread', '--ioengine=libaio', '--direct=1', `--filename=${path}`];
      return runLoad(where, { ...load, depth }, sizeBytes, mib * MIB);
    };
    const mib = MOVED[i]!;
    const requests = load.bs === '1m' ? mib : mib * 256;
    for (const [, path] of paths) {
      if (load.bs === '4k') await run(path, WARM.moved, WARM.depth);
      await run(path, Math.min(mib, 4));
    }
    const taken: Record<Side, number[]> = { ublk: [], loop: [], c: [], disk: [] };
    const used: Record<Ours, number[]> = { ublk: [], disk: [] };
    for (let turn = 0; turn < n; turn++) {
      for (const [side, path] of turn % 2 === 0 ? paths : paths.toReversed()) {
        const before = process.cpuUsage();
        taken[side].push(await run(path, mib));
        const { user, system } = process.cpuUsage(before);
        if (side === 'ublk' || side === 'disk') used[side].push((user + system) / requests);
      }
    }
    loads.push(taken);
    cpu.push(used);
    console.error(`${load.name}: measured`);
  }
  const measured: Measured = { kernel: execFileSync('uname', ['-r'], { encoding: 'utf8' }).trim(), loads, cpu };
  loop.close();
  await device.stop();
  await ofLayers.stop();
  await target.close();
  await layers.close();
  if (c !== undefined) {
    const ended = once(c.child, 'exit');
    c.child.kill('SIGTERM');
    await ended;
  }
  rmSync(folder, { recursive: true });
  console.log(MARK + JSON.stringify(measured));
}

/** What the file has, in a writable layer. */
async function diskOf(file: string, folder: string): Promise<BlockTarget> {
  const from = await open(file);
  const { size } = await from.stat();
  await createDisk(folder, { sizeBytes: size });
  const { disk } = await openDisk(folder);
  for (let at = 0; at < size; at += MIB) {
    const bytes = Buffer.allocUnsafe(MIB);
    await from.read(bytes, 0, MIB, at);
    await disk.write(at, bytes);
  }
  await from.close();
  return disk;
}

async function startServer(program: string, file: string): Promise<{ child: ChildProcess; path: string }> {
  const child = spawn(program, [file, 'copies'], { stdio: ['ignore', 'pipe', 'inherit'] });
  const [path] = await Promise.race([
    once(child.stdout!.setEncoding('utf8'), 'data'),
    once(child, 'exit').then(([status]) => {
      throw new Error(`${program} ended with ${status}`);
    }),
  ]);
  return { child, path: (path as string).trim() };
}
