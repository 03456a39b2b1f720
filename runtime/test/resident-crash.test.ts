/** The process that keeps the books is killed at every step of create, exec, pause, resume, reading its changes and stop: the next one has all of it right. */
import { spawn } from 'node:child_process';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { commandGroupsOf } from '../aether/command-group.ts';
import { commandFolders, isFrozen } from '../aether/freeze.ts';
import { findAgent } from '../backend/agent-binary.ts';
import { reclaimSandboxes, removeSandbox } from '../index.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

const CREATE_STEPS = [
  'create-recorded',
  'mount-recorded',
  'mount-layer-folder',
  'mount-layer',
  'mount-layers',
  'mount-composed',
  'mount-identified',
  'mount-attached',
  'mount-mounted',
  'create-mounted',
];

describe.skipIf(agent === undefined || !canRun())('a sandbox whose service was killed', { timeout: 120_000 }, () => {
  let all: ResidentSite;
  let program: BundledChild;
  beforeAll(async () => {
    all = await ResidentSite.open();
    program = bundledChild(new URL('./resident-child.ts', import.meta.url));
  }, 120_000);
  afterAll(async () => {
    program?.remove();
    await all.remove();
  }, 120_000);

  async function killedAt(point: string, remove = false): Promise<void> {
    all.node.close();
    const { storeUrl, folders } = all.site;
    const order = JSON.stringify({ storeUrl, folders, image: 'busybox:1', name: 'one', remove });
    const child = spawn(process.execPath, [program.path, order], {
      stdio: ['ignore', 'inherit', 'inherit'],
      env: { ...process.env, DSEC_FAILPOINT: point },
    });
    const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
    expect(signal).toBe('SIGKILL');
    await all.restart();
  }

  it.each(CREATE_STEPS)('at %s: nothing is left', async (point) => {
    await killedAt(point);
    expect(all.node.list()).toEqual([]);
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  it.each(['create-launched', 'exec-recorded', 'exec-sent'])('at %s: it runs, or is undone', async (point) => {
    await killedAt(point);
    const [one] = all.node.list();
    if (one === undefined) expect(point).toBe('create-launched');
    else {
      for (const command of one.commands()) {
        const end = await command.wait().then(
          ({ exitCode }) => exitCode,
          (error: { code?: string }) => error.code,
        );
        expect([0, 'RUNTIME_SANDBOX_GONE']).toContain(end);
      }
      expect(await say(one, 'echo here')).toBe('here\n');
      await one.stop({ timeMs: 0 });
      await removeSandbox('one', all.site.folders);
    }
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  it.each(['pause-recorded', 'pause-frozen', 'pause-reclaimed', 'resume-recorded', 'resume-thawed', 'pack-frozen'])(
    'at %s: it is paused, or it runs, and is what its record says',
    async (point) => {
      await killedAt(point);
      const [one] = all.node.list();
      expect(one?.state).toBe(point.startsWith('pause') ? 'paused' : 'running');
      expect(one!.facts.resident?.pausedAt === undefined).toBe(one!.state === 'running');
      const groups = commandGroupsOf(one!.facts.id)!;
      const stand = commandFolders(groups).map((folder) => isFrozen(folder, groups.version));
      expect(new Set(stand)).toEqual(new Set([one!.state === 'paused']));
      expect(await say(one!, 'echo here')).toBe('here\n');
      expect(one!.state).toBe('running');
      await one!.stop({ timeMs: 0 });
      await removeSandbox('one', all.site.folders);
      expect(all.site.leftovers()).toEqual(NOTHING);
    },
  );

  it.each(['end-begun', 'umount-detached', 'umount-removed', 'end-dismantled'])(
    'at %s: it has ended, and why is known',
    async (point) => {
      await killedAt(point);
      expect(() => all.node.get('one')).toThrow(/has ended: it was stopped/);
      expect(all.site.leftovers()).toMatchObject({ mounts: [], cgroups: [] });
      await removeSandbox('one', all.site.folders);
      expect(all.site.leftovers()).toEqual(NOTHING);
    },
  );

  it.each(['end-begun', 'umount-detached', 'end-dismantled', 'sandbox-aside'])(
    'at %s of one that is removed while it runs: it is gone, or can be removed again',
    async (point) => {
      await killedAt(point, true);
      await reclaimSandboxes(all.site.folders);
      expect(all.site.leftovers()).toMatchObject({ mounts: [], cgroups: [] });
      await all.node.remove('one', { force: true }).catch((error) => {
        expect(error).toMatchObject({ code: 'RUNTIME_SANDBOX_NOT_FOUND' });
      });
      expect(all.site.leftovers()).toEqual(NOTHING);
    },
  );
});
