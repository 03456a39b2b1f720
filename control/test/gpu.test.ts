/** Graphics processors: what an edge has, who gets which, and what a cluster answers that has none. Harmless devices stand for cards. */
import { execFileSync } from 'node:child_process';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { cardsOf, GpuCards, gpuCards, gpuEnv, instancesOf, kindOf } from '../edge/gpu-cards.ts';
import { parseOutput } from '../runtime-service/output-frames.ts';
import { SandboxClient } from '../runtime-service/sandbox-client.ts';
import { ApiSite, type FakeEdge } from './api-site.ts';
import { canServeEdge, EdgeSite } from './edge-site.ts';

describe('cards', () => {
  it('have kinds by their names', () => {
    expect(['NVIDIA H100 80GB HBM3', 'Tesla T4', 'NVIDIA', '???'].map(kindOf)).toEqual([
      'h100-80gb-hbm3',
      'tesla-t4',
      'nvidia',
      'gpu',
    ]);
  });

  it('are described by their devices, or refused', async () => {
    await expect(gpuCards(['a=/dev/null', 'a=/dev/null,/dev/zero'])).rejects.toThrow('two cards begin with it');
    expect(await gpuCards(['h100=/dev/null,/dev/zero'])).toEqual([
      {
        id: '/dev/null',
        kind: 'h100',
        devices: [
          { path: '/dev/null', major: 1, minor: 3, mode: 0o666 },
          { path: '/dev/zero', major: 1, minor: 5, mode: 0o666 },
        ],
      },
    ]);
    for (const text of [
      'h100',
      '=/dev/null',
      'H100=/dev/null',
      'a=',
      'a=/etc/passwd',
      'a=/dev/../etc/passwd',
      'a=/dev/none-such',
      'a=/dev/console',
      'a=/dev/shm',
    ]) {
      await expect(gpuCards([text])).rejects.toMatchObject({ code: 'EDGE_GPU', exit: 2 });
    }
    // Instances of a divided card are no whole cards.
    const part = { uuid: 'MIG-1', name: 'NVIDIA H200', index: 0, profile: '1g.18gb', memoryMib: 18_000 };
    expect(cardsOf([part])).toEqual([]);
  });

  it('are one sandbox’s each', () => {
    const card = (id: string, kind: string) => ({ id, kind, devices: [], uuid: `GPU-${id}` });
    const cards = new GpuCards([card('1', 'a'), card('2', 'b'), card('3', 'a')]);
    const ids = (taken: readonly { id: string }[]) => taken.map(({ id }) => id);
    expect(ids(cards.take(0, undefined, 'e'))).toEqual([]);
    expect(ids(cards.take(1, 'b', 'e'))).toEqual(['2']);
    expect(() => cards.take(1, 'b', 'e')).toThrow('0 free gpus of kind b, of 1');
    expect(() => cards.take(3, undefined, 'e')).toThrow('2 free gpus, of 3');
    expect([...cards.kinds]).toEqual([
      ['a', { cards: 2, free: 2 }],
      ['b', { cards: 1, free: 0 }],
    ]);
    cards.keep(['3']);
    expect(ids(cards.take(1, undefined, 'e'))).toEqual(['1']);
    cards.release(['3', 'unknown']);
    expect(ids(cards.take(1, 'a', 'e'))).toEqual(['3']);
    expect(gpuEnv(['A=1', 'CUDA_VISIBLE_DEVICES=GPU-old'], [card('1', 'a'), card('3', 'a')])).toEqual([
      'A=1',
      'NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-3',
      'CUDA_VISIBLE_DEVICES=GPU-1,GPU-3',
    ]);
  });
});

