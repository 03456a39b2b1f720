/**
 * The service is killed while it makes, pauses, resumes, reads and ends a sandbox in a virtual machine: the next one has it, or undoes it, and nothing stays
 * behind. $DSEC_VM_STEPS=all for every step; each of the later ones takes a boot.
 */
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { reclaimSandboxes, removeSandbox } from '../index.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import { say } from './resident-fixture.ts';
import { NOTHING } from './sandbox-fixture.ts';
import { canRunVms, ResidentSite, SMALL_VM } from './vm-site.ts';

const EARLY = [
  'create-recorded',
  'create-mounted',
  'vm-disk-served',
  'vm-recorded',
  'vm-spawned',
  'vm-started',
  'create-launched',
];
const all = process.env.DSEC_VM_STEPS === 'all';
const LATER = all
  ? ['pause-recorded', 'vm-snapshot-taken', 'vm-paused', 'vm-restored', 'vm-resumed', 'pack-frozen']
  : ['pause-recorded', 'vm-snapshot-taken', 'vm-restored', 'pack-frozen'];
const LAST = all ? ['end-begun', 'end-dismantled'] : ['end-begun'];

describe.skipIf(!canRunVms())('a virtual machine whose service was killed', { timeout: 600_000 }, () => {
  let site: ResidentSite;
  let program: BundledChild;
  beforeAll(async () => {
    site = await ResidentSite.open();
    program = bundledChild(new URL('./resident-child.ts', import.meta.url));
  }, 120_000);
  afterAll(async () => {
    program?.remove();
    await site?.remove();
  }, 300_000);
  afterEach(() => {
    const left = [...fs.readdirSync('/dev/shm'), ...listed(join(site.site.folders.runDir, 'vm'))];
    expect(left.filter((name) => name.startsWith('dsec-vm-') && isOurs(name))).toEqual([]);
    expect(listed(join(site.site.folders.runDir, 'vm'))).toEqual([]);
  });

  const before = new Set(fs.existsSync('/dev/shm') ? fs.readdirSync('/dev/shm') : []);
  /** Others run tests of their own beside these. */
  const isOurs = (name: string) => !before.has(name) && made.has(name);
  const made = new Set<string>();

  async function killedAt(point: string): Promise<void> {
    await site.node.close();
    const { storeUrl, folders } = site.site;
    const order = JSON.stringify({ storeUrl, folders, image: 'busybox:1', name: 'one', options: SMALL_VM });
    const child = spawn(process.execPath, [program.path, order], {
      stdio: ['ignore', 'inherit', 'inherit'],
      env: { ...process.env, DSEC_FAILPOINT: point },
    });
    const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
    expect(signal).toBe('SIGKILL');
    for (const folder of listed(join(folders.runDir, 'vm'))) made.add(`dsec-vm-${folder}`);
    await site.restart();
  }

  it.each(EARLY)('at %s: nothing is left', async (point) => {
    await killedAt(point);
    await reclaimSandboxes(site.site.folders);
    expect(site.node.list()).toEqual([]);
    expect(site.site.leftovers()).toEqual(NOTHING);
  });

  it.each(LATER)('at %s: it is there, and does what it is asked', async (point) => {
    await killedAt(point);
    const [one] = site.node.list();
    if (['vm-snapshot-taken', 'vm-paused'].includes(point)) expect(one?.state).toBe('paused');
    expect(await say(one!, 'echo here > /f; cat /f')).toBe('here\n');
    expect(one!.commands().filter(({ result }) => result === undefined).length).toBe(1);
    await one!.stop({ timeMs: 0 });
    await removeSandbox('one', site.site.folders);
    expect(site.site.leftovers()).toEqual(NOTHING);
  });

  it.each(LAST)('at %s: it has ended, and why is known', async (point) => {
    await killedAt(point);
    await reclaimSandboxes(site.site.folders);
    expect(() => site.node.get('one')).toThrow(/has ended/);
    expect(site.site.leftovers()).toMatchObject({ mounts: [], cgroups: [] });
    await removeSandbox('one', site.site.folders);
    expect(site.site.leftovers()).toEqual(NOTHING);
  });
});

function listed(folder: string): string[] {
  return fs.existsSync(folder) ? fs.readdirSync(folder) : [];
}
