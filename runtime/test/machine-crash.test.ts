/**
 * The service is killed while it makes, pauses and resumes a full machine: the next one has it, or undoes it, and nothing stays behind. Its disk has a
 * boot sector that waits for ever, which is all of a machine that this needs. $DSEC_VM_STEPS=all for every step.
 */
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { projectRoot } from '../backend/agent-binary.ts';
import { reclaimSandboxes, removeSandbox } from '../index.ts';
import { fullVmProblem } from '../vm/vm-support.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import { ResidentSite } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const problem = fullVmProblem();
if (problem !== undefined) console.log(`skipped: ${problem}`);
const all = process.env.DSEC_VM_STEPS === 'all';
const LATER = all ? ['machine-saved', 'machine-paused', 'machine-restored'] : ['machine-saved', 'machine-restored'];

/** cli; hlt; and again. */
const WAITS = Buffer.from([0xfa, 0xf4, 0xeb, 0xfd]);

describe.skipIf(problem !== undefined || !canRun())(
  'a full machine whose service was killed',
  { timeout: 600_000 },
  () => {
    let site: ResidentSite;
    let program: BundledChild;
    beforeAll(async () => {
      site = await ResidentSite.open();
      program = bundledChild(new URL('./machine-child.ts', import.meta.url));
      const { root, storeUrl, folders } = site.site;
      const disk = Buffer.alloc(1 << 20);
      WAITS.copy(disk);
      disk.writeUInt16LE(0xaa55, 510);
      fs.writeFileSync(join(root, 'waits.raw'), disk);
      const places = { DSEC_STORE: storeUrl, DSEC_STATE: folders.stateDir, DSEC_RUN: folders.runDir };
      const env = { ...process.env, ...places, DSEC_CACHE: folders.cacheDir };
      const dsec = (...args: string[]) =>
        execFileSync(process.execPath, [join(projectRoot(), 'bin/dsec'), 'disk', ...args], { env, stdio: 'pipe' });
      dsec('create', 'waits', '--from', `raw:${join(root, 'waits.raw')}`);
      dsec('pack-diff', 'waits', '--name', 'waits:1');
      dsec('rm', 'waits');
    }, 300_000);
    afterAll(async () => {
      program?.remove();
      await site?.remove();
    }, 300_000);

    async function killedAt(point: string): Promise<void> {
      await site.node.close();
      const { storeUrl, folders } = site.site;
      const order = JSON.stringify({ storeUrl, folders, image: 'waits:1', name: 'one' });
      const child = spawn(process.execPath, [program.path, order], {
        stdio: ['ignore', 'inherit', 'inherit'],
        env: { ...process.env, DSEC_FAILPOINT: point },
      });
      const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
      expect(signal).toBe('SIGKILL');
      await site.restart();
    }
    /** Of the machine. */
    const processes = () =>
      fs
        .readdirSync('/proc')
        .filter((name) => /^\d+$/.test(name))
        .filter((pid) => commandLineOf(pid).includes(join(site.site.folders.stateDir, 'sandboxes/one/')));

    it('at machine-started: nothing is left', async () => {
      await killedAt('machine-started');
      await reclaimSandboxes(site.site.folders);
      expect(site.node.list()).toEqual([]);
      expect(processes()).toEqual([]);
      expect(site.site.leftovers()).toEqual(NOTHING);
    });

    it.each(LATER)('at %s: it is paused, or it runs, and is what its record says', async (point) => {
      await killedAt(point);
      const [one] = site.node.list();
      expect(one?.state).toBe(point === 'machine-saved' ? 'running' : 'paused');
      expect(processes().length).toBe(one!.state === 'running' ? 1 : 0);
      for (let i = 0; i < 2; i++) {
        await one!.pause();
        expect([one!.state, processes().length]).toEqual(['paused', 0]);
        await one!.resume();
        expect([one!.state, processes().length]).toEqual(['running', 1]);
      }
      await one!.stop({ timeMs: 0 });
      expect(processes()).toEqual([]);
      await removeSandbox('one', site.site.folders);
      expect(site.site.leftovers()).toEqual(NOTHING);
    });
  },
);

function commandLineOf(pid: string): string {
  try {
    return fs.readFileSync(`/proc/${pid}/cmdline`, 'latin1');
  } catch {
    return '';
  }
}
