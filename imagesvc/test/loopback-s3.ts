/** versitygw, an S3 server over a folder, on a free port of 127.0.0.1. Where it is missing, tests against it are skipped. */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { type AddressInfo, connect, createServer } from 'node:net';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

export const S3_KEYS = { AWS_ACCESS_KEY_ID: 'test-key', AWS_SECRET_ACCESS_KEY: 'test-secret' };

/** Path of the program, or undefined; then the reason is printed, with the name of who asks. */
export function findS3Server(who: string): string | undefined {
  const own = join(homedir(), '.cache/dsec/tools/versitygw');
  if (existsSync(own)) return own;
  if (spawnSync('sh', ['-c', 'command -v versitygw']).status === 0) return 'versitygw';
  console.log(
    `${who}: no versitygw here, its tests are skipped ("node scripts/setup.mjs test" installs it where Go is)`,
  );
  return undefined;
}

/** Files in PEM. */
export interface Tls {
  readonly cert: string;
  readonly key: string;
}

export class LoopbackS3 {
  readonly endpoint: string;
  readonly folder: string;
  readonly #program: string;
  readonly #port: number;
  #server: ChildProcess | undefined;

  readonly #arguments: readonly string[];

  private constructor(program: string, folder: string, port: number, tls: Tls | undefined) {
    this.#program = program;
    this.folder = folder;
    this.#port = port;
    this.#arguments = tls === undefined ? [] : ['--cert', tls.cert, '--key', tls.key];
    this.endpoint = `${tls === undefined ? 'http' : 'https'}://127.0.0.1:${port}`;
  }

  /** With an empty bucket of this name. */
  static async start(program: string, folder: string, bucket: string, tls?: Tls): Promise<LoopbackS3> {
    mkdirSync(join(folder, 'buckets', bucket), { recursive: true });
    const s3 = new LoopbackS3(program, folder, await freePort(), tls);
    await s3.restart();
    return s3;
  }

  url(bucket: string, prefix = ''): string {
    return `s3://${bucket}/${prefix}?endpoint=${encodeURIComponent(this.endpoint)}`;
  }

  async restart(): Promise<void> {
    const server = spawn(
      this.#program,
      ['--port', `127.0.0.1:${this.#port}`, '--quiet', ...this.#arguments, 'posix', join(this.folder, 'buckets')],
      {
        stdio: 'ignore',
        env: {
          ...process.env,
          ROOT_ACCESS_KEY: S3_KEYS.AWS_ACCESS_KEY_ID,
          ROOT_SECRET_KEY: S3_KEYS.AWS_SECRET_ACCESS_KEY,
        },
      },
    );
    this.#server = server;
    for (let tries = 0; ; tries++) {
      if (await answers(this.#port)) return;
      if (tries > 400 || server.exitCode !== null) {
        server.kill('SIGKILL');
        throw new Error(`versitygw does not answer on ${this.endpoint}`);
      }
      await sleep(50);
    }
  }

  /** It takes connections and answers none, until it is let go on. */
  pause(): { goOn(): void } {
    const server = this.#server!;
    server.kill('SIGSTOP');
    return { goOn: () => void server.kill('SIGCONT') };
  }

  /** SIGKILL: what a crash is. */
  async stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    if (server === undefined || server.exitCode !== null) return;
    const ended = new Promise((done) => server.once('exit', done));
    server.kill('SIGKILL');
    await ended;
  }
}

function answers(port: number): Promise<boolean> {
  return new Promise((done) => {
    const socket = connect(port, '127.0.0.1');
    socket.on('connect', () => done(true)).on('error', () => done(false));
    socket.on('connect', () => socket.destroy());
  });
}

async function freePort(): Promise<number> {
  const probe = createServer();
  await new Promise<void>((done) => probe.listen(0, '127.0.0.1', done));
  const { port } = probe.address() as AddressInfo;
  await new Promise((done) => probe.close(done));
  return port;
}
