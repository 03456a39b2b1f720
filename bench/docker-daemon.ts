/**
 * A dockerd of a benchmark's own: its folders, socket and network settings touch nothing of another one that may run here. It
 * is ended by its process id, and everything that it mounted or made goes with its folder.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, openSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { readMountInfo, umount } from '#linux';
import { fail } from './errors.ts';
import { timedCommand } from './timed-command.ts';
import { findTool } from './tool.ts';

const START_SECONDS = 60;

/** Why there can be none. */
export function dockerMissing(): string | undefined {
  if (findTool('dockerd') !== undefined && findTool('docker') !== undefined) return undefined;
  return 'dockerd is missing (apt-get install --no-install-recommends docker.io)';
}

export class DockerDaemon {
  readonly #process: ChildProcess;
  readonly #folder: string;
  readonly version: string;

  private constructor(process: ChildProcess, folder: string, version: string) {
    this.#process = process;
    this.#folder = folder;
    this.version = version;
  }

  /** @throws BENCH_DAEMON */
  static async start(folder: string): Promise<DockerDaemon> {
    mkdirSync(folder);
    const log = join(folder, 'log');
    const out = openSync(log, 'w');
    const process = spawn(
      'dockerd',
      [
        '--iptables=false',
        '--ip6tables=false',
        '--bridge=none',
        '--storage-driver=overlay2',
        `--data-root=${join(folder, 'data')}`,
        `--exec-root=${join(folder, 'exec')}`,
        `--pidfile=${join(folder, 'pid')}`,
        `--host=unix://${socketIn(folder)}`,
      ],
      { stdio: ['ignore', out, out] },
    );
    for (let tries = 0; ; tries++) {
      const { status, stdout } = spawnSync(
        'docker',
        ['-H', `unix://${socketIn(folder)}`, 'version', '-f', '{{.Server.Version}}'],
        { encoding: 'utf8' },
      );
      if (status === 0) return new DockerDaemon(process, folder, stdout.trim());
      if (process.exitCode !== null || tries > START_SECONDS * 5) {
        process.kill('SIGKILL');
        const output = existsSync(log) ? readFileSync(log, 'utf8').slice(-1500) : '';
        throw fail('BENCH_DAEMON', { daemon: `dockerd with its files in ${folder}`, seconds: START_SECONDS, output });
      }
      await sleep(200);
    }
  }

  argv(args: readonly string[]): string[] {
    return ['docker', '-H', `unix://${socketIn(this.#folder)}`, ...args];
  }

  /** From a layout, under a name. */
  async load(layout: string, name: string): Promise<void> {
    const archive = join(this.#folder, 'image.tar');
    await timedCommand(['skopeo', 'copy', '--quiet', `oci:${layout}`, `docker-archive:${archive}:${name}`]);
    await timedCommand(this.argv(['load', '--quiet', '--input', archive]));
  }

  async stop(): Promise<void> {
    if (this.#process.exitCode === null && this.#process.signalCode === null) {
      const ended = new Promise((done) => this.#process.once('exit', done));
      this.#process.kill('SIGTERM');
      await Promise.race([ended, sleep(20_000)]);
      this.#process.kill('SIGKILL');
    }
    const points = readMountInfo().map((row) => row.mountPoint);
    for (const point of points.filter((path) => path.startsWith(`${this.#folder}/`)).reverse()) {
      umount(point, { lazy: true });
    }
  }
}

/** In the folder, whose path is short enough for a socket. */
function socketIn(folder: string): string {
  return join(folder, 'sock');
}
