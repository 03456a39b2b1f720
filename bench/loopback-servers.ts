/**
 * Stores of a benchmark's own on free ports of 127.0.0.1, with their files in its folder: versitygw, an S3 server over a folder, and
 * Debian's docker-registry. Both end by their process id.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { type AddressInfo, connect, createServer } from 'node:net';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fail } from './errors.ts';
import { findTool } from './tool.ts';

export const S3_KEYS = { AWS_ACCESS_KEY_ID: 'bench-key', AWS_SECRET_ACCESS_KEY: 'bench-secret' };
export const S3_MISSING = 'versitygw is missing (node scripts/setup.mjs test installs it where Go is)';

const START_SECONDS = 30;

export function findS3Server(): string | undefined {
  const own = join(homedir(), '.cache/dsec/tools/versitygw');
  return existsSync(own) ? own : findTool('versitygw');
}

export class LoopbackServer {
  /** `127.0.0.1:PORT` */
  readonly host: string;
  readonly #process: ChildProcess;

  private constructor(host: string, process: ChildProcess) {
    this.host = host;
    this.#process = process;
  }

  /** With one bucket, `bucket`. @throws BENCH_DAEMON */
  static async startS3(folder: string): Promise<LoopbackServer> {
    const buckets = join(folder, 'buckets');
    mkdirSync(join(buckets, 'bucket'), { recursive: true });
    const env = { ROOT_ACCESS_KEY: S3_KEYS.AWS_ACCESS_KEY_ID, ROOT_SECRET_KEY: S3_KEYS.AWS_SECRET_ACCESS_KEY };
    return start(findS3Server()!, (host) => ['--port', host, '--quiet', 'posix', buckets], env);
  }

  /** @throws BENCH_DAEMON */
  static async startRegistry(folder: string): Promise<LoopbackServer> {
    mkdirSync(join(folder, 'storage'), { recursive: true });
    const config = join(folder, 'config.yml');
    return start('docker-registry', (host) => {
      const lines = [
        'version: 0.1',
        'log: { level: error, accesslog: { disabled: true } }',
        `storage: { filesystem: { rootdirectory: ${join(folder, 'storage')} } }`,
        `http: { addr: "${host}" }`,
        '',
      ];
      writeFileSync(config, lines.join('\n'));
      return ['serve', config];
    });
  }

  /** For whoever makes one, here below. */
  static of(host: string, process: ChildProcess): LoopbackServer {
    return new LoopbackServer(host, process);
  }

  async stop(): Promise<void> {
    if (this.#process.exitCode !== null || this.#process.signalCode !== null) return;
    const ended = new Promise((done) => this.#process.once('exit', done));
    this.#process.kill('SIGKILL');
    await ended;
  }
}

/** The address of a store in the S3 server behind `host`. Its credentials are in the environment: S3_KEYS. */
export function s3Url(host: string, prefix = 'images'): string {
  return `s3://bucket/${prefix}?endpoint=${encodeURIComponent(`http://${host}`)}`;
}

async function start(
  program: string,
  argumentsFor: (host: string) => string[],
  env: NodeJS.ProcessEnv = {},
): Promise<LoopbackServer> {
  const port = await freePort();
  const host = `127.0.0.1:${port}`;
  const child = spawn(program, argumentsFor(host), { stdio: 'ignore', env: { ...process.env, ...env } });
  for (let tries = 0; tries < START_SECONDS * 20 && child.exitCode === null; tries++) {
    if (await answers(port)) return LoopbackServer.of(host, child);
    await sleep(50);
  }
  child.kill('SIGKILL');
  throw fail('BENCH_DAEMON', { daemon: `${program} on ${host}`, seconds: START_SECONDS, output: '' });
}

function answers(port: number): Promise<boolean> {
  return new Promise((done) => {
    const socket = connect(port, '127.0.0.1');
    socket
      .on('connect', () => {
        socket.destroy();
        done(true);
      })
      .on('error', () => done(false));
  });
}

async function freePort(): Promise<number> {
  const probe = createServer();
  await new Promise<void>((done) => probe.listen(0, '127.0.0.1', done));
  const { port } = probe.address() as AddressInfo;
  await new Promise((done) => probe.close(done));
  return port;
}
