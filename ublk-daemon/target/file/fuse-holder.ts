/**
 * Keeps a FUSE device open while its server is replaced: a process that does nothing (`sleep`, about a megabyte), with the device as
 * descriptor 3. While it lives, requests of a dead server wait; the next server takes the descriptor from it and has them sent again. When it
 * ends without a server, the mount is dead.
 *
 * It is found again by its environment.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, readFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { isAlive, type ProcessIdentity, processIdentity, takeDescriptor } from '#linux';

const HELD = 3;
/** A process that is killed and waits for nothing takes no time; a machine may have none. */
const END_MS = 10_000;
const VARIABLE = 'DSEC_FUSE_HOLDER';

/** @throws where there is no `sleep` */
export async function holdDevice(fd: number, path: string): Promise<ProcessIdentity> {
  const child = spawn('sleep', ['infinity'], {
    stdio: ['ignore', 'ignore', 'ignore', fd],
    env: { ...process.env, [VARIABLE]: path },
    // Ctrl-C is for the server; and it outlives the server.
    detached: true,
    cwd: '/',
  });
  await once(child, 'spawn');
  child.unref();
  const identity = processIdentity(child.pid);
  if (identity === undefined) throw new Error('sleep has ended');
  return identity;
}

/** Of what is shown at `path`. */
export function findHolders(path: string): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name) && isHolder(name, path))
    .map(Number);
}

/** A copy of what it holds. @throws where it is gone */
export function takeFromHolder(pid: number): number {
  return takeDescriptor(pid, HELD);
}

/** Resolves when they are gone, with all that they held. */
export async function endHolders(path: string): Promise<void> {
  for (const pid of findHolders(path)) {
    const identity = processIdentity(pid);
    if (identity === undefined) continue;
    try {
      process.kill(pid, 'SIGKILL');
    } catch {
      // It has ended by itself.
    }
    for (const until = performance.now() + END_MS; isAlive(identity) && performance.now() < until; ) await delay(5);
  }
}

function isHolder(pid: string, path: string): boolean {
  try {
    if (readFileSync(`/proc/${pid}/comm`, 'latin1') !== 'sleep\n') return false;
    return readFileSync(`/proc/${pid}/environ`, 'utf8').split('\0').includes(`${VARIABLE}=${path}`);
  } catch {
    return false;
  }
}
