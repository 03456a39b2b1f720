/** The process that keeps the books is killed while it makes, changes or takes away limits: nothing of a disk stays, and what is on record holds. */
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { listLoops } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { reclaimSandboxes, removeSandbox } from '../index.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import { ResidentSite, say, until } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const agent = findAgent();
const MIB = 1 << 20;

describe.skipIf(agent === undefined || !canRun())(
  'a sandbox with limits whose service was killed',
  { timeout: 120_000 },
  () => {
    let all: ResidentSite;
    let program: BundledChild;
    beforeAll(async () => {
      all = await ResidentSite.open();
      program = bundledChild(new URL('./resident-child.ts', import.meta.url));
    }, 120_000);
    afterAll(async () => {
      program?.remove();
      await all?.remove();
    }, 120_000);

    async function killedAt(point: string): Promise<void> {
      all.node.close();
      const { storeUrl, folders } = all.site;
      const limits = { diskBytes: 16 * MIB, memoryBytes: 64 * MIB };
      const order = JSON.stringify({ storeUrl, folders, image: 'busybox:1', name: 'one', remove: false, limits });
      const env = { ...process.env, DSEC_FAILPOINT: point };
      const child = spawn(process.execPath, [program.path, order], { stdio: ['ignore', 'inherit', 'inherit'], env });
      const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
      expect(signal).toBe('SIGKILL');
      await all.restart();
    }
    const loops = () => listLoops().filter(({ file }) => file.startsWith(`${all.site.root}/`));
    const nothingIsLeft = async () => {
      expect(all.site.leftovers()).toEqual(NOTHING);
      // The kernel frees a device when its last user has gone, a moment later.
      await until('its loop device is free', () => loops().length === 0);
    };

    it.each(['create-recorded', 'disk-made', 'disk-attached', 'disk-mounted', 'create-mounted'])(
      'at %s: nothing is left',
      async (point) => {
        await killedAt(point);
        expect(all.node.list()).toEqual([]);
        await nothingIsLeft();
      },
    );

    it.each(['limits-recorded', 'limits-applied'])('at %s: what is on record holds', async (point) => {
      await killedAt(point);
      const one = all.node.get('one');
      expect((await one.usage()).limits).toEqual({ diskBytes: 16 * MIB, memoryBytes: 64 * MIB, pids: 77 });
      const bomb = await one.exec({ args: ['sh', '-c', 'f() { sleep 600 & f; }; f'] });
      await until('it is full', async () => (await one.usage()).pids >= 77);
      await bomb.killTree();
      expect(await say(one, 'dd if=/dev/zero of=/big bs=1M count=40 2>&1')).toMatch(/No space|quota/);
      await one.stop({ timeMs: 0 });
      await removeSandbox('one', all.site.folders);
      await nothingIsLeft();
    });

    it.each(['end-begun', 'umount-detached', 'end-dismantled'])(
      'at %s: it has ended, and its disk with it',
      async (point) => {
        await killedAt(point);
        await reclaimSandboxes(all.site.folders);
        await until('its loop device is free', () => loops().length === 0);
        expect(fs.existsSync(sandboxFolders(all.site.folders, 'one').diskImage)).toBe(true);
        await removeSandbox('one', all.site.folders);
        await nothingIsLeft();
      },
    );
  },
);
