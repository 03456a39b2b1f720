/** Classes of service on processes with many threads, as virtual machines are: what the kernel has them as, not how fast they are. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { coreSchedulingMissing, isScheduledWhenIdle } from '#linux';
import { applyClass } from '../node/service-class.ts';
import { endProcess, startProcess } from '../vm/qemu/machine-process.ts';
import type { VmSpec } from '../vm/vm-driver.ts';

const children: ChildProcess[] = [];
const folders: string[] = [];
afterEach(async () => {
  for (const child of children.splice(0)) child.kill('SIGKILL');
  for (const folder of folders.splice(0)) {
    await endProcess(folder);
    rmSync(folder, { recursive: true, force: true });
  }
});

function folder(): string {
  const made = mkdtempSync(join(tmpdir(), 'dsec-class-'));
  folders.push(made);
  return made;
}

const threadsOf = (pid: number) => readdirSync(`/proc/${pid}/task`).map(Number);

describe('a best-effort process', { timeout: 120_000 }, () => {
  it('is one with all its threads, and with those that it starts later', async () => {
    const code =
      "const { Worker } = require('node:worker_threads'); const one = () => new Worker('setInterval(() => {}, 1e6)', { eval: true }).once('online', () => console.log('on')); one(); process.stdin.on('data', one);";
    const child = spawn(process.execPath, ['-e', code], { stdio: ['pipe', 'pipe', 'ignore'] });
    children.push(child);
    const online = () => new Promise<void>((resolve) => child.stdout!.once('data', () => resolve()));
    await online();
    const before = threadsOf(child.pid!);
    expect(before.length).toBeGreaterThan(5);
    expect(before.some((thread) => isScheduledWhenIdle(thread))).toBe(false);
    expect(applyClass('be', child.pid!, [])).toEqual({
      writes: [],
      scheduledWhenIdle: true,
      coreAlone: coreSchedulingMissing() === undefined,
    });
    expect(threadsOf(child.pid!).every((thread) => isScheduledWhenIdle(thread))).toBe(true);
    const more = online();
    child.stdin!.write('one more\n');
    await more;
    const after = threadsOf(child.pid!);
    expect(after.length).toBeGreaterThan(before.length);
    expect(after.filter((thread) => !isScheduledWhenIdle(thread))).toEqual([]);
  });

  it('is left to its control group where that knows of it', () => {
    const group = folder();
    for (const file of ['cpu.idle', 'io.weight']) writeFileSync(join(group, file), '0');
    const child = spawn('sleep', ['1000']);
    children.push(child);
    expect(applyClass('be', child.pid!, [group])).toMatchObject({
      writes: ['cpu.idle=1', 'io.weight=default 1'],
      scheduledWhenIdle: false,
    });
    expect(isScheduledWhenIdle(child.pid!)).toBe(false);
    expect(readFileSync(join(group, 'cpu.idle'), 'utf8')).toBe('1');
  });

  it('is what a machine of that class runs in, from its first moment', () => {
    const run = (serviceClass: 'ls' | 'be' | undefined) => {
      const place = folder();
      const spec = { id: 'm', folder: place, memoryFile: join(place, 'memory'), serviceClass } as VmSpec;
      return startProcess('/bin/sleep', ['1000'], spec).pid;
    };
    expect(isScheduledWhenIdle(run('be'))).toBe(true);
    expect(isScheduledWhenIdle(run('ls'))).toBe(false);
    expect(isScheduledWhenIdle(run(undefined))).toBe(false);
  });

  it('that has gone is an error, not a class', () => {
    expect(() => applyClass('be', 2 ** 22 - 3, [])).toThrow(expect.objectContaining({ code: 'ESRCH' }));
  });
});
