/** Which machines share a template, when one is made, and what becomes of those that are of no use; no machine runs here. */
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { tryLock } from '#linux';
import { fail } from '../errors.ts';
import { findQemu } from '../vm/qemu/accelerator.ts';
import { findProcess, startProcess } from '../vm/qemu/machine-process.ts';
import type { VmSpec } from '../vm/vm-driver.ts';
import type { SandboxVmDriver } from '../vm/vm-drivers.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { endDeadMaker } from '../vm/warm-pool/make-template.ts';
import {
  listTemplates,
  proveTemplate,
  readTemplate,
  removeTemplate,
  snapshotDigests,
  TEMPLATE,
} from '../vm/warm-pool/template-folder.ts';
import { lateSpec, shapeOf } from '../vm/warm-pool/template-shape.ts';
import { WarmPool } from '../vm/warm-pool/warm-pool.ts';

describe.skipIf(findQemu() === undefined)('templates of virtual machines', () => {
  const folder = fs.mkdtempSync(join(tmpdir(), 'dsec-templates-'));
  afterAll(() => fs.rmSync(folder, { recursive: true, force: true }));
  const kernel = join(folder, 'kernel');
  fs.writeFileSync(kernel, 'kernel');
  const started: VmSpec[] = [];
  const forgotten: string[] = [];
  let refusal: Error | undefined;
  let held: Promise<void> | undefined;
  let arrived = () => {};
  const driver = {
    name: 'qemu',
    clockArguments: 'tsc_early_khz=1',
    features: { accelerator: 'tcg' },
    sweep: async () => {},
    start: async (spec: VmSpec) => {
      started.push(spec);
      throw fail('VM_START', { id: spec.id, reason: 'there is none' });
    },
    restore: async (spec: VmSpec) => {
      arrived();
      await held;
      throw refusal ?? fail('VM_START', { id: spec.id, reason: 'it does not take the state' });
    },
    forgetSnapshot: (path: string) => forgotten.push(path),
  } as unknown as SandboxVmDriver;
  const spec: VmSpec = {
    id: 'one',
    folder: '/run/one',
    boot: { kernel, initrd: '/a/guest-1-2.cpio', commandLine: `quiet ${driver.clockArguments} last` },
    cpus: 1,
    memoryBytes: 128 << 20,
    memoryFile: '/dev/shm/one',
    drives: [],
    ports: [{ name: 'agent', socket: '/run/one/agent.sock' }],
  };
  const keyOf = (change: Partial<VmSpec> = {}) => shapeOf(lateSpec({ ...spec, ...change }), driver).key;

  it('are shared by machines that differ in what comes later', () => {
    const layer = join(folder, 'layer');
    fs.writeFileSync(layer, Buffer.alloc(2 << 20));
    const drives = [
      { id: 'l0', source: { file: layer }, readOnly: true, transport: 'pmem' },
      { id: 'upper', source: { nbd: '/run/other/disk.sock' }, readOnly: false, transport: 'blk' },
    ] as const;
    const other: Partial<VmSpec> = {
      id: 'other',
      folder: '/run/other',
      memoryFile: '/dev/shm/other',
      ports: [{ name: 'agent', socket: '/run/other/agent.sock' }],
      drives,
      network: { tap: 'tap0', mac: '02:00:00:00:00:01' },
      cgroups: ['/sys/fs/cgroup/x'],
      serviceClass: 'be',
    };
    expect(keyOf(other)).toBe(keyOf());
    // What a machine with pmem says of its end, and what its clock was told.
    const boot = {
      kernel,
      initrd: '/b/guest-1-2.cpio',
      commandLine: `quiet dsec.end=off ${driver.clockArguments} last`,
    };
    expect(keyOf({ boot })).toBe(keyOf());
  });

  it('are of one size, one kernel and one way to keep memory small', () => {
    const boot = { kernel, initrd: '/a/guest-1-3.cpio', commandLine: 'quiet last' };
    const keys = [
      keyOf(),
      keyOf({ cpus: 2 }),
      keyOf({ memoryBytes: 256 << 20 }),
      keyOf({ balloon: { freePageReporting: true } }),
      keyOf({ boot }),
      keyOf({ boot: { ...boot, commandLine: 'quiet' } }),
    ];
    fs.writeFileSync(kernel, 'another kernel');
    keys.push(keyOf());
    expect(new Set(keys).size).toBe(keys.length);
  });

  const stateDir = join(folder, 'state');

  it('are made when a shape is asked for twice, and not again and again when they cannot be', async () => {
    const notes: string[] = [];
    const pool = new WarmPool({ stateDir, runDir: join(folder, 'run'), onNote: (text) => notes.push(text) });
    const ask = async () => {
      const vm = await pool.start(driver, spec, []);
      await pool.made();
      return vm;
    };
    expect(await ask()).toBeUndefined();
    expect(started).toEqual([]);
    for (let i = 0; i < 6; i++) expect(await ask()).toBeUndefined();
    expect(started.length).toBe(3);
    expect(started[0]).toMatchObject({ lateDevices: true, drives: [], serviceClass: 'be' });
    expect(notes.length).toBe(3);
    expect(notes[0]).toMatch(/no template .* there is none/);
    expect(fs.readdirSync(join(stateDir, 'vm/templates')).filter((name) => name !== 'lock')).toEqual([]);
    await pool.close();
  });

  const lockPath = join(stateDir, 'vm/templates/lock');

  it('are given up at once when the service closes, though somebody else has the turn', async () => {
    const lock = tryLock(lockPath)!;
    const pool = new WarmPool({ stateDir, runDir: join(folder, 'run') });
    for (let i = 0; i < 2; i++) expect(await pool.start(driver, spec, [])).toBeUndefined();
    await pool.close();
    lock.release();
    expect(started.length).toBe(3);
  });

  it.skipIf(process.geteuid?.() !== 0)('that somebody was killed over leave no machine', async () => {
    const places = { stateDir, runDir: join(folder, 'run') };
    const maker = vmPlaces(places.runDir, 'template');
    await endDeadMaker(places);
    fs.mkdirSync(maker.folder, { recursive: true });
    startProcess('sleep', ['600'], { ...spec, folder: maker.folder, memoryFile: join(folder, 'memory') });
    const lock = tryLock(lockPath)!;
    await endDeadMaker(places);
    expect(findProcess(maker.folder)).toBeGreaterThan(0);
    lock.release();
    await endDeadMaker(places);
    expect(findProcess(maker.folder)).toBeUndefined();
    expect(fs.existsSync(maker.folder)).toBe(false);
  });

  async function plant(key: string): Promise<string> {
    const place = join(stateDir, 'vm/templates', key);
    const snapshot = join(place, 's-0123456789abcdef');
    fs.mkdirSync(snapshot, { recursive: true });
    fs.writeFileSync(join(snapshot, 'state'), 'state');
    fs.writeFileSync(join(snapshot, 'memory.lsmt'), 'memory');
    const { digests, bytes } = await snapshotDigests(snapshot);
    const record = {
      version: 1,
      key,
      world: 'w',
      cpus: 1,
      memoryBytes: 1,
      reporting: false,
      made: '',
      kernel: '',
      bytes,
    };
    fs.writeFileSync(join(place, TEMPLATE), JSON.stringify({ ...record, snapshot: 's-0123456789abcdef', digests }));
    return snapshot;
  }

  it('that cannot be restored go when it happens again and again, and the machine is booted', async () => {
    const notes: string[] = [];
    const key = keyOf();
    const snapshot = await plant(key);
    const pool = new WarmPool({ stateDir, runDir: join(folder, 'run'), onNote: (text) => notes.push(text) });
    refusal = fail('VM_SPEC', { id: 'one', field: 'drives', problem: 'too much' });
    // Not its fault, and twice it may not be.
    expect(await pool.start(driver, spec, [])).toBeUndefined();
    refusal = fail('VM_GUEST_SILENT', { seconds: 60 });
    expect(await pool.start(driver, spec, [])).toBeUndefined();
    refusal = Object.assign(new Error('no room'), { code: 'ENOSPC' });
    expect(await pool.start(driver, spec, [])).toBeUndefined();
    expect(readTemplate(stateDir, key)?.snapshotFolder).toBe(snapshot);
    refusal = undefined;
    expect(await pool.start(driver, spec, [])).toBeUndefined();
    expect(notes).toEqual([
      expect.stringMatching(/is booted, .*too much/),
      expect.stringMatching(/is booted, .*has not answered/),
      expect.stringMatching(/is booted, .*no room/),
      expect.stringMatching(/is booted, .*does not take the state/),
    ]);
    expect(readTemplate(stateDir, key)).toBeUndefined();
    expect(forgotten).toEqual([snapshot]);
    await pool.close();
  });

  it('that are broken go at once, and their memory when the last machine has it', async () => {
    forgotten.length = 0;
    const key = keyOf();
    const snapshot = await plant(key);
    const pool = new WarmPool({ stateDir, runDir: join(folder, 'run') });
    let goOn = () => {};
    held = new Promise((resolve) => {
      goOn = resolve;
    });
    const underWay = new Promise<void>((resolve) => {
      arrived = resolve;
    });
    const slow = pool.start(driver, spec, []);
    await underWay;
    fs.writeFileSync(join(snapshot, 'state'), 'statf');
    expect(await pool.start(driver, spec, [])).toBeUndefined();
    expect(readTemplate(stateDir, key)).toBeUndefined();
    expect(forgotten).toEqual([]);
    goOn();
    expect(await slow).toBeUndefined();
    expect(forgotten).toEqual([snapshot]);
    held = undefined;
    await pool.close();
  });

  it('are proved to be what they were made as, and nothing else is one', async () => {
    const key = 'a'.repeat(24);
    const snapshot = await plant(key);
    const template = readTemplate(stateDir, key)!;
    await proveTemplate(template);
    for (const [name, text] of [
      ['memory.lsmt', 'memorx'],
      ['state', 'stat'],
    ] as const) {
      const before = fs.readFileSync(join(snapshot, name));
      fs.writeFileSync(join(snapshot, name), text);
      await expect(proveTemplate(template)).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
      fs.writeFileSync(join(snapshot, name), before);
      await proveTemplate(template);
    }
    fs.rmSync(join(snapshot, 'state'));
    await expect(proveTemplate(template)).rejects.toMatchObject({ code: 'VM_SNAPSHOT_DAMAGED' });
    const path = join(template.folder, TEMPLATE);
    const record = JSON.parse(fs.readFileSync(path, 'utf8'));
    for (const text of [
      '',
      'null',
      '[]',
      JSON.stringify({ ...record, version: 2 }),
      JSON.stringify({ ...record, key: 'b'.repeat(24) }),
      JSON.stringify({ ...record, snapshot: '../../x' }),
      JSON.stringify({ ...record, snapshot: undefined }),
    ]) {
      fs.writeFileSync(path, text);
      expect(readTemplate(stateDir, key), text).toBeUndefined();
    }
    expect(readTemplate(stateDir, '../templates')).toBeUndefined();
    expect(listTemplates(stateDir)).toEqual([]);
    removeTemplate(stateDir, key);
    removeTemplate(stateDir, key);
  });
});
