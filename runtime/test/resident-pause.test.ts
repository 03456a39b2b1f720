/** Sandboxes that are paused: what lives on, what resumes them, what ends them meanwhile, and what a dead service leaves. */
import * as fs from 'node:fs';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { commandGroupsOf } from '../aether/command-group.ts';
import { commandFolders, freezeCommands } from '../aether/freeze.ts';
import { Standing } from '../aether/standing.ts';
import { findAgent } from '../backend/agent-binary.ts';
import { reclaimSandboxes } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { processesOf, ResidentSite, say, told, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

const codeOf = (promise: Promise<unknown>) =>
  promise.then(
    () => 'no error',
    (error: unknown) => (isDsecError(error) ? error.code : String(error)),
  );

/** Each of its commands' groups, as the kernel has it. */
function frozen(sandbox: NodeSandbox): boolean[] {
  return commandFolders(commandGroupsOf(sandbox.facts.id)!).map((folder) =>
    fs.existsSync(`${folder}/freezer.state`)
      ? fs.readFileSync(`${folder}/freezer.state`, 'utf8').trim() === 'FROZEN'
      : /^frozen 1$/m.test(fs.readFileSync(`${folder}/cgroup.events`, 'utf8')),
  );
}

describe.skipIf(agent === undefined || !canRun())('a paused sandbox', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  const counter = 'n=0; while :; do n=$((n + 1)); echo $n > /tmp/n; sleep 0.01; done';
  const upperOf = (sandbox: NodeSandbox) => `${all.site.folders.stateDir}/sandboxes/${sandbox.name}/upper`;

  it('stands still, is resumed by a command, and all of it goes on', async () => {
    const box = await all.create();
    await box.exec({ args: ['sh', '-c', counter] });
    const listening = await box.exec({
      args: ['sh', '-c', 'exec 5>/tmp/open; read word; echo "got $word" >&5'],
      stdin: true,
    });
    await until('it counts', () => fs.existsSync(`${upperOf(box)}/tmp/n`));
    const report = await box.pause();
    expect(report.pausedAt).toMatch(/^\d{4}-/);
    expect(box.state).toBe('paused');
    expect(frozen(box)).toEqual([true, true]);
    const at = fs.readFileSync(`${upperOf(box)}/tmp/n`, 'utf8');
    await new Promise((go) => setTimeout(go, 100));
    expect(fs.readFileSync(`${upperOf(box)}/tmp/n`, 'utf8')).toBe(at);
    // Twice is no error, and tells of the first time.
    expect((await box.pause()).pausedAt).toBe(report.pausedAt);
    // What only looks does not resume it.
    expect((await told(listening, { follow: false })).stdout).toBe('');
    expect(box.state).toBe('paused');
    await listening.write(Buffer.from('this\n'));
    expect((await listening.wait()).exitCode).toBe(0);
    expect(box.state).toBe('running');
    await until('it counts on', () => Number(fs.readFileSync(`${upperOf(box)}/tmp/n`, 'utf8')) > Number(at));
    await box.resume();
    expect(await say(box, 'cat /tmp/open; date +%s')).toMatch(
      new RegExp(`^got this\n${String(Math.floor(Date.now() / 1e6))}`),
    );
    await box.stop({ timeMs: 0 });
    expect([await codeOf(box.pause()), await codeOf(box.resume())]).toEqual([
      'RUNTIME_SANDBOX_GONE',
      'RUNTIME_SANDBOX_GONE',
    ]);
  });

  it('is resumed by every kind of request, once for many', async () => {
    const box = await all.create();
    const shell = await box.openShell();
    await shell.run('x=kept');
    const sleeper = await box.exec({ args: ['sleep', '1000'] });
    const requests: Record<string, () => Promise<unknown>> = {
      exec: () => say(box, 'true'),
      file: () => box.files.write('/tmp/file', Buffer.from('x')),
      shell: () => shell.run('echo $x').then(({ stdout }) => expect(String(stdout)).toBe('kept\n')),
      'new shell': async () => (await box.openShell()).close(),
      use: () => box.use(async () => {}),
      many: () => Promise.all(Array.from({ length: 10 }, (_, n) => say(box, `echo ${n}`))),
      kill: async () => {
        sleeper.kill('SIGTERM');
        expect((await sleeper.wait()).signal).toBe('SIGTERM');
      },
    };
    for (const [name, request] of Object.entries(requests)) {
      await box.pause();
      expect([name, box.state, frozen(box).includes(false)]).toEqual([name, 'paused', false]);
      await request();
      expect([name, box.state, frozen(box).includes(true)]).toEqual([name, 'running', false]);
    }
    await box.stop({ timeMs: 0 });
  });

  it('keeps requests that come while it is being paused', async () => {
    const box = await all.create();
    for (let i = 0; i < 10; i++) {
      const text = say(box, 'echo on');
      await Promise.all([box.pause(), box.files.write('/tmp/x', Buffer.from('x')), box.resume(), box.pause()]);
      // It may have begun before, and stand still now.
      await box.resume();
      expect(await text).toBe('on\n');
      await box.pause();
    }
    expect(await say(box, 'cat /tmp/x')).toBe('x');
    await box.stop({ timeMs: 0 });
  });

  it('does not use up the time of its commands', async () => {
    const box = await all.create();
    const command = await box.exec({ args: ['sh', '-c', 'read x; echo $x'], stdin: true, timeoutMs: 60_000 });
    await box.pause();
    all.node.close();
    // As if all had been an hour ago.
    const folder = `${all.site.folders.stateDir}/sandboxes/${box.name}`;
    const change = (path: string, work: (record: Record<string, never>) => unknown) =>
      fs.writeFileSync(path, JSON.stringify(work(JSON.parse(fs.readFileSync(path, 'utf8')))));
    const earlier = (ms: number) => ms - 3_600_000;
    const journal = `${folder}/commands/journal`;
    const withEarlier = (_all: string, ms: string) => `"deadlineMs":${earlier(Number(ms))}`;
    fs.writeFileSync(journal, fs.readFileSync(journal, 'utf8').replace(/"deadlineMs":(\d+)/, withEarlier));
    change(`${folder}/record.json`, (record) => {
      const resident = record.resident as unknown as { readonly pausedAt: string };
      return {
        ...record,
        resident: { ...resident, pausedAt: new Date(earlier(Date.parse(resident.pausedAt))).toISOString() },
      };
    });
    await all.restart();
    const again = all.node.get(box.name);
    await again.resume();
    await all.restart();
    const third = all.node.get(box.name);
    await third.command(command.id).write(Buffer.from('in time\n'));
    expect(await third.command(command.id).wait()).toMatchObject({ exitCode: 0, timedOut: false });
    await third.stop({ timeMs: 0 });
  });

  it('does not use up the time of a command of a session', async () => {
    const standing = new Standing(0);
    expect([standing.stoodMs(), standing.isStanding]).toEqual([0, false]);
    standing.stand(Date.now() - 5_000);
    const order: string[] = [];
    expect(standing.postpone(() => order.push('first'))).toBe(true);
    const gone = standing.gone().then(() => order.push('then'));
    expect(standing.stoodMs()).toBeGreaterThanOrEqual(5_000);
    standing.go();
    await gone;
    expect([order, standing.postpone(() => {})]).toEqual([['first', 'then'], false]);
    expect(standing.stoodMs()).toBeGreaterThanOrEqual(5_000);
    standing.stand();
    standing.end(new Error('ended'));
    await expect(standing.gone()).rejects.toThrow('ended');
  });

  it('is stopped, politely and not', async () => {
    for (const timeMs of [5_000, 0]) {
      const box = await all.create();
      const command = await box.exec({
        args: ['sh', '-c', 'trap "echo bye > /tmp/bye; exit" TERM; echo set; while :; do sleep 0.05; done'],
      });
      await until('it is set', () => command.total('stdout') > 0);
      await box.pause();
      expect((await box.stop({ timeMs })).reason).toBe('stopped');
      expect(fs.existsSync(`${upperOf(box)}/tmp/bye`)).toBe(timeMs > 0);
      expect(processesOf(box)).toEqual([]);
    }
  });

  it('ends when its time is up', async () => {
    const box = await all.create({ ttlMs: 8_000 });
    await box.exec({ args: ['sleep', '1000'] });
    await box.pause();
    expect(await box.ended).toMatchObject({ reason: 'expired' });
    expect(processesOf(box)).toEqual([]);
  });

  it('ends when its time is up and nobody is there', async () => {
    const box = await all.create({ ttlMs: 8_000, pids: 50 });
    await box.exec({ args: ['sleep', '1000'] });
    await box.update({ pids: 60 });
    await box.pause();
    all.node.close();
    // Its keeper sees to it that what stands still can end.
    await until('nothing of it runs', () => processesOf(box).length === 0);
    await all.restart();
    expect(() => all.node.get(box.name)).toThrow(/has ended: its time was up/);
  });

  it('stays paused when the service is killed and started again', async () => {
    const box = await all.create();
    await box.exec({ args: ['sleep', '1000'] });
    await box.pause();
    await all.restart();
    const again = all.node.get(box.name);
    expect([again.state, frozen(again)]).toEqual(['paused', [true]]);
    expect(await say(again, 'echo on')).toBe('on\n');
    await all.restart();
    const third = all.node.get(box.name);
    expect([third.state, frozen(third)]).toEqual(['running', [false]]);
    await third.stop({ timeMs: 0 });
  });

  it('ends like every other when its keeper is killed', async () => {
    const other = await ResidentSite.open();
    const box = await other.create();
    await box.exec({ args: ['sleep', '1000'] });
    await box.pause();
    const first = Math.min(...processesOf(box));
    const keeper = /^PPid:\s+(\d+)/m.exec(fs.readFileSync(`/proc/${first}/status`, 'utf8'))![1];
    process.kill(Number(keeper), 'SIGKILL');
    expect((await box.ended).reason).toBe('lost');
    await until('nothing of it runs', async () => {
      await reclaimSandboxes(other.site.folders);
      return processesOf(box).length === 0;
    });
    await other.remove();
  });

  it('goes on where a process of it cannot stand still', async () => {
    const parent = fs.mkdtempSync(`${all.site.root}/groups-`);
    fs.mkdirSync(`${parent}/c1`);
    // It takes what is written and never says FROZEN.
    fs.symlinkSync('/dev/null', `${parent}/c1/freezer.state`);
    expect(await codeOf(freezeCommands('x', { parent, version: 1 }, 20))).toBe('RUNTIME_PAUSE_STUCK');
  });
});
