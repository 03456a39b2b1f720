/** An edge in a process of its own, with a small image, for tests that kill it. */
import { type ChildProcess, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { buildSync } from 'esbuild';
import { readMountInfo, umount } from '#linux';
import { findAgent } from '#runtime';
import { PeerClient } from '../service-base/peer-client.ts';
import { runCommand } from './command-run.ts';

export const canServeEdge = process.getuid?.() === 0 && findAgent() !== undefined && fs.existsSync('/bin/busybox');
export const CLUSTER_TOKEN = 'the-token-of-a-test-cluster';

const root = join(import.meta.dirname, '../..');

/** The command line bundled once, in the checkout, where it finds packages: from its sources each child would take seconds to start. */
export function bundled(): string {
  const path = join(root, `dist/test/edge-child-${process.pid}.mjs`);
  buildSync({
    entryPoints: [join(import.meta.dirname, 'service-child.ts')],
    outfile: path,
    bundle: true,
    platform: 'node',
    format: 'esm',
    packages: 'external',
    logLevel: 'error',
  });
  return path;
}

export async function until(what: string, holds: () => boolean | Promise<boolean>): Promise<void> {
  const deadline = Date.now() + 180_000;
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error(`it did not happen in three minutes: ${what}`);
    await delay(20);
  }
}

export class EdgeSite {
  readonly folder: string;
  readonly env: NodeJS.ProcessEnv;
  log = '';
  private child: ChildProcess | undefined;
  private peer: PeerClient | undefined;
  private readonly options: readonly string[];
  private readonly program = bundled();
  private readonly saved = { ...process.env };

  private constructor(folder: string, options: readonly string[]) {
    this.folder = folder;
    this.options = options;
    Object.assign(process.env, {
      DSEC_STORE: join(folder, 'store'),
      DSEC_RUN: join(folder, 'run'),
      DSEC_STATE: join(folder, 'state'),
      DSEC_CACHE: join(folder, 'cache'),
      DSEC_CLUSTER_TOKEN: CLUSTER_TOKEN,
    });
    this.env = { ...process.env };
  }

  /** With the image `bb:1`. */
  static async make(...options: string[]): Promise<EdgeSite> {
    const folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-edge-')));
    const site = new EdgeSite(folder, [
      '--id',
      'edge-1',
      '--pressure',
      'cpu=1,memory=1,io=1',
      '--reserve',
      'memory=0,disk=0',
      ...options,
    ]);
    const tree = join(folder, 'tree');
    fs.mkdirSync(join(tree, 'bin'), { recursive: true });
    fs.mkdirSync(join(tree, 'tmp'));
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cat', 'echo', 'sleep', 'true', 'wc']) fs.symlinkSync('busybox', join(tree, 'bin', name));
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    return site;
  }

  get client(): PeerClient {
    return this.peer!;
  }

  get url(): string {
    return this.peer!.url;
  }

  /** A service in a process of its own, and what it said. */
  serve(...args: string[]): { readonly child: ChildProcess; readonly said: () => string } {
    const child = spawn(process.execPath, [this.program, 'serve', ...args], {
      cwd: root,
      env: this.env,
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    let said = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (bytes) => {
        said += bytes;
      });
    }
    return { child, said: () => said };
  }

  async start(...more: string[]): Promise<void> {
    const { child, said } = this.serve('edge', '--listen', '127.0.0.1:0', ...this.options, ...more);
    this.child = child;
    await until('the edge listens', () => /^edge .* at (\S+)$/m.test(said()) || child.exitCode !== null);
    const url = /^edge .* at (\S+)$/m.exec(said())?.[1];
    if (url === undefined) throw new Error(`the edge did not start: ${said()}`);
    await this.peer?.close();
    this.peer = new PeerClient({ url, token: CLUSTER_TOKEN });
    this.log = said();
  }

  async end(signal: NodeJS.Signals): Promise<void> {
    const { child } = this;
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return;
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill(signal);
    await ended;
    this.child = undefined;
  }

  async restart(signal: NodeJS.Signals = 'SIGKILL', ...more: string[]): Promise<void> {
    await this.end(signal);
    await this.start(...more);
  }

  create<T extends object>(body: object): Promise<T & { readonly name: string }> {
    return this.client.json({ method: 'POST', path: '/v1/sandboxes', body: { image: 'bb:1', ...body } });
  }

  get<T>(path: string): Promise<T> {
    return this.client.json({ method: 'GET', path });
  }

  async remove(): Promise<void> {
    if (this.child !== undefined && this.peer !== undefined) {
      const all = await this.get<{ sandboxes: { name: string }[] }>('/v1/roster').catch(() => ({ sandboxes: [] }));
      for (const { name } of all.sandboxes) {
        await this.client.json({ method: 'DELETE', path: `/v1/sandboxes/${name}?force=true` }).catch(() => {});
      }
    }
    await this.end('SIGTERM');
    await this.peer?.close();
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${this.folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = this.saved;
    fs.rmSync(this.program, { force: true });
    fs.rmSync(this.folder, { recursive: true, force: true });
  }
}
