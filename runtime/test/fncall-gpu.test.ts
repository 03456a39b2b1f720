/** Pools with graphics processors: who gets which, what is in their containers, and what is refused. Harmless devices stand for cards, a script for nvidia-smi. */
import { execFileSync } from 'node:child_process';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { driverLibraries, GPU_LIBRARIES, gpuDevices } from '../fncall/gpu/gpu-devices.ts';
import type { GpuSource } from '../fncall/gpu/node-gpus.ts';
import { listGpus } from '../fncall/gpu/nvidia-smi.ts';
import { FnCallNode, type FnCallTask, type Pool } from '../index.ts';
import { fillTaskRoot, hostPython } from './fncall-images.ts';
import { canRun, NOTHING, Site } from './sandbox-fixture.ts';

const python = canRun() && findAgent() !== undefined ? hostPython() : undefined;
const TIME = 240_000;
const CARD = 'GPU-11111111-aaaa-bbbb-cccc-000000000000';
const DIVIDED = 'GPU-22222222-aaaa-bbbb-cccc-000000000000';
const PART = 'MIG-33333333-aaaa-bbbb-cccc-000000000000';
const LIST = `GPU 0: NVIDIA H100 (UUID: ${CARD})
GPU 1: NVIDIA H100 (UUID: ${DIVIDED})
  MIG 1g.10gb     Device  0: (UUID: ${PART})
`;
const DETAILS = `<nvidia_smi_log><gpu id="0"><uuid>${CARD}</uuid></gpu><gpu id="1"><mig_devices><mig_device><index>0</index>
<gpu_instance_id>9</gpu_instance_id><compute_instance_id>0</compute_instance_id></mig_device></mig_devices><uuid>${DIVIDED}</uuid></gpu></nvidia_smi_log>`;

function nvidiaSmi(folder: string): string {
  const path = join(folder, 'nvidia-smi');
  const said = { list: LIST, details: DETAILS, memory: '0, 81559, Disabled\n1, 81559, Enabled\n' };
  for (const [name, text] of Object.entries(said)) writeFileSync(join(folder, name), text);
  const which = `case "$1" in -L) echo list;; -q) echo details;; *) echo memory;; esac`;
  writeFileSync(path, `#!/bin/sh\nexec cat "${folder}/$(${which})"\n`);
  chmodSync(path, 0o755);
  return path;
}

