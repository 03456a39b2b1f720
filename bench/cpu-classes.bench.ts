/**
 * Figure 13 of the paper: how long a latency-sensitive service takes to answer alone, beside best-effort work without classes, with it scheduled when nothing else
 * wants the processor (SCHED_IDLE), and with core scheduling on top, where the processor has hyper-threads and the kernel has it. Where it does not, the last is left out, and
 * the result says so: SCHED_IDLE alone.
 *
 * Service and work are processes of their own; the service is asked at fixed times, however long it takes, so that a slow answer makes the next ones wait.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { coreSchedulingMissing, scheduleWhenIdle, takeCoreAlone } from '#linux';
import { type Benchmark, type Result, round } from './benchmark.ts';
import { projectRoot } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { summary } from './sample.ts';
import { needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

const REQUESTS = 300;
const EVERY_MS = 25;
/** Best-effort processes for each processor. */
const LOADS = 2;
/** Until the kernel has spread them. */
const SETTLE_MS = 500;
const TURNS = 2;

interface Condition {
  readonly name: string;
  readonly loaded: boolean;
  classify?(pid: number): void;
}

const CONDITIONS: readonly Condition[] = [
  { name: 'alone', loaded: false },
  { name: 'beside, no classes', loaded: true },
  { name: 'SCHED_IDLE', loaded: true, classify: scheduleWhenIdle },
];
const CORE_SCHEDULING: Condition = {
  name: 'and core scheduling',
  loaded: true,
  classify(pid) {
    scheduleWhenIdle(pid);
    takeCoreAlone(pid);
  },
};

export const benchmark: Benchmark = {
  name: 'cpu-classes',
  about:
    'answers of a service alone, beside best-effort work, with classes, with core scheduling where there is such a thing (figure 13 of the paper)',
  needs: needsRoot,
  run: () => withScratch('classes', measure),
};

async function measure(folder: string): Promise<Result> {
  const requests = numberOption('n', REQUESTS);
  const missing = coreSchedulingMissing();
  const conditions = missing === undefined ? [...CONDITIONS, CORE_SCHEDULING] : CONDITIONS;
  const socket = join(folder, 'service.sock');
  const service = await start('service.mjs', [socket]);
  const taken = new Map<string, { readonly ms: number[]; loadSeconds: number; seconds: number }>();
  try {
    for (let turn = 0; turn < TURNS; turn++) {
      for (const condition of conditions) {
        const all = taken.get(condition.name) ?? { ms: [], loadSeconds: 0, seconds: 0 };
        const one = await underCondition(condition, socket, Math.ceil(requests / TURNS));
        all.ms.push(...one.ms);
        all.loadSeconds += one.loadSeconds;
        all.seconds += one.seconds;
        taken.set(condition.name, all);
      }
    }
  } finally {
    service.kill('SIGKILL');
  }
  const rows = conditions.map(({ name }) => {
    const { ms, loadSeconds, seconds } = taken.get(name)!;
    return { name, ...summary(ms), load: round(loadSeconds / seconds) };
  });
  printTable([
    ['a request takes, ms', 'p50', 'p99', 'processors of the load'],
    ...rows.map(({ name, p50, p99, load }) => [name, round(p50), round(p99), load]),
  ]);
  saveFigure(
    'cpu-classes',
    barChart({
      title: `A service beside best-effort work${missing === undefined ? '' : '; no core scheduling here'}`,
      unit: 'ms',
      groups: rows.map(({ name, p50, p99 }) => ({ label: name, values: [round(p50), round(p99)] })),
      series: ['p50', 'p99'],
    }),
  );
  const [alone, beside, idle] = rows as [Row, Row, Row];
  const best = rows.at(-1)!;
  return {
    ratio: round(best.p99 / alone.p99),
    target: undefined,
    met: undefined,
    against: 'the same service alone',
    n: requests,
    p50: round(best.p50),
    p99: round(best.p99),
    unit: 'ms',
    classes: missing === undefined ? 'SCHED_IDLE and core scheduling' : 'SCHED_IDLE alone',
    coreScheduling: missing ?? 'used',
    hyperThreads: hyperThreads(),
    p99Ratios: { withoutClasses: round(beside.p99 / alone.p99), schedIdle: round(idle.p99 / alone.p99) },
    p50Ratios: { withoutClasses: round(beside.p50 / alone.p50), schedIdle: round(idle.p50 / alone.p50) },
    rows,
  };
}

type Row = ReturnType<typeof summary> & { readonly name: string; readonly load: number };

interface Taken {
  readonly ms: number[];
  /** Processor time that the best-effort work had. */
  readonly loadSeconds: number;
  readonly seconds: number;
}

async function underCondition(condition: Condition, socket: string, requests: number): Promise<Taken> {
  const loads: ChildProcess[] = [];
  try {
    if (condition.loaded) {
      for (let i = 0; i < LOADS * availableParallelism(); i++) loads.push(await start('load.mjs', []));
      for (const { pid } of loads) condition.classify?.(pid!);
      await delay(SETTLE_MS);
    }
    const seconds = () => loads.reduce((sum, { pid }) => sum + cpuSeconds(pid!), 0);
    const [before, began] = [seconds(), performance.now()];
    const ms = await answers(socket, requests);
    return { ms, loadSeconds: seconds() - before, seconds: (performance.now() - began) / 1000 };
  } finally {
    for (const load of loads) load.kill('SIGKILL');
    await Promise.all(
      loads.map((load) => (load.exitCode === null && load.signalCode === null ? once(load, 'exit') : undefined)),
    );
  }
}

/** From when each should be asked, not from when it was. */
async function answers(path: string, requests: number): Promise<number[]> {
  const socket: Socket = connect(path);
  await once(socket, 'connect');
  const asked: number[] = [];
  const ms: number[] = [];
  socket.on('data', (bytes: Buffer) => {
    for (let i = 0; i < bytes.length; i++) ms.push(performance.now() - asked[ms.length]!);
  });
  const began = performance.now();
  for (let i = 0; i < requests; i++) {
    const due = began + i * EVERY_MS;
    const wait = due - performance.now();
    if (wait > 0) await delay(wait);
    asked.push(due);
    socket.write('?');
  }
  while (ms.length < requests) await delay(EVERY_MS);
  socket.destroy();
  return ms;
}

async function start(program: string, args: readonly string[]): Promise<ChildProcess> {
  const path = join(projectRoot(), 'bench/cpu-classes', program);
  const child = spawn(process.execPath, [path, ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  await once(child.stdout!, 'data');
  return child;
}

function cpuSeconds(pid: number): number {
  const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  return (Number(fields[11]) + Number(fields[12])) / 100;
}

function hyperThreads(): boolean {
  try {
    return readFileSync('/sys/devices/system/cpu/smt/active', 'latin1').trim() === '1';
  } catch {
    return false;
  }
}
