/** Virtual machines that begin from a template instead of booting: each is its own, does all that one that has booted does, and no template is needed. */
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { findAgent } from '../backend/agent-binary.ts';
import { reclaimSandboxes } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { findProcess, readMachineRecord } from '../vm/qemu/machine-process.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { prepareTemplate, type TemplateWish, templateStates } from '../vm/warm-pool/prepare-template.ts';
import { bundledChild } from './bundled-child.ts';
import { COMMAND_CASES } from './conformance-commands.ts';
import { say, told, until } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRunVms, createVm, ResidentSite, SMALL_VM } from './vm-site.ts';

const MEMORY = 128 << 20;
const SIZE: TemplateWish = { cpus: 1, memoryBytes: MEMORY, reporting: false };
const CYCLES = 20;

async function killedAt(point: string, program: string, order: object): Promise<void> {
  const child = bundledChild(new URL(program, import.meta.url));
  try {
    const running = spawn(process.execPath, [child.path, JSON.stringify(order)], {
      stdio: ['ignore', 'inherit', 'inherit'],
      env: { ...process.env, DSEC_FAILPOINT: point },
    });
    expect(await new Promise((resolve) => running.once('exit', (_code, by) => resolve(by)))).toBe('SIGKILL');
  } finally {
    child.remove();
  }
}

