/** A disk that another process serves as a file and a loop device (disk-file-process.ts), so that this one may wait for it, and kill it. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { processEntry } from '#base';

export class DiskFile {
  readonly path: string;
  readonly loop: string;
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  private constructor(child: ChildProcess, lines: AsyncIterator<string>, path: string, loop: string) {
    this.#child = child;
    this.#lines = lines;
    this.path = path;
    this.loop = loop;
  }

  static async serve(folder: string, path: string, hold = false): Promise<DiskFile> {
    const entry = processEntry('', new URL('./disk-file-process.ts', import.meta.url));
    const child = spawn(process.execPath, [...entry, folder, path, ...(hold ? ['hold'] : [])], {
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    const lines = createInterface({ input: child.stdout! })[Symbol.asyncIterator]();
    const first = await lines.next();
    if (first.done === true) throw new Error('the server did not start');
    const at = JSON.parse(first.value) as { path: string; loop: string };
    return new DiskFile(child, lines, at.path, at.loop);
  }

  async ask(command: string): Promise<Record<string, unknown>> {
    this.#child.stdin!.write(`${command}\n`);
    const answer = JSON.parse((await this.#lines.next()).value) as Record<string, unknown>;
    if (answer.error !== undefined) throw new Error(String(answer.error));
    return answer;
  }

  /** SIGUSR2: it leaves the mount to the next one. */
  async end(signal: 'SIGTERM' | 'SIGUSR2' | 'SIGKILL' = 'SIGTERM'): Promise<void> {
    if (this.#child.exitCode !== null || this.#child.signalCode !== null) return;
    const ended = once(this.#child, 'exit');
    this.#child.kill(signal);
    const [status] = await ended;
    if (signal !== 'SIGKILL' && status !== 0) throw new Error(`the server ended with ${status}`);
  }
}
