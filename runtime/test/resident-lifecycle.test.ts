/** Sandboxes that stay, at the edges of their lives: many first ones at once, the same request again after a restart, removal, what is left when all that kept them was killed. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import { listSandboxes, reclaimSandboxes, removeSandbox } from '../index.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('sandboxes that stay', { timeout: 120_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  it('share one keeper when the first of them are made at once', async () => {
    const made = await Promise.all([1, 2, 3, 4].map((number) => all.create({ name: `first${number}` })));
    expect(await Promise.all(made.map((sandbox) => say(sandbox, 'echo here')))).toEqual(Array(4).fill('here\n'));
    await Promise.all(made.map(({ name }) => all.node.remove(name, { force: true })));
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  it('are made once for a request, whatever is restarted in between', async () => {
    const asked = { requestId: 'one of its kind', name: 'asked' };
    const made = await all.create(asked);
    await say(made, 'echo kept > /tmp/mark');
    await all.restart();
    const again = await all.create({ ...asked, name: 'another' });
    expect(again.facts.id).toBe(made.facts.id);
    expect(await say(again, 'cat /tmp/mark')).toBe('kept\n');
    await again.stop({ timeMs: 0 });
    for (const restarted of [false, true]) {
      if (restarted) await all.restart();
      await expect(all.create(asked)).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
    }
    await removeSandbox('asked', all.site.folders);
    // Nothing tells of it any more.
    expect((await all.create(asked)).facts.id).not.toBe(made.facts.id);
    await all.node.remove('asked', { force: true });
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  it('are removed while they run only when that is asked for, and then with all that they had', async () => {
    const sandbox = await all.create({ name: 'gone' });
    await say(sandbox, 'for i in $(seq 200); do echo $i > /tmp/$i; done; head -c 3000000 /dev/zero > /tmp/large');
    await expect(all.node.remove('gone')).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_RUNNING' });
    expect(await say(sandbox, 'echo here')).toBe('here\n');
    await all.node.remove('gone', { force: true });
    expect(sandbox.end).toMatchObject({ reason: 'stopped' });
    expect(all.site.leftovers()).toEqual(NOTHING);
    await expect(all.node.remove('gone', { force: true })).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_NOT_FOUND',
    });
    const ended = await all.create({ name: 'ended' });
    await ended.stop({ timeMs: 0 });
    await all.node.remove('ended');
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  it('leave what is reclaimed, many at once, while others are made', async () => {
    const COUNT = 24;
    await Promise.all(Array.from({ length: COUNT }, (_, i) => all.create({ name: `stale${i}` })));
    all.node.close();
    process.kill(keeperPid(), 'SIGKILL');
    await all.restart();
    const reclaimed = reclaimSandboxes(all.site.folders);
    const made = await all.create({ name: 'fresh' });
    expect(await say(made, 'echo here')).toBe('here\n');
    const { kept, problems } = await reclaimed;
    expect(problems).toEqual([]);
    expect(kept.length).toBe(COUNT);
    const records = listSandboxes(all.site.folders).filter(({ name }) => name.startsWith('stale'));
    expect(new Set(records.map(({ end }) => end?.reason))).toEqual(new Set(['lost']));
    await Promise.all(records.map(({ name }) => all.node.remove(name)));
    await all.node.remove('fresh', { force: true });
    expect(all.site.leftovers()).toEqual(NOTHING);
  });

  function keeperPid(): number {
    const children = readdirSync('/proc/self/task').flatMap((thread) =>
      readFileSync(`/proc/self/task/${thread}/children`, 'utf8').split(' ').filter(Boolean).map(Number),
    );
    const isKeeper = (pid: number) =>
      existsSync(`/proc/${pid}/comm`) && readFileSync(`/proc/${pid}/comm`, 'utf8').trim() === 'dsec-keeper';
    return children.find(isKeeper)!;
  }
});
