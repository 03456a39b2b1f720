/**
 * Figure 13 of the paper: how long a latency-sensitive service takes to answer alone, beside best-effort work that has no class, and beside the same work with its
 * class. All of it as DSec gives it: the service and whoever asks it in a sandbox of class `ls`, the work in sandboxes of class `ls` (no classes) or `be`.
 *
 * The conditions take turns, and each ratio is the median over turns of what was measured beside one another: what else the machine does meets all of them. How long service and
 * client waited for a processor, by the kernel's count, stands beside the times: a machine under us that takes the processor away is not in it. Core scheduling is part of the
 * class where processor and kernel have it; the result says whether.
 */
import { copyFileSync, readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { coreSchedulingMissing } from '#linux';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand, projectRoot } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { fillPythonRoot, pythonMissing } from './python-root.ts';
import { printTable, saveFigure } from './results.ts';
import { median, summary } from './sample.ts';
import { SandboxHost } from './sandbox-host.ts';
import { agentMissing, needsRoot } from './tool.ts';
import { withScratch } from './work-folder.ts';

/** Of the service's answers beside best-effort work to those when it is alone. */
const P50_TARGET = 1.2;
/** More than that is other work, and the ratios say nothing about classes: processors of what is neither service nor load, when the service is alone. */
const QUIET = 0.5;
/** The load has to get what the service leaves: processors, for each that there is. */
const LEAST_LOAD = 0.25;
const TURNS = 12;
const REQUESTS = 80;
const EVERY_MS = 25;
/** Sandboxes with best-effort work; each has a busy process for each processor. */
const LOADS = 2;
/** Until the kernel has spread them. */
const SETTLE_MS = 500;
const SOCKET = '/service.sock';
const IMAGE = 'python:1';

const CONDITIONS = ['alone', 'beside, no classes', 'beside, classes'] as const;
type Condition = (typeof CONDITIONS)[number];

export const benchmark: Benchmark = {
  name: 'cpu-classes',
  about:
    'answers of a service in a sandbox: alone, beside best-effort sandboxes without classes, with them (figure 13 of the paper)',
  needs: () => needsRoot() ?? agentMissing() ?? pythonMissing(),
  run: () => withScratch('classes', measure),
};

