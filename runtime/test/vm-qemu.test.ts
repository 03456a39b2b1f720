/** Machines under QEMU, with a real guest: started once, everything else goes on from its snapshot. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { mount, umount } from '#linux';
import { findProcess } from '../vm/qemu/machine-process.ts';
import { openQemuDriver, type QemuDriver } from '../vm/qemu/qemu-driver.ts';
import type { RunningVm } from '../vm/vm-driver.ts';
import { said, shell, shellArchive, shellGuestMissing, shellSpec } from './shell-guest.ts';

const missing = process.getuid?.() === 0 ? shellGuestMissing() : 'needs root';
if (missing !== undefined) console.log(`machines under QEMU are not tested: ${missing}`);
const MINUTES = 60_000;

describe.skipIf(missing !== undefined)('a machine under QEMU', () => {
  let folder: string;
  let initrd: string;
  let driver: QemuDriver;
  let booted: string;
  let count = 0;
  const spec = () => shellSpec(folder, `m${++count}`, initrd);
  const resumed = async (snapshot = booted, options = {}): Promise<RunningVm> => {
    const vm = await driver.restore(spec(), snapshot, options);
    await vm.cont();
    return vm;
  };

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-vm-'));
    initrd = shellArchive(folder);
    driver = openQemuDriver();
    booted = join(folder, 'booted');
    const vm = await driver.start(spec());
    await said(vm, 'guest-is-ready');
    await shell(vm, 'true');
    await vm.snapshot(booted);
    expect(await vm.state()).toBe('stopped');
    await vm.kill();
    expect(await vm.ended).toMatchObject({ reason: 'killed' });
  }, 5 * MINUTES);
  afterAll(async () => {
    if (driver === undefined) return;
    driver.forgetSnapshot(booted);
    for (let i = 1; i <= count; i++) {
      await driver.sweep(join(folder, `m${i}`));
      expect(existsSync(`/dev/shm/dsec-test-${process.pid}-m${i}`)).toBe(false);
    }
    rmSync(folder, { recursive: true });
  });

  test(
    '20 times written to, paused and resumed, its files are what they were',
    async () => {
      let vm = await resumed();
      await shell(vm, 'mkdir /tmp/tree');
      let base = booted;
      const states = mkdtempSync(join(folder, 'states-'));
      for (let round = 0; round < 20; round++) {
        await shell(vm, `head -c ${20_000 + round} /dev/urandom > /tmp/tree/f${round % 7}`);
        const before = await shell(vm, 'sha256sum /tmp/tree/* | sha256sum');
        expect(before).toMatch(/^[0-9a-f]{64}/);
        const next = join(states, String(round));
        const facts = await vm.snapshot(next, { base });
        await vm.kill();
        // All pages again when the chain is long; else what has changed.
        expect(facts.changedPages).toBeLessThan(round === 15 ? 32_768 : 8_000);
        base = next;
        vm = await resumed(next);
        expect(await shell(vm, 'sha256sum /tmp/tree/* | sha256sum')).toBe(before);
      }
      await vm.kill();
    },
    10 * MINUTES,
  );

  test(
    'forks share a snapshot’s memory, and nothing that they write; a fork can be paused',
    async () => {
      const [a, b] = await Promise.all([
        resumed(booted, { memory: 'private' }),
        resumed(booted, { memory: 'private' }),
      ]);
      await shell(a, 'echo of-a > /tmp/x');
      await shell(b, 'echo of-b > /tmp/x');
      expect([await shell(a, 'cat /tmp/x'), await shell(b, 'cat /tmp/x')]).toEqual(['of-a', 'of-b']);
      const state = join(folder, 'fork-state');
      const facts = await a.snapshot(state, { base: booted });
      expect(facts.changedPages).toBeLessThan(8_000);
      await a.kill();
      const again = await resumed(state);
      expect(await shell(again, 'cat /tmp/x')).toBe('of-a');
      expect(await shell(b, 'cat /tmp/x')).toBe('of-b');
      await Promise.all([again.kill(), b.kill()]);
      const fresh = await resumed();
      expect(await shell(fresh, 'ls /tmp')).toBe('');
      await fresh.kill();
    },
    5 * MINUTES,
  );

  test(
    'a snapshot that finds the disk full leaves a machine that runs, and nothing else',
    async () => {
      const vm = await resumed();
      const small = join(folder, 'small');
      mkdirSync(small);
      for (const size of ['64k', '4m']) {
        mount('tmpfs', small, 'tmpfs', 0, `size=${size}`);
        try {
          await expect(vm.snapshot(join(small, 'one'), { base: undefined })).rejects.toMatchObject({
            code: 'VM_SNAPSHOT',
          });
          expect(readdirSync(small)).toEqual([]);
        } finally {
          umount(small);
        }
        expect(await vm.state()).toBe('running');
        expect(await shell(vm, 'echo goes on')).toBe('goes on');
      }
      const given = new AbortController();
      given.abort(new Error('not any more'));
      await expect(vm.snapshot(join(folder, 'aborted'), { signal: given.signal })).rejects.toThrow('not any more');
      await vm.snapshot(join(folder, 'fits'), { base: booted });
      await vm.kill();
    },
    5 * MINUTES,
  );

  test(
    'the guest can switch itself off; a process that is killed is told as such; nothing stays',
    async () => {
      const vm = await resumed();
      vm.console.write(Buffer.from('poweroff -f\n'));
      expect(await vm.ended).toMatchObject({ reason: 'guest' });
      await expect(vm.state()).rejects.toMatchObject({ code: expect.stringMatching(/^VM_/) });
      await vm.kill();
      const killed = await resumed();
      process.kill(killed.pid, 'SIGKILL');
      expect(await killed.ended).toMatchObject({ reason: 'crashed' });
      expect(existsSync(join(killed.folder, 'machine.json'))).toBe(false);
      expect(await driver.find(killed.folder)).toBeUndefined();
    },
    5 * MINUTES,
  );

  test(
    'a spec that cannot be, a snapshot of another machine, a folder that is taken: said, and nothing starts',
    async () => {
      const good = spec();
      for (const wrong of [{ id: 'a b' }, { cpus: 0 }, { memoryBytes: 5 }, { folder: `/${'x'.repeat(120)}` }]) {
        await expect(driver.start({ ...good, ...wrong }), JSON.stringify(wrong)).rejects.toMatchObject({
          code: 'VM_SPEC',
        });
      }
      await expect(driver.restore({ ...good, memoryBytes: 2 ** 28 }, booted)).rejects.toMatchObject({
        code: 'VM_SPEC',
      });
      await expect(driver.restore(good, join(folder, 'none'))).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
      await expect(driver.start({ ...good, boot: { kernel: '/none', commandLine: '' } })).rejects.toMatchObject({
        code: 'VM_START',
        message: expect.stringContaining('/none'),
      });
      expect(existsSync(good.memoryFile)).toBe(false);
      const vm = await driver.restore(good, booted);
      await expect(driver.restore(good, booted)).rejects.toMatchObject({ code: 'VM_START' });
      expect(await vm.state()).toBe('stopped');
      await vm.kill();
    },
    5 * MINUTES,
  );

  test(
    'it outlives whoever started it: found again, or ended, wherever that one was killed',
    async () => {
      for (const point of ['vm-recorded', 'vm-spawned', 'none']) {
        const one = spec();
        const order = JSON.stringify({ spec: one, snapshot: booted });
        const child = spawn(process.execPath, ['--import', 'tsx', join(import.meta.dirname, 'vm-starter.mts')], {
          env: { ...process.env, DSEC_FAILPOINT: point, ORDER: order },
          stdio: ['ignore', 'pipe', 'inherit'],
        });
        const closed = once(child, 'exit');
        if (point === 'none') {
          await once(child.stdout, 'data');
          child.kill('SIGKILL');
        }
        await closed;
        const found = point === 'vm-spawned' ? undefined : await driver.find(one.folder);
        if (point === 'none') {
          expect(await shell(found!, 'cat /tmp/said')).toBe('before');
          await found!.snapshot(join(folder, 'found'), { base: booted });
        } else expect(found).toBeUndefined();
        await driver.sweep(one.folder);
        expect(findProcess(one.folder)).toBeUndefined();
        expect(existsSync(one.memoryFile)).toBe(false);
      }
    },
    5 * MINUTES,
  );

  test(
    'what the guest prints without end is kept in bounds',
    async () => {
      const vm = await resumed();
      vm.console.write(Buffer.from('yes 0123456789 | head -n 20000; echo all-of-it\n'));
      await said(vm, 'all-of-it');
      expect(vm.console.recent().length).toBeLessThanOrEqual(64 * 1024);
      await vm.kill();
      for (;;) {
        const { size } = await stat(join(vm.folder, 'console.log'));
        if (size > 1000) {
          expect(size).toBeLessThanOrEqual(64 * 1024);
          break;
        }
        await delay(10);
      }
    },
    5 * MINUTES,
  );
});
