/** An S3 server and a registry on free ports of 127.0.0.1, with their files in a folder of the test's. They end by their process id. */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { type AddressInfo, connect, createServer } from 'node:net';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

export const S3_KEYS = { AWS_ACCESS_KEY_ID: 'test-key', AWS_SECRET_ACCESS_KEY: 'test-secret' };
const START_SECONDS = 60;

/** Undefined where it is missing; then the reason is printed. */
export function findS3(): string | undefined {
  const own = join(homedir(), '.cache/dsec/tools/versitygw');
  if (existsSync(own)) return own;
  console.warn('skipped: versitygw is missing (node scripts/setup.mjs test installs it where Go is)');
  return undefined;
}

export function hasRegistry(): boolean {
  const found = spawnSync('docker-registry', ['--version']).error === undefined;
  if (!found) console.warn('skipped: docker-registry is not installed (apt-get install docker-registry)');
  return found;
}

export class RemoteStore {
  readonly host: string;
  /** Where the server keeps its files. */
  readonly folder: string;
  readonly #begin: () => ChildProcess;
  #server: ChildProcess | undefined;

  private constructor(host: string, folder: string, begin: () => ChildProcess) {
    this.host = host;
    this.folder = folder;
    this.#begin = begin;
  }

  static async s3(program: string, root: string, bucket: string): Promise<RemoteStore> {
    const host = `127.0.0.1:${await freePort()}`;
    const buckets = join(root, 'buckets');
    mkdirSync(join(buckets, bucket), { recursive: true });
    const env = { ...process.env, ROOT_ACCESS_KEY: 'test-key', ROOT_SECRET_KEY: 'test-secret' };
    const begin = () => spawn(program, ['--port', host, '--quiet', 'posix', buckets], { stdio: 'ignore', env });
    const store = new RemoteStore(host, buckets, begin);
    await store.start();
    return store;
  }

  static async registry(root: string): Promise<RemoteStore> {
    const host = `127.0.0.1:${await freePort()}`;
    mkdirSync(join(root, 'storage'), { recursive: true });
    const config = join(root, 'registry.yml');
    writeFileSync(
      config,
      `version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: ${root}/storage}}\nhttp: {addr: "${host}"}\n`,
    );
    const store = new RemoteStore(host, join(root, 'storage'), () =>
      spawn('docker-registry', ['serve', config], { stdio: 'ignore' }),
    );
    await store.start();
    return store;
  }

  async start(): Promise<void> {
    const server = this.#begin();
    this.#server = server;
    for (let tries = 0; tries < START_SECONDS * 20; tries++) {
      if (await answers(this.host)) return;
      if (server.exitCode !== null) break;
      await sleep(50);
    }
    server.kill('SIGKILL');
    throw new Error(`nobody answers on ${this.host}`);
  }

  async stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    if (server === undefined || server.exitCode !== null) return;
    const ended = once(server, 'exit');
    server.kill('SIGKILL');
    await ended;
  }
}

function answers(host: string): Promise<boolean> {
  const [address, port] = host.split(':');
  return new Promise((resolve) => {
    const socket = connect(Number(port), address!, () => {
      socket.destroy();
      resolve(true);
    });
    socket.once('error', () => resolve(false));
  });
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  return port;
}
