import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { parseGpus } from '../fncall/gpu/nvidia-smi.ts';
import { GpuScheduler, listGpus } from '../index.ts';

const CARDS = `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
  MIG 1g.10gb     Device  0: (UUID: MIG-33333333-aaaa-bbbb-cccc-000000000000)
  MIG 3g.40gb     Device  1: (UUID: MIG-44444444-aaaa-bbbb-cccc-000000000000)
`;
const MEMORY = '0, 81559, Disabled\n1, 81559, Enabled\n';
const folder = mkdtempSync(join(tmpdir(), 'dsec-gpu-'));
afterAll(() => rmSync(folder, { recursive: true }));

function fake(script: string): string {
  const path = join(folder, `smi-${Math.random()}`);
  writeFileSync(path, `#!/bin/sh\n${script}\n`);
  chmodSync(path, 0o755);
  return path;
}

describe('graphics processors', () => {
  it('reads cards and instances from nvidia-smi', async () => {
    const program = fake(
      `if [ "$1" = -L ]; then printf '%s' '${CARDS}'; else printf '${MEMORY.replaceAll('\n', '\\n')}'; fi`,
    );
    const found = await listGpus(program);
    expect(found.map(({ uuid, profile, memoryMib, index }) => [uuid.slice(0, 6), profile, memoryMib, index])).toEqual([
      ['GPU-11', undefined, 81559, 0],
      ['MIG-33', '1g.10gb', 10240, 1],
      ['MIG-44', '3g.40gb', 40960, 1],
    ]);
    expect(await listGpus(join(folder, 'nothing'))).toEqual([]);
    await expect(listGpus(fake('echo "NVML: Driver/library version mismatch" >&2; exit 18'))).rejects.toMatchObject({
      code: 'RUNTIME_GPU',
    });
    await expect(listGpus(fake('echo nonsense'))).rejects.toMatchObject({ code: 'RUNTIME_GPU' });
    expect(parseGpus('', '')).toEqual([]);
  });

  it('asks a driver that knows no divided cards again, without their mode', async () => {
    const asks = (then: string) =>
      `case "$*" in
-L) echo 'GPU 0: Tesla K80 (UUID: GPU-77777777-aaaa-bbbb-cccc-000000000000)';;
*mig.mode.current*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
*) ${then};;
esac`;
    const found = await listGpus(fake(asks(`echo '0, 11441'`)));
    expect(found.map(({ name, memoryMib }) => [name, memoryMib])).toEqual([['Tesla K80', 11441]]);
    await expect(listGpus(fake(asks('exit 9')))).rejects.toMatchObject({ code: 'RUNTIME_GPU' });
  });

  it('knows a divided card that has no instances yet, which is none to be had whole', () => {
    const list = `${CARDS}GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-55555555-aaaa-bbbb-cccc-000000000000)
GPU 3: Tesla T4 (UUID: GPU-66666666-aaaa-bbbb-cccc-000000000000)
`;
    const cards = `${MEMORY}2, 40960, Enabled\n3, 15360, [N/A]\n`;
    expect(parseGpus(list, cards).map(({ uuid, memoryMib }) => [uuid.slice(0, 6), memoryMib])).toEqual([
      ['GPU-11', 81559],
      ['MIG-33', 10240],
      ['MIG-44', 40960],
      ['GPU-66', 15360],
    ]);
  });

  it('gives an instance to one task, shares where that was asked, and never both', async () => {
    const scheduler = new GpuScheduler({ gpus: parseGpus(CARDS, MEMORY), perGpu: 2 });
    const small = await scheduler.take({ mode: 'exclusive' });
    expect(small.env.CUDA_VISIBLE_DEVICES).toBe(small.gpu.uuid);
    expect(small.gpu.profile).toBe('1g.10gb');
    const shared = await Promise.all([1, 2, 3].map(() => scheduler.take({ mode: 'shared' })));
    expect(shared.map(({ gpu }) => gpu.profile)).toEqual(['3g.40gb', '3g.40gb', undefined]);
    let got = false;
    const alone = scheduler.take({ mode: 'exclusive' }).then((lease) => {
      got = true;
      return lease;
    });
    // What came later does not take what is meant for it, but another one where there is room.
    let later = false;
    const fourth = scheduler.take({ mode: 'shared' }).then((lease) => {
      later = true;
      return lease;
    });
    await new Promise((resolve) => setImmediate(resolve));
    expect([got, later]).toEqual([false, true]);
    small.release();
    small.release();
    expect((await alone).gpu.uuid).toBe(small.gpu.uuid);
    expect((await fourth).gpu.profile).toBeUndefined();
    expect(scheduler.state.map(({ mode, tasks }) => [mode, tasks])).toEqual([
      ['shared', 2],
      ['exclusive', 1],
      ['shared', 2],
    ]);
    for (const lease of [...shared, await alone, await fourth]) lease.release();
    expect(scheduler.state.map(({ mode, tasks }) => [mode, tasks])).toEqual([
      [undefined, 0],
      [undefined, 0],
      [undefined, 0],
    ]);
  });

  it('refuses what there is not, a full queue and a long wait; who gives up makes way', async () => {
    const scheduler = new GpuScheduler({ gpus: parseGpus(CARDS, MEMORY).slice(1, 2), waiting: 2, waitMs: 20 });
    await expect(scheduler.take({ mode: 'exclusive', profile: '7g.80gb' })).rejects.toMatchObject({
      code: 'RUNTIME_GPU_NONE',
    });
    await expect(scheduler.take({ mode: 'shared', memoryMib: 20_000 })).rejects.toMatchObject({
      code: 'RUNTIME_GPU_NONE',
    });
    const held = await scheduler.take({ mode: 'shared' });
    const waits = scheduler.take({ mode: 'exclusive' });
    const stop = new AbortController();
    const gives = scheduler.take({ mode: 'exclusive' }, stop.signal);
    await expect(scheduler.take({ mode: 'shared' })).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_BUSY', http: 429 });
    stop.abort(new Error('gone'));
    await expect(gives).rejects.toThrow('gone');
    const behind = scheduler.take({ mode: 'shared' });
    await expect(waits).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_BUSY' });
    expect((await behind).gpu).toBe(held.gpu);
    scheduler.update([]);
    // Away for a moment: it is still somebody's.
    scheduler.update([held.gpu]);
    expect(scheduler.state.find(({ gpu }) => gpu.uuid === held.gpu.uuid)!.tasks).toBeGreaterThan(0);
    scheduler.update([]);
    held.release();
    expect(scheduler.state).toEqual([]);
  });
});
