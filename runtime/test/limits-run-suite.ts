/** Limits of one command, by every launcher that is here: the same ones, told in the same way. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { listLoops } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { chooseBackend, RUNTIME_NAMES } from '../backend/choose-backend.ts';
import { diskWay } from '../disk/sandbox-disk.ts';
import { reclaimSandboxes, withKeptSandbox } from '../index.ts';
import { until } from './resident-fixture.ts';
import { busybox, canRun, Site } from './sandbox-fixture.ts';

const MIB = 1 << 20;
const usable = canRun();
const names = RUNTIME_NAMES.filter((name) => {
  if (name === 'dsec') return findAgent() !== undefined;
  return ['/usr/bin', '/usr/sbin', '/usr/local/bin', '/usr/local/sbin'].some((folder) =>
    fs.existsSync(join(folder, name)),
  );
});

export function runLimits(place: string): void {
  describe.skipIf(!usable || names.length === 0).each(names)(
    `limits of a command by %s, ${place}`,
    { timeout: 900_000 },
    (name) => {
      let site: Site;
      let base: Image;
      beforeAll(async () => {
        site = await new Site().open();
        base = await site.image('bb:1', [busybox]);
      });
      afterAll(() => site?.remove());
      const run = (script: string, limits: Parameters<Site['run']>[2] = {}) =>
        site.run(base, ['/bin/sh', '-c', script], {
          env: ['PATH=/bin'],
          backend: chooseBackend(site.folders.runDir, name),
          ...limits,
        });

      it('hold memory, and name it as what ended the command', async () => {
        const limits = { memoryBytes: 32 * MIB, memorySwapBytes: 32 * MIB };
        const hog = await run('a=x; while :; do a="$a$a"; done', limits);
        expect([hog.exitCode, hog.outOfMemory]).toEqual([137, true]);
        const child = await run('sh -c \'a=x; while :; do a="$a$a"; done\'; echo then $?', limits);
        expect([child.stdout.toString().trim(), child.exitCode, child.outOfMemory]).toEqual(['then 137', 0, true]);
        const modest = await run('echo well; exit 3', limits);
        expect([modest.exitCode, modest.outOfMemory]).toEqual([3, false]);
        const unlimited = await run('kill -9 $$');
        expect(unlimited.outOfMemory).toBe(false);
      });

      it('hold processes', async () => {
        const { stdout } = await run('i=0; while [ $i -lt 60 ]; do sleep 30 & i=$((i+1)); done 2>/dev/null; echo all', {
          pids: 20,
        });
        expect(stdout.toString()).not.toContain('all');
      });

      it('hold processor time', async () => {
        const { stdout } = await run(
          'read before _ < /proc/uptime; i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; times; read after _ < /proc/uptime; echo $before $after',
          { cpus: 0.1 },
        );
        const lines = stdout.toString().trim().split('\n');
        const [before, after] = lines.at(-1)!.split(' ').map(Number);
        const used = [...lines[0]!.matchAll(/(\d+)m([\d.]+)s/g)].reduce(
          (sum, [, m, s]) => sum + Number(m) * 60 + Number(s),
          0,
        );
        // A tenth; at the beginning of a period it may be a little more.
        expect(used / (after! - before! + 0.2)).toBeLessThan(0.3);
      });

      it('hold its disk, and leave nothing of it', async () => {
        const isImage = diskWay(site.folders.stateDir).way === 'image';
        const limits = { diskBytes: 16 * MIB, inodes: 100, keep: true, name: `disk-${name}` };
        const { stdout } = await run(
          'dd if=/dev/zero of=/big bs=1M count=32 2>&1; mkdir /made; echo here > /made/file',
          limits,
        );
        expect(stdout.toString()).toMatch(/No space left|quota exceeded/);
        const loops = () => listLoops().filter(({ file }) => file.startsWith(site.root));
        await until('its loop device is free', () => loops().length === 0);
        await withKeptSandbox(
          limits.name,
          async ({ upper }) => {
            expect(fs.statSync(join(upper, 'big')).size).toBeGreaterThanOrEqual(15 * MIB);
            expect(loops().length).toBe(isImage ? 1 : 0);
          },
          site.folders,
        );
        await run('echo > /x', { ...limits, keep: false, replace: true });
        await until('its loop device is free', () => loops().length === 0);
        expect(await reclaimSandboxes(site.folders)).toEqual({ removed: [], kept: [], problems: [] });
      });

      it('hold input and output on the device', async () => {
        const started = performance.now();
        const { stdout } = await run('dd if=/dev/zero of=/d bs=1M count=6 oflag=direct 2>&1', { ioWriteBps: 2 * MIB });
        expect(stdout.toString()).toContain('6+0 records out');
        expect(performance.now() - started).toBeGreaterThan(1500);
      });

      it('that nothing can hold stop it before it runs', async () => {
        await expect(run('echo > /ran', { inodes: 100 })).rejects.toThrow(/inodes/);
        await expect(run('echo > /ran', { memoryBytes: 5 })).rejects.toThrow(/memoryBytes/);
      });

      it('leave no control group behind', () => {
        expect(
          cgroupsOf('')
            .flatMap((group) => fs.readdirSync(group))
            .filter((one) => one.startsWith(`disk-${name}`)),
        ).toEqual([]);
      });
    },
  );
}
