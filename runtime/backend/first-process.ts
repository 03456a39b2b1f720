/**
 * The first process of a sandbox as a process of this machine: found again by whoever knows the bundle, and sent signals.
 * `signalled` in the bundle tells the one who waits for the sandbox why it was ended with SIGKILL, whichever process did it.
 */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { isAlive, type ProcessIdentity, processIdentity } from '#linux';
import { endsByDefault, signalNumber } from './signal-effect.ts';

export const pidFileOf = (bundle: string) => join(bundle, 'pid');
export const reasonFileOf = (bundle: string) => join(bundle, 'signalled');

/** Undefined before it runs and after it has ended. */
export function firstProcessOf(bundle: string): ProcessIdentity | undefined {
  try {
    const pid = Number(readFileSync(pidFileOf(bundle), 'latin1').trim());
    return Number.isSafeInteger(pid) && pid > 1 ? processIdentity(pid) : undefined;
  } catch {
    return undefined;
  }
}

/** As outside a pid namespace: a signal that the process does not care for ends it. False when it has ended already. */
export function signalFirstProcess(bundle: string, identity: ProcessIdentity, signal: NodeJS.Signals): boolean {
  if (!isAlive(identity)) return false;
  const { pid } = identity;
  try {
    if (!endsByDefault(pid, signal)) return process.kill(pid, signal);
    noteReason(bundle, signal);
    return process.kill(pid, 'SIGKILL');
  } catch {
    // Ended in between.
    return false;
  }
}

/** On a full disk it ends all the same, and only why is not known. */
function noteReason(bundle: string, signal: NodeJS.Signals): void {
  try {
    writeFileSync(reasonFileOf(bundle), signal, { mode: 0o600 });
  } catch {
    // Told as SIGKILL then.
  }
}

/** The signal that `signalFirstProcess` turned into SIGKILL. */
export function reasonOfEnd(bundle: string): NodeJS.Signals | undefined {
  try {
    const text = readFileSync(reasonFileOf(bundle), 'latin1') as NodeJS.Signals;
    return signalNumber(text) === undefined ? undefined : text;
  } catch {
    return undefined;
  }
}
