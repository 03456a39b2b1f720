/** Debian's docker-registry on a free port of 127.0.0.1, with its files in a folder of the test's. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

export class LoopbackRegistry {
  /** `127.0.0.1:PORT` */
  readonly host: string;
  readonly #server: ChildProcess;

  private constructor(host: string, server: ChildProcess) {
    this.host = host;
    this.#server = server;
  }

  static async start(folder: string): Promise<LoopbackRegistry> {
    const host = `127.0.0.1:${await freePort()}`;
    mkdirSync(join(folder, 'storage'), { recursive: true });
    const config = join(folder, 'config.yml');
    writeFileSync(
      config,
      [
        'version: 0.1',
        'log: { level: error, accesslog: { disabled: true } }',
        `storage: { filesystem: { rootdirectory: ${join(folder, 'storage')} } }`,
        `http: { addr: "${host}" }`,
        '',
      ].join('\n'),
    );
    const server = spawn('docker-registry', ['serve', config], { stdio: 'ignore' });
    for (let tries = 0; ; tries++) {
      const answer = await fetch(`http://${host}/v2/`).catch(() => undefined);
      if (answer?.ok) return new LoopbackRegistry(host, server);
      if (tries > 200 || server.exitCode !== null) {
        server.kill('SIGKILL');
        throw new Error(`docker-registry does not answer on ${host}`);
      }
      await sleep(50);
    }
  }

  async stop(): Promise<void> {
    if (this.#server.exitCode !== null) return;
    const ended = new Promise((done) => this.#server.once('exit', done));
    this.#server.kill('SIGKILL');
    await ended;
  }
}

async function freePort(): Promise<number> {
  const probe = createServer();
  await new Promise<void>((done) => probe.listen(0, '127.0.0.1', done));
  const { port } = probe.address() as AddressInfo;
  await new Promise((done) => probe.close(done));
  return port;
}