describe.skipIf(process.getuid?.() !== 0)('instances of divided cards', () => {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-mig-'));
  afterAll(() => rmSync(folder, { recursive: true }));

  it('are cards of a kind of their own, with the nodes of theirs alone', () => {
    const [proc, dev] = [join(folder, 'proc'), join(folder, 'dev')];
    const access = (path: string, minor: number) => {
      mkdirSync(join(proc, 'capabilities/gpu0/mig', path), { recursive: true });
      writeFileSync(
        join(proc, 'capabilities/gpu0/mig', path, 'access'),
        `DeviceFileMinor: ${minor}\nDeviceFileMode: 292\n`,
      );
    };
    access('gi9', 84);
    access('gi9/ci0', 85);
    mkdirSync(join(dev, 'nvidia-caps'), { recursive: true });
    const node = (path: string, mode: string) => execFileSync('mknod', ['-m', mode, join(dev, path), 'c', '1', '3']);
    for (const path of ['nvidiactl', 'nvidia-uvm', 'nvidia0']) node(path, '666');
    node('nvidia-caps/nvidia-cap84', '444');
    node('nvidia-caps/nvidia-cap85', '444');
    const whole = { uuid: 'GPU-1', name: 'NVIDIA H100 80GB HBM3', index: 1, profile: undefined, memoryMib: 81559 };
    const part = {
      ...whole,
      uuid: 'MIG-1',
      cardUuid: 'GPU-2',
      index: 0,
      profile: '1g.10gb',
      instance: { gpuInstance: 9, computeInstance: 0 },
    };
    const found = instancesOf([whole, part], { proc, dev });
    expect(found.map(({ id, uuid, kind }) => [id, uuid, kind])).toEqual([['MIG-1', 'MIG-1', 'h100-80gb-hbm3-1g-10gb']]);
    expect(found[0]!.devices.map(({ path, mode }) => [path.slice(dev.length + 1), mode])).toEqual([
      ['nvidiactl', 0o666],
      ['nvidia-uvm', 0o666],
      ['nvidia0', 0o666],
      ['nvidia-caps/nvidia-cap84', 0o444],
      ['nvidia-caps/nvidia-cap85', 0o444],
    ]);
    chmodSync(join(dev, 'nvidia-caps/nvidia-cap85'), 0o400);
    expect(() => instancesOf([part], { proc, dev })).toThrow(/not everybody may open .*nvidia-cap85/);
  });
});

describe('a cluster', () => {
  let site: ApiSite;
  let edge: FakeEdge;
  beforeAll(async () => {
    site = await ApiSite.make(2);
    edge = site.edges[1]!;
  });
  afterAll(() => site?.remove());

  it('says that it has none, which waiting does not help', async () => {
    expect(await site.create({ gpus: 1 })).toMatchObject({
      status: 501,
      body: { error: { code: 'PLACEMENT_NO_GPU', message: 'no node of this cluster has 1 gpu', retryable: false } },
    });
    expect(await site.used()).toBe(0);
  });

  it('places by count and kind', async () => {
    edge.gpus = 2;
    edge.labels = ['gpu:h100'];
    await site.api.parts.edges.poll();
    for (const body of [{ gpus: 1 }, { gpus: 2, gpuKind: 'h100' }, { gpuKind: 'h100' }]) {
      const { status, body: made } = await site.create(body);
      expect([status, made.edge]).toEqual([201, 'e2']);
      const sent = JSON.parse(edge.heard.filter(({ url }) => url === '/v1/sandboxes').at(-1)!.body);
      expect(sent.amounts.gpus).toBe(body.gpus ?? 1);
      expect([sent.gpus, sent.gpuKind]).toEqual([undefined, body.gpuKind]);
      edge.sandboxes.clear();
      edge.epoch += '1';
      await site.api.parts.edges.poll();
    }
    for (const body of [{ gpus: 3 }, { gpuKind: 'a100' }, { gpus: 1, labels: ['none'] }]) {
      expect((await site.create(body)).body.error.code).toBe('PLACEMENT_NO_GPU');
    }
    expect((await site.create({ gpus: 0 })).status).toBe(201);
    // Enough cards, of another kind.
    edge.gpus = 4;
    edge.labels = ['gpu:h100', 'gpu:a100'];
    edge.gpuKinds = { h100: { cards: 3, free: 0 }, a100: { cards: 1, free: 1 } };
    await site.api.parts.edges.poll();
    const codeOf = async (body: object) => {
      const { status, body: said } = await site.create(body);
      return [status, said.error?.code];
    };
    expect(await codeOf({ gpus: 4, gpuKind: 'h100' })).toEqual([501, 'PLACEMENT_NO_GPU']);
    expect(await codeOf({ gpus: 2, gpuKind: 'a100' })).toEqual([501, 'PLACEMENT_NO_GPU']);
    // They are taken, which ends.
    expect(await codeOf({ gpus: 3, gpuKind: 'h100' })).toEqual([503, 'PLACEMENT_NO_ROOM']);
    expect(await codeOf({ gpus: 1, gpuKind: 'a100' })).toEqual([201, undefined]);
    for (const body of [{ gpus: -1 }, { gpus: 65 }, { gpus: 0.5 }, { gpuKind: 'A b' }, { gpuKind: '' }]) {
      expect((await site.create(body)).status).toBe(400);
    }
    for (const body of [
      { gpus: 1, backend: 'vm' },
      { gpus: 1, backend: 'microvm' },
      { gpus: 1, runtime: 'crun' },
    ]) {
      expect((await site.create(body)).body.error.code).not.toMatch(/PLACEMENT|INTERNAL|BUG/);
    }
  });
});

