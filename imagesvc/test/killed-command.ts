/**
 * `bin/dsec` as a process that is killed after a while, and the moments to do it: spread evenly over the time that a whole run
 * takes, in an order that a seed decides.
 */
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';

const PROGRAM = fileURLToPath(new URL('../../bin/dsec', import.meta.url));

export interface Ended {
  /** True when SIGKILL ended it, false when it had ended before. */
  readonly killed: boolean;
  readonly status: number | null;
  readonly ms: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** Kills it after `killMs`; never, when that is undefined. */
export async function runDsec(args: readonly string[], env: NodeJS.ProcessEnv, killMs?: number): Promise<Ended> {
  const { ended, kill } = startDsec(args, env);
  const timer = killMs === undefined ? undefined : setTimeout(kill, killMs);
  try {
    return await ended;
  } finally {
    clearTimeout(timer);
  }
}

export function startDsec(args: readonly string[], env: NodeJS.ProcessEnv): { ended: Promise<Ended>; kill(): void } {
  const startedAt = performance.now();
  const child = spawn(process.execPath, [PROGRAM, ...args], {
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let [stdout, stderr] = ['', ''];
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    stderr += text;
  });
  const ended = new Promise<Ended>((done, failed) => {
    child.once('error', failed);
    child.once('close', (status, signal) => {
      done({ killed: signal === 'SIGKILL', status, ms: performance.now() - startedAt, stdout, stderr });
    });
  });
  return { ended, kill: () => void child.kill('SIGKILL') };
}

/** `count` moments, one somewhere in each of as many equal parts of `wholeMs`, shuffled. */
export function killMoments(count: number, wholeMs: number, seed: number): number[] {
  const random = randomFrom(seed);
  const moments = Array.from({ length: count }, (_, i) => ((i + random()) / count) * wholeMs);
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [moments[i], moments[j]] = [moments[j]!, moments[i]!];
  }
  return moments;
}

/** mulberry32: 0 <= x < 1, the same sequence for the same seed. */
function randomFrom(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
