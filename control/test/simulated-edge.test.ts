/** A simulated edge answers as a real one does: admission, figures, roster, request ids. */
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type ServingSimulatedEdge, serveSimulatedEdge } from '../edge/simulated-edge.ts';
import { reportFromJson } from '../placement/report-json.ts';
import { PeerClient } from '../service-base/peer-client.ts';

const TOKEN = 'the-token-of-a-test-cluster';
const AMOUNTS = { cpuMilli: 100, memoryBytes: 10, diskBytes: 1, gpus: 0 };
const ANN = { project: 'root/a', user: 'ann', job: 'j', reservation: 'r' };

interface Made {
  readonly name: string;
  readonly admission: { readonly number: number };
}

describe('a simulated edge', () => {
  let edge: ServingSimulatedEdge;
  let client: PeerClient;
  beforeEach(async () => {
    edge = await serveSimulatedEdge(
      {
        edge: 'sim-1',
        createMs: 5,
        limits: {
          capacity: { cpuMilli: 1000, memoryBytes: 1000, diskBytes: 1000, gpus: 0 },
          sandboxes: new Map([['container', 100]]),
          memoryReserve: 0,
          diskReserve: 0,
          mostWaiting: { cpu: 1, memory: 1, io: 1 },
        },
      },
      { listen: '127.0.0.1:0', token: TOKEN },
    );
    client = new PeerClient({ url: edge.url, token: TOKEN });
  });
  afterEach(async () => {
    await client.close();
    await edge.close();
  });
  const create = (body: object = {}) =>
    client.json<Made>({
      method: 'POST',
      path: '/v1/sandboxes',
      body: { image: 'x', owner: ANN, amounts: AMOUNTS, ...body },
    });
  const report = async () => reportFromJson(await client.json({ method: 'GET', path: '/v1/report' }));
  const roster = () =>
    client.json<{ sandboxes: { name?: string; state: string }[] }>({ method: 'GET', path: '/v1/roster' });

  it('takes what it has room for, and no more', async () => {
    const all = await Promise.allSettled(Array.from({ length: 15 }, () => create()));
    expect(all.filter(({ status }) => status === 'fulfilled')).toHaveLength(10);
    const refused = all.find((one) => one.status === 'rejected')!.reason;
    expect(refused).toMatchObject({ code: 'EDGE_REFUSED', http: 503 });
    expect((await report()).reserved).toEqual({ cpuMilli: 1000, memoryBytes: 100, diskBytes: 10, gpus: 0 });
    expect((await report()).admitted).toBe(10);
    const { sandboxes } = await roster();
    await client.json({ method: 'DELETE', path: `/v1/sandboxes/${sandboxes[0]!.name}` });
    await client.json({ method: 'POST', path: `/v1/sandboxes/${sandboxes[1]!.name}/stop` });
    expect((await report()).reserved.cpuMilli).toBe(800);
    const { name } = sandboxes[2]!;
    expect(await client.json({ method: 'GET', path: `/v1/roster?name=${name}` })).toMatchObject({
      sandboxes: [{ name }],
    });
    expect((await roster()).sandboxes.map(({ state }) => state).sort()).toEqual([
      'ended',
      ...Array.from({ length: 8 }, () => 'running'),
    ]);
  });

  it('gives the same sandbox to the same request id', async () => {
    const both = await Promise.all([create({ requestId: 'a' }), create({ requestId: 'a' })]);
    expect(both[0]).toEqual(both[1]);
    expect(await create({ requestId: 'a' })).toEqual(both[0]);
    await expect(create({ requestId: 'a', owner: { ...ANN, project: 'other' } })).rejects.toMatchObject({
      code: 'EDGE_REQUEST_TAKEN',
    });
    const get = () => client.json({ method: 'GET', path: `/v1/sandboxes/${both[0].name}` });
    expect(await get()).toMatchObject({ name: both[0].name, state: 'running', owner: ANN });
    await client.json({ method: 'POST', path: `/v1/sandboxes/${both[0].name}/stop` });
    await expect(get()).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE', http: 410 });
    await expect(create({ requestId: 'a' })).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE', http: 410 });
    await client.json({ method: 'DELETE', path: `/v1/sandboxes/${both[0].name}` });
    await expect(get()).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_NOT_FOUND', http: 404 });
  });

  it('drains', async () => {
    await client.json({ method: 'POST', path: '/v1/drain', body: { on: true } });
    await expect(create()).rejects.toMatchObject({ code: 'EDGE_REFUSED' });
    expect((await report()).state).toBe('draining');
  });
});
