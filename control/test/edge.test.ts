/** An edge with real sandboxes: what it takes and refuses, what it says of itself, and that none of it is lost when it is killed. */
import * as fs from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { fullVmProblem } from '#runtime';
import { reportFromJson } from '../placement/report-json.ts';
import { parseOutput } from '../runtime-service/output-frames.ts';
import { SandboxClient } from '../runtime-service/sandbox-client.ts';
import { PeerClient } from '../service-base/peer-client.ts';
import { runCommand } from './command-run.ts';
import { canServeEdge, EdgeSite, until } from './edge-site.ts';

if (!canServeEdge) console.log('skipped: not root, or no dsec-agent, or no busybox');

const MIB = 2 ** 20;
const AMOUNTS = { cpuMilli: 500, memoryBytes: 64 * MIB, diskBytes: 64 * MIB, gpus: 0 };
const ANN = { project: 'root/a', user: 'ann', job: 'j1', reservation: 'r-1' };
const CAPACITY = 'cpus=4,memory=1GiB,disk=10GiB,sandboxes=20';

interface Made {
  readonly name: string;
  readonly id: string;
  readonly owner: object;
  readonly admission: { readonly epoch: string; readonly number: number };
}
interface RosterView {
  readonly epoch: string;
  readonly writtenAtMs: number;
  readonly sandboxes: { name?: string; state: string; end?: { reason: string }; owner: object; amounts: object }[];
}

