/**
 * Creations a second through the apiserver, IAM (SQLite) and placement, onto simulated edges in processes of their own: real HTTP, real admission, no
 * containers. One at a time from many clients, then a burst by one request. `--n`: how many one by one; `--apiservers=N`: so many
 * of them, over PostgreSQL; `--profile=FOLDER`: where the time of each service goes; `--full`: 160 edges, 380,000 held first (`--hold`), a burst of 32,000.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { profileOptions, selfTimes } from './cpu-profile.ts';
import { DsecCommand } from './dsec-command.ts';
import { fail } from './errors.ts';
import { folderOption, hasFlag, numberOption } from './options.ts';
import { type PostgresServer, startPostgres } from './postgres-server.ts';
import { RawConnection } from './raw-http-client.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';
import { startSimulatedEdges } from './simulated-edge-process.ts';
import { withScratch } from './work-folder.ts';

const TOKEN = 'the-token-of-a-benchmark-cluster';
const TARGET_A_SECOND = 5000;
const CLIENTS = 256;
const BATCH = 32_000;
/** On a machine that has much else to do. */
const START_SECONDS = 300;
const TICKS_A_SECOND = 100;
const REST_MS = 45_000;
/** Of creations that failed: why, for the first ones. */
const MOST_TOLD = 5;
/** As bin/dsec has node run it. */
const API_OPTIONS = ['--max-semi-space-size=64'];
/** Whose processor time is told: the client and the simulated edges are what measures. */
const PARTS = ['client', 'api', 'database', 'edges', 'watcher'] as const;

export const benchmark: Benchmark = {
  name: 'cluster-scale',
  about: 'creations a second through apiserver, IAM and placement, onto simulated edges; what each step costs',
  run,
};

function run(): Promise<Result> {
  return withScratch('cluster-scale', measure);
}

