/** The process that keeps the books is killed at every step of create, exec and stop: the next one has all of it right. */
import { spawn } from 'node:child_process';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import { removeSandbox } from '../index.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('a sandbox whose service was killed', { timeout: 120_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  async function killedAt(point: string): Promise<void> {
    all.node.close();
    const { storeUrl, folders } = all.site;
    const order = JSON.stringify({ storeUrl, folders, image: 'busybox:1', name: 'one' });
    const script = new URL('./resident-child.ts', import.meta.url).pathname;
    const child = spawn(process.execPath, ['--import', 'tsx', script, order], {
      stdio: ['ignore', 'inherit', 'inherit'],
      env: { ...process.env, DSEC_FAILPOINT: point },
    });
    const signal = await new Promise((resolve) => child.once('exit', (_code, by) => resolve(by)));
    expect(signal).toBe('SIGKILL');
    await all.restart();
  }

  it.each(['create-recorded', 'create-mounted'])('at %s: nothing is left', async (point) => {
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

  it.each(['end-begun', 'end-dismantled'])('at %s: it has ended, and why is known', async (point) => {
    await killedAt(point);
    expect(() => all.node.get('one')).toThrow(/has ended: it was stopped/);
    expect(all.site.leftovers()).toMatchObject({ mounts: [], cgroups: [] });
    await removeSandbox('one', all.site.folders);
    expect(all.site.leftovers()).toEqual(NOTHING);
  });
});
