/**
 * The same tasks at `dsec serve fncall` and at a server of SandboxFusion (docs/fncall.md says how one is set up), in its own dialect, by turns. An answer that
 * is wrong is counted and not hidden: what is fast and wrong counts for nothing.
 */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { round } from './benchmark.ts';
import type { DsecCommand } from './dsec-command.ts';
import { fillPackageRoot, packagesMissing } from './package-root.ts';
import { listenerOf, treeCpuMs } from './process-tree.ts';
import { RawConnection } from './raw-http-client.ts';
import { median } from './sample.ts';
import { withFnCallServer } from './serve-fncall.ts';

const PACKAGES = ['g++', 'bash', 'python3', 'coreutils'];

/** Without input: the server writes a traceback to its log for each task that has some. */
const TASKS = {
  python: 'print(sum(map(int, "1 2 3".split())))',
  bash: 'echo $((1 + 2 + 3))',
  cpp: '#include <iostream>\nint main() { std::cout << 1 + 2 + 3 << std::endl; }',
} as const;
type Language = keyof typeof TASKS;

/** A compiler takes a hundred times as long as what it compiles here. */
const SHARE: Readonly<Record<Language, number>> = { python: 1, bash: 1, cpp: 0.1 };
const FEWEST = 5;
const CLIENTS = [2, 4];
/** Each rate is measured in so many slices, the two sides by turns. */
const SLICES = 4;
/** Before anything counts. */
const WARM_UP = 4;

/** As it compiles. */
const ROWS = { cpp: { file: 'main.cpp', compile: ['g++', '-std=c++17', '{file}', '-o', 'test'], run: ['./test'] } };

interface Side {
  readonly url: string;
  readonly pid: number;
}

interface Measured {
  readonly p50: number;
  readonly perSecond: Readonly<Record<number, number>>;
  /** Processor time of a task, of the server and all that it starts, over all of the rates. */
  readonly cpuMs: number;
  readonly wrong: number;
}

export interface FusionRatio {
  readonly p50: number;
  /** By the number of clients. */
  readonly perSecond: Readonly<Record<string, number>>;
  readonly cpu: number;
}

/** By language. `wrong`: answers of both sides. */
export type FusionComparison = Readonly<Record<string, { readonly ratio: FusionRatio; readonly wrong: number }>>;

export async function compareWithFusion(
  url: string,
  dsec: DsecCommand,
  folder: string,
  n: number,
): Promise<FusionComparison> {
  const missing = packagesMissing(PACKAGES);
  if (missing !== undefined) throw new Error(`the tools of its tasks are not here: ${missing}`);
  const tree = join(folder, 'tools');
  fillPackageRoot(tree, PACKAGES);
  await dsec.convert(`dir:${tree}`, 'tools:1');
  const rows = join(folder, 'languages.json');
  writeFileSync(rows, JSON.stringify(ROWS));
  const options = ['--image', 'tools:1', '--floor', '4', '--ceiling', '4', '--python', '--languages', rows];
  return withFnCallServer(dsec, options, async (ours) => {
    await untilWarm(ours.url);
    const theirs = { url, pid: listenerOf(Number(new URL(url).port)) };
    const found: Record<string, Awaited<ReturnType<typeof compare>>> = {};
    for (const language of Object.keys(TASKS) as Language[]) {
      found[language] = await compare(language, ours, theirs, Math.max(FEWEST, Math.round(n * SHARE[language])));
    }
    return found;
  });
}

async function compare(language: Language, ours: Side, theirs: Side, n: number) {
  const sides = [ours, theirs];
  const ms: number[][] = [[], []];
  const callers = await Promise.all(sides.map((side) => caller(side, language)));
  for (const one of callers) await rate(WARM_UP, [one.run]);
  for (let i = 0; i < n; i++) {
    for (const which of i % 2 === 0 ? [0, 1] : [1, 0]) {
      const from = performance.now();
      await callers[which]!.run();
      ms[which]!.push(performance.now() - from);
    }
  }
  const part = Math.ceil(n / SLICES);
  const counted = sides.map((_, i) => ({
    cpuMs: 0,
    tasks: 0,
    wrong: callers[i]!.wrong(),
    perSecond: {} as Record<number, number>,
  }));
  for (const clients of CLIENTS) {
    const groups = await Promise.all(
      sides.map((side) => Promise.all(Array.from({ length: clients }, () => caller(side, language)))),
    );
    const rates: number[][] = [[], []];
    for (let slice = 0; slice < SLICES; slice++) {
      for (const which of slice % 2 === 0 ? [0, 1] : [1, 0]) {
        const { pid } = sides[which]!;
        const before = treeCpuMs(pid);
        const runs = groups[which]!.map(({ run }) => run);
        rates[which]!.push(await rate(part, runs));
        counted[which]!.cpuMs += treeCpuMs(pid) - before;
        counted[which]!.tasks += part;
      }
    }
    for (const [which, one] of counted.entries()) {
      one.perSecond[clients] = round(median(rates[which]!));
      one.wrong += groups[which]!.reduce((sum, { wrong }) => sum + wrong(), 0);
    }
  }
  const [dsec, fusion] = counted.map(
    ({ cpuMs, tasks, ...rest }, i): Measured => ({ ...rest, p50: round(median(ms[i]!)), cpuMs: round(cpuMs / tasks) }),
  ) as [Measured, Measured];
  const perSecond = Object.fromEntries(
    CLIENTS.map((clients) => [clients, round(dsec.perSecond[clients]! / fusion.perSecond[clients]!)]),
  );
  const ratio = { p50: round(fusion.p50 / dsec.p50), perSecond, cpu: round(fusion.cpuMs / dsec.cpuMs) };
  console.log(
    `${language}: dsec ${JSON.stringify(dsec)}; SandboxFusion ${JSON.stringify(fusion)}; ${JSON.stringify(ratio)}`,
  );
  return { n, dsec, fusion, ratio, wrong: dsec.wrong + fusion.wrong };
}

/** Until all of its containers are there: what starts them is no task's. */
async function untilWarm(url: string): Promise<void> {
  for (let ready = false; !ready; await sleep(50)) {
    const pools = (await (await fetch(`${url}/v1/fncall/pools`)).json()) as { ready: number; ceiling: number }[];
    ready = pools.every((pool) => pool.ready === pool.ceiling);
  }
}

/** Of a connection that stays. */
async function caller({ url }: Side, language: Language): Promise<{ run(): Promise<void>; wrong(): number }> {
  const body = JSON.stringify({ language, code: TASKS[language], compile_timeout: 60, run_timeout: 60 });
  const headers = { 'content-type': 'application/json' };
  const connection = await RawConnection.open(url, { method: 'POST', path: '/run_code', headers, body });
  let wrong = 0;
  return {
    run: async () => {
      const status = await connection.ask();
      const [, answer = ''] = connection.text().split('\r\n\r\n');
      if (status !== 200) throw new Error(connection.text());
      const { status: word, run_result: run } = JSON.parse(answer) as {
        status: string;
        run_result?: { stdout: string };
      };
      if (word !== 'Success' || run?.stdout !== '6\n') wrong++;
    },
    wrong: () => wrong,
  };
}

/** Calls a second. */
export async function rate(n: number, callers: readonly (() => Promise<void>)[]): Promise<number> {
  let left = n;
  const from = performance.now();
  const worker = async (run: () => Promise<void>) => {
    while (left-- > 0) await run();
  };
  await Promise.all(callers.map(worker));
  return round((n / (performance.now() - from)) * 1000);
}
