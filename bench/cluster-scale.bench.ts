/**
 * Creations a second through the apiserver, IAM (SQLite) and placement, onto simulated edges in processes of their own: real HTTP, real admission, no
 * containers. One at a time from many clients, then a burst by one request. `--n`: how many one by one; `--full`: 160 edges, 380,000 held first, a burst of 32,000.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { fail } from './errors.ts';
import { hasFlag, numberOption } from './options.ts';
import { printTable } from './results.ts';
import { median, quantile } from './sample.ts';
import { startSimulatedEdges } from './simulated-edge-process.ts';
import { withScratch } from './work-folder.ts';

const TOKEN = 'the-token-of-a-benchmark-cluster';
const TARGET_A_SECOND = 5000;
const CLIENTS = 256;
const BATCH = 32_000;
const START_SECONDS = 60;
const TICKS_A_SECOND = 100;

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
  const hold = full ? 380_000 : 0;
  const edges = full ? 160 : 40;
  const children: ChildProcess[] = [];
  const simulated = await startSimulatedEdges(
    {
      names: Array.from({ length: edges }, (_, at) => `sim-${at}`),
      token: TOKEN,
      sandboxes: Math.ceil(((hold + count + burst) / edges) * 1.3),
    },
    full ? 4 : 2,
  );
  try {
    const dsec = new DsecCommand(folder);
    const tree = join(folder, 'tree');
    mkdirSync(tree);
    writeFileSync(join(tree, 'file'), 'content');
    await dsec.convert(`dir:${tree}`, 'small:1');
    const list = join(folder, 'edges');
    writeFileSync(list, simulated.edges.map(({ edge, url }) => `${edge} ${url}\n`).join(''));
    const env = { ...process.env, ...dsec.env, DSEC_CLUSTER_TOKEN: TOKEN };
    const serve = (ready: RegExp, ...args: string[]) => started(children, dsec, env, ready, args);
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
    const database = ['--database', `sqlite:${join(folder, 'iam.db')}`];
    const limits = ['--rate-limit', '0', '--creates', '1024', '--log-level', 'warn'];
    const api = await serve(
      /^apiserver at (\S+)/m,
      ...['serve', 'apiserver', '--listen', '127.0.0.1:0', '--watcher', watcher.url, '--admin-token-file', tokenFile],
      ...database,
      ...limits,
    );
    const client = new Client(api.url, readFileSync(tokenFile, 'utf8').trim());
    await client.allHealthy(edges);

    for (let held = 0; held < hold; held += BATCH) await client.batch(Math.min(BATCH, hold - held));
    const before = { api: usageOf(api.pid), watcher: usageOf(watcher.pid), edges: simulated.usage() };
    const one = await client.oneByOne(count);
    const after = { api: usageOf(api.pid), watcher: usageOf(watcher.pid), edges: simulated.usage() };
    const many = await client.batch(burst);
    const last = usageOf(api.pid);
    const steps = await client.steps();
    await client.close();

    const rate = count / one.seconds;
    const apiMs = ((after.api.cpuSeconds - before.api.cpuSeconds) * 1000) / count;
    const burstMs = ((last.cpuSeconds - after.api.cpuSeconds) * 1000) / burst;
    printTable([
      ['', 'a second', 'apiserver CPU each', 'p50', 'p99'],
      [
        'one by one',
        rate.toFixed(0),
        `${apiMs.toFixed(3)} ms`,
        `${median(one.ms).toFixed(1)} ms`,
        `${quantile(one.ms, 0.99).toFixed(1)} ms`,
      ],
      ['by one request', (burst / many.seconds).toFixed(0), `${burstMs.toFixed(3)} ms`, '', ''],
      ...steps.map(({ step, meanMs, p50Ms, p99Ms }) => [
        `  ${step}`,
        '',
        `mean ${meanMs.toFixed(2)} ms`,
        `<= ${p50Ms} ms`,
        `<= ${p99Ms} ms`,
      ]),
    ]);
    const ratio = rate / TARGET_A_SECOND;
    return {
      ratio: round(ratio),
      ...atLeast(1, ratio),
      against: `${TARGET_A_SECOND} creations a second`,
      n: count,
      p50: round(median(one.ms)),
      p99: round(quantile(one.ms, 0.99)),
      unit: 'ms',
      perSecond: round(rate),
      burst,
      burstPerSecond: round(burst / many.seconds),
      apiserverCpuMs: round(apiMs),
      apiserverBurstCpuMs: round(burstMs),
      edgesCpuMs: round(((after.edges.cpuSeconds - before.edges.cpuSeconds) * 1000) / count),
      watcherCpuShare: round((after.watcher.cpuSeconds - before.watcher.cpuSeconds) / one.seconds),
      apiserverBytes: last.residentBytes,
      edgesBytes: after.edges.residentBytes,
      edges,
      held: hold,
      failed: one.failed + many.failed,
      steps,
    };
  } finally {
    await Promise.all(children.map(ended));
    await simulated.close();
  }
}

class Client {
  readonly #pool: Pool;
  readonly #headers: Record<string, string>;

  constructor(url: string, token: string) {
    this.#pool = new Pool(url, { connections: CLIENTS, bodyTimeout: 0, headersTimeout: 0 });
    this.#headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
  }

  async allHealthy(count: number): Promise<void> {
    for (let tries = 0; tries < 600; tries++) {
      const { body } = await this.#pool.request({ method: 'GET', path: '/v1/nodes', headers: this.#headers });
      const { nodes } = (await body.json()) as { nodes: { report?: { state: string } }[] };
      if (nodes.filter(({ report }) => report?.state === 'healthy').length === count) return;
      await sleep(100);
    }
    throw new Error('not all edges became healthy in a minute');
  }

  async oneByOne(count: number): Promise<{ seconds: number; ms: number[]; failed: number }> {
    const ms: number[] = [];
    let failed = 0;
    let left = count;
    const from = performance.now();
    const worker = async () => {
      while (left-- > 0) {
        const at = performance.now();
        const { statusCode, body } = await this.#pool.request({
          method: 'POST',
          path: '/v1/sandboxes',
          headers: this.#headers,
          body: '{"image":"small:1"}',
        });
        await body.dump();
        ms.push(performance.now() - at);
        if (statusCode !== 201) failed++;
      }
    };
    await Promise.all(Array.from({ length: CLIENTS }, worker));
    return { seconds: (performance.now() - from) / 1000, ms, failed };
  }

  async batch(count: number): Promise<{ seconds: number; failed: number }> {
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
      for (const line of lines) if (!/^\{"index":\d+,"error"/.test(line)) made++;
    }
    return { seconds: (performance.now() - from) / 1000, failed: count - made };
  }

  /** From the apiserver's own histograms: quantiles are upper bounds of buckets. */
  async steps(): Promise<{ step: string; meanMs: number; p50Ms: number; p99Ms: number }[]> {
    const { body } = await this.#pool.request({ method: 'GET', path: '/metrics', headers: this.#headers });
    const text = await body.text();
    return ['layers', 'reserve', 'asking', 'edge', 'placed'].map((step) => {
      const value = (name: string) =>
        Number(new RegExp(`^dsec_create_step_seconds_${name}\\{step="${step}"\\} (\\S+)$`, 'm').exec(text)?.[1]);
      const count = value('count');
      const buckets = [
        ...text.matchAll(new RegExp(`^dsec_create_step_seconds_bucket\\{step="${step}",le="([^"]+)"\\} (\\d+)$`, 'gm')),
      ];
      const bound = (part: number) => Number(buckets.find(([, , below]) => Number(below) >= part * count)?.[1]) * 1000;
      return { step, meanMs: (value('sum') / count) * 1000, p50Ms: bound(0.5), p99Ms: bound(0.99) };
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
) {
  const [program, ...words] = dsec.argv(args);
  const child = spawn(program!, words, { env, stdio: ['ignore', 'pipe', 'pipe'] });
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
