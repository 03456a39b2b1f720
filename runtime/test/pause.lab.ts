/** Pause, resume and classes where control groups are v2 alone: cgroup.freeze, memory.reclaim to zram, cpu.idle. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { atLeast, swapSpace } from '#linux';
import { commandGroupsOf } from '../aether/command-group.ts';
import { commandFolders, isFrozen } from '../aether/freeze.ts';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { processesOf, ResidentSite, say, told, until } from './resident-fixture.ts';

const sh = (script: string) => execFileSync('sh', ['-c', script], { encoding: 'utf8' });

describe('a paused sandbox', () => {
  let all: ResidentSite;
  beforeAll(async () => {
    expect(atLeast(6, 12)).toBe(true);
    sh('modprobe zram && echo 256M > /sys/block/zram0/disksize && mkswap /dev/zram0 && swapon /dev/zram0');
    all = await ResidentSite.open();
  });
  afterAll(async () => {
    await all.remove();
    sh('swapoff /dev/zram0; echo 1 > /sys/block/zram0/reset');
  });

  it('stands still, gives its memory back, and has all of it when it goes on', async () => {
    const box = await all.create();
    const bytes = 64 << 20;
    await say(box, `head -c ${bytes} /dev/urandom > /tmp/data; busybox mkfifo /tmp/go`);
    const sum = (await say(box, 'busybox md5sum < /tmp/data')).trim();
    const script = `dd if=/tmp/data bs=${bytes} count=1 2>/dev/null | { read x </tmp/go; busybox md5sum; }`;
    const holder = await box.exec({ args: ['sh', '-c', script], background: true });
    const inMemory = () =>
      processesOf(box).some(
        (pid) => Number(/^VmRSS:\s+(\d+)/m.exec(fs.readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1]) > bytes / 1024,
      );
    await until('it has it in memory', inMemory);
    const report = await box.pause();
    expect(report.reason).toBeUndefined();
    expect(report.beforeBytes).toBeGreaterThan(bytes);
    expect(report.afterBytes).toBeLessThan(report.beforeBytes / 10);
    const { totalBytes, freeBytes } = swapSpace();
    expect(totalBytes - freeBytes).toBeGreaterThan(bytes * 0.9);
    const groups = commandGroupsOf(box.facts.id)!;
    expect(groups.version).toBe(2);
    expect(commandFolders(groups).map((folder) => isFrozen(folder, 2))).toEqual([true]);
    await all.restart();
    const again = all.node.get(box.name);
    expect([again.state, commandFolders(groups).map((folder) => isFrozen(folder, 2))]).toEqual(['paused', [true]]);
    await say(again, 'echo >/tmp/go');
    expect((await told(again.command(holder.id))).stdout.split(' ')[0]).toBe(sum.split(' ')[0]);
    await again.stop({ timeMs: 0 });
  });

  it('is stopped, and ends when its time is up and nobody is there', async () => {
    const stopped = await all.create();
    await stopped.exec({ args: ['sleep', '1000'] });
    await stopped.pause();
    expect((await stopped.stop()).reason).toBe('stopped');
    const box = await all.create({ ttlMs: 60_000 });
    await box.exec({ args: ['sleep', '1000'] });
    await box.pause();
    await all.node.close();
    for (let tries = 0; processesOf(box).length > 0 && tries < 3000; tries++)
      await new Promise((go) => setTimeout(go, 100));
    await all.restart();
    expect(() => all.node.get(box.name)).toThrow(/has ended: its time was up/);
  });

  it('of best effort is idle to the kernel', async () => {
    const box = await all.create({ class: 'be' });
    const values = cgroupsOf(box.facts.id).map((folder) => fs.readFileSync(`${folder}/../cpu.idle`, 'utf8').trim());
    expect(values).toEqual(['1']);
    await box.stop({ timeMs: 0 });
  });
});
