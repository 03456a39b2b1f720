/** Classes of service on processes with many threads, as virtual machines are: what the kernel has them as, not how fast they are. */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { coreSchedulingMissing, isScheduledWhenIdle } from '#linux';
import { cgroupsOf, endCgroups, membersOf } from '../backend/cgroup-cleanup.ts';
import { BEST_EFFORT_PARENT } from '../backend/sandbox-group.ts';
import { applyClass } from '../node/service-class.ts';
import { limitMachine, makeMachineGroups } from '../vm/machine-groups.ts';
import { endProcess, startProcess } from '../vm/qemu/machine-process.ts';
import type { VmSpec } from '../vm/vm-driver.ts';
import { until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

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

  it.skipIf(!canRun())('that is a machine runs in groups of best effort, and its limits are there', async () => {
    const id = `class-${process.pid}`;
    const place = folder();
    const cgroups = makeMachineGroups(id, { cpus: 0.5 }, 'be');
    try {
      const spec: Partial<VmSpec> = {
        id,
        folder: place,
        memoryFile: join(place, 'memory'),
        serviceClass: 'be',
        cgroups,
      };
      const { pid } = startProcess('/bin/sleep', ['1000'], spec as VmSpec);
      const folders = cgroupsOf(id);
      expect(new Set(folders.map((one) => basename(dirname(one))))).toEqual(new Set([BEST_EFFORT_PARENT]));
      await until('it is in them', () => folders.every((one) => membersOf(one).includes(pid)));
      limitMachine(id, { cpus: 0.25 });
      const quotas = folders.flatMap((one) =>
        ['cpu.cfs_quota_us', 'cpu.max'].map((file) => `${one}/${file}`).filter((path) => existsSync(path)),
      );
      expect(quotas.map((path) => readFileSync(path, 'utf8').split(/\s/)[0])).toEqual(['25000']);
    } finally {
      await endCgroups(id);
    }
    expect(cgroupsOf(id)).toEqual([]);
  });

  it('that has gone is an error, not a class', () => {
    expect(() => applyClass('be', 2 ** 22 - 3, [])).toThrow(expect.objectContaining({ code: 'ESRCH' }));
  });
});
