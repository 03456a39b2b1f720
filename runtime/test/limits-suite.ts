/** Limits of a sandbox that stays: what is held, what it costs its neighbours and its own agent (nothing), how they are changed, and what is told. One suite for v1, v2, and every way to limit a disk. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { CAPABILITY, hasEffective, listLoops, mountsAt } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { diskWay } from '../disk/sandbox-disk.ts';
import { reclaimSandboxes, removeSandbox, withKeptSandbox } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { HEAD, ResidentSite, say, TAIL, told, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const MIB = 1 << 20;
const agent = findAgent();
const skip = agent === undefined || !canRun();

export function residentLimits(place: string, runtime?: string): void {
  describe.skipIf(skip)(`limits of a sandbox, ${place}`, { timeout: 900_000 }, () => {
    let all: ResidentSite;
    let neighbour: NodeSandbox;
    beforeAll(async () => {
      all = await ResidentSite.open();
      neighbour = await create({ name: 'neighbour', memoryBytes: 64 * MIB, diskBytes: 32 * MIB });
    });
    afterAll(() => all?.remove());
    const neighbourAnswers = async () => expect(await say(neighbour, 'echo well > /w && cat /w')).toBe('well\n');
    const create = (options: Parameters<ResidentSite['create']>[0] = {}) => all.create({ runtime, ...options });
    const placesOf = (name: string) => sandboxFolders(all.site.folders, name);
    const loopsOf = (name: string) => listLoops().filter(({ file }) => file.startsWith(`${placesOf(name).folder}/`));

    // The kernel frees a device when its last user has gone, a moment later.
    const isDetached = async (name: string) => {
      expect(mountsAt(placesOf(name).disk)).toEqual([]);
      await until('its loop device is free', () => loopsOf(name).length === 0);
    };

    it('of processes end a fork bomb; its agent and its neighbour answer meanwhile', async () => {
      const box = await create({ pids: 64 });
      const bomb = await box.exec({ args: ['sh', '-c', 'f() { sleep 600 & f; }; f'] });
      await until('it is full', async () => (await box.usage()).pids >= 64);
      await neighbourAnswers();
      // Of new commands too, which can do what needs no further process.
      expect(await say(box, 'echo $((6 * 7))')).toBe('42\n');
      await box.files.write('/note', Buffer.from('x'));
      expect((await box.files.read('/note')).toString()).toBe('x');
      await bomb.killTree();
      await until('it is gone', async () => (await box.usage()).pids < 10);
      expect(await say(box, 'echo free | cat')).toBe('free\n');
    });

    it('of memory end the command that wants more, and tell so; its agent and its neighbour do not notice', async () => {
      const box = await create({ memoryBytes: 48 * MIB, memorySwapBytes: 48 * MIB });
      const hog = await box.exec({ args: ['sh', '-c', 'a=x; while :; do a="$a$a"; done'] });
      expect(await hog.wait()).toMatchObject({ signal: 'SIGKILL', outOfMemory: true });
      // A tmpfs that is full of what nobody can give back.
      const full = await box.exec({ args: ['dd', 'if=/dev/zero', 'of=/dev/shm/full', 'bs=1M', 'count=60'] });
      expect(await full.wait()).toMatchObject({ signal: 'SIGKILL', outOfMemory: true });
      await neighbourAnswers();
      expect((await box.usage()).memory.outOfMemory).toBeGreaterThan(1);
      // No command has memory now, and the agent has.
      await box.files.remove('/dev/shm/full');
      expect(await say(box, 'echo again')).toBe('again\n');
      expect(box.state).toBe('running');
    });

    it('of processor time hold what runs, and not its agent', async () => {
      const box = await create({ cpus: 0.05 });
      const loop = await box.exec({ args: ['sh', '-c', 'while :; do :; done'] });
      await until('it had to wait', async () => ((await box.usage()).throttledUsec ?? 0) > 1_000_000);
      await neighbourAnswers();
      await box.files.write('/note', Buffer.from('x'));
      expect((await box.files.stat('/note')).size).toBe(1);
      const { cpuUsec, atMs } = await box.usage();
      // Twice as much as it may have, for what the agent had.
      expect(cpuUsec / 1000).toBeLessThan((atMs - Date.parse(box.facts.createdAt)) * 0.1);
      await loop.killTree();
    });

    it('of its disk tell a command that it is full, and leave the neighbour its own', async () => {
      const box = await create({ diskBytes: 32 * MIB, inodes: 200 });
      expect(loopsOf(box.name).length).toBe(diskWay(all.site.folders.stateDir).way === 'image' ? 1 : 0);
      const out = await say(box, 'dd if=/dev/zero of=/big bs=1M count=64 2>&1; echo $(($(wc -c < /big) >> 20))');
      expect(out).toMatch(/No space left|quota exceeded/);
      // What was asked for can be written, and hardly more.
      const MiB = Number(out.trim().split('\n').at(-1));
      expect([MiB >= 31, MiB <= 36], out).toEqual([true, true]);
      await neighbourAnswers();
      const { disk } = await box.usage();
      expect(disk!.usedBytes / disk!.limitBytes!).toBeGreaterThan(0.9);
      // What is removed can be written again; and so many files, and hardly more.
      const files = await say(box, 'rm /big; i=0; while echo > /f$i; do i=$((i+1)); done 2>/dev/null; echo $i');
      expect([Number(files) >= 199, Number(files) <= 232], files).toEqual([true, true]);
      await neighbourAnswers();
      expect(await say(box, 'rm /f*; echo ok > /ok; cat /ok')).toBe('ok\n');
    });

    it('of its disk are gone when it has ended, and its changes are there for who packs them', async () => {
      const { name } = await create({ diskBytes: 32 * MIB });
      const box = all.node.get(name);
      await say(box, 'mkdir /made; echo kept > /made/file');
      await box.stop();
      const places = placesOf(name);
      await isDetached(name);
      const read = await withKeptSandbox(
        name,
        async ({ upper }) => fs.readFileSync(join(upper, 'made/file'), 'utf8'),
        all.site.folders,
      );
      expect(read).toBe('kept\n');
      await isDetached(name);
      await removeSandbox(name, all.site.folders);
      expect(fs.existsSync(places.folder)).toBe(false);
    });

    it('of a disk that somebody was reading when he was killed are put right by the next command', async () => {
      const { name } = await create({ diskBytes: 32 * MIB });
      await all.node.stop(name);
      // As a process leaves it that is killed in the middle.
      const held = withKeptSandbox(name, () => new Promise<void>((go) => setTimeout(go, 1)), all.site.folders);
      await held;
      const places = placesOf(name);
      const { attachDiskImage } = await import('../disk/disk-image.ts');
      if (diskWay(all.site.folders.stateDir).way === 'image') attachDiskImage(places);
      await reclaimSandboxes(all.site.folders);
      await isDetached(name);
      await removeSandbox(name, all.site.folders);
    });

    it('are changed while it runs, as a whole or not at all', async () => {
      const box = await create({ memoryBytes: 64 * MIB, diskBytes: 32 * MIB });
      const grows = hasEffective(CAPABILITY.SYS_RESOURCE) || diskWay(all.site.folders.stateDir).way === 'quota';
      const diskBytes = (grows ? 64 : 32) * MIB;
      if (!grows) await expect(box.update({ diskBytes: 64 * MIB, pids: 99 })).rejects.toThrow(/CAP_SYS_RESOURCE/);
      const limits = await box.update({ memoryBytes: 128 * MIB, pids: 50, cpus: 0.5, diskBytes });
      expect(limits).toEqual({ memoryBytes: 128 * MIB, pids: 50, cpus: 0.5, diskBytes });
      expect((await box.usage()).limits).toEqual(limits);
      expect(await say(box, 'dd if=/dev/zero of=/dev/shm/a bs=1M count=60 2>/dev/null; ls -l /dev/shm/a | wc -l')).toBe(
        '1\n',
      );
      const written = await say(box, 'dd if=/dev/zero of=/b bs=1M count=48 2>/dev/null; echo $(($(wc -c < /b) >> 20))');
      expect(Number(written)).toBeGreaterThanOrEqual(grows ? 48 : 31);
      await expect(box.update({ memoryBytes: 16 * MIB, memorySwapBytes: 16 * MIB, pids: 99 })).rejects.toThrow(
        /memory/,
      );
      if (diskWay(all.site.folders.stateDir).way === 'image') {
        await expect(box.update({ diskBytes: 16 * MIB, pids: 99 })).rejects.toThrow(/smaller|CAP_SYS_RESOURCE/);
      }
      await expect(box.update({ inodes: 5 })).rejects.toThrow(/inodes/);
      expect((await box.usage()).limits).toEqual(limits);
      // What is on record is what the next service finds.
      await all.restart();
      const next = all.node.get(box.name);
      expect((await next.usage()).limits).toEqual(limits);
      expect(await next.update({ cpus: null })).toEqual({ memoryBytes: 128 * MIB, pids: 50, diskBytes });
      // One that there was none of before, and after a restart still the same one.
      const late = await create();
      await late.update({ memoryBytes: 32 * MIB });
      await all.restart();
      const later = all.node.get(late.name);
      await later.update({ memoryBytes: 128 * MIB });
      expect(await say(later, 'dd if=/dev/zero of=/dev/shm/a bs=1M count=60 2>/dev/null; echo $?')).toBe('0\n');
      await later.update({ memoryBytes: null });
      expect((await later.usage()).limits).toEqual({ pids: 4096 });
      const again = all.node.get(box.name);
      neighbour = all.node.get('neighbour');
      // And commands are in them as before.
      const bomb = await again.exec({ args: ['sh', '-c', 'f() { sleep 600 & f; }; f'] });
      await until('it is full', async () => (await again.usage()).pids >= 50);
      await bomb.killTree();
    });

    it('of input and output are on the device that has its changes', async () => {
      const box = await create({ ioWriteBps: 4 * MIB, ioReadBps: 64 * MIB, diskBytes: 64 * MIB });
      const before = (await box.usage()).io;
      const started = performance.now();
      // Past the page cache, which is what v1 can hold too. So much takes two seconds, less a first burst.
      const out = await say(
        box,
        'dd if=/dev/zero of=/d bs=1M count=8 oflag=direct 2>&1; echo $(($(wc -c < /d) >> 20))',
      );
      expect(out.trim().split('\n').at(-1)).toBe('8');
      expect(performance.now() - started).toBeGreaterThan(1000);
      expect((await box.usage()).io.writeBytes - before.writeBytes).toBeGreaterThanOrEqual(8 * MIB);
      await neighbourAnswers();
    });

    it('do not keep endless output from being taken, nor anybody else from answering', async () => {
      const box = await create({ memoryBytes: 32 * MIB, diskBytes: 32 * MIB });
      const endless = await box.exec({ args: ['yes'] });
      let taken = 0;
      for await (const part of endless.output()) {
        taken += part.bytes?.length ?? 0;
        if (taken > 16 * MIB) break;
      }
      await neighbourAnswers();
      await until('its tail is thrown away', async () => (await told(endless, { follow: false })).missing > 0);
      expect((await told(endless, { follow: false })).stdout.length).toBeLessThanOrEqual(HEAD + TAIL + MIB);
      await box.files.write('/note', Buffer.from('x'));
      await endless.killTree();
    });
  });
}