async function measure(folder: string): Promise<Result> {
  const full = hasFlag('full');
  const count = numberOption('n', full ? 50_000 : 5000);
  const burst = full ? BATCH : Math.min(BATCH, count);
  const hold = full ? numberOption('hold', 380_000) : 0;
  const edges = full ? 160 : 40;
  /** 0: one over SQLite, whose time is its own. */
  const servers = numberOption('apiservers', 0);
  const children: ChildProcess[] = [];
  const profiles = folderOption('profile');
  const profiled = (service: string) => (profiles === undefined ? [] : profileOptions(join(profiles, service)));
  const simulated = await startSimulatedEdges(
    {
      names: Array.from({ length: edges }, (_, at) => `sim-${at}`),
      token: TOKEN,
      sandboxes: Math.ceil(((hold + count + burst) / edges) * 1.3),
    },
    full ? 4 : 2,
    profiled('edges'),
  );
  // Not in the scratch folder, which is one user's alone: PostgreSQL does not run as root.
  const postgresFolder = servers === 0 ? undefined : mkdtempSync(join(tmpdir(), 'dsec-bench-pg-'));
  let postgres: PostgresServer | undefined;
  try {
    if (postgresFolder !== undefined) postgres = startPostgres(postgresFolder);
    const dsec = new DsecCommand(folder);
    const tree = join(folder, 'tree');
    mkdirSync(tree);
    writeFileSync(join(tree, 'file'), 'content');
    await dsec.convert(`dir:${tree}`, 'small:1');
    const list = join(folder, 'edges');
    writeFileSync(list, simulated.edges.map(({ edge, url }) => `${edge} ${url}\n`).join(''));
    const env = { ...process.env, ...dsec.env, DSEC_CLUSTER_TOKEN: TOKEN };
    const serve = (ready: RegExp, ...args: string[]) =>
      started(children, dsec, env, ready, args, [
        ...(args[1] === 'apiserver' ? API_OPTIONS : []),
        ...profiled(args[1] ?? ''),
      ]);
    const watcher = await serve(
      /^watcher at (\S+)/m,
      'serve',
      'watcher',
      '--listen',
      '127.0.0.1:0',
      '--edges-file',
      list,
    );
    const tokenFile = join(folder, 'admin-token');
    const database = ['--database', postgres?.url ?? `sqlite:${join(folder, 'iam.db')}`];
    const limits = ['--rate-limit', '0', '--creates', '1024', '--log-level', 'warn'];
    const apis: Awaited<ReturnType<typeof serve>>[] = [];
    while (apis.length < Math.max(1, servers)) {
      const api = await serve(
        /^apiserver at (\S+)/m,
        ...['serve', 'apiserver', '--listen', '127.0.0.1:0', '--watcher', watcher.url, '--admin-token-file', tokenFile],
        ...database,
        ...limits,
      );
      apis.push(api);
    }
    const token = readFileSync(tokenFile, 'utf8').trim();
    const clients = new Clients(apis.map(({ url }) => new Client(url, token)));
    await clients.allHealthy(edges);

    const parts = (): Parts => ({
      client: (process.cpuUsage().user + process.cpuUsage().system) / 1e6,
      api: apis.reduce((sum, { pid }) => sum + usageOf(pid).cpuSeconds, 0),
      database: (postgres?.cpuMs() ?? 0) / 1000,
      edges: simulated.usage().cpuSeconds,
      watcher: usageOf(watcher.pid).cpuSeconds,
    });
    const start = parts();
    let holding = { seconds: 0, failed: 0 };
    for (let held = 0; held < hold; held += BATCH) {
      const { seconds, failed } = await clients.batch(Math.min(BATCH, hold - held));
      holding = { seconds: holding.seconds + seconds, failed: holding.failed + failed };
    }
    const full0 = parts();
    // Nothing is asked for: what it costs to have them, by reports, rosters and what is held against quotas.
    const restMs = full ? REST_MS : 2000;
    await sleep(restMs);
    const before = parts();
    const one = await clients.oneByOne(count);
    const after = parts();
    const many = await clients.batch(burst);
    const last = parts();
    const apiBytes = apis.reduce((sum, { pid }) => sum + usageOf(pid).residentBytes, 0);
    const watcherBytes = usageOf(watcher.pid).residentBytes;
    const steps = await clients.steps();
    await clients.close();

    const rate = count / one.seconds;
    const resting = each(full0, before, restMs / 1000);
    const oneMs = each(before, after, count / 1000);
    const burstMs = each(after, last, burst / 1000);
    const row = (what: string, a: number, cpu: Parts, ...more: string[]) => [
      what,
      a.toFixed(0),
      ...PARTS.map((part) => `${cpu[part].toFixed(3)} ms`),
      ...more,
    ];
    printTable([
      ['', 'a second', ...PARTS.map((part) => `${part} CPU`), 'p50', 'p99'],
      ...(hold === 0 ? [] : [row(`the first ${hold}`, hold / holding.seconds, each(start, full0, hold / 1000))]),
      row('one by one', rate, oneMs, `${median(one.ms).toFixed(1)} ms`, `${quantile(one.ms, 0.99).toFixed(1)} ms`),
      row('by one request', burst / many.seconds, burstMs),
      ['at rest', '', ...PARTS.map((part) => `${(resting[part] * 100).toFixed(1)} %`)],
      ...steps.map(({ step, meanMs, p50Ms, p99Ms }) => [
        `  ${step}`,
        '',
        `mean ${meanMs.toFixed(2)} ms`,
        `<= ${p50Ms} ms`,
        `<= ${p99Ms} ms`,
      ]),
    ]);
    const failures = one.failed + many.failed + holding.failed;
    const ratio = rate / TARGET_A_SECOND;
    return {
      ratio: round(ratio),
      ...atLeast(1, failures > 0 ? 0 : ratio),
      against: `${TARGET_A_SECOND} creations a second`,
      database: servers === 0 ? 'SQLite' : 'PostgreSQL',
      n: count,
      p50: round(median(one.ms)),
      p99: round(quantile(one.ms, 0.99)),
      unit: 'ms',
      perSecond: round(rate),
      burst,
      burstPerSecond: round(burst / many.seconds),
      cpuMs: rounded(oneMs),
      burstCpuMs: rounded(burstMs),
      restCpuShare: rounded(resting),
      ...(hold === 0
        ? {}
        : { holdPerSecond: round(hold / holding.seconds), holdCpuMs: rounded(each(start, full0, hold / 1000)) }),
      apiserverBytes: apiBytes,
      watcherBytes,
      edgesBytes: simulated.usage().residentBytes,
      edges,
      apiservers: apis.length,
      held: hold,
      failed: failures,
      steps,
    };
  } finally {
    await Promise.all(children.map(ended));
    await simulated.close();
    postgres?.stop();
    if (postgresFolder !== undefined) rmSync(postgresFolder, { recursive: true, force: true });
    if (profiles !== undefined)
      for (const service of ['apiserver', 'edges', 'watcher']) printProfile(profiles, service);
  }
}

