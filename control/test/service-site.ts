/** A runtime service for tests of what is typed: a store with a busybox image `bb:1`, folders of its own, and `dsec serve runtime` from the sources as a process. */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { readMountInfo, umount } from '#linux';
import { findAgent } from '#runtime';
import { runCommand } from './command-run.ts';

export const projectRoot = join(import.meta.dirname, '../..');
const dsec = join(projectRoot, 'bin/dsec');

export interface ServiceSiteOptions {
  /** Of its folder. */
  readonly name: string;
  /** Of busybox. */
  readonly applets: readonly string[];
  /** In front of the service's own command line. */
  readonly wrap?: readonly string[];
}

/** Says what is missing. `tools`: beside what every one needs. */
export function canServe(...tools: readonly string[]): boolean {
  const missing = tools.filter((tool) => spawnSync('which', [tool]).status !== 0);
  if (process.getuid?.() !== 0) missing.push('root');
  if (findAgent() === undefined) missing.push('dsec-agent');
  if (!fs.existsSync('/bin/busybox')) missing.push('busybox');
  if (missing.length > 0) console.log(`skipped: without ${missing.join(', ')}`);
  return missing.length === 0;
}

const START_MS = 120_000;

export class ServiceSite {
  readonly folder: string;
  /** Of clients. */
  env: NodeJS.ProcessEnv;
  /** What the services have written. */
  log = '';
  service: ChildProcess | undefined;
  private readonly wrap: readonly string[];
  private readonly saved = { ...process.env };

  private constructor({ name, wrap = [] }: ServiceSiteOptions) {
    this.folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), `dsec-${name}-`)));
    this.wrap = wrap;
    for (const own of ['store', 'run', 'state', 'cache']) {
      process.env[`DSEC_${own.toUpperCase()}`] = join(this.folder, own);
    }
    this.env = { ...process.env, HOME: '/nowhere' };
  }

  /** With its service. */
  static async open(options: ServiceSiteOptions): Promise<ServiceSite> {
    const site = new ServiceSite(options);
    const tree = join(site.folder, 'tree');
    for (const name of ['bin', 'dev', 'etc', 'proc', 'sys', 'tmp']) fs.mkdirSync(join(tree, name), { recursive: true });
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of options.applets) fs.symlinkSync('busybox', join(tree, 'bin', name));
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    await site.serve();
    return site;
  }

  /** Resolves when it listens. */
  async serve(env: NodeJS.ProcessEnv = {}): Promise<void> {
    const script = join(import.meta.dirname, 'service-child.ts');
    const [program, ...args] = [...this.wrap, process.execPath, '--import', 'tsx', script, 'serve', 'runtime'];
    const service = spawn(program!, args, {
      cwd: projectRoot,
      env: { ...process.env, HOME: '/nowhere', ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    this.service = service;
    let told = '';
    for (const stream of [service.stdout, service.stderr]) {
      stream.on('data', (bytes) => {
        told += bytes;
        this.log += bytes;
      });
    }
    for (const deadline = Date.now() + START_MS; !told.includes('runtime service at'); await delay(20)) {
      const hasEnded = service.exitCode !== null || service.signalCode !== null;
      if (hasEnded || Date.now() > deadline) throw new Error(`the service has not begun: ${told}`);
    }
  }

  /** Resolves when it has ended; at once when none runs. */
  async end(signal: NodeJS.Signals = 'SIGTERM'): Promise<void> {
    const { service } = this;
    this.service = undefined;
    if (service === undefined || service.exitCode !== null || service.signalCode !== null) return;
    const ended = new Promise((resolve) => service.once('exit', resolve));
    service.kill(signal);
    await ended;
  }

  /** A command, to its end. */
  dsec(...args: readonly string[]) {
    const { folder: cwd, env } = this;
    const { status, stdout, stderr } = spawnSync(dsec, args, { cwd, env, input: 'typed\n', encoding: 'utf8' });
    return { status, stdout, stderr };
  }

  /** One that goes on meanwhile. */
  start(args: readonly string[], env: NodeJS.ProcessEnv = {}): ChildProcess {
    return spawn(dsec, args, { cwd: this.folder, env: { ...this.env, ...env }, stdio: 'pipe' });
  }

  /** With the sandboxes named. */
  async remove(...sandboxes: readonly string[]): Promise<void> {
    for (const name of sandboxes) await runCommand('sandbox', 'rm', '--force', name).catch(() => {});
    await this.end();
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${this.folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = this.saved;
    fs.rmSync(this.folder, { recursive: true, force: true });
  }
}
