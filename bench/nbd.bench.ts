/**
 * The NBD server against qemu-nbd, all showing the same content: ours as a raw file and as a disk of layers with a writable one on top,
 * qemu-nbd's as qcow2. Random 4 KiB (alone and 16 at once) and sequential 1 MiB, reads and writes, through fio's nbd engine over a
 * unix socket. The files lie on tmpfs where there is one, so that the servers are measured and not the disk. Processor time of the
 * servers is told beside it.
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readFileSync, rmSync, statfsSync } from 'node:fs';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { BLOCK_LOADS, runLoad, writeNoise } from './block-loads.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, median, type Summary, summary } from './sample.ts';
import { missingTool } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 1024 * 1024;
const TMPFS = 0x01021994;

/** What a load moves, of the disk. */
const SHARES = [0.25, 0.5, 2, 0.25, 0.5, 2];

export const benchmark: Benchmark = {
  name: 'nbd',
  about: 'random and sequential reads and writes over NBD, against qemu-nbd',
  needs: () =>
    missingTool({ 'qemu-nbd': 'qemu-utils', fio: 'fio' }) ??
    (/\bnbd\b/.test(spawnSync('fio', ['--enghelp'], { encoding: 'utf8' }).stdout)
      ? undefined
      : 'this fio has no nbd engine'),
  run: () => withScratch('nbd', measure),
};

interface Server {
  readonly child: ChildProcess;
  readonly uri: string;
}

async function measure(scratch: string): Promise<Result> {
  const sizeBytes = numberOption('mb', 128) * MIB;
  const folder = diskFolder(scratch, sizeBytes);
  const servers: Server[] = [];
  try {
    const raw = join(folder, 'disk.raw');
    writeNoise(raw, sizeBytes);
    execFileSync('qemu-img', ['convert', '-f', 'raw', '-O', 'qcow2', raw, join(folder, 'disk.qcow2')]);
    const dsec = new DsecCommand(folder);
    await dsec.run(['disk', 'create', 'layers', '--from', `raw:${raw}`]);
    const start = async (server: Promise<Server>) => {
      servers.push(await server);
      return servers.at(-1)!;
    };
    const ours = await start(startOurs(dsec, raw, join(scratch, 'ours.sock')));
    const layers = await start(startOurs(dsec, 'disk:layers', join(scratch, 'layers.sock')));
    const theirs = await start(startQemu(join(folder, 'disk.qcow2'), join(scratch, 'theirs.sock')));
    const n = numberOption('n', 5);
    const rows: string[][] = [
      ['', 'raw', 'layers', 'qemu-nbd', 'raw, ratio', 'layers, ratio', 'CPU raw', 'CPU layers', 'CPU qemu-nbd'],
    ];
    const details: Record<string, unknown> = {};
    const ratios: { raw: number; layers: number }[] = [];
    let first: Summary | undefined;
    for (const [i, load] of BLOCK_LOADS.entries()) {
      const bytes = Math.max(4 * MIB, Math.round((sizeBytes * SHARES[i]!) / MIB) * MIB);
      // All have served for a while before it counts.
      for (const server of servers) await runLoad(through(server), load, sizeBytes, Math.min(bytes, 16 * MIB));
      const against = async (server: Server) => {
        const cpu = { ours: [] as number[], theirs: [] as number[] };
        const run = (one: Server, into: number[]) => async () => {
          const before = cpuMs(one.child);
          const ms = await runLoad(through(one), load, sizeBytes, bytes);
          into.push(cpuMs(one.child) - before);
          return ms;
        };
        const pairs = await inTurn(n, run(server, cpu.ours), run(theirs, cpu.theirs));
        const cpuOf = { ours: median(cpu.ours), qemu: median(cpu.theirs) };
        return { ratio: pairs.ratio, ours: summary(pairs.ours), qemu: summary(pairs.theirs), cpuMs: cpuOf };
      };
      const sides = { raw: await against(ours), layers: await against(layers) };
      const rate = ({ p50: ms }: Summary) =>
        load.bs === '1m' ? `${((bytes / MIB / ms) * 1000).toFixed(0)} MiB/s` : `${(bytes / 4096 / ms).toFixed(1)} k/s`;
      const { raw: a, layers: b } = sides;
      ratios.push({ raw: a.ratio, layers: b.ratio });
      first ??= a.ours;
      details[load.name] = sides;
      const rates = [rate(a.ours), rate(b.ours), rate(a.qemu), String(a.ratio), String(b.ratio)];
      rows.push([load.name, ...rates, ...[a.cpuMs.ours, b.cpuMs.ours, a.cpuMs.qemu].map((ms) => `${ms} ms`)]);
    }
    printTable(rows);
    const worst = Math.min(...ratios.map(({ raw, layers }) => Math.min(raw, layers)));
    const version = /\d+\.\d+\.\d+/.exec(execFileSync('qemu-nbd', ['--version'], { encoding: 'utf8' }))?.[0];
    return {
      ratio: round(worst),
      ...atLeast(1, worst),
      against: `qemu-nbd ${version} -f qcow2 --shared=0, fio nbd engine, unix sockets`,
      n,
      p50: first!.p50,
      p99: first!.p99,
      unit: 'ms',
      sizeBytes,
      onTmpfs: folder !== scratch,
      worst: { raw: Math.min(...ratios.map((one) => one.raw)), layers: Math.min(...ratios.map((one) => one.layers)) },
      loads: details,
    };
  } finally {
    for (const { child } of servers) {
      child.kill('SIGTERM');
      if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    }
    if (folder !== scratch) rmSync(folder, { recursive: true, force: true });
  }
}

function diskFolder(scratch: string, sizeBytes: number): string {
  const shared = '/dev/shm';
  // Three times the disk, and what writing adds to the qcow2 and the layers.
  if (existsSync(shared) && statfsSync(shared).type === TMPFS) {
    const { bavail, bsize } = statfsSync(shared);
    if (bavail * bsize > sizeBytes * 8) return mkdtempSync(join(shared, 'dsec-bench-nbd-'));
  }
  needSpace(scratch, sizeBytes * 8);
  return scratch;
}

const through = ({ uri }: Server) => ['--ioengine=nbd', `--uri=${uri}`];

async function startOurs(dsec: DsecCommand, disk: string, socket: string): Promise<Server> {
  const [program, ...args] = dsec.argv(['disk', 'serve', disk, '--nbd', `unix:${socket}`, '--json']);
  const child = spawn(program!, args, {
    env: { ...process.env, ...dsec.env },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const [line] = (await once(child.stdout!.setEncoding('utf8'), 'data')) as [string];
  return { child, uri: JSON.parse(line).uri };
}

async function startQemu(image: string, socket: string): Promise<Server> {
  const child = spawn('qemu-nbd', ['-f', 'qcow2', '-t', '--shared=0', '-k', socket, image], { stdio: 'inherit' });
  for (let i = 0; !existsSync(socket); i++) {
    if (i > 1000 || child.exitCode !== null) throw new Error('qemu-nbd did not start');
    await new Promise((done) => setTimeout(done, 10));
  }
  return { child, uri: `nbd+unix:///?socket=${socket}` };
}

/** User and system time; clock ticks are 10 ms on every Linux that Node runs on. */
function cpuMs(child: ChildProcess): number {
  const fields = readFileSync(`/proc/${child.pid}/stat`, 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ');
  return (Number(fields[11]) + Number(fields[12])) * 10;
}
