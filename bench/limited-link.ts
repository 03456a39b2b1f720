/** A link with limits between this machine and a server on it: limited-link.mjs as a process. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { projectRoot } from './dsec-command.ts';

export interface LinkLimits {
  /** Of what comes from the server. */
  readonly bytesPerSecond: number;
  /** Added to every answer: a round trip. */
  readonly latencyMs: number;
}

export class LimitedLink {
  /** `127.0.0.1:PORT`, in place of the server's. */
  readonly host: string;
  readonly #process: ChildProcess;
  readonly #lines: Interface;

  private constructor(host: string, process: ChildProcess, lines: Interface) {
    this.host = host;
    this.#process = process;
    this.#lines = lines;
  }

  /** @param target `127.0.0.1:PORT` */
  static async start(target: string, limits: LinkLimits): Promise<LimitedLink> {
    const program = join(projectRoot(), 'bench/limited-link.mjs');
    const child = spawn(process.execPath, [program, JSON.stringify({ target, ...limits })], {
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    const lines = createInterface({ input: child.stdout });
    const [port] = (await once(lines, 'line')) as [string];
    return new LimitedLink(`127.0.0.1:${port}`, child, lines);
  }

  /** That came from the server so far. */
  async bytes(): Promise<number> {
    const answer = once(this.#lines, 'line');
    this.#process.stdin!.write('stats\n');
    return Number(((await answer) as [string])[0]);
  }

  async stop(): Promise<void> {
    if (this.#process.exitCode !== null) return;
    const ended = once(this.#process, 'exit');
    this.#process.stdin!.end();
    await ended;
  }
}