describe.skipIf(!canServeEdge)('an edge', { timeout: 240_000 }, () => {
  /** Of FUSE and of loop devices, as everybody may open them. */
  const [first, second] = ['a', 'b'].map((end) => `/dev/dsec-test-${process.pid}${end}`) as [string, string];
  let site: EdgeSite;
  beforeAll(async () => {
    for (const [path, minor] of [
      [first, '229'],
      [second, '237'],
    ] as const) {
      execFileSync('mknod', ['-m', '666', path, 'c', '10', minor]);
    }
    site = await EdgeSite.make('--gpu', `first=${first}`, '--gpu', `second=${second}`);
    await site.start();
  }, 240_000);
  afterAll(async () => {
    await site?.remove();
    for (const path of [first, second]) rmSync(path, { force: true });
  }, 240_000);

  const amounts = (gpus: number) => ({ cpuMilli: 100, memoryBytes: 1 << 20, diskBytes: 1 << 20, gpus });
  const create = (more: object) => site.create({ owner: { project: 'root', user: 'ann' }, ...more });
  /** Whether it can be opened there. */
  const opens = async (name: string, path: string): Promise<boolean> => {
    const base = `/v1/sandboxes/${name}/commands`;
    const script = `(exec 3<${path}) 2>/dev/null && echo yes || echo no`;
    const { id } = await site.client.json<{ id: number }>({
      method: 'POST',
      path: base,
      body: { args: ['sh', '-c', script] },
    });
    const { body } = await site.client.request({ method: 'GET', path: `${base}/${id}/output` });
    let text = '';
    for await (const news of parseOutput(body)) if ('part' in news) text += news.part.bytes ?? '';
    expect(text).toMatch(/^(yes|no)\n$/);
    return text === 'yes\n';
  };

  it('gives a sandbox the devices of its cards and no others, also after its own death', async () => {
    expect(await site.get('/v1/report')).toMatchObject({ capacity: { gpus: 2 }, labels: ['gpu:first', 'gpu:second'] });
    const one = await create({ amounts: amounts(1), gpuKind: 'second' });
    const none = await create({ amounts: amounts(0) });
    expect([await opens(one.name, second), await opens(one.name, first)]).toEqual([true, false]);
    expect([await opens(none.name, second), await opens(none.name, first)]).toEqual([false, false]);
    await expect(create({ amounts: amounts(1), gpuKind: 'second' })).rejects.toMatchObject({ code: 'EDGE_REFUSED' });
    await expect(create({ amounts: amounts(1), runtime: 'crun' })).rejects.toMatchObject({
      code: 'SANDBOX_BAD_REQUEST',
    });
    expect(await site.get('/v1/report')).toMatchObject({ reserved: { gpus: 1 } });
    await site.restart();
    expect(await site.get('/v1/report')).toMatchObject({ reserved: { gpus: 1 } });
    await expect(create({ amounts: amounts(1), gpuKind: 'second' })).rejects.toMatchObject({ code: 'EDGE_REFUSED' });
    const other = await create({ amounts: amounts(1) });
    expect([await opens(other.name, first), await opens(one.name, second)]).toEqual([true, true]);
    await expect(create({ amounts: amounts(1) })).rejects.toMatchObject({ code: 'EDGE_REFUSED' });
    await site.client.json({ method: 'DELETE', path: `/v1/sandboxes/${one.name}?force=true` });
    const again = await create({ amounts: amounts(1), gpuKind: 'second' });
    expect(await opens(again.name, second)).toBe(true);
    for (const { name } of [none, other, again]) {
      await site.client.json({ method: 'DELETE', path: `/v1/sandboxes/${name}?force=true` });
    }
  });

  it('has its cards back when the request id is one that somebody on the machine has used', async () => {
    const local = await new SandboxClient().create({
      store: site.env.DSEC_STORE!,
      image: 'bb:1',
      requestId: 'guessed',
    });
    for (let times = 0; times < 3; times++) {
      await expect(create({ amounts: amounts(2), requestId: 'guessed' })).rejects.toMatchObject({
        code: 'EDGE_REQUEST_TAKEN',
      });
    }
    expect(await site.get('/v1/report')).toMatchObject({
      reserved: { gpus: 0 },
      backends: { container: { sandboxes: 1 } },
    });
    await new SandboxClient().remove(local.name, true);
    const both = await create({ amounts: amounts(2) });
    expect([await opens(both.name, first), await opens(both.name, second)]).toEqual([true, true]);
  });
});