describe.skipIf(process.getuid?.() !== 0)('nodes and libraries of graphics processors', () => {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-gpu-'));
  const [proc, dev] = [join(folder, 'proc'), join(folder, 'dev')];
  afterAll(() => rmSync(folder, { recursive: true }));
  const node = (path: string, minor: number) =>
    execFileSync('mknod', ['-m', '666', join(dev, path), 'c', '1', `${minor}`]);
  const file = (path: string, text: string) => {
    mkdirSync(join(proc, path, '..'), { recursive: true });
    writeFileSync(join(proc, path), text);
  };

  it('are found by what the driver says, not by the index', async () => {
    mkdirSync(join(dev, 'nvidia-caps'), { recursive: true });
    file('gpus/0000:01:00.0/information', `Model: \t NVIDIA H100\nGPU UUID: \t ${CARD}\nDevice Minor: \t 3\n`);
    file('gpus/0000:02:00.0/information', `Model: \t NVIDIA H100\nGPU UUID: \t ${DIVIDED}\nDevice Minor: \t 2\n`);
    file('capabilities/gpu2/mig/gi9/access', 'DeviceFileMinor: 84\nDeviceFileMode: 292\n');
    file('capabilities/gpu2/mig/gi9/ci0/access', 'DeviceFileMinor: 85\nDeviceFileMode: 292\n');
    for (const name of ['nvidiactl', 'nvidia-uvm', 'nvidia3', 'nvidia2']) node(name, 3);
    for (const name of ['nvidia-cap84', 'nvidia-cap85']) node(`nvidia-caps/${name}`, 5);
    const gpus = await listGpus(nvidiaSmi(folder));
    expect(gpus.map(({ uuid, instance }) => [uuid, instance])).toEqual([
      [CARD, undefined],
      [PART, { gpuInstance: 9, computeInstance: 0 }],
    ]);
    const paths = gpus.map((gpu) => gpuDevices(gpu, { proc, dev }).map(({ path }) => path.slice(dev.length + 1)));
    expect(paths).toEqual([
      ['nvidiactl', 'nvidia-uvm', 'nvidia3'],
      ['nvidiactl', 'nvidia-uvm', 'nvidia2', 'nvidia-caps/nvidia-cap84', 'nvidia-caps/nvidia-cap85'],
    ]);
    expect(gpuDevices(gpus[1]!, { proc, dev }).at(-1)).toMatchObject({ major: 1, minor: 5, mode: 0o666 });
    rmSync(join(dev, 'nvidia-uvm'));
    expect(() => gpuDevices(gpus[0]!, { proc, dev })).toThrow(/nvidia-uvm is missing: the driver is not loaded whole/);
    expect(() => gpuDevices({ ...gpus[1]!, instance: undefined }, { proc, dev })).toThrow(/which instance/);
  });

  it('are the driver’s libraries of this machine’s kind', () => {
    const here = join(folder, 'libcuda.so.1');
    writeFileSync(here, '');
    const list = `3 libs found in cache
\tlibcuda.so.1 (libc6,x86-64) => ${here}
\tlibcuda.so.1 (libc6) => /usr/lib32/libcuda.so.1
\tlibnvidia-ml.so.1 (libc6,x86-64) => ${folder}/gone
\tlibc.so.6 (libc6,x86-64) => ${here}
`;
    expect(driverLibraries(list)).toEqual([{ source: here, target: `${GPU_LIBRARIES}/libcuda.so.1` }]);
    expect(driverLibraries('')).toEqual([]);
  });
});

