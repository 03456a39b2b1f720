/**
 * `dsec serve all` with real sandboxes under faults, cycle after cycle: sandboxes are made, used, ended in every way there is, while a service is killed or
 * stands still. At the end of each cycle nothing may be left of it: none in the list, nothing counted, no mount, no more files or descriptors than before.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, readdirSync, readFileSync, statSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { readMountInfo } from '#linux';
import { DsecCommand } from './dsec-command.ts';
import { fail } from './errors.ts';

const SERVICES = ['edge', 'watcher', 'apiserver'] as const;
export type Service = (typeof SERVICES)[number];

export interface SoakOptions {
  readonly folder: string;
  /** Sandboxes of a cycle, made at once by as many clients. */
  readonly clients: number;
  readonly sandboxes: number;
  /** Called before each cycle; `fault`: whether a service is killed in it. */
  readonly next: (cycle: number) => { readonly fault: boolean } | undefined;
  readonly onCycle?: (sample: Sample) => void;
}

/** After a cycle, when all of it is gone. */
export interface Sample {
  readonly cycle: number;
  readonly seconds: number;
  readonly fault: string;
  readonly mounts: number;
  readonly files: number;
  readonly databaseBytes: number;
  readonly residentBytes: Readonly<Record<Service | 'supervisor', number>>;
  readonly descriptors: Readonly<Record<Service | 'supervisor', number>>;
}

export interface Soaked {
  readonly samples: readonly Sample[];
  readonly made: number;
  readonly kills: number;
  /** Answers that were errors, of which each was asked again. */
  readonly errors: number;
  readonly cpuSeconds: number;
}

const PATIENCE_MS = 180_000;
const PAGE_BYTES = 4096;
const TICKS_A_SECOND = 100;

/** @throws BENCH_SOAK for whatever does not hold */
export async function soak(options: SoakOptions): Promise<Soaked> {
  const cluster = await SoakCluster.start(options.folder);
  const samples: Sample[] = [];
  let made = 0;
  let kills = 0;
  try {
    for (let cycle = 0; ; cycle++) {
      const next = options.next(cycle);
      if (next === undefined) break;
      const from = performance.now();
      let left = options.sandboxes;
      const client = async () => {
        while (left > 0) {
          const number = left--;
          await cluster.live(`cycle ${cycle} ${number}`, number);
          made++;
        }
      };
      const clients = Array.from({ length: options.clients }, client);
      let fault = '';
      if (next.fault) {
        fault = await cluster.fault(cycle);
        kills++;
      }
      await Promise.all(clients);
      await cluster.settled();
      const sample = { cycle, seconds: (performance.now() - from) / 1000, fault, ...cluster.sample() };
      samples.push(sample);
      options.onCycle?.(sample);
    }
    const { errors } = cluster;
    return { samples, made, kills, errors, cpuSeconds: cluster.cpuSeconds() };
  } finally {
    await cluster.stop();
  }
}

interface Answer {
  readonly status: number;
  readonly body: Record<string, unknown> & { readonly error?: { readonly code: string; readonly retryable: boolean } };
}

class SoakCluster {
  errors = 0;
  private readonly child: ChildProcess;
  private readonly folder: string;
  private readonly url: string;
  private readonly token: string;

  private constructor(child: ChildProcess, folder: string, url: string) {
    this.child = child;
    this.folder = folder;
    this.url = url;
    this.token = readFileSync(join(folder, 'state/cluster/admin-token'), 'utf8').trim();
  }

