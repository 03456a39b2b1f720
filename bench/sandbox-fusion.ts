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

export async function compareWithFusion(url: string, dsec: DsecCommand, folder: string, n: number): Promise<object> {
  const missing = packagesMissing(PACKAGES);
  if (missing !== undefined) return { missing };
  const tree = join(folder, 'tools');
  fillPackageRoot(tree, PACKAGES);
  await dsec.convert(`dir:${tree}`, 'tools:1');
  const rows = join(folder, 'languages.json');
  writeFileSync(rows, JSON.stringify(ROWS));
  const options = ['--image', 'tools:1', '--floor', '4', '--ceiling', '4', '--python', '--languages', rows];
  return withFnCallServer(dsec, options, async (ours) => {
    await untilWarm(ours.url);
    const theirs = { url, pid: listenerOf(Number(new URL(url).port)) };
    const found: Record<string, object> = {};
    for (const language of Object.keys(TASKS) as Language[]) {
      found[language] = await compare(language, ours, theirs, Math.max(FEWEST, Math.round(n * SHARE[language])));
    }
    return found;
  });
}

async function compare(language: Language, ours: Side, theirs: Side, n: number): Promise<object> {
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
  const measured: Measured[] = [];
  for (const [i, side] of sides.entries()) {
    const perSecond: Record<number, number> = {};
    let [wrong, tasks] = [callers[i]!.wrong(), 0];
    const before = treeCpuMs(side.pid);
    for (const clients of CLIENTS) {
      const all = await Promise.all(Array.from({ length: clients }, () => caller(side, language)));
      perSecond[clients] = await rate(
        n,
        all.map(({ run }) => run),
      );
      tasks += n;
      wrong += all.reduce((sum, one) => sum + one.wrong(), 0);
    }
    const cpuMs = round((treeCpuMs(side.pid) - before) / tasks);
    measured.push({ p50: round(median(ms[i]!)), perSecond, cpuMs, wrong });
  }
  const [dsec, fusion] = measured as [Measured, Measured];
  const perSecond = Object.fromEntries(
    CLIENTS.map((clients) => [clients, round(dsec.perSecond[clients]! / fusion.perSecond[clients]!)]),
  );
  const ratio = { p50: round(fusion.p50 / dsec.p50), perSecond, cpu: round(fusion.cpuMs / dsec.cpuMs) };
  console.log(
    `${language}: dsec ${JSON.stringify(dsec)}; SandboxFusion ${JSON.stringify(fusion)}; ${JSON.stringify(ratio)}`,
  );
  return { n, dsec, fusion, ratio };
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
