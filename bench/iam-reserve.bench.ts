/**
 * What it costs to count sandboxes against quotas: reservations alone, and the whole of a create (reserve, asking, placed) and its end, in a tree of
 * projects four deep, with every call durable before it is answered. On SQLite and on PostgreSQL, in processor time: the disk decides how long
 * a commit takes, and with it how many calls share one.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { bootstrapAdmin, type OpenIam, openIam } from '#control';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { numberOption } from './options.ts';
import { postgresMissing, startPostgres } from './postgres-server.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';
import { withScratch } from './work-folder.ts';

/** What the cluster is made for. */
const RATE = 5000;
/** Creates that are under way at once: what a second of them has, when each takes 50 ms. */
const AT_ONCE = 256;
const PROJECTS = ['root/a', 'root/a/b', 'root/a/b/c', 'root/a/b/d', 'root/e', 'root/e/f'];
const AMOUNTS = { sandboxes: 1, cpuMilli: 500, memoryBytes: 512 << 20, diskBytes: 2 ** 31 };

interface Cost {
  /** Microseconds of processor time a call, in this process. */
  readonly cpuUs: number;
  readonly serverUs: number;
  readonly perSecond: number;
  readonly latenciesMs: readonly number[];
}

export const benchmark: Benchmark = {
  name: 'iam-reserve',
  about: `processor time of quotas at ${RATE} creates a second, SQLite and PostgreSQL`,
  run,
};

async function run(): Promise<Result> {
  const n = numberOption('n', 20_000);
  return withScratch('iam-reserve', async (folder) => {
    const sqlite = await measure(await openIam({ database: join(folder, 'iam.db') }), n, () => 0);
    const rows = [['', 'a second', 'CPU us', 'server CPU us', 'p50 ms', 'p99 ms'], ...rowsOf('SQLite', sqlite)];
    const missing = postgresMissing();
    if (missing === undefined) {
      // Not in the scratch folder, which is one user's alone: PostgreSQL does not run as root.
      const own = mkdtempSync(join(tmpdir(), 'dsec-bench-pg-'));
      const server = startPostgres(own);
      try {
        const postgres = await measure(await openIam({ database: server.url }), n, server.cpuMs);
        rows.push(...rowsOf(`PostgreSQL ${server.version}`, postgres));
      } finally {
        server.stop();
        rmSync(own, { recursive: true, force: true });
      }
    } else console.log(`PostgreSQL: skipped: ${missing}`);
    printTable(rows);
    const { reserve, create, release } = sqlite;
    const cores = round((reserve.cpuUs * RATE) / 1e6);
    return {
      ratio: cores,
      ...atMost(0.5, cores),
      against: `one core: ${RATE} reservations a second on SQLite, each durable`,
      n,
      p50: round(median(reserve.latenciesMs)),
      p99: round(quantile(reserve.latenciesMs, 0.99)),
      unit: 'ms',
      reservationsPerSecond: Math.round(reserve.perSecond),
      reserveCpuUs: round(reserve.cpuUs),
      createCpuUs: round(create.cpuUs),
      releaseCpuUs: round(release.cpuUs),
      createsOfOneCore: Math.round(1e6 / create.cpuUs),
      table: rows.slice(1),
    };
  });
}

interface Costs {
  readonly reserve: Cost;
  readonly create: Cost;
  readonly release: Cost;
}

async function measure(iam: OpenIam, n: number, serverMs: () => number): Promise<Costs> {
  const admin = await iam.authenticate((await bootstrapAdmin(iam)) as string);
  for (const path of PROJECTS) await iam.createProject(admin, path);
  await iam.setQuota(admin, 'root', { sandboxes: 1_000_000 });
  await iam.setQuota(admin, 'root/a', { sandboxes: 500_000 });
  const ids: string[] = [];
  const reserve = (i: number) => {
    const project = PROJECTS[i % PROJECTS.length] as string;
    // Random, as those of clients are.
    return iam.reserve({ project, user: `u${i % 50}`, requestId: `${Math.random()}-${i}`, amounts: AMOUNTS });
  };
  const create = async (i: number) => {
    const { id } = await reserve(i);
    const edge = `edge-${Math.floor(Math.random() * 160)}`;
    await iam.asking(id, edge);
    await iam.placed(id, edge, `s-${id}`);
    ids.push(id);
  };
  await timed(Math.min(n, 2000), create, serverMs);
  const reserveCost = await timed(n, async (i) => void ids.push((await reserve(i)).id), serverMs);
  const createCost = await timed(n, create, serverMs);
  const all = [...ids];
  const releaseCost = await timed(all.length, (i) => iam.release(all[i] as string), serverMs);
  await iam.close();
  return { reserve: reserveCost, create: createCost, release: releaseCost };
}

async function timed(n: number, call: (i: number) => Promise<unknown>, serverMs: () => number): Promise<Cost> {
  const latenciesMs: number[] = [];
  const server = serverMs();
  const cpu = process.cpuUsage();
  const begun = performance.now();
  let next = 0;
  await Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      while (next < n) {
        const i = next++;
        const from = performance.now();
        await call(i);
        latenciesMs.push(performance.now() - from);
      }
    }),
  );
  const perSecond = (n / (performance.now() - begun)) * 1000;
  const { user, system } = process.cpuUsage(cpu);
  return { cpuUs: (user + system) / n, serverUs: ((serverMs() - server) * 1000) / n, perSecond, latenciesMs };
}

function rowsOf(name: string, costs: Costs): string[][] {
  return Object.entries(costs).map(([what, { cpuUs, serverUs, perSecond, latenciesMs }]: [string, Cost]) => [
    `${name}: ${what}`,
    perSecond.toFixed(0),
    cpuUs.toFixed(1),
    serverUs === 0 ? '-' : serverUs.toFixed(1),
    median(latenciesMs).toFixed(1),
    quantile(latenciesMs, 0.99).toFixed(1),
  ]);
}