  static async start(folder: string): Promise<SoakCluster> {
    const dsec = new DsecCommand(folder);
    const tree = join(folder, 'tree');
    for (const path of ['bin', 'tmp']) mkdirSync(join(tree, path), { recursive: true });
    copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cat', 'echo', 'sleep']) symlinkSync('busybox', join(tree, 'bin', name));
    await dsec.convert(`dir:${tree}`, 'bb:1');
    const limits = ['--pressure', 'cpu=1,memory=1,io=1', '--reserve', 'memory=0,disk=0', '--keep-ended', '1s'];
    const [program, ...words] = dsec.argv(['serve', 'all', '--listen', '127.0.0.1:0', '--no-context', ...limits]);
    const env = { ...process.env, ...dsec.env, XDG_CONFIG_HOME: join(folder, 'config') };
    const child = spawn(program!, words, { env, stdio: ['pipe', 'pipe', 'pipe'] });
    let said = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (bytes) => {
        said = (said + bytes).slice(-20_000);
      });
    }
    await until('the cluster serves', () => /^next:/m.test(said) || child.exitCode !== null);
    const url = /^cluster at (\S+): /m.exec(said)?.[1];
    if (url === undefined) throw fail('BENCH_SOAK', { problem: `the cluster did not start: ${said}` });
    const cluster = new SoakCluster(child, folder, url);
    await cluster.settled();
    return cluster;
  }

  /** A sandbox from its beginning to its end, each step asked for until it is answered. */
  async live(mark: string, number: number): Promise<void> {
    const asked = { image: 'bb:1', requestId: mark, ttlMs: number % 4 === 0 ? 20_000 : 600_000 };
    const { id } = await this.right<{ id: string }>('POST', '/v1/sandboxes', asked, 201);
    const path = `/v1/sandboxes/${id}`;
    const args = ['sh', '-c', `echo "${mark}" > /tmp/mark; sleep 0.2; echo "${mark}" >> /tmp/mark`];
    const command = await this.right<{ id: number }>('POST', `${path}/commands`, { args, requestId: 'once' }, 201);
    await until(`${mark}: its command has ended`, async () => {
      const { running } = await this.right<{ running: boolean }>(
        'GET',
        `${path}/commands/${command.id}`,
        undefined,
        200,
      );
      return !running;
    });
    const text = await this.text(`${path}/files?path=/tmp/mark`);
    if (text !== `${mark}\n${mark}\n`)
      throw fail('BENCH_SOAK', { problem: `${id} has "${text}" where it wrote ${mark} twice` });
    // A quarter each: by its time, stopped and then removed, stopped alone, removed at once.
    if (number % 4 === 0) return;
    if (number % 4 !== 3) await this.right('POST', `${path}/stop`, {}, 200);
    if (number % 4 !== 2) await this.ended('DELETE', `${path}?force=true`);
  }

  /** One service is killed, or stands still for a second. */
  async fault(cycle: number): Promise<string> {
    await sleep(100 + Math.random() * 500);
    const service = SERVICES[cycle % SERVICES.length]!;
    const stands = Math.floor(cycle / SERVICES.length) % 3 === 2;
    const pid = this.pidOf(service);
    if (pid === undefined) return `${service} was away`;
    process.kill(pid, stands ? 'SIGSTOP' : 'SIGKILL');
    if (stands) {
      await sleep(1000);
      process.kill(pid, 'SIGCONT');
    }
    return `${service} ${stands ? 'stood still' : 'killed'}`;
  }

  /** Nothing is there and nothing counts: what a fault left half done is mended by then. */
  async settled(): Promise<void> {
    await until('every service answers, no sandbox is there and none counts', async () => {
      const [nodes, all, quotas] = await Promise.all(
        ['/v1/nodes', '/v1/sandboxes', '/v1/quotas'].map((path) => this.once('GET', path)),
      );
      const [node] = (nodes?.body.nodes ?? []) as { report?: { state: string }; alive: boolean }[];
      const [root] = (quotas?.body.quotas ?? []) as { used: Record<string, number> }[];
      const empty = (all?.body.sandboxes as unknown[] | undefined)?.length === 0;
      const isFree = root !== undefined && Object.values(root.used).every((used) => used === 0);
      return node?.alive === true && node.report?.state === 'healthy' && empty && isFree && this.mounts() === 0;
    });
  }

  sample() {
    const pids = {
      supervisor: this.child.pid,
      ...Object.fromEntries(SERVICES.map((name) => [name, this.pidOf(name)])),
    };
    const each = (read: (pid: number) => number) =>
      Object.fromEntries(
        Object.entries(pids).map(([name, pid]) => [name, pid === undefined ? 0 : read(pid)]),
      ) as Record<Service | 'supervisor', number>;
    return {
      mounts: this.mounts(),
      files: filesIn(join(this.folder, 'state')) + filesIn(join(this.folder, 'run')),
      databaseBytes: statSync(join(this.folder, 'state/cluster/iam.db')).size,
      residentBytes: each((pid) => Number(readFileSync(`/proc/${pid}/statm`, 'latin1').split(' ')[1]) * PAGE_BYTES),
      descriptors: each((pid) => readdirSync(`/proc/${pid}/fd`).length),
    };
  }

  /** Of the services that live now, and of those before them that were waited for. */
  cpuSeconds(): number {
    const stat = readFileSync(`/proc/${this.child.pid}/stat`, 'latin1');
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    const own = fields.slice(11, 15).reduce((sum, ticks) => sum + Number(ticks), 0);
    return own / TICKS_A_SECOND;
  }

  async stop(): Promise<void> {
    if (this.child.exitCode !== null || this.child.signalCode !== null) return;
    const ended = new Promise((resolve) => this.child.once('exit', resolve));
    this.child.kill('SIGTERM');
    await ended;
  }

  private mounts(): number {
    const state = `${this.folder}/state/`;
    return readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(state)).length;
  }

  private pidOf(service: Service): number | undefined {
    const children = readFileSync(`/proc/${this.child.pid}/task/${this.child.pid}/children`, 'utf8').trim().split(' ');
    const found = children.find((pid) => {
      if (!existsSync(`/proc/${pid}/cmdline`)) return false;
      const words = readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      return words[words.indexOf('serve') + 1] === service;
    });
    return found === undefined ? undefined : Number(found);
  }

  private async once(method: string, path: string, body?: object): Promise<Answer | undefined> {
    try {
      const answer = await this.fetch(method, path, body);
      return { status: answer.status, body: (await answer.json()) as Answer['body'] };
    } catch {
      return undefined;
    }
  }

  private fetch(method: string, path: string, body?: object): Promise<Response> {
    const headers = {
      authorization: `Bearer ${this.token}`,
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
    };
    return fetch(`${this.url}${path}`, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  }

  /** @throws BENCH_SOAK for an answer that is neither right nor an error that passes */
  private async right<T>(method: string, path: string, body: object | undefined, status: number): Promise<T> {
    let last: Answer | undefined;
    await until(`${method} ${path}`, async () => {
      last = await this.once(method, path, body);
      if (last?.status === status) return true;
      this.errors++;
      if (last !== undefined && last.body.error?.retryable !== true) {
        throw fail('BENCH_SOAK', { problem: `${method} ${path}: ${last.status} ${JSON.stringify(last.body)}` });
      }
      await sleep(150);
      return false;
    });
    return last!.body as T;
  }

  /** Asked again it may be gone already. */
  private async ended(method: string, path: string): Promise<void> {
    await until(`${method} ${path}`, async () => {
      const answer = await this.once(method, path);
      if (answer?.status === 200 || answer?.status === 410) return true;
      this.errors++;
      await sleep(150);
      return false;
    });
  }

  private async text(path: string): Promise<string> {
    let text = '';
    await until(`GET ${path}`, async () => {
      const answer = await this.fetch('GET', path).catch(() => undefined);
      text = (await answer?.text().catch(() => '')) ?? '';
      if (answer?.status === 200) return true;
      this.errors++;
      await sleep(150);
      return false;
    });
    return text;
  }
}

function filesIn(folder: string): number {
  let files = 0;
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    if (!entry.isDirectory()) files++;
    else {
      try {
        files += filesIn(join(folder, entry.name));
      } catch {
        // It went meanwhile.
      }
    }
  }
  return files;
}

async function until(what: string, holds: () => boolean | Promise<boolean>): Promise<void> {
  const deadline = Date.now() + PATIENCE_MS;
  while (!(await holds())) {
    if (Date.now() > deadline) throw fail('BENCH_SOAK', { problem: `it did not happen in three minutes: ${what}` });
    await sleep(50);
  }
}
