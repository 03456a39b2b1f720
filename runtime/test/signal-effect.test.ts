/** What a signal does to a program, read from what the kernel says of it. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { afterEach, describe, expect, it } from 'vitest';
import { endsByDefault, isTaken } from '../backend/signal-effect.ts';

let child: ChildProcess | undefined;
afterEach(() => {
  child?.kill('SIGKILL');
  child = undefined;
});

async function program(name: string, ...args: string[]): Promise<number> {
  child = spawn(name, args, { stdio: ['ignore', 'pipe', 'ignore'] });
  const failed = once(child, 'error').then(([error]) => Promise.reject(error));
  await Promise.race([once(child.stdout!, 'data'), failed]);
  return child.pid!;
}

describe('a signal', () => {
  it('reads the masks of the kernel', () => {
    const status =
      'SigPnd:\t0000000000004000\nSigBlk:\t0000000000010000\nSigIgn:\t0000000000000004\nSigCgt:\t0000000180004a02\n';
    expect([2, 3, 10, 12, 15, 17, 32, 33].filter((number) => isTaken(status, number))).toEqual([
      2, 3, 10, 12, 15, 17, 32, 33,
    ]);
    expect([1, 4, 9, 11, 13, 14, 16, 18, 31, 34, 64].filter((number) => isTaken(status, number))).toEqual([]);
  });

  it('ends what does not care for it', async () => {
    const pid = await program('sh', '-c', 'echo; exec sleep 100');
    expect(endsByDefault(pid, 'SIGTERM')).toBe(true);
    expect(['SIGKILL', 'SIGWINCH', 'SIGCHLD', 'SIGCONT'].map((s) => endsByDefault(pid, s as NodeJS.Signals))).toEqual([
      false,
      false,
      false,
      false,
    ]);
  });

  it('does not end what handles or ignores it', async () => {
    // Stopped, since a shell that starts programs blocks signals for moments.
    const pid = await program('sh', '-c', "trap : TERM; trap '' INT; echo; kill -STOP $$");
    expect(['SIGTERM', 'SIGINT', 'SIGUSR1'].map((s) => endsByDefault(pid, s as NodeJS.Signals))).toEqual([
      false,
      false,
      true,
    ]);
  });

  it('does not end what waits for it, as small init programs do', async ({ skip }) => {
    const script =
      'import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nprint(flush=True)\nsignal.sigtimedwait([signal.SIGTERM], 100)';
    let pid: number;
    try {
      pid = await program('python3', '-c', script);
    } catch {
      return skip('python3 is not installed');
    }
    // Before the wait it is blocked, then the system call tells: never a moment in which it would be killed.
    for (let i = 0; i < 200; i++) expect(endsByDefault(pid, 'SIGTERM')).toBe(false);
  });

  it('does not end what is gone', () => {
    expect(endsByDefault(2 ** 30, 'SIGTERM')).toBe(false);
  });
});
