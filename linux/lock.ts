/**
 * Advisory locks on whole files (flock). The kernel drops them when the process dies, however it dies. The descriptor is
 * close-on-exec: programs we start do not inherit it and cannot keep the lock. Two locks in one process exclude each
 * other like two processes do.
 *
 * Paths are text, as Node's fs takes them. Waiting polls, so that the event loop goes on: `flock` would block it.
 */
import { closeSync, constants, fstatSync, mkdirSync, openSync, statSync } from 'node:fs';
import { dirname } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { systemCode } from '#base';
import { fail } from './errors.ts';
import { type Call, call } from './libc.ts';

const FLOCK: Call = { name: 'flock', result: 'int', args: ['int', 'int'] };
const LOCK_SH = 1;
const LOCK_EX = 2;
const LOCK_NB = 4;

export type LockMode = 'exclusive' | 'shared';

export interface FileLock {
  readonly path: string;
  readonly fd: number;
  /** Safe to call twice. The file stays. */
  release(): void;
}

/** Locks `path`, made when it is missing. Undefined when another holder is in the way. */
export function tryLock(path: string, mode: LockMode = 'exclusive'): FileLock | undefined {
  for (;;) {
    const fd = openLockFile(path);
    try {
      call(FLOCK, [fd, (mode === 'exclusive' ? LOCK_EX : LOCK_SH) | LOCK_NB], path);
    } catch (error) {
      closeSync(fd);
      if (systemCode(error) === 'EAGAIN' || systemCode(error) === 'EWOULDBLOCK') return undefined;
      throw error;
    }
    // Whoever cleans up may have unlinked the file between open and flock: a lock on a nameless file keeps nobody out.
    if (sameFile(fd, path)) return heldLock(path, fd);
    closeSync(fd);
  }
}

/** Locks what the caller has open; the lock goes with the descriptor. False when another holder is in the way. */
export function lockDescriptor(fd: number, mode: LockMode = 'exclusive'): boolean {
  try {
    call(FLOCK, [fd, (mode === 'exclusive' ? LOCK_EX : LOCK_SH) | LOCK_NB], `fd ${fd}`);
    return true;
  } catch (error) {
    if (systemCode(error) === 'EAGAIN' || systemCode(error) === 'EWOULDBLOCK') return false;
    throw error;
  }
}

/**
 * Waits for the lock.
 * @throws LINUX_LOCK_TIMEOUT after `timeoutMs`, or the signal's reason
 */
export async function lock(
  path: string,
  options: { mode?: LockMode; timeoutMs?: number; signal?: AbortSignal } = {},
): Promise<FileLock> {
  const { mode = 'exclusive', timeoutMs = 60_000, signal } = options;
  const deadline = performance.now() + timeoutMs;
  for (let pauseMs = 1; ; pauseMs = Math.min(pauseMs * 2, 20)) {
    signal?.throwIfAborted();
    const held = tryLock(path, mode);
    if (held !== undefined) return held;
    const leftMs = deadline - performance.now();
    if (leftMs <= 0) throw fail('LINUX_LOCK_TIMEOUT', { path, seconds: timeoutMs / 1000 });
    // Jitter, so that many waiters do not ask in step.
    await delay(Math.min(pauseMs * (0.5 + Math.random()), leftMs));
  }
}

/** Runs `work` under an exclusive lock. */
export async function withLock<T>(
  path: string,
  work: () => T | Promise<T>,
  options?: { timeoutMs?: number; signal?: AbortSignal },
): Promise<T> {
  const held = await lock(path, options);
  try {
    return await work();
  } finally {
    held.release();
  }
}

function openLockFile(path: string): number {
  const flags = constants.O_RDWR | constants.O_CREAT | constants.O_NOFOLLOW;
  try {
    return openSync(path, flags, 0o600);
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
    mkdirSync(dirname(path), { recursive: true });
    return openSync(path, flags, 0o600);
  }
}

function sameFile(fd: number, path: string): boolean {
  const named = statSync(path, { bigint: true, throwIfNoEntry: false });
  const opened = fstatSync(fd, { bigint: true });
  return named !== undefined && named.ino === opened.ino && named.dev === opened.dev;
}

function heldLock(path: string, fd: number): FileLock {
  let released = false;
  return {
    path,
    fd,
    release() {
      if (released) return;
      released = true;
      closeSync(fd);
    },
  };
}
