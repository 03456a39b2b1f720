/** Forks of a full machine with its memory: each is where that one was, and goes on by itself; nothing is asked of what runs in it. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type Image, openDiskImage } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { SandboxNode } from '../node/sandbox-node.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import type { Moment } from '../vm/fork/moment.ts';
import type { FullVmSandbox } from '../vm/full/full-vm-sandbox.ts';
import { fullVmProblem } from '../vm/vm-support.ts';
import { hasNetworkTools } from './network-tools.ts';
import { NetworkWorld } from './network-world.ts';
import { until } from './resident-fixture.ts';
import { canRun, Site } from './sandbox-fixture.ts';

const canTry = canRun() && findAgent() !== undefined && fullVmProblem() === undefined && hasNetworkTools();

/** The machine says each key that is pressed on its serial line (scripts/echo-image.mjs). */
describe.skipIf(!canTry)('forks of a full machine with its memory', { timeout: 300_000 }, () => {
  let world: NetworkWorld;
  let site: Site;
  let node: SandboxNode;
  let image: Image;
  let one: FullVmSandbox;
  let stateDir: string;
  const heard = new Map<string, string>();

  const openNode = () => SandboxNode.open({ agent: findAgent()!, folders: { ...site.folders, stateDir } });
  const folderOf = (name: string) => sandboxFolders({ ...site.folders, stateDir }, name).folder;
  const momentsOf = (name: string) => fs.readdirSync(folderOf(name)).filter((entry) => entry.startsWith('moment-'));
  const machine = (name: string) => node.get(name) as FullVmSandbox;
  /** What it says from now on. */
  const hear = async (name: string) => {
    heard.set(name, '');
    (await machine(name).console()).follow((bytes) => heard.set(name, heard.get(name)! + bytes.toString('latin1')));
  };
  /** Firmware that is still at work loses keys. */
  const press = async (name: string, key: string) => {
    while (!heard.get(name)!.includes(key)) {
      await machine(name).act([{ type: 'key', keys: [key] }]);
      await delay(200);
    }
  };
  const fork = (name: string, moment: Moment, more: object = {}) =>
    node.create({
      backend: 'vm',
      store: site.store,
      base: image,
      name,
      memoryBytes: 32 << 20,
      network: { mode: 'policy' },
      moment,
      ...more,
    });

  beforeAll(async () => {
    world = await NetworkWorld.open();
    site = await new Site().open();
    stateDir = join(site.root, 'small');
    fs.mkdirSync(stateDir);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=64m,mode=700', 'dsec-test', stateDir]);
    const places = { DSEC_STORE: join(site.root, 'store'), DSEC_STATE: stateDir, DSEC_RUN: site.folders.runDir };
    const script = join(import.meta.dirname, '../../scripts/echo-image.mjs');
    const env = { ...process.env, ...places, DSEC_CACHE: site.folders.cacheDir };
    execFileSync(process.execPath, [script, '--image', 'echo:1'], { env, stdio: 'pipe' });
    image = await openDiskImage(site.store, 'echo:1');
    node = await openNode();
    const options = { backend: 'vm', store: site.store, base: image, memoryBytes: 32 << 20 };
    one = (await node.create({ ...options, name: 'one', network: { mode: 'policy' } })) as FullVmSandbox;
    await hear('one');
    await press('one', 'a');
  }, 300_000);
  afterAll(async () => {
    await Promise.all(node.list().map((sandbox) => sandbox.destroy()));
    await node.close();
    world.close();
    execFileSync('umount', ['-l', stateDir]);
    await site.remove();
  }, 120_000);

  it('show what it showed, stand still until all are there, and go on by themselves', async () => {
    const moment = await one.takeMoment();
    const forks = await Promise.all(['two', 'three'].map((name) => fork(name, moment)));
    const idle = await fork('idle', moment, { idleMs: 1000, idleAction: 'pause' });
    await moment.discard();
    expect(momentsOf('one')).toEqual([]);
    const shown = await one.screenshot();
    for (const name of ['two', 'three']) {
      await hear(name);
      expect((await machine(name).screenshot()).equals(shown), name).toBe(true);
      // Nothing of it runs.
      await expect(machine(name).act([{ type: 'key', keys: ['b'] }])).rejects.toMatchObject({ code: 'VM_MONITOR' });
    }
    // It is not idle, however long the others take: when that was looked at is the time of a folder.
    const looked = () => fs.statSync(sandboxFolders({ ...site.folders, stateDir }, 'idle').commands).mtimeMs;
    const before = looked();
    await until('its idleness was looked at', () => looked() > before);
    expect([idle.state, idle.end]).toEqual(['running', undefined]);
    await idle.destroy();
    // Whoever would have it go on waits.
    const copy = machine('two').besideDisk('copy.qcow2');
    let copied = false;
    const copying = machine('two')
      .copyDisk(copy)
      .then(() => {
        copied = true;
      });
    await Promise.all(forks.map((sandbox) => sandbox.markReady()));
    await expect(machine('two').act([{ type: 'key', keys: ['b'] }])).rejects.toMatchObject({ code: 'VM_MONITOR' });
    expect([copied, fs.existsSync(copy)]).toEqual([false, false]);
    await Promise.all(forks.map((sandbox) => sandbox.goOn()));
    await copying;
    fs.rmSync(copy);
    await press('two', 'c');
    await press('three', 'd');
    await press('one', 'e');
    expect([...heard.get('two')!, ...heard.get('three')!].filter((key) => 'ae'.includes(key))).toEqual([]);
    expect(heard.get('one')).not.toMatch(/[cd]/);
    const numbers = ['one', 'two', 'three'].map((name) => machine(name).facts.network);
    expect(new Set(numbers.map((network) => network?.mode === 'policy' && network.ipv4)).size).toBe(3);
    // The card is in the memory: its number is that of the first.
    expect(machine('two').facts.machine?.cardOf).toBe((numbers[0] as { number: number }).number);
  });

  it('are made of one that is paused, which stays so, and of a fork', async () => {
    await machine('two').pause();
    const moment = await machine('two').takeMoment();
    await (await fork('four', moment)).goOn();
    await moment.discard();
    expect(machine('two').state).toBe('paused');
    await hear('four');
    await press('four', 'f');
    expect(machine('four').facts.machine?.cardOf).toBe(machine('two').facts.machine?.cardOf);
    await machine('two').resume();
    await hear('two');
    await press('two', 'g');
    await node.remove('four', { force: true });
  });

  it('are those of before for the next service; of moments that nobody finished nothing stays', async () => {
    await node.close();
    fs.mkdirSync(join(folderOf('one'), 'moment-of-one-that-was-killed'));
    node = await openNode();
    one = machine('one');
    expect(momentsOf('one')).toEqual([]);
    for (const name of ['one', 'two', 'three']) {
      await hear(name);
      await press(name, 'h');
    }
  });

  it('are not made when the disk is full; it goes on', async () => {
    const filler = fs.openSync(join(stateDir, 'filler'), 'w');
    try {
      for (;;) fs.writeSync(filler, Buffer.alloc(4096));
    } catch (error) {
      expect(error).toMatchObject({ code: 'ENOSPC' });
    } finally {
      fs.closeSync(filler);
    }
    await expect(one.takeMoment()).rejects.toMatchObject({ http: 507 });
    expect(momentsOf('one')).toEqual([]);
    await press('one', 'i');
    fs.rmSync(join(stateDir, 'filler'));
  });

  it('leave nothing', async () => {
    const ids = node.list().map(({ facts }) => facts.id);
    for (const name of ['one', 'two', 'three']) await node.remove(name, { force: true });
    expect(fs.readdirSync('/dev/shm').filter((entry) => ids.some((id) => entry.includes(id)))).toEqual([]);
    expect(fs.readdirSync(join(stateDir, 'sandboxes')).filter((entry) => !entry.startsWith('.'))).toEqual([]);
  });
});
