/**
 * A `dsec serve runtime` of a benchmark's own. Commands that it does not take would be run by node, at another speed: those that are
 * measured find no node, so that one that was declined fails instead.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { setTimeout as sleep } from 'node:timers/promises';
import type { DsecCommand } from './dsec-command.ts';
import { fail } from './errors.ts';
import { type Measured, timedCommand } from './timed-command.ts';

const START_SECONDS = 60;

export class RuntimeServiceProcess {
  readonly #process: ChildProcess;
  readonly #dsec: DsecCommand;

  private constructor(process: ChildProcess, dsec: DsecCommand) {
    this.#process = process;
    this.#dsec = dsec;
  }

  /** @throws BENCH_DAEMON */
  static async start(dsec: DsecCommand): Promise<RuntimeServiceProcess> {
    const child = spawn(dsec.program, ['serve', 'runtime'], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, ...dsec.env },
    });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (bytes) => {
        output += bytes;
      });
    }
    for (let tries = 0; !output.includes('runtime service at'); tries++) {
      if (child.exitCode !== null || tries > START_SECONDS * 20) {
        child.kill('SIGKILL');
        throw fail('BENCH_DAEMON', { daemon: 'dsec serve runtime', seconds: START_SECONDS, output });
      }
      await sleep(50);
    }
    return new RuntimeServiceProcess(child, dsec);
  }

  get pid(): number {
    return this.#process.pid!;
  }

  /** As a user types it: bin/dsec by itself, which goes to the service. */
  run(args: readonly string[]): Promise<Measured> {
    const { argv, env } = this.argv(args);
    return timedCommand(argv, { env });
  }

  /** The same, for whoever starts it in another way. */
  argv(args: readonly string[]): { readonly argv: readonly string[]; readonly env: NodeJS.ProcessEnv } {
    return { argv: [this.#dsec.program, ...args], env: { ...this.#dsec.env, PATH: '/nonexistent' } };
  }

  /** Without a chance to end in order. */
  async kill(): Promise<void> {
    const ended = new Promise((done) => this.#process.once('exit', done));
    this.#process.kill('SIGKILL');
    await ended;
  }

  async stop(): Promise<void> {
    if (this.#process.exitCode !== null || this.#process.signalCode !== null) return;
    const ended = new Promise((done) => this.#process.once('exit', done));
    this.#process.kill('SIGTERM');
    await Promise.race([ended, sleep(20_000)]);
    this.#process.kill('SIGKILL');
  }
}
