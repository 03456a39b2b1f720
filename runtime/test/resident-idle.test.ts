/** What becomes of sandboxes that nobody uses, and classes of service: values, as the kernel has them. */
import * as fs from 'node:fs';
import { basename, dirname } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { coreSchedulingMissing, isScheduledWhenIdle } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { BEST_EFFORT_PARENT, CGROUP_PARENT } from '../backend/sandbox-group.ts';
import { IdleWatch } from '../node/idle-watch.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { applyClass } from '../node/service-class.ts';
import { processesOf, ResidentSite, say, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('a sandbox that nobody uses', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  it('ends, and says why', async () => {
    const box = await all.create({ idleMs: 1000 });
    expect(await box.ended).toMatchObject({ reason: 'idle' });
    expect(() => all.node.get(box.name)).toThrow(/nobody had used it/);
  });

  it('is paused, comes back when it is wanted, and is paused again', async () => {
    const box = await all.create({ idleMs: 1000, idleAction: 'pause' });
    for (let i = 0; i < 2; i++) {
      await until('it is paused', () => box.state === 'paused');
      expect(await say(box, 'echo on')).toBe('on\n');
    }
    await box.stop({ timeMs: 0 });
  });

  it('is in use while a command runs, one of a session too, and a connection is open; not by one in the background', async () => {
    const box = await all.create({ idleMs: 1000, idleAction: 'pause' });
    const shell = await box.openShell();
    let states: string[] = [];
    const watched = async (work: Promise<unknown>) => {
      states = [];
      const watching = setInterval(() => states.push(box.state), 50);
      await work.finally(() => clearInterval(watching));
      expect(states.slice(Math.max(0, states.indexOf('running'))).includes('paused')).toBe(false);
    };
    await watched((await box.exec({ args: ['sleep', '2.5'] })).wait());
    await watched(shell.run('sleep 2.5'));
    await watched(box.use(() => new Promise((go) => setTimeout(go, 2500))));
    // Sessions that wait for commands, commands that nobody waits for, and children that were left behind.
    await box.exec({ args: ['sleep', '1000'], background: true });
    await (await box.exec({ args: ['sh', '-c', 'sleep 1000 &'] })).wait();
    await until('it is paused', () => box.state === 'paused');
    await box.stop({ timeMs: 0 });
  });

  it('is found so by the process that comes next, which goes on counting', async () => {
    const [ending, pausing] = [
      await all.create({ idleMs: 20_000 }),
      await all.create({ idleMs: 20_000, idleAction: 'pause' }),
    ];
    all.node.close();
    for (const { name } of [ending, pausing]) {
      const earlier = Date.now() / 1000 - 30;
      fs.utimesSync(`${all.site.folders.stateDir}/sandboxes/${name}/commands`, earlier, earlier);
    }
    await all.restart();
    const again = all.node.get(pausing.name);
    await until(
      'both are',
      () => again.state === 'paused' && !all.node.list().some(({ name }) => name === ending.name),
    );
    expect(() => all.node.get(ending.name)).toThrow(/nobody had used it/);
    await again.stop({ timeMs: 0 });
  });

  it('is not counted while it is paused by hand, and its uses are kept', async () => {
    const marker = fs.mkdtempSync(`${all.site.root}/idle-`);
    let acted = 0;
    let isOff = true;
    const watch = new IdleWatch({
      idleMs: 50,
      marker,
      isInUse: () => false,
      isOff: () => isOff,
      act: async () => acted++,
    });
    await new Promise((go) => setTimeout(go, 300));
    expect(acted).toBe(0);
    isOff = false;
    await until('it acts', () => acted > 0);
    fs.utimesSync(marker, 1, 1);
    await new Promise((go) => setTimeout(go, 20));
    watch.used();
    expect(fs.statSync(marker).mtimeMs).toBeGreaterThan(Date.now() - 60_000);
    watch.stop();
  });
});

describe.skipIf(agent === undefined || !canRun())('a class of service', { timeout: 120_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  const groupValue = (sandbox: NodeSandbox, file: string) =>
    cgroupsOf(sandbox.facts.id)
      .map((folder) => `${folder}/${file}`)
      .filter((path) => fs.existsSync(path))
      .map((path) => fs.readFileSync(path, 'utf8').trim())[0];

  it('of best effort is idle to the kernel, and stays so over a restart; the other is like every group', async () => {
    const [best, plain] = [await all.create({ class: 'be' }), await all.create()];
    const parents = (sandbox: NodeSandbox) =>
      new Set(cgroupsOf(sandbox.facts.id).map((folder) => basename(dirname(folder))));
    expect([parents(best), parents(plain)]).toEqual([new Set([BEST_EFFORT_PARENT]), new Set([CGROUP_PARENT])]);
    if (groupValue(best, '../cpu.idle') === undefined) {
      expect(groupValue(best, '../cpu.weight') ?? groupValue(best, '../cpu.shares')).toMatch(/^[12]$/);
    } else expect([groupValue(best, '../cpu.idle'), groupValue(plain, '../cpu.idle')]).toEqual(['1', '0']);
    expect([best.facts.resident?.class, plain.facts.resident?.class]).toEqual(['be', undefined]);
    await all.restart();
    expect(all.node.get(best.name).facts.resident?.class).toBe('be');
    expect(await say(all.node.get(best.name), 'echo on')).toBe('on\n');
  });

  it('falls back to weights and SCHED_IDLE, which commands inherit and cannot leave', async () => {
    const box = await all.create();
    const first = Math.min(...processesOf(box));
    const groups = fs.mkdtempSync(`${all.site.root}/groups-`);
    fs.writeFileSync(`${groups}/cpu.shares`, '1024');
    fs.writeFileSync(`${groups}/io.weight`, 'default 100');
    expect(applyClass('be', first, [groups])).toEqual({
      writes: ['cpu.shares=2', 'io.weight=default 1'],
      scheduledWhenIdle: true,
      coreAlone: coreSchedulingMissing() === undefined,
    });
    await box.exec({ args: ['sleep', '1000'] });
    const pids = processesOf(box);
    expect(pids.length).toBe(2);
    expect(pids.map((pid) => isScheduledWhenIdle(pid))).toEqual([true, true]);
    const none = { writes: [], scheduledWhenIdle: false, coreAlone: false };
    expect(applyClass('ls', first, [groups])).toEqual(none);
  });
});
