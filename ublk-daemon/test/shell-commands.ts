/**
 * One shell that runs commands one after the other: where everything is emulated, starting a process from Node costs a second, from a shell
 * a tenth of it.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';

export class ShellCommands {
  readonly #shell: ChildProcess;
  #text = '';
  #turn: Promise<unknown> = Promise.resolve();
  #more: () => void = () => {};

  constructor() {
    this.#shell = spawn('/bin/sh', { stdio: ['pipe', 'pipe', 'inherit'] });
    this.#shell.stdout!.setEncoding('utf8').on('data', (text: string) => {
      this.#text += text;
      this.#more();
    });
  }

  /** What it printed. @param command for the shell @throws Error with that when it fails */
  run(command: string): Promise<string> {
    const done = this.#turn.then(() => this.#run(command));
    this.#turn = done.catch(() => {});
    return done;
  }

  async close(): Promise<void> {
    await this.#turn;
    const ended = once(this.#shell, 'exit');
    this.#shell.stdin!.end();
    await ended;
  }

  async #run(command: string): Promise<string> {
    this.#text = '';
    this.#shell.stdin!.write(`{ ${command}; } 2>&1 </dev/null; echo "@status $?"\n`);
    for (;;) {
      const end = /@status (\d+)\n$/.exec(this.#text);
      if (end === null) {
        await new Promise<void>((more) => {
          this.#more = more;
        });
        continue;
      }
      const output = this.#text.slice(0, end.index);
      if (end[1] !== '0') throw new Error(`${command}: ${end[1]}\n${output}`);
      return output;
    }
  }
}
