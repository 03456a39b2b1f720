/**
 * What a signal would do to the first process of a sandbox.
 *
 * The kernel drops a signal that the first process of a pid namespace neither handles nor blocks, so that Ctrl-C or SIGTERM
 * would do nothing to `sleep`. Outside a namespace it would end the program, and that is what users expect. An init
 * program inside would give them that, but there is none of ours in an image. So whoever sends a signal asks here first:
 * where the default action would have ended the program, the sandbox is ended with SIGKILL and the signal that was asked for
 * is told as the reason. A program that handles, blocks, awaits or ignores the signal gets it as it is.
 */
import { readFileSync } from 'node:fs';
import { constants } from 'node:os';

/** Their default action does not end a program: it is ignored, stops it or lets it go on. */
const HARMLESS: ReadonlySet<NodeJS.Signals> = new Set<NodeJS.Signals>([
  'SIGCHLD',
  'SIGCONT',
  'SIGSTOP',
  'SIGTSTP',
  'SIGTTIN',
  'SIGTTOU',
  'SIGURG',
  'SIGWINCH',
]);

export function signalNumber(signal: NodeJS.Signals): number {
  return constants.signals[signal];
}

/** Whether `signal` would end process `pid` by its default action, were it not the first of its namespace. */
export function endsByDefault(pid: number, signal: NodeJS.Signals): boolean {
  if (signal === 'SIGKILL' || HARMLESS.has(signal)) return false;
  try {
    const status = readFileSync(`/proc/${pid}/status`, 'latin1');
    return !isTaken(status, signalNumber(signal)) && !awaitsSignals(pid);
  } catch {
    // Gone: nothing to be ended.
    return false;
  }
}

/** `status`: the text of /proc/PID/status. Its masks have bit n-1 for signal n. */
export function isTaken(status: string, number: number): boolean {
  return ['SigBlk', 'SigIgn', 'SigCgt'].some((field) => {
    const digits = new RegExp(`^${field}:\\s*([0-9a-f]+)$`, 'm').exec(status)?.[1];
    return digits !== undefined && ((BigInt(`0x${digits}`) >> BigInt(number - 1)) & 1n) === 1n;
  });
}

const RT_SIGTIMEDWAIT: Readonly<Record<string, string>> = { x64: '128', arm64: '137' };

/** While a program waits in sigtimedwait, as small init programs do, SigBlk leaves out what it waits for. */
function awaitsSignals(pid: number): boolean {
  try {
    return readFileSync(`/proc/${pid}/syscall`, 'latin1').split(' ')[0] === RT_SIGTIMEDWAIT[process.arch];
  } catch {
    return false;
  }
}
