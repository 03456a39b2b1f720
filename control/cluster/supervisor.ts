/**
 * Processes that belong together: each is started, and started again when it ends by itself, until all are told to end, in the reverse order. One that
 * keeps dying is started ever later, up to half a minute. They end with us, however we do: each sees the end of its standard input.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { setTimeout as delay } from 'node:timers/promises';
import { fail } from '../errors.ts';

export interface ServiceProgram {
  readonly name: string;
  /** Of Node, before the script. */
  readonly nodeArgs?: readonly string[];
  /** Behind the program: `serve edge --listen ...`. */
  readonly args: readonly string[];
  /** What it prints once it serves. */
  readonly ready: RegExp;
  /** When it is started again, by what it printed the first time: where any port would have done, it is the same one. */
  readonly argsAgain?: (ready: RegExpExecArray) => readonly string[];
}

export interface SupervisorOptions {
  /** Node, and what goes before `args`. */
  readonly command: readonly [string, ...string[]];
  readonly env: NodeJS.ProcessEnv;
  readonly say: (text: string) => void;
}

interface Running {
  readonly program: ServiceProgram;
  child: ChildProcess | undefined;
}

const FIRST_MS = 200;
const LONGEST_MS = 30_000;
/** One that lived so long is started again at once. */
const STABLE_MS = 60_000;
const READY_BYTES = 4096;
const LAST_WORDS_MS = 1000;
/** For whoever is supervised (cli/supervised.ts). */
export const SUPERVISED = 'DSEC_SUPERVISED';

export class Supervisor {
  private readonly options: SupervisorOptions;
  private readonly running: Running[] = [];
  private ending = false;

  constructor(options: SupervisorOptions) {
    this.options = options;
  }

  pidOf(name: string): number | undefined {
    return this.running.find(({ program }) => program.name === name)?.child?.pid;
  }

  /** Serves, when this resolves: the match of `ready`. @throws CLUSTER_SERVICE when it ends before */
  async start(program: ServiceProgram): Promise<RegExpExecArray> {
    const one: Running = { program, child: undefined };
    this.running.push(one);
    const { child, ready } = this.spawn(program);
    one.child = child;
    const ended = once(child, 'exit');
    const closed = new Promise<void>((done) => child.once('close', () => done()));
    const first = await Promise.race([ready, ended.then(() => undefined)]);
    if (first === undefined) {
      one.child = undefined;
      // What it says why comes before ours, unless something that it has left keeps its stderr open.
      await Promise.race([closed, delay(LAST_WORDS_MS)]);
      throw fail('CLUSTER_SERVICE', { name: program.name, how: endOf(child) });
    }
    const args = program.argsAgain?.(first) ?? program.args;
    void this.keep(one, { ...program, args }, ended, Date.now());
    return first;
  }

  async end(graceMs: number): Promise<void> {
    this.ending = true;
    for (const one of this.running.reverse()) {
      const { child } = one;
      if (child === undefined || child.exitCode !== null || child.signalCode !== null) continue;
      const ended = once(child, 'exit');
      child.kill('SIGTERM');
      const late = setTimeout(() => child.kill('SIGKILL'), graceMs + 10_000);
      await ended;
      clearTimeout(late);
    }
  }

  private async keep(one: Running, program: ServiceProgram, first: Promise<unknown>, startedAt: number): Promise<void> {
    const { say } = this.options;
    let ended = first;
    let since = startedAt;
    let waitMs = FIRST_MS;
    for (;;) {
      await ended;
      if (this.ending) return;
      const { child } = one;
      const how = endOf(child);
      waitMs = Date.now() - since > STABLE_MS ? FIRST_MS : Math.min(LONGEST_MS, waitMs * 2);
      say(`${program.name} ended (${how}); it is started again`);
      await delay(waitMs);
      if (this.ending) return;
      since = Date.now();
      one.child = this.spawn(program).child;
      ended = once(one.child, 'exit');
    }
  }

  private spawn({ nodeArgs = [], args, ready }: ServiceProgram) {
    const [program, ...before] = this.options.command;
    const env = { ...this.options.env, [SUPERVISED]: '1' };
    const child = spawn(program, [...nodeArgs, ...before, ...args], { env, stdio: ['pipe', 'pipe', 'pipe'] });
    child.stdin.on('error', () => {});
    let text = '';
    const isReady = new Promise<RegExpExecArray>((resolve) => {
      child.stdout.on('data', (bytes: Buffer) => {
        if (text.length > READY_BYTES) return;
        text += bytes;
        const found = ready.exec(text);
        if (found !== null) resolve(found);
      });
    });
    child.stderr.on('data', (bytes: Buffer) => process.stderr.write(bytes));
    return { child, ready: isReady };
  }
}

function endOf(child: ChildProcess | undefined): string {
  return child?.signalCode ?? `exit status ${child?.exitCode}`;
}
