/** A `dsec run` that is killed, or gets signals, in a process of its own. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import {
  forceRemoveSandbox,
  listSandboxes,
  reclaimSandboxes,
  removeSandbox,
  runContainer,
  stopSandbox,
  withKeptSandbox,
} from '../index.ts';
import { makeLockFolder } from '../node/create-sandbox.ts';
import { writeRecord } from '../sandbox/sandbox-record.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { machineRecord } from '../vm/full/create-machine.ts';
import { busybox, canRun, NOTHING, Site, type Spawned } from './sandbox-fixture.ts';

describe.skipIf(!canRun())('the process that runs a sandbox', () => {
  let site: Site;
  let base: Image;
  let running: Spawned | undefined;
  beforeAll(async () => {
    site = await new Site().open();
    base = await site.image('bb:1', [busybox], { Env: ['PATH=/bin'] });
  });
  afterEach(() => {
    running?.child.kill('SIGKILL');
    running = undefined;
  });
  afterAll(() => site.remove());
  const start = (script: string, options: Partial<Parameters<Site['spawn']>[0]> = {}, env?: NodeJS.ProcessEnv) => {
    running = site.spawn({ image: 'bb:1', command: ['sh', '-c', script], ...options }, env);
    return running;
  };
  const pidsOf = (id: string) =>
    cgroupsOf(id).flatMap((group) =>
      fs.readFileSync(join(group, 'cgroup.procs'), 'latin1').split('\n').filter(Boolean),
    );

  it('passes streams and exit status through', async () => {
    const run = start('cat; echo err >&2; exit 42');
    run.child.stdin!.end('through');
    expect(await run.finished).toEqual({ code: 42, signal: null });
    expect([run.stdout.toString(), run.stderr]).toEqual(['through', 'err\n']);
  });

  it('exits with 127 for a command that is not there', async () => {
    const run = start('', { command: ['nope'] });
    expect((await run.finished).code).toBe(127);
    expect(run.stderr).toContain('nope: command not found');
  });

  it.each(['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT', 'SIGUSR1', 'SIGUSR2', 'SIGWINCH'] as const)(
    'passes %s on',
    async (signal) => {
      const name = signal.slice(3);
      const run = start(`trap 'echo got ${name}; exit 9' ${name}; echo ready; while :; do sleep 0.05; done`);
      await run.sees('ready');
      run.child.kill(signal);
      expect(await run.finished).toEqual({ code: 9, signal: null });
      expect(run.stdout.toString()).toBe(`ready\ngot ${name}\n`);
    },
  );

  it.each([
    ['SIGTERM', 143],
    ['SIGINT', 130],
    ['SIGHUP', 129],
    ['SIGQUIT', 131],
    ['SIGUSR1', 138],
    ['SIGUSR2', 140],
    ['SIGALRM', 142],
  ] as const)('ends a command that does not care for %s: %i', async (signal, code) => {
    const run = start('', { command: ['sleep', '1000'] });
    await run.runs('sleep');
    run.child.kill(signal);
    expect(await run.finished).toEqual({ code, signal: null });
    expect(run.stderr).toBe('');
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('ends by no signal that is harmless by default', async () => {
    const run = start('', { command: ['sh', '-c', 'echo ready; exec cat'] });
    await run.sees('ready');
    for (const signal of ['SIGWINCH', 'SIGCONT'] as const) run.child.kill(signal);
    run.child.stdin!.end('still here');
    expect(await run.finished).toEqual({ code: 0, signal: null });
    expect(run.stdout.toString()).toContain('still here');
  });

  describe('stopped by another process', () => {
    it('ends what does not care, as SIGTERM would', async () => {
      const run = start('', { command: ['sleep', '1000'], name: 'stopped' });
      await run.runs('sleep');
      expect(await stopSandbox('stopped', { folders: site.folders })).toEqual({
        name: 'stopped',
        was: 'ended',
        killed: false,
        kept: false,
      });
      expect(await run.finished).toEqual({ code: 143, signal: null });
      expect(site.leftovers()).toEqual(NOTHING);
    });

    it('lets a handler work, and keeps what was to be kept', async () => {
      const script = `trap 'echo end > /f; exit 9' TERM; echo ready; while :; do sleep 0.05; done`;
      const run = start(script, { name: 'graceful', keep: true });
      await run.sees('ready');
      await expect(removeSandbox('graceful', site.folders)).rejects.toMatchObject({
        code: 'RUNTIME_SANDBOX_RUNNING',
        hint: expect.stringContaining('dsec sandbox stop graceful'),
      });
      await expect(withKeptSandbox('graceful', async () => 0, site.folders)).rejects.toMatchObject({
        hint: expect.not.stringContaining('--name'),
      });
      const stopped = await stopSandbox('graceful', { folders: site.folders });
      expect(stopped).toMatchObject({ was: 'ended', killed: false, kept: true });
      expect((await run.finished).code).toBe(9);
      expect(await stopSandbox('graceful', { folders: site.folders })).toMatchObject({ was: 'not-running' });
      const read = async ({ upper }: { upper: string }) => fs.readFileSync(join(upper, 'f'), 'utf8');
      expect(await withKeptSandbox('graceful', read, site.folders)).toBe('end\n');
      await forceRemoveSandbox('graceful', site.folders);
      expect(site.leftovers()).toEqual(NOTHING);
    });

    it('kills what ignores it, and --force removes it', async () => {
      const command = ['sh', '-c', "trap '' TERM; echo ready; exec sleep 1000"];
      const run = start('', { command, name: 'stubborn' });
      await run.sees('ready');
      expect(await stopSandbox('stubborn', { timeMs: 100, folders: site.folders })).toMatchObject({ killed: true });
      expect((await run.finished).code).toBe(137);
      const again = start('', { command, name: 'stubborn', keep: true });
      await again.sees('ready');
      await forceRemoveSandbox('stubborn', site.folders);
      expect((await again.finished).code).toBe(137);
      expect(site.leftovers()).toEqual(NOTHING);
    });

    it('is told that there is none', async () => {
      await expect(stopSandbox('nobody', { folders: site.folders })).rejects.toMatchObject({
        code: 'RUNTIME_SANDBOX_NOT_FOUND',
      });
    });
  });

  it('gives a signal to the sandbox once, also when the whole process group gets it', async () => {
    const run = start(`trap 'echo got' INT; echo ready; cat; echo end`);
    await run.sees('ready');
    for (let i = 0; i < 2; i++) {
      run.child.kill('SIGINT');
      await delay(100);
    }
    run.child.stdin!.end();
    await run.finished;
    expect(run.stdout.toString()).not.toContain('got\ngot\ngot');
  });

  it('kills after the third interrupt in a row what does not listen', async () => {
    const run = start('', { command: ['sh', '-c', "trap '' INT; echo ready; exec sleep 1000"] });
    await run.sees('ready');
    for (let i = 0; i < 3; i++) {
      run.child.kill('SIGINT');
      await delay(50);
    }
    expect(await run.ended).toEqual({ code: 137, signal: null });
  });

  it('is killed: the sandbox is ended and every trace removed by the next command', async () => {
    const run = start('(setsid sleep 1000 &) ; echo ready; sleep 1000');
    await run.sees('ready');
    const [record] = listSandboxes(site.folders);
    expect(pidsOf(record!.id).length).toBeGreaterThan(1);
    // In use: left alone.
    expect(await reclaimSandboxes(site.folders)).toEqual({ removed: [], kept: [], problems: [] });

    run.child.kill('SIGKILL');
    await run.ended;
    expect(await reclaimSandboxes(site.folders)).toEqual({ removed: [record!.name], kept: [], problems: [] });
    expect(pidsOf(record!.id)).toEqual([]);
    expect(cgroupsOf(record!.id)).toEqual([]);
    expect(site.leftovers()).toEqual(NOTHING);
    expect(await reclaimSandboxes(site.folders)).toEqual({ removed: [], kept: [], problems: [] });
  });

  it('is killed while it was to keep the sandbox: what was changed stays', async () => {
    const run = start('echo precious > /file; echo ready; sleep 1000', { keep: true, name: 'keeper' });
    await run.sees('ready');
    run.child.kill('SIGKILL');
    await run.ended;
    // Any run puts it right.
    expect((await site.run(base, ['true'])).exitCode).toBe(0);
    expect(listSandboxes(site.folders)).toMatchObject([{ name: 'keeper', state: 'kept' }]);
    const { mounts, runtime } = site.leftovers();
    expect({ mounts, runtime }).toEqual({ mounts: [], runtime: [] });
    await withKeptSandbox(
      'keeper',
      async ({ upper }) => {
        expect(fs.readdirSync(upper)).toEqual(['file']);
        await expect(removeSandbox('keeper', site.folders)).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_BUSY' });
      },
      site.folders,
    );
    await removeSandbox('keeper', site.folders);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it.each([
    'run-recorded',
    'mount-recorded',
    'mount-attached',
    'run-mounted',
    'run-mount-points',
    'run-launched',
    'run-exited',
    'run-dismantled',
  ])('is killed at %s: nothing stays', async (point) => {
    const run = start('echo x > /x; exit 0', {}, { DSEC_FAILPOINT: point });
    expect(await run.ended).toEqual({ code: null, signal: 'SIGKILL' });
    expect((await reclaimSandboxes(site.folders)).problems).toEqual([]);
    expect((await site.run(base, ['true'])).exitCode).toBe(0);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('is killed at random moments, again and again: nothing stays', async () => {
    for (let i = 0; i < 8; i++) {
      const run = start('for i in 1 2 3 4 5; do echo $i > /$i; sleep 0.01; done');
      await delay(300 + Math.random() * 900);
      run.child.kill('SIGKILL');
      await run.ended;
    }
    // What the runtime's own process was doing when it died with ours settles in no time, but not in none.
    await delay(100);
    expect((await reclaimSandboxes(site.folders)).problems).toEqual([]);
    expect((await site.run(base, ['true'])).exitCode).toBe(0);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('gives a terminal of its own, as large as ours', async () => {
    if (!fs.existsSync('/usr/bin/script')) return console.log('skipped: script is not installed');
    const script = 'stty rows 33 cols 77; exec "$0" "$@"';
    const inside = 'tty; stty size; test -t 0 && test -t 1 && test -t 2; echo "all $?"; echo "$TERM"; exit 6';
    const run = site.spawn({ image: 'bb:1', command: ['sh', '-c', inside], terminal: true }, {}, (argv) => [
      'script',
      '-qec',
      [`sh -c '${script}'`, ...argv.map((word) => `'${word.replaceAll("'", "'\\''")}'`)].join(' '),
      '/dev/null',
    ]);
    expect((await run.finished).code).toBe(6);
    expect(run.stdout.toString().split('\r\n').slice(0, 4)).toEqual(['/dev/pts/0', '33 77', 'all 0', 'xterm']);
  });

  it('refuses a terminal where it has none itself', async () => {
    const run = start('true', { terminal: true });
    expect((await run.finished).code).toBe(2);
    expect(run.stderr).toContain('RUNTIME_NO_TERMINAL');
  });

  it('refuses a name in use', async () => {
    const run = start('echo ready; sleep 1000', { name: 'taken' });
    await run.sees('ready');
    await expect(site.run(base, ['true'], { name: 'taken' })).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_RUNNING',
    });
    run.child.kill('SIGKILL');
    await run.ended;
  });

  it('was to be kept and its process was killed: packing finds it put right', async () => {
    const run = start('echo 1 > /file; echo ready; sleep 1000', { keep: true, name: 'late' });
    await run.sees('ready');
    run.child.kill('SIGKILL');
    await run.ended;
    const seen = await withKeptSandbox(
      'late',
      async ({ upper, state }) => [state, fs.readdirSync(upper)],
      site.folders,
    );
    expect(seen).toEqual(['kept', ['file']]);
    await removeSandbox('late', site.folders);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('was making forks of a machine that has gone: of its memory nothing stays', async () => {
    const places = sandboxFolders(site.folders, 'gone');
    const options = { backend: 'vm', store: site.store, base, memoryBytes: 32 << 20 };
    fs.mkdirSync(join(places.folder, 'moment-of-then/machine'), { recursive: true });
    makeLockFolder(places);
    writeRecord(places.record, machineRecord('gone', options), false);
    expect(await reclaimSandboxes(site.folders)).toEqual({ removed: [], kept: ['gone'], problems: [] });
    expect(fs.readdirSync(places.folder)).not.toContain('moment-of-then');
    await removeSandbox('gone', site.folders);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('leaves a damaged record and what lies beside it alone, and says so', async () => {
    const folder = join(site.folders.stateDir, 'sandboxes/hurt');
    fs.mkdirSync(join(folder, 'upper'), { recursive: true });
    fs.writeFileSync(join(folder, 'record.json'), '{"version": 1, "name"');
    const report = await reclaimSandboxes(site.folders);
    expect(report.problems).toEqual([expect.stringContaining('hurt: ')]);
    expect(fs.existsSync(join(folder, 'upper'))).toBe(true);
    await expect(
      runContainer({ store: site.store, base, command: ['true'], name: 'hurt', folders: site.folders }),
    ).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_RECORD',
    });
    fs.rmSync(folder, { recursive: true });
  });
});