async function measure(folder: string): Promise<Result> {
  const turns = numberOption('n', TURNS);
  const tree = join(folder, 'tree');
  fillPythonRoot(tree);
  for (const program of ['service.py', 'client.py']) {
    copyFileSync(join(projectRoot(), 'bench/cpu-classes', program), join(tree, program));
  }
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${tree}`, IMAGE);
  const host = await SandboxHost.start(dsec);
  try {
    return report(await takeTurns(host, turns));
  } finally {
    await host.stop();
  }
}

/** What one condition was like in one turn. */
interface Turn {
  readonly tookMs: readonly number[];
  /** By service and client together, for a processor, a request. */
  readonly waitedMs: number;
  /** Processors that the best-effort work had. */
  readonly load: number;
  /** Processors that all else had: the service too, and whatever else this machine does. */
  readonly others: number;
  /** Processors that this machine wanted, and the one under it did not give. */
  readonly stolen: number;
}

type Turns = Readonly<Record<Condition, Turn[]>>;

async function takeTurns(host: SandboxHost, count: number): Promise<Turns> {
  const service = await host.create(IMAGE, { class: 'ls' });
  const sandboxes = async (serviceClass: 'ls' | 'be') => {
    const made: string[] = [];
    for (let i = 0; i < LOADS; i++) made.push(await host.create(IMAGE, { class: serviceClass }));
    return made;
  };
  const loads: Readonly<Record<Condition, readonly string[]>> = {
    alone: [],
    'beside, no classes': await sandboxes('ls'),
    'beside, classes': await sandboxes('be'),
  };
  await startService(host, service);
  const turns: Turns = { alone: [], 'beside, no classes': [], 'beside, classes': [] };
  for (let at = 0; at < count; at++) {
    // Each is first, and after each, as often as the others.
    const order = CONDITIONS.map((_, i) => CONDITIONS[(i + at) % CONDITIONS.length]!);
    if (at % 2 === 1) order.reverse();
    for (const condition of order) turns[condition].push(await takeTurn(host, service, loads[condition]));
  }
  return turns;
}

async function startService(host: SandboxHost, service: string): Promise<void> {
  const { id } = await host.client.exec(service, { args: ['python3', '/service.py', SOCKET] });
  for await (const news of host.client.output(service, id)) {
    const said = 'part' in news ? (news.part.bytes?.toString() ?? '') : JSON.stringify(news);
    if (said.startsWith('ready')) return;
    throw new Error(`the service has not begun: ${said}`);
  }
}

async function takeTurn(host: SandboxHost, service: string, loads: readonly string[]): Promise<Turn> {
  const running: { readonly name: string; readonly id: number }[] = [];
  try {
    for (const name of loads) {
      for (let i = 0; i < availableParallelism(); i++) {
        running.push({ name, id: (await host.client.exec(name, { args: ['python3', '-c', 'while True: pass'] })).id });
      }
    }
    await delay(SETTLE_MS);
    const before = await usageOf(host, loads);
    const said = await host.exec(service, ['python3', '/client.py', SOCKET, String(REQUESTS), String(EVERY_MS)]);
    const after = await usageOf(host, loads);
    const { tookMs, waitedMs } = JSON.parse(said) as { tookMs: number[]; waitedMs: number };
    const per = (what: 'loadMs' | 'busyMs' | 'stolenMs') => (after[what] - before[what]) / (after.atMs - before.atMs);
    const load = per('loadMs');
    return { tookMs, waitedMs: waitedMs / REQUESTS, load, others: per('busyMs') - load, stolen: per('stolenMs') };
  } finally {
    for (const { name, id } of running) {
      await host.client.signal(name, id, 'SIGKILL');
      for await (const news of host.client.output(name, id)) if ('result' in news) break;
    }
  }
}

interface Usage {
  readonly atMs: number;
  readonly loadMs: number;
  readonly busyMs: number;
  readonly stolenMs: number;
}

async function usageOf(host: SandboxHost, loads: readonly string[]): Promise<Usage> {
  let loadMs = 0;
  for (const name of loads) loadMs += (await host.client.usage(name, false)).cpuUsec / 1000;
  // Of all processors, in ticks of 10 ms: user, nice, system, idle, iowait, irq, softirq, steal.
  const ticks = readFileSync('/proc/stat', 'latin1').split('\n', 1)[0]!.split(/\s+/).slice(1).map(Number);
  const [user, nice, system, , , irq, softirq, steal] = ticks as [
    number,
    number,
    number,
    number,
    number,
    number,
    number,
    number,
  ];
  return { atMs: performance.now(), loadMs, busyMs: 10 * (user + nice + system + irq + softirq), stolenMs: 10 * steal };
}

function report(turns: Turns): Result {
  const missing = coreSchedulingMissing();
  const mean = (of: (turn: Turn) => number, condition: Condition) =>
    round(turns[condition].reduce((sum, turn) => sum + of(turn), 0) / turns[condition].length);
  const rows = CONDITIONS.map((name) => ({
    name,
    ...summary(turns[name].flatMap(({ tookMs }) => tookMs)),
    waitedMs: mean(({ waitedMs }) => waitedMs, name),
    load: mean(({ load }) => load, name),
    others: mean(({ others }) => others, name),
    stolen: mean(({ stolen }) => stolen, name),
  }));
  printTable([
    ['a request, ms', 'p50', 'p99', 'of it without a processor', 'processors: the load', 'all else', 'stolen'],
    ...rows.map(({ name, p50, p99, waitedMs, load, others, stolen }) => [
      name,
      p50,
      p99,
      waitedMs,
      load,
      others,
      stolen,
    ]),
  ]);
  const figure = saveFigure(
    'cpu-classes',
    barChart({
      title: `A service in a sandbox beside best-effort sandboxes${missing === undefined ? '' : '; no core scheduling here'}`,
      unit: 'ms',
      groups: rows.map(({ name, p50, p99, waitedMs }) => ({ label: name, values: [p50, p99, waitedMs] })),
      series: ['p50', 'p99', 'waited for a processor, mean'],
    }),
  );
  const ratios = (of: 'p50' | 'p99') => {
    const [withoutClasses, withClasses] = CONDITIONS.slice(1).map((condition) =>
      round(
        median(turns[condition].map((turn, at) => summary(turn.tookMs)[of] / summary(turns.alone[at]!.tookMs)[of])),
      ),
    );
    return { withoutClasses: withoutClasses!, withClasses: withClasses! };
  };
  const p50 = ratios('p50');
  const best = rows.at(-1)!;
  const byCondition = (of: 'load' | 'others' | 'stolen') =>
    Object.fromEntries(rows.map((row) => [row.name.replace('beside, ', ''), row[of]]));
  const leastLoad = Math.min(...rows.slice(1).map(({ load }) => load)) / availableParallelism();
  const isMeasured = rows[0]!.others <= QUIET && leastLoad >= LEAST_LOAD;
  if (!isMeasured) console.log('this machine had other work: nothing is said about the target');
  return {
    ratio: p50.withClasses,
    ...atMost(P50_TARGET, p50.withClasses),
    ...(!isMeasured && { met: undefined }),
    against: 'the same service alone',
    n: turns.alone.length,
    p50: best.p50,
    p99: best.p99,
    unit: 'ms',
    requests: best.n,
    coreScheduling: missing ?? 'used',
    p50Ratios: p50,
    p99Ratios: ratios('p99'),
    processorsOfTheLoad: byCondition('load'),
    processorsOfAllElse: byCondition('others'),
    processorsStolen: byCondition('stolen'),
    figure,
    rows,
  };
}
