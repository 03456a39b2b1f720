/**
 * One process owns a cache folder. The lock is the kernel's (flock), so it ends with its holder however that ends; the file says
 * who holds it, for the message only.
 */
import { ftruncateSync, readFileSync, writeSync } from 'node:fs';
import { type FileLock, tryLock } from '#linux';
import { fail } from './errors.ts';

/** @throws CACHE_BUSY, naming the holder */
export function takeOwnership(folder: string, lockPath: string): FileLock {
  const held = tryLock(lockPath);
  if (held === undefined) throw fail('CACHE_BUSY', { folder, pid: holderOf(lockPath) ?? 'unknown' });
  try {
    ftruncateSync(held.fd, 0);
    writeSync(held.fd, `${JSON.stringify({ pid: process.pid, startedMs: Date.now() })}\n`, 0);
  } catch {
    // A full disk: the lock holds all the same, without a name.
  }
  return held;
}

function holderOf(lockPath: string): number | undefined {
  try {
    const { pid } = JSON.parse(readFileSync(lockPath, 'utf8')) as { pid?: unknown };
    return typeof pid === 'number' ? pid : undefined;
  } catch {
    // Just taken, not written yet.
    return undefined;
  }
}