describe.skipIf(!canRunVms())('virtual machines out of a template', { timeout: 900_000 }, () => {
  let all: ResidentSite;
  let one: NodeSandbox;
  let other: NodeSandbox;
  const notes: string[] = [];
  const recordOf = (box: NodeSandbox) => readMachineRecord(vmPlaces(all.site.folders.runDir, box.facts.id).folder);
  const make = (options: Parameters<typeof createVm>[1] = {}) =>
    createVm(all, { memoryBytes: MEMORY, env: ['GIVEN=1'], ...options });
  const prepare = () => prepareTemplate(SIZE, all.site.folders, findAgent()!.path);

  beforeAll(async () => {
    all = await ResidentSite.open('busybox', { vmPool: true, onNote: (text) => notes.push(text) });
  }, 600_000);
  afterAll(() => all?.remove(), 300_000);

  it('is made once, after one that nobody finished, of which nothing stays', async () => {
    const { folders } = all.site;
    await killedAt('template-booting', './template-child.ts', { wish: SIZE, folders });
    const maker = vmPlaces(folders.runDir, 'template');
    expect(findProcess(maker.folder)).toBeGreaterThan(0);
    const made = await prepare();
    expect(fs.existsSync(maker.folder)).toBe(false);
    expect(fs.existsSync(maker.memoryFile)).toBe(false);
    expect(fs.readdirSync(join(folders.stateDir, 'vm/templates')).sort()).toEqual([made.key, 'lock'].sort());
    expect((await prepare()).snapshot).toBe(made.snapshot);
    expect(templateStates(folders, findAgent()!.path)).toEqual([expect.objectContaining({ isUseful: true })]);
  });

  it('differ in all that has to be their own', async () => {
    one = await make();
    // Its layers are of another kind, and it has a second disk: of the same template all the same.
    other = await make({
      memory: { ...SMALL_VM.memory, pmem: true },
      dockerDiskBytes: 64 << 20,
    });
    for (const box of [one, other])
      expect(recordOf(box)).toMatchObject({ spec: { lateDevices: true }, privateMemory: true });
    const drawn = async (box: NodeSandbox) =>
      (
        await say(
          box,
          'cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid; od -An -tx1 -N16 /dev/urandom; od -An -tx1 -N16 /dev/random; hostname; mktemp -u',
        )
      )
        .trim()
        .split('\n');
    const [a, b] = await Promise.all([drawn(one), drawn(other)]);
    expect(a.length).toBe(6);
    for (const [number, value] of a.entries()) expect(b[number], value).not.toBe(value);
    // Neither has what its image has not.
    expect(await say(one, 'cat /etc/machine-id 2>/dev/null')).toBe('');
    const inside = Number(await say(other, 'date +%s'));
    expect(Math.abs(inside - Date.now() / 1000)).toBeLessThan(60);
    expect(await say(other, 'grep -c " /var/lib/docker ext4 " /proc/mounts')).toBe('1\n');
    expect(notes).toEqual([]);
    await other.stop({ timeMs: 0 });
  });

  const busybox = TEST_IMAGES.find(({ name }) => name === 'busybox')!;
  it.each(COMMAND_CASES.filter(({ shell }) => shell !== true || busybox.hasShell))('$name', async (spec) => {
    const { env, cwd, user, stdin } = spec;
    const asked = one.exec({ args: spec.args(busybox), env, cwd, user, stdin: stdin !== undefined });
    if (spec.error !== undefined) {
      const error = await asked.then((command) => command.wait()).catch((thrown: unknown) => thrown);
      expect(isDsecError(error) && error.code).toBe(spec.error);
      return;
    }
    const command = await asked;
    const written = stdin === undefined ? undefined : command.write(stdin).then(() => command.closeStdin());
    const { stdout, stderr } = await told(command);
    await written;
    const wanted = { exitCode: spec.exitCode ?? 0, stderr: spec.stderr ?? '' };
    expect({ exitCode: (await command.wait()).exitCode, stderr: spec.stderr === undefined ? '' : stderr }).toEqual(
      wanted,
    );
    const { stdout: said } = spec;
    if (said instanceof RegExp) expect(String(Buffer.from(stdout, 'latin1'))).toMatch(said);
    else if (said !== undefined) expect(stdout).toBe(Buffer.from(said).toString('latin1'));
  });

  it('are undone when the service is killed while it makes one', async () => {
    await all.node.close();
    const { storeUrl, folders } = all.site;
    const options = { ...SMALL_VM, memoryBytes: MEMORY };
    const order = { storeUrl, folders, image: 'busybox:1', name: 'killed', options, vmPool: true };
    await killedAt('vm-warm-restored', './resident-child.ts', order);
    await all.restart();
    await reclaimSandboxes(folders);
    expect(all.node.list().map(({ name }) => name)).toEqual([one.name]);
    const mine = vmPlaces(folders.runDir, one.facts.id).folder;
    expect(fs.readdirSync(join(folders.runDir, 'vm')).map((name) => join(folders.runDir, 'vm', name))).toEqual([mine]);
    one = all.node.get(one.name);
  });

  it('go on when the service is started again', async () => {
    await say(one, 'mkdir -p /work/tree; echo kept > /work/tree/kept');
    await all.restart();
    one = all.node.get(one.name);
    expect(await say(one, 'cat /work/tree/kept; hostname')).toBe(`kept\n${one.name}\n`);
  });

  it(`have the same tree after ${CYCLES} times of pause, resume and write, and a command that ran through all of them`, async () => {
    const waiting = await one.exec({ args: ['sh', '-c', 'read x; echo got $x'], stdin: true });
    const hash = 'find /work/tree -type f | sort | xargs sha256sum | sha256sum';
    let files = 'kept';
    for (let i = 0; i < CYCLES; i++) {
      const before = await say(one, `head -c 20000 /dev/urandom > /work/tree/${i}; ${hash}`);
      files += ` ${i}`;
      await one.pause();
      expect(one.state).toBe('paused');
      expect(await say(one, hash), `after pause ${i}`).toBe(before);
    }
    expect((await say(one, 'ls /work/tree')).trim().split('\n').sort()).toEqual(files.split(' ').sort());
    await waiting.write(Buffer.from('it\n'));
    expect((await told(waiting)).stdout).toBe('got it\n');
    expect(await waiting.wait()).toMatchObject({ exitCode: 0 });
    await one.stop({ timeMs: 0 });
  });

  it('are booted where a template is damaged, which goes', async () => {
    const made = await prepare();
    const memory = fs.openSync(join(made.snapshotFolder, 'memory.lsmt'), 'r+');
    fs.writeSync(memory, 'damaged', made.bytes / 2);
    fs.closeSync(memory);
    notes.length = 0;
    const booted = await make();
    expect(recordOf(booted)?.spec.lateDevices).toBeUndefined();
    expect(await say(booted, 'echo here')).toBe('here\n');
    expect(notes).toEqual([expect.stringMatching(/is booted, .*memory.lsmt is not what it was made as/)]);
    expect(templateStates(all.site.folders, findAgent()!.path)).toEqual([]);
    await booted.stop({ timeMs: 0 });
  });

  it('leave nothing', async () => {
    const { runDir } = all.site.folders;
    const vms = join(runDir, 'vm');
    await until('their folders have gone', () => !fs.existsSync(vms) || fs.readdirSync(vms).length === 0);
    expect(all.site.leftovers()).toMatchObject({ mounts: [], cgroups: [] });
  });
});
