/** Locks: who is kept out, and that they end with the process. */
import { execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bootId, isAlive, lock, processIdentity, tryLock, withLock } from '../index.ts';

let folder: string;
let path: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lock-'));
  path = join(folder, 'deep', 'lock');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

it('excludes a second holder in the same process until it is released', async () => {
  const first = await lock(path);
  expect(tryLock(path)).toBeUndefined();
  await expect(lock(path, { timeoutMs: 30 })).rejects.toMatchObject({ code: 'LINUX_LOCK_TIMEOUT', retryable: true });
  const waiting = lock(path, { timeoutMs: 10_000 });
  first.release();
  first.release();
  (await waiting).release();
});

it('is shared by readers', () => {
  const one = tryLock(path, 'shared')!;
  const two = tryLock(path, 'shared')!;
  expect(tryLock(path, 'exclusive')).toBeUndefined();
  one.release();
  two.release();
  tryLock(path, 'exclusive')!.release();
});

it('is not held by a file that was removed meanwhile', () => {
  const first = tryLock(path)!;
  rmSync(path);
  const second = tryLock(path)!;
  expect(second).toBeDefined();
  expect(tryLock(path)).toBeUndefined();
  first.release();
  second.release();
});

it('stops waiting when the signal says so', async () => {
  const held = tryLock(path)!;
  const stop = new AbortController();
  const waiting = lock(path, { signal: stop.signal });
  stop.abort(new Error('enough'));
  await expect(waiting).rejects.toThrow('enough');
  held.release();
});

it('is released when the work throws', async () => {
  await expect(withLock(path, () => Promise.reject(new Error('no')))).rejects.toThrow('no');
  tryLock(path)!.release();
});

it('ends with a killed process, and is not inherited by its children', async () => {
  const script = `
    const { tryLock } = await import('${join(import.meta.dirname, '..', 'index.ts')}');
    const { spawn } = await import('node:child_process');
    tryLock(process.argv[1]);
    const child = spawn('sleep', ['60'], { stdio: 'ignore', detached: true });
    console.log(child.pid);
    setInterval(() => {}, 1000);`;
  const holder = spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script, path], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const grandchild = Number(await new Promise((done) => holder.stdout.once('data', done)));
  try {
    expect(tryLock(path)).toBeUndefined();
    const identity = processIdentity(holder.pid)!;
    expect(isAlive(identity)).toBe(true);
    const ended = new Promise((done) => holder.once('exit', done));
    holder.kill('SIGKILL');
    await ended;
    expect(isAlive(identity)).toBe(false);
    tryLock(path)!.release();
  } finally {
    process.kill(grandchild, 'SIGKILL');
  }
});

it('a process is known by its start time and boot, not by its pid alone', () => {
  const me = processIdentity()!;
  expect(me).toEqual({ pid: process.pid, startTime: expect.stringMatching(/^\d+$/), bootId: bootId() });
  expect(isAlive(me)).toBe(true);
  expect(isAlive({ ...me, startTime: '1' })).toBe(false);
  expect(isAlive({ ...me, bootId: 'other' })).toBe(false);
  expect(processIdentity(2 ** 22 + 1)).toBeUndefined();
});

it('reads the start time of a program whose name holds parentheses and spaces', async () => {
  const program = join(folder, ') R 1 2 (x');
  execFileSync('cp', ['/bin/sleep', program]);
  const child = spawn(program, ['60'], { stdio: 'ignore' });
  await new Promise((done) => child.once('spawn', done));
  const identity = processIdentity(child.pid)!;
  expect(Number(identity.startTime)).toBeGreaterThanOrEqual(Number(processIdentity()!.startTime));
  child.kill('SIGKILL');
  await new Promise((done) => child.once('exit', done));
});