describe.skipIf(python === undefined)('pools with graphics processors', () => {
  const site = new Site();
  /** Of FUSE, as everybody may open it; below a folder, as those of instances are. */
  const folder = `/dev/dsec-gpu-${process.pid}`;
  const device = join(folder, 'card');
  const notes: string[] = [];
  let node: FnCallNode;
  let image: Image;
  let cards = 1;

  beforeAll(async () => {
    await site.open();
    image = await site.image('tasks', [(tree) => fillTaskRoot(tree, python)]);
    mkdirSync(folder);
    execFileSync('mknod', ['-m', '666', device, 'c', '10', '229']);
    const library = join(site.root, 'libcuda.so.1');
    writeFileSync(library, 'of this machine');
    const smi = nvidiaSmi(site.root);
    const gpus: GpuSource = {
      list: async () => (await listGpus(smi)).slice(0, cards),
      devices: () => [{ path: device, major: 10, minor: 229, mode: statSync(device).mode & 0o777 }],
      libraries: () => [{ source: library, target: `${GPU_LIBRARIES}/libcuda.so.1` }],
    };
    node = new FnCallNode({ folders: site.folders, note: (text) => notes.push(text), gpus });
  }, TIME);
  afterAll(async () => {
    await node?.close();
    rmSync(folder, { recursive: true, force: true });
    expect(site.leftovers()).toEqual(NOTHING);
    await site.remove();
  }, TIME);

  const LOOK: FnCallTask = {
    language: 'python',
    code: `import os
def opens():
    try: return os.close(os.open('${device}', os.O_RDWR)) is None
    except OSError as error: return error.strerror
print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('NVIDIA_VISIBLE_DEVICES'), opens())
folder = os.environ.get('LD_LIBRARY_PATH')
print(open(folder + '/libcuda.so.1').read() if folder else 'none')`,
  };
  const look = async (pool: Pool) => (await node.run(pool, LOOK)).run!.stdout.toString().trim().split('\n');
  const environment = () => ({ store: site.store, base: image });

  it(
    'have it in their containers, and nobody else has',
    async () => {
      const usual = { ceiling: 1, queueMs: 120_000 };
      const plain = node.poolFor(environment(), usual);
      expect(await look(plain)).toEqual(['None None No such file or directory', 'none']);
      const one = await node.definePool('one', environment(), { ...usual, ceiling: 2, gpu: { mode: 'exclusive' } });
      expect(await look(one)).toEqual([`${CARD} ${CARD} True`, 'of this machine']);
      // There is one card: the second container waits for it, and both tasks have the first one.
      expect(await Promise.all([look(one), look(one)])).toEqual(
        Array(2).fill([`${CARD} ${CARD} True`, 'of this machine']),
      );
      expect(one.state.ready).toBeLessThanOrEqual(1);
      // What nobody uses makes room for a call of another pool; its interpreter knows the libraries too.
      const warm = await node.definePool('warm', environment(), {
        ...usual,
        gpu: { mode: 'exclusive', memoryMib: 80_000 },
        python: {},
      });
      expect(await look(warm)).toEqual([`${CARD} ${CARD} True`, 'of this machine']);
      expect(await look(one)).toEqual([`${CARD} ${CARD} True`, 'of this machine']);
      expect(await look(plain)).toEqual(['None None No such file or directory', 'none']);
      await node.removePool('one');
      await node.removePool('warm');
    },
    TIME,
  );

  it(
    'share one, or have an instance each',
    async () => {
      cards = 2;
      const shared = await node.definePool('shared', environment(), {
        floor: 2,
        ceiling: 2,
        gpu: { mode: 'shared', memoryMib: 80_000 },
      });
      await shared.warm();
      expect(shared.state.ready).toBe(2);
      const part = await node.definePool('part', environment(), {
        ceiling: 1,
        queueMs: 120_000,
        gpu: { mode: 'exclusive', profile: '1g.10gb' },
      });
      const all = await Promise.all([shared, shared, part].map((pool) => node.run(pool, LOOK)));
      expect(all.map(({ run }) => run!.stdout.toString().split(' ')[0])).toEqual([CARD, CARD, PART]);
    },
    TIME,
  );

  it(
    'are refused where there is none, and end at once while they wait for one',
    async () => {
      const define = (gpu: object) => node.definePool('no', environment(), { gpu: gpu as { mode: 'shared' } });
      await expect(define({ mode: 'exclusive', profile: '7g.80gb' })).rejects.toMatchObject({
        code: 'RUNTIME_GPU_NONE',
        http: 501,
        message: 'this machine has no instance 7g.80gb of a graphics processor',
      });
      await expect(define({ mode: 'shared', memoryMib: 1_000_000 })).rejects.toMatchObject({
        code: 'RUNTIME_GPU_NONE',
      });
      for (const gpu of [{ mode: 'some' }, { mode: 'shared', profile: 'a b' }, { mode: 'shared', memoryMib: -1 }]) {
        await expect(define(gpu)).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_POOL_OPTION' });
      }
      expect(node.hasPool('no')).toBe(false);
      const none = new FnCallNode({
        folders: site.folders,
        gpus: { list: async () => [], devices: () => [], libraries: () => [] },
      });
      await expect(none.definePool('no', environment(), { gpu: { mode: 'shared' } })).rejects.toMatchObject({
        code: 'RUNTIME_GPU_NONE',
        message: 'this machine has no graphics processor',
      });
      await none.close();
      // A floor that takes the only instance, and one that waits for it: nothing is given up for a floor, and nobody waits for it at the end.
      const first = await node.definePool('part', environment(), {
        floor: 1,
        ceiling: 1,
        gpu: { mode: 'exclusive', profile: '1g.10gb' },
      });
      await first.warm();
      await node.definePool('behind', environment(), {
        floor: 1,
        ceiling: 1,
        gpu: { mode: 'exclusive', profile: '1g.10gb' },
      });
      await node.removePool('behind');
      expect(first.state).toMatchObject({ ready: 1, replaced: 0 });
    },
    TIME,
  );
});
