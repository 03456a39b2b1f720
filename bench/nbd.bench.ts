/**
 * The NBD server against qemu-nbd, both showing the same content, ours as a raw file, qemu-nbd's as qcow2: random 4 KiB (alone and 16
 * at once) and sequential 1 MiB, reads and writes, through fio's nbd engine over a unix socket. The files lie on tmpfs where there
 * is one, so that the servers are measured and not the disk. Processor time of the servers is told beside it.
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { closeSync, existsSync, mkdtempSync, openSync, readFileSync, rmSync, statfsSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { projectRoot } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, median, summary } from './sample.ts';
import { missingTool } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 1024 * 1024;
const TMPFS = 0x01021994;

const LOADS = [
  { name: 'random 4 KiB read', rw: 'randread', bs: '4k', depth: 1, share: 0.25 },
  { name: 'random 4 KiB read, 16 at once', rw: 'randread', bs: '4k', depth: 16, share: 0.5 },
  { name: 'sequential 1 MiB read, 4 at once', rw: 'read', bs: '1m', depth: 4, share: 2 },
  { name: 'random 4 KiB write', rw: 'randwrite', bs: '4k', depth: 1, share: 0.25 },
  { name: 'random 4 KiB write, 16 at once', rw: 'randwrite', bs: '4k', depth: 16, share: 0.5 },
  { name: 'sequential 1 MiB write, 4 at once', rw: 'write', bs: '1m', depth: 4, share: 2 },
] as const;

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
    const ours = await startOurs(raw, join(scratch, 'ours.sock'));
    servers.push(ours);
    const theirs = await startQemu(join(folder, 'disk.qcow2'), join(scratch, 'theirs.sock'));
    servers.push(theirs);
    const n = numberOption('n', 5);
    const rows: string[][] = [['', 'ours', 'qemu-nbd', 'ratio', 'CPU ours', 'CPU qemu-nbd']];
    const details: Record<string, unknown> = {};
    const ratios: number[] = [];
    let first: { p50: number; p99: number } | undefined;
    for (const load of LOADS) {
      const bytes = Math.max(4 * MIB, Math.round((sizeBytes * load.share) / MIB) * MIB);
      const cpu = { ours: [] as number[], theirs: [] as number[] };
      const run = (server: Server, into: number[]) => async () => {
        const before = cpuMs(server.child);
        const ms = await fio(server.uri, load, sizeBytes, bytes);
        into.push(cpuMs(server.child) - before);
        return ms;
      };
      // Both have served for a while before it counts.
      for (const { uri } of servers) await fio(uri, load, sizeBytes, Math.min(bytes, 16 * MIB));
      const pairs = await inTurn(n, run(ours, cpu.ours), run(theirs, cpu.theirs));
      const rate = (ms: number) =>
        load.bs === '1m' ? `${((bytes / MIB / ms) * 1000).toFixed(0)} MiB/s` : `${(bytes / 4096 / ms).toFixed(1)} k/s`;
      const [a, b] = [summary(pairs.ours), summary(pairs.theirs)];
      const [cpuOurs, cpuTheirs] = [median(cpu.ours), median(cpu.theirs)];
      ratios.push(pairs.ratio);
      first ??= a;
      details[load.name] = { ratio: pairs.ratio, ours: a, qemu: b, cpuMs: { ours: cpuOurs, qemu: cpuTheirs } };
      rows.push([load.name, rate(a.p50), rate(b.p50), String(pairs.ratio), `${cpuOurs} ms`, `${cpuTheirs} ms`]);
    }
    printTable(rows);
    const worst = Math.min(...ratios);
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
  // Twice the disk, and what writing to a qcow2 adds.
  if (existsSync(shared) && statfsSync(shared).type === TMPFS) {
    const { bavail, bsize } = statfsSync(shared);
    if (bavail * bsize > sizeBytes * 3) return mkdtempSync(join(shared, 'dsec-bench-nbd-'));
  }
  needSpace(scratch, sizeBytes * 3);
  return scratch;
}

function writeNoise(path: string, sizeBytes: number): void {
  const fd = openSync(path, 'w');
  for (let at = 0; at < sizeBytes; at += MIB) writeSync(fd, randomBytes(MIB));
  closeSync(fd);
}

async function startOurs(raw: string, socket: string): Promise<Server> {
  const program = join(projectRoot(), 'bin/dsec');
  const child = spawn(process.execPath, [program, 'disk', 'serve', raw, '--nbd', `unix:${socket}`, '--json'], {
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

/** Milliseconds that fio's job took. */
async function fio(uri: string, load: (typeof LOADS)[number], sizeBytes: number, bytes: number): Promise<number> {
  const child = spawn(
    'fio',
    [
      '--name=load',
      '--ioengine=nbd',
      `--uri=${uri}`,
      `--size=${sizeBytes}`,
      `--io_size=${bytes}`,
      `--rw=${load.rw}`,
      `--bs=${load.bs}`,
      `--iodepth=${load.depth}`,
      '--randrepeat=0',
      '--norandommap',
      '--output-format=json',
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
  const side = load.rw.endsWith('read') ? job.read : job.write;
  // In steps of a millisecond `runtime` is too coarse for the short ones.
  return (side.total_ios / side.iops) * 1000;
}

/** User and system time; clock ticks are 10 ms on every Linux that Node runs on. */
function cpuMs(child: ChildProcess): number {
  const fields = readFileSync(`/proc/${child.pid}/stat`, 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ');
  return (Number(fields[11]) + Number(fields[12])) * 10;
}
