/**
 * Commands as somebody types them at a shell that is there already: /bin/sh starts them, one after the other. A process that Node starts costs it
 * 3 to 7 ms of its own, more than many a command takes.
 */
import { type ChildProcessByStdio, spawn } from 'node:child_process';
import { closeSync, openSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import { fail } from './errors.ts';

export class PromptShell {
  readonly #shell: ChildProcessByStdio<Writable, Readable, null>;
  readonly #errors: string;
  #answered: (line: string) => void = () => {};

  /** `folder`: where what commands complain of is kept. */
  constructor(folder: string) {
    this.#errors = join(folder, 'prompt-shell.errors');
    closeSync(openSync(this.#errors, 'w'));
    this.#shell = spawn('/bin/sh', [], { stdio: ['pipe', 'pipe', 'inherit'] });
    let text = '';
    this.#shell.stdout.setEncoding('latin1').on('data', (part: string) => {
      text += part;
      if (!text.endsWith('\n')) return;
      const line = text;
      text = '';
      this.#answered(line);
    });
    this.#shell.once('close', () => this.#answered('no status: the shell has ended'));
    this.#shell.on('error', () => this.#answered('no status: there is no /bin/sh'));
    this.#shell.stdin.on('error', () => {});
  }

  /** Milliseconds until the shell knows that it has ended. One at a time. @throws BENCH_COMMAND when it does not end with 0 */
  async run(argv: readonly string[], env: Readonly<Record<string, string | undefined>> = {}): Promise<number> {
    const variables = Object.entries(env).map(([name, value]) => `${name}=${quoted(value ?? '')} `);
    const command = `${variables.join('')}${argv.map(quoted).join(' ')}`;
    const answer = new Promise<string>((resolve) => {
      this.#answered = resolve;
    });
    const startedAt = performance.now();
    this.#shell.stdin.write(`${command} </dev/null >/dev/null 2>${quoted(this.#errors)}; echo $?\n`);
    const status = (await answer).trim();
    const ms = performance.now() - startedAt;
    if (status !== '0') {
      const output = readFileSync(this.#errors, 'utf8').trim().slice(-1000);
      throw fail('BENCH_COMMAND', { command: argv.join(' '), status, output });
    }
    return ms;
  }

  end(): void {
    this.#shell.stdin.end();
  }
}

function quoted(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