const MOST_FUNCTIONS = 20;

function printProfile(folder: string, service: string): void {
  const rows = selfTimes(join(folder, service)).slice(0, MOST_FUNCTIONS);
  printTable([
    [service, 'self', ''],
    ...rows.map(({ name, ms, share }) => [name, `${(share * 100).toFixed(1)} %`, `${ms.toFixed(0)} ms`]),
  ]);
}

/** Processor time in seconds, or for each of something. */
type Parts = Record<(typeof PARTS)[number], number>;

function each(from: Parts, to: Parts, thousands: number): Parts {
  return Object.fromEntries(PARTS.map((part) => [part, (to[part] - from[part]) / thousands])) as Parts;
}

function rounded(parts: Parts): Parts {
  return Object.fromEntries(PARTS.map((part) => [part, round(parts[part])])) as Parts;
}

interface OneByOne extends Many {
  readonly ms: number[];
}

interface Many {
  readonly seconds: number;
  readonly failed: number;
}

interface Step {
  readonly step: string;
  readonly meanMs: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
}

/** Of several API servers, each with its part of the work, all at once. */
class Clients {
  readonly #all: readonly Client[];

  constructor(all: readonly Client[]) {
    this.#all = all;
  }

  async allHealthy(count: number): Promise<void> {
    await Promise.all(this.#all.map((client) => client.allHealthy(count)));
  }

  async oneByOne(count: number): Promise<OneByOne> {
    const part = Math.ceil(count / this.#all.length);
    const connections = Math.ceil(CLIENTS / this.#all.length);
    const all = await Promise.all(this.#all.map((client) => client.oneByOne(part, connections)));
    return { ...together(all), ms: all.flatMap(({ ms }) => ms) };
  }

  async batch(count: number): Promise<Many> {
    const part = Math.ceil(count / this.#all.length);
    return together(await Promise.all(this.#all.map((client) => client.batch(part))));
  }

  /** Of the first one. */
  async steps(): Promise<Step[]> {
    return (await this.#all[0]?.steps()) ?? [];
  }

  async close(): Promise<void> {
    await Promise.all(this.#all.map((client) => client.close()));
  }
}

function together(all: readonly Many[]): Many {
  return {
    seconds: Math.max(...all.map(({ seconds }) => seconds)),
    failed: all.reduce((sum, { failed }) => sum + failed, 0),
  };
}

class Client {
  /** Errors that were printed. */
  #told = 0;
  readonly #pool: Pool;
  readonly #headers: Record<string, string>;
  readonly #url: string;

  constructor(url: string, token: string) {
    this.#url = url;
    this.#pool = new Pool(url, { connections: CLIENTS, bodyTimeout: 0, headersTimeout: 0 });
    this.#headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
  }

  async allHealthy(count: number): Promise<void> {
    for (let tries = 0; tries < START_SECONDS * 10; tries++) {
      const { body } = await this.#pool.request({ method: 'GET', path: '/v1/nodes', headers: this.#headers });
      const { nodes } = (await body.json()) as { nodes: { report?: { state: string } }[] };
      if (nodes.filter(({ report }) => report?.state === 'healthy').length === count) return;
      await sleep(100);
    }
    throw new Error('not all edges became healthy in five minutes');
  }

  async oneByOne(count: number, connections: number): Promise<OneByOne> {
    const ms: number[] = [];
    let failed = 0;
    let left = count;
    const from = performance.now();
    const request = { method: 'POST', path: '/v1/sandboxes', headers: this.#headers, body: '{"image":"small:1"}' };
    const worker = async () => {
      const connection = await RawConnection.open(this.#url, request);
      while (left-- > 0) {
        const at = performance.now();
        const status = await connection.ask();
        ms.push(performance.now() - at);
        if (status !== 201) failed++;
      }
      connection.close();
    };
    await Promise.all(Array.from({ length: connections }, worker));
    return { seconds: (performance.now() - from) / 1000, ms, failed };
  }

  async batch(count: number): Promise<Many> {
    const from = performance.now();
    const { body } = await this.#pool.request({
      method: 'POST',
      path: '/v1/sandboxes/batch',
      headers: this.#headers,
      body: JSON.stringify({ request: { image: 'small:1' }, count }),
    });
    let text = '';
    let made = 0;
    for await (const part of body) {
      const lines = (text + part).split('\n');
      text = lines.pop()!;
      for (const line of lines) {
        if (!/^\{"index":\d+,"error"/.test(line)) made++;
        else if (this.#told++ < MOST_TOLD) console.log(line);
      }
    }
    return { seconds: (performance.now() - from) / 1000, failed: count - made };
  }

  /** From the apiserver's own histograms: quantiles are upper bounds of buckets. */
  async steps(): Promise<Step[]> {
    const { body } = await this.#pool.request({ method: 'GET', path: '/metrics', headers: this.#headers });
    const text = await body.text();
    return ['layers', 'reserve', 'asking', 'edge', 'placed'].flatMap((step) => {
      const value = (name: string) =>
        Number(new RegExp(`^dsec_create_step_seconds_${name}\\{step="${step}"\\} (\\S+)$`, 'm').exec(text)?.[1]);
      const count = value('count');
      const buckets = [
        ...text.matchAll(new RegExp(`^dsec_create_step_seconds_bucket\\{step="${step}",le="([^"]+)"\\} (\\d+)$`, 'gm')),
      ];
      const bound = (part: number) => Number(buckets.find(([, , below]) => Number(below) >= part * count)?.[1]) * 1000;
      // An edge is noted with the reservation: it is asked for by itself only when the first one has refused.
      if (!(count > 0)) return [];
      return [{ step, meanMs: (value('sum') / count) * 1000, p50Ms: bound(0.5), p99Ms: bound(0.99) }];
    });
  }

  close(): Promise<void> {
    return this.#pool.destroy();
  }
}

async function started(
  children: ChildProcess[],
  dsec: DsecCommand,
  env: NodeJS.ProcessEnv,
  ready: RegExp,
  args: string[],
  nodeOptions: readonly string[],
) {
  const [program, ...words] = dsec.argv(args);
  const child = spawn(program!, [...nodeOptions, ...words], { env, stdio: ['ignore', 'pipe', 'pipe'] });
  children.push(child);
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (bytes) => {
      if (output.length < 100_000) output += bytes;
    });
  }
  for (let tries = 0; !ready.test(output); tries++) {
    if (child.exitCode !== null || tries > START_SECONDS * 20) {
      throw fail('BENCH_DAEMON', { daemon: `dsec ${args.slice(0, 2).join(' ')}`, seconds: START_SECONDS, output });
    }
    await sleep(50);
  }
  return { url: ready.exec(output)![1]!, pid: child.pid! };
}

async function ended(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = new Promise((resolve) => child.once('exit', resolve));
  child.kill('SIGTERM');
  await gone;
}

function usageOf(pid: number): { cpuSeconds: number; residentBytes: number } {
  const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  const cpuSeconds = (Number(fields[11]) + Number(fields[12])) / TICKS_A_SECOND;
  const residentBytes = Number(readFileSync(`/proc/${pid}/statm`, 'latin1').split(' ')[1]) * 4096;
  return { cpuSeconds, residentBytes };
}