describe.skipIf(!canServeEdge)('an edge', { timeout: 300_000 }, () => {
  let site: EdgeSite;
  beforeAll(async () => {
    site = await EdgeSite.make('--capacity', CAPACITY, '--label', 'ssd');
    await site.start();
  }, 300_000);
  afterEach(async () => {
    for (const { name } of (await roster()).sandboxes) await remove(name!).catch(() => {});
  });
  afterAll(() => site?.remove(), 300_000);

  const create = (body: object = {}) => site.create<Made>({ owner: ANN, amounts: AMOUNTS, ...body });
  const report = async () => reportFromJson(await site.get('/v1/report'));
  const roster = () => site.get<RosterView>('/v1/roster');
  const remove = (name: string, headers = {}) =>
    site.client.request({ method: 'DELETE', path: `/v1/sandboxes/${name}?force=true`, headers });
  const thrown = (work: Promise<unknown>) =>
    work.then(
      () => undefined,
      (error: unknown) => error as { code: string; message: string },
    );
  const exec = async (name: string, script: string, operation?: string) => {
    const headers = operation === undefined ? undefined : { 'x-dsec-operation': operation };
    const answer = await site.client.request({
      method: 'POST',
      path: `/v1/sandboxes/${name}/commands`,
      body: { args: ['sh', '-c', script] },
      headers,
    });
    const { id, error } = (await answer.body.json()) as { id: number; error?: { code: string } };
    return { status: answer.status, id, error, repeated: answer.headers['x-dsec-repeated'] };
  };
  const outputOf = async (name: string, id: number): Promise<string> => {
    const { body } = await site.client.request({ method: 'GET', path: `/v1/sandboxes/${name}/commands/${id}/output` });
    let text = '';
    for await (const news of parseOutput(body)) {
      if ('error' in news) throw new Error(news.error.message);
      if ('part' in news) text += news.part.bytes ?? '';
    }
    return text;
  };

  it('makes sandboxes for their owners, counts what they hold, and runs commands in them', async () => {
    const before = await report();
    expect(before).toMatchObject({ edge: 'edge-1', state: 'healthy', labels: new Set(['ssd']), heldBy: undefined });
    expect(before.capacity).toEqual({ cpuMilli: 4000, memoryBytes: 1024 * MIB, diskBytes: 10240 * MIB, gpus: 0 });
    const one = await create();
    expect(one).toMatchObject({ state: 'running', edge: 'edge-1', owner: ANN, amounts: AMOUNTS });
    expect(one.admission).toEqual({ epoch: before.epoch, number: before.admitted + 1 });
    const after = await report();
    expect(after.reserved).toEqual(AMOUNTS);
    expect(after.admitted).toBe(one.admission.number);
    expect([...after.users, ...after.jobs]).toEqual([
      ['ann', 1],
      ['j1', 1],
    ]);
    expect(after.backends.get('container')).toEqual({ sandboxes: 1, limit: 20 });
    expect(after.layers.size).toBe(1);
    expect((await roster()).sandboxes).toMatchObject([
      { name: one.name, state: 'running', owner: ANN, amounts: AMOUNTS, backend: 'container', runtime: 'dsec' },
    ]);
    const { id, status } = await exec(one.name, 'echo from inside');
    expect([status, await outputOf(one.name, id)]).toEqual([201, 'from inside\n']);
    await remove(one.name);
    expect((await report()).reserved).toEqual({ cpuMilli: 0, memoryBytes: 0, diskBytes: 0, gpus: 0 });
    expect((await roster()).sandboxes).toEqual([]);
  });

  it('promises no more than it has, also to a burst, and a refused creation leaves nothing', async () => {
    const amounts = { ...AMOUNTS, cpuMilli: 1500 };
    const burst = await Promise.allSettled(Array.from({ length: 6 }, () => create({ amounts })));
    const refused = burst
      .filter((one) => one.status === 'rejected')
      .map(({ reason }) => [reason.code, reason.http, reason.message]);
    const why = 'edge edge-1 takes no such sandbox now: the node has promised what it has of cpuMilli';
    expect(refused).toEqual(Array.from({ length: 4 }, () => ['EDGE_REFUSED', 503, why]));
    expect((await roster()).sandboxes).toHaveLength(2);
    expect((await report()).reserved.cpuMilli).toBe(3000);
    // One that the runtime refuses gives back what was promised to it.
    expect(await thrown(create({ image: 'none:1' }))).toMatchObject({
      code: expect.stringMatching(/NOT_FOUND|MISSING|IMAGE/),
    });
    expect((await report()).reserved.cpuMilli).toBe(3000);
  });

  it('keeps users apart who ask for it', async () => {
    await create({ alone: true });
    expect((await report()).heldBy).toBe('ann');
    expect(await thrown(create({ owner: { ...ANN, user: 'bob' } }))).toMatchObject({
      message: expect.stringContaining('held by another user'),
    });
    await create();
  });

  it('has all of it again when it is killed', async () => {
    const one = await create({ requestId: 'req-1', alone: true });
    const same = await Promise.all([
      create({ requestId: 'req-1' }),
      create({ requestId: 'req-2' }),
      create({ requestId: 'req-2' }),
    ]);
    expect(same[0]).toMatchObject({ name: one.name, id: one.id, admission: one.admission });
    expect(same[1]!.id).toBe(same[2]!.id);
    const ended = await create({ requestId: 'req-3' });
    await site.client.json({ method: 'POST', path: `/v1/sandboxes/${ended.name}/stop`, body: { timeMs: 0 } });
    const command = await exec(one.name, 'echo once >>/tmp/count; sleep 0.2; cat /tmp/count', 'op-1');
    expect(command.status).toBe(201);
    const before = await report();

    await site.restart('SIGKILL');
    const after = await report();
    expect(after.epoch).not.toBe(before.epoch);
    expect(after).toMatchObject({
      admitted: 0,
      reserved: before.reserved,
      users: before.users,
      jobs: before.jobs,
      heldBy: 'ann',
    });
    expect(after.backends.get('container')!.sandboxes).toBe(2);
    const names = new Map((await roster()).sandboxes.map(({ name, state, end }) => [name, [state, end?.reason]]));
    expect(names).toEqual(
      new Map([
        [one.name, ['running', undefined]],
        [same[1]!.name, ['running', undefined]],
        [ended.name, ['ended', 'stopped']],
      ]),
    );
    const again = await create({ requestId: 'req-1' });
    expect(again).toMatchObject({
      name: one.name,
      id: one.id,
      owner: ANN,
      admission: { epoch: after.epoch, number: 0 },
    });
    expect(await thrown(create({ requestId: 'req-3' }))).toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
    expect(await thrown(create({ requestId: 'req-1', owner: { ...ANN, project: 'root/b' } }))).toMatchObject({
      code: 'EDGE_REQUEST_TAKEN',
    });
    expect(await thrown(create({ requestId: 'req-3', owner: { ...ANN, project: 'root/b' } }))).toMatchObject({
      code: 'EDGE_REQUEST_TAKEN',
    });

    const repeated = await exec(one.name, 'echo once >>/tmp/count; sleep 0.2; cat /tmp/count', 'op-1');
    expect(repeated).toMatchObject({ status: 201, id: command.id, repeated: 'true' });
    expect(await outputOf(one.name, repeated.id)).toBe('once\n');
    expect((await report()).reserved).toEqual(before.reserved);
  });

  it('is killed in the middle of creations: each is there once when it is asked for again, or was never', async () => {
    const requests = Array.from({ length: 6 }, (_, i) => ({
      requestId: `burst-${i}`,
      amounts: { ...AMOUNTS, cpuMilli: 100 },
    }));
    const burst = Promise.allSettled(requests.map((request) => create(request)));
    await until('one of them is there', async () => (await roster()).sandboxes.some(({ name }) => name !== undefined));
    await site.end('SIGKILL');
    const told = (await burst).flatMap((one) => (one.status === 'fulfilled' ? [one.value] : []));
    await site.start();
    const made = await Promise.all(requests.map((request) => create(request)));
    for (const one of told) expect(made.map(({ id }) => id)).toContain(one.id);
    expect((await roster()).sandboxes.map(({ name }) => name).sort()).toEqual(made.map(({ name }) => name).sort());
    expect((await report()).reserved.cpuMilli).toBe(600);
  });

  it('carries an operation out once', async () => {
    const { name } = await create();
    const run = () => exec(name, 'echo x >>/tmp/log; sleep 0.3', 'op-a');
    const both = await Promise.all([run(), run(), run()]);
    expect(new Set(both.map(({ id }) => id)).size).toBe(1);
    expect(both.filter(({ repeated }) => repeated === 'true')).toHaveLength(2);
    expect(await exec(name, 'other', 'op-a')).toMatchObject({ status: 409, error: { code: 'OPERATION_MISMATCH' } });
    expect(await exec(name, 'true', 'no id')).toMatchObject({ status: 400, error: { code: 'OPERATION_ID' } });

    const write = (text: string, operation: string) =>
      site.client.request({
        method: 'PUT',
        path: `/v1/sandboxes/${name}/files?path=/tmp/file`,
        body: Buffer.from(text),
        headers: { 'content-type': 'application/octet-stream', 'x-dsec-operation': operation },
      });
    expect((await write('one', 'op-w')).status).toBe(200);
    expect((await (await write('one', 'op-w')).body.json()) as object).toMatchObject({ size: 3 });
    expect((await write('two', 'op-w')).status).toBe(409);
    expect((await write('x'.repeat((1 << 20) + 1), 'op-big')).status).toBe(413);
    const { id } = await exec(name, 'cat /tmp/file; echo; wc -l </tmp/log');
    expect(await outputOf(name, id)).toBe('one\n1\n');

    const gone = [
      await remove(name, { 'x-dsec-operation': 'op-rm' }),
      await remove(name, { 'x-dsec-operation': 'op-rm' }),
    ];
    expect(gone.map(({ status }) => status)).toEqual([200, 200]);
    expect((await remove(name)).status).toBe(404);
  });

  it('drains, and goes on draining when it starts anew', async () => {
    const { name } = await create();
    await site.client.json({ method: 'POST', path: '/v1/drain', body: { on: true } });
    expect((await report()).state).toBe('draining');
    expect(await thrown(create())).toMatchObject({
      code: 'EDGE_REFUSED',
      message: expect.stringContaining('draining'),
    });
    await site.restart('SIGTERM');
    expect((await report()).state).toBe('draining');
    const { id } = await exec(name, 'echo still here');
    expect(await outputOf(name, id)).toBe('still here\n');
    await site.client.json({ method: 'POST', path: '/v1/drain', body: { on: false } });
    await create();
  });

  it('gives back what one had whose time is up, and removes it after a while', async () => {
    await site.restart('SIGTERM', '--keep-ended', '2s');
    const { name } = await create({ ttlMs: 300 });
    await until('it has ended', async () => (await roster()).sandboxes.every(({ state }) => state === 'ended'));
    // It counts until all of it is undone.
    await until('it is given back', async () => (await report()).reserved.cpuMilli === 0);
    const answer = await site.client.request({ method: 'GET', path: `/v1/sandboxes/${name}` });
    expect([answer.status, ((await answer.body.json()) as { error: { code: string } }).error.code]).toEqual([
      410,
      'RUNTIME_SANDBOX_GONE',
    ]);
    await until('it is removed', async () => (await roster()).sandboxes.length === 0);
    await site.restart('SIGTERM');
  });

  it('counts what was made on the machine itself, and owns the machine', async () => {
    const local = await new SandboxClient().create({
      store: process.env.DSEC_STORE,
      image: 'bb:1',
      memoryBytes: 100 * MIB,
    });
    expect((await report()).reserved).toMatchObject({ memoryBytes: 100 * MIB });
    expect((await roster()).sandboxes).toMatchObject([
      { name: local.name, owner: { project: 'local', user: 'local' } },
    ]);
    const { child, said } = site.serve('runtime');
    await until('it gives up', () => child.exitCode !== null);
    expect(said()).toMatch(/runs already/);
  });

  it('forks a sandbox as its owner’s, with what was reserved for each', async () => {
    const { name } = await create();
    const { sandboxes } = await site.client.json<{ sandboxes: { owner: object; amounts: object }[] }>({
      method: 'POST',
      path: `/v1/sandboxes/${name}/fork`,
      body: { count: 2, reservations: ['r-2', 'r-3'] },
    });
    expect(sandboxes.map(({ owner }) => owner)).toEqual(['r-2', 'r-3'].map((reservation) => ({ ...ANN, reservation })));
    expect((await report()).reserved.cpuMilli).toBe(1500);
    const many = site.client.json({ method: 'POST', path: `/v1/sandboxes/${name}/fork`, body: { count: 10 } });
    expect(await thrown(many)).toMatchObject({ code: 'EDGE_REFUSED' });
    expect((await roster()).sandboxes).toHaveLength(3);
  });

  it('counts changes of limits that come at once, each for what it names, and what failed not at all', async () => {
    const { name } = await create();
    const put = (limits: object, told: object) =>
      site.client.json({
        method: 'PUT',
        path: `/v1/sandboxes/${name}/limits`,
        body: limits,
        headers: { 'x-dsec-amounts': JSON.stringify({ ...AMOUNTS, ...told }) },
      });
    // Each was told from what there was before all of them.
    await Promise.all([
      put({ memoryBytes: 256 * MIB }, { memoryBytes: 256 * MIB }),
      put({ cpus: 1.5 }, { cpuMilli: 1500 }),
      put({ pids: 99 }, {}),
    ]);
    const now = { cpuMilli: 1500, memoryBytes: 256 * MIB, diskBytes: 64 * MIB };
    expect((await report()).reserved).toMatchObject(now);
    expect((await roster()).sandboxes[0]!.amounts).toMatchObject(now);
    const failures = await Promise.all([
      thrown(put({ memoryBytes: 4096 * MIB }, { memoryBytes: 4096 * MIB })),
      // It is promised nothing less because of what the runtime refuses.
      thrown(put({ memoryBytes: 128 * MIB, memorySwapBytes: 1 }, { memoryBytes: 128 * MIB })),
    ]);
    expect(failures[0]).toMatchObject({ code: 'EDGE_REFUSED' });
    expect(failures[1]?.code).toMatch(/^RUNTIME_LIMIT/);
    expect((await report()).reserved).toMatchObject(now);
    await site.restart();
    expect((await report()).reserved).toMatchObject(now);
  });

  it.skipIf(fullVmProblem() !== undefined)('makes full machines where there is QEMU', async () => {
    fs.writeFileSync(join(site.folder, 'empty.raw'), '');
    fs.truncateSync(join(site.folder, 'empty.raw'), 64 * MIB);
    process.env.DSEC_DISKS = join(site.folder, 'disks');
    await runCommand('disk', 'create', 'empty', '--from', `raw:${site.folder}/empty.raw`);
    await runCommand('disk', 'pack-diff', 'empty', '--name', 'empty:1');
    expect((await report()).backends.get('vm')).toEqual({ sandboxes: 0, limit: 20 });
    const { name } = await site.create<Made>({ backend: 'vm', image: 'empty:1', owner: ANN, memoryBytes: 128 * MIB });
    expect((await report()).backends.get('vm')!.sandboxes).toBe(1);
    expect((await report()).reserved).toMatchObject({ cpuMilli: 1000, memoryBytes: 128 * MIB });
    await remove(name);
    expect((await report()).backends.get('vm')!.sandboxes).toBe(0);
  });

  it('means the sandbox that is meant', async () => {
    const { name, id } = await create();
    const get = (meant: string) =>
      site.client.request({ method: 'GET', path: `/v1/sandboxes/${name}`, headers: { 'x-dsec-sandbox': meant } });
    expect((await get(id)).status).toBe(200);
    const other = await get('another');
    expect([other.status, await other.body.json()]).toMatchObject([410, { error: { code: 'RUNTIME_SANDBOX_GONE' } }]);
  });

  it('lets nobody in without the token, by upgrades either', async () => {
    const { name } = await create();
    const stranger = new PeerClient({ url: site.url, token: 'another-token-of-others' });
    for (const path of ['/v1/report', '/v1/roster', `/v1/sandboxes/${name}`, `/v1/sandboxes/${name}/ports/80/`]) {
      expect((await stranger.request({ method: 'GET', path })).status).toBe(401);
    }
    await stranger.close();
    const answer = await new Promise<string>((resolve) => {
      const { hostname, port } = new URL(site.url);
      const socket = connect(Number(port), hostname);
      let text = '';
      socket.on('data', (bytes) => {
        text += bytes;
      });
      socket.once('close', () => resolve(text));
      socket.write(
        `GET /v1/sandboxes/${name}/ports/80 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\n`,
      );
    });
    expect(answer).toMatch(/^HTTP\/1.1 401 SERVICE_TOKEN/);
    // Files of the machine are nobody's business there.
    const upload = await site.client.request({
      method: 'POST',
      path: `/v1/sandboxes/${name}/files/upload`,
      body: { from: '/etc/shadow', to: '/tmp/shadow' },
    });
    expect(upload.status).toBe(404);
  });
});
