/**
 * Runs a program and measures it from outside: wall time from spawn to exit, time to its first byte of output, the most
 * memory that it and its children held. Both sides of every comparison are measured here, as processes, in the same way.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { fail } from './errors.ts';

export interface CommandOptions {
  readonly env?: NodeJS.ProcessEnv;
  readonly cwd?: string;
  /** Samples the memory of the process and its children every so many milliseconds. */
  readonly sampleMemoryMs?: number;
  /** `drop`: the output is read and thrown away, as a pipe's reader would. Default: kept. */
  readonly stdout?: 'keep' | 'drop';
}

export interface Measured {
  readonly ms: number;
  /** Processor time of it and its children, in steps of 10 ms: says more than wall time where the machine does other work too. */
  readonly cpuMs: number;
  /** Until the first byte on stdout; undefined when there was none. */
  readonly firstOutputMs: number | undefined;
  readonly stdout: string;
  readonly stdoutBytes: number;
  /** Sum over the process tree of each process's own peak, at the worst sample. Undefined unless sampled. */
  readonly peakBytes: number | undefined;
}

/** @throws BENCH_COMMAND when it does not end with 0 */
export async function timedCommand(argv: readonly string[], options: CommandOptions = {}): Promise<Measured> {
  const [program, ...args] = argv as [string, ...string[]];
  const cpuBefore = childrenCpuMs();
  const startedAt = performance.now();
  const child = spawn(program, args, {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, ...options.env },
    cwd: options.cwd,
  });
  const kept: Buffer[] = [];
  let stderr = '';
  let stdoutBytes = 0;
  let firstOutputMs: number | undefined;
  child.stdout!.on('data', (bytes: Buffer) => {
    firstOutputMs ??= performance.now() - startedAt;
    stdoutBytes += bytes.length;
    if (options.stdout !== 'drop') kept.push(bytes);
  });
  child.stderr!.setEncoding('utf8').on('data', (text: string) => {
    stderr = (stderr + text).slice(-4000);
  });
  const memory = options.sampleMemoryMs === undefined ? undefined : sampleMemory(child, options.sampleMemoryMs);
  let ms = 0;
  child.once('exit', () => {
    ms = performance.now() - startedAt;
  });
  const status = await new Promise<string | number>((done) => {
    child.once('error', (error) => done(error.message));
    child.once('close', (code, signal) => done(signal ?? code ?? 'no status'));
  });
  const peakBytes = memory?.();
  const stdout = Buffer.concat(kept).toString();
  if (status !== 0) {
    const output = (stderr.trim() || stdout.trim()).slice(-1000);
    throw fail('BENCH_COMMAND', { command: argv.join(' '), status, output });
  }
  return { ms, cpuMs: childrenCpuMs() - cpuBefore, firstOutputMs, stdout, stdoutBytes, peakBytes };
}

/** Of all children of this process that have ended, and theirs. Clock ticks are 10 ms on every Linux that Node runs on. */
function childrenCpuMs(): number {
  // The name in parentheses may hold anything; after it, cutime and cstime are the 14th and 15th.
  const fields = readFileSync('/proc/self/stat', 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ');
  return (Number(fields[13]) + Number(fields[14])) * 10;
}

/** Ends the sampling and answers the peak. */
function sampleMemory(child: ChildProcess, everyMs: number): () => number {
  let peak = 0;
  const sample = () => {
    let total = 0;
    for (const pid of treeOf(child.pid!)) total += peakOf(pid);
    peak = Math.max(peak, total);
  };
  const timer = setInterval(sample, everyMs);
  return () => {
    clearInterval(timer);
    return peak;
  };
}

function treeOf(pid: number): number[] {
  const out = [pid];
  try {
    for (const thread of readdirSync(`/proc/${pid}/task`)) {
      for (const child of readFileSync(`/proc/${pid}/task/${thread}/children`, 'utf8').split(' ')) {
        if (child !== '') out.push(...treeOf(Number(child)));
      }
    }
  } catch {
    // It has ended.
  }
  return out;
}

function peakOf(pid: number): number {
  try {
    const kib = /^VmHWM:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1];
    return Number(kib ?? 0) * 1024;
  } catch {
    return 0;
  }
}
