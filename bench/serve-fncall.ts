/** A `dsec serve fncall` of a benchmark's own. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import type { DsecCommand } from './dsec-command.ts';

export interface FnCallServer {
  readonly url: string;
  readonly pid: number;
}

export async function withFnCallServer<T>(
  dsec: DsecCommand,
  options: readonly string[],
  work: (server: FnCallServer) => Promise<T>,
): Promise<T> {
  const args = ['serve', 'fncall', ...options, '--listen', '127.0.0.1:0', '--log-level', 'error'];
  const child = spawn(dsec.program, args, {
    env: { ...process.env, ...dsec.env },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  try {
    return await work({ url: await listening(child.stdout), pid: child.pid! });
  } finally {
    const gone = child.exitCode !== null || child.signalCode !== null ? undefined : once(child, 'exit');
    child.kill('SIGTERM');
    await gone;
  }
}

async function listening(stream: NodeJS.ReadableStream): Promise<string> {
  let said = '';
  for await (const bytes of stream) {
    said += bytes;
    const url = /fncall at (\S+)/.exec(said)?.[1];
    if (url !== undefined) return url;
  }
  throw new Error(`dsec serve fncall has ended: ${said}`);
}
