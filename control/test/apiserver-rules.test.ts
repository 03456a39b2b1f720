/** What the apiserver holds callers to, over edges in this process: pages of lists, limits that count, names of images, what shares the machine. */
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { openStore } from '#imagesvc';
import { amountsOf } from '../apiserver/create-sandbox.ts';
import { packTarget } from '../apiserver/image-target.ts';
import { whileAsking } from '../apiserver/keep-asking.ts';
import { promisedOf } from '../edge/sandbox-owner.ts';
import { fail } from '../errors.ts';
import { ApiSite } from './api-site.ts';

const MIB = 1 << 20;

describe('the apiserver', () => {
  let site: ApiSite;
  beforeAll(async () => {
    site = await ApiSite.make(3);
  });
  beforeEach(async () => {
    for (const edge of site.edges) {
      edge.mode = 'ok';
      edge.onFork = undefined;
      edge.onLimits = undefined;
      edge.sandboxes.clear();
      edge.heard.length = 0;
    }
    for (const { edge } of site.edges) await site.api.parts.reconciler.edge(edge);
    expect(await site.used()).toBe(0);
  });
  afterAll(() => site?.remove());

  it('lists in pages, each sandbox once, whatever comes and goes meanwhile', async () => {
    const made = await Promise.all(Array.from({ length: 25 }, () => site.create()));
    const ids = made.map(({ body }) => body.id as string).sort();
    const seen: string[] = [];
    let pages = 0;
    for (let from: string | undefined = ''; from !== undefined; pages++) {
      const page = await site.json(`/v1/sandboxes?limit=4${from === '' ? '' : `&continue=${from}`}`);
      expect(page.status).toBe(200);
      expect(page.body.sandboxes.length).toBeLessThanOrEqual(4);
      seen.push(...page.body.sandboxes.map(({ id }: { id: string }) => id));
      from = page.body.continue;
      // One that was told already goes, and one comes that may be told or not.
      await site.json(`/v1/sandboxes/${seen[pages]}?force=true`, { method: 'DELETE' });
      await site.create({ name: `new-${pages}` });
    }
    expect(pages).toBeGreaterThan(5);
    expect(new Set(seen).size).toBe(seen.length);
    expect(ids.filter((id) => !seen.includes(id))).toEqual([]);
    const whole = await site.json('/v1/sandboxes');
    expect(whole.body.continue).toBeUndefined();
    for (const bad of ['x', 'AAAA', '%00']) {
      expect((await site.json(`/v1/sandboxes?continue=${bad}`)).status).toBe(400);
    }
    expect((await site.json('/v1/sandboxes?limit=0')).status).toBe(400);
  });

  it('lists those that are called so, on whichever edge', async () => {
    const made = [await site.create({ name: 'one' }), await site.create({ name: 'one-2' })];
    const { body } = await site.json('/v1/sandboxes?name=one');
    expect(body.sandboxes.map(({ id }: { id: string }) => id)).toEqual([made[0]!.body.id]);
    // No edge told of others.
    const asked = site.edges.map(({ heard }) => heard.filter(({ url }) => url.startsWith('/v1/roster')).at(-1)?.url);
    expect(new Set(asked)).toEqual(new Set(['/v1/roster?name=one']));
    expect((await site.json('/v1/sandboxes?name=on')).body.sandboxes).toEqual([]);
    expect((await site.json('/v1/sandboxes?name=')).status).toBe(400);
  });

  it('counts other limits: what grows before the edge has it, what shrinks afterwards', async () => {
    const quota = (memoryBytes: number | null) =>
      site.json('/v1/quotas', { method: 'PUT', body: { project: 'root', limits: { memoryBytes } } });
    const used = async () => (await site.json('/v1/quotas')).body.quotas[0].used.memoryBytes as number;
    const { body } = await site.create({ memoryBytes: 100 * MIB });
    const put = (limits: object) => site.json(`/v1/sandboxes/${body.id}/limits`, { method: 'PUT', body: limits });
    await quota(300 * MIB);
    try {
      expect(await used()).toBe(100 * MIB);
      expect((await put({ memoryBytes: 200 * MIB })).status).toBe(200);
      expect(await used()).toBe(200 * MIB);
      const edge = site.edges.find((one) => one.edge === body.edge)!;
      const before = edge.heard.filter(({ method }) => method === 'PUT').length;
      const refused = await put({ memoryBytes: 301 * MIB });
      expect(refused).toMatchObject({ status: 429, body: { error: { code: 'IAM_QUOTA' } } });
      // Its edge was not asked.
      expect(edge.heard.filter(({ method }) => method === 'PUT').length).toBe(before);
      edge.mode = 'refuse';
      expect((await put({ memoryBytes: 250 * MIB })).status).toBe(503);
      expect(await used()).toBe(200 * MIB);
      edge.mode = 'ok';
      expect((await put({ memoryBytes: 50 * MIB, pids: 7 })).status).toBe(200);
      expect(await used()).toBe(50 * MIB);
      // Without a limit it counts as what has none.
      await quota(null);
      expect((await put({ memoryBytes: null })).status).toBe(200);
      expect(await used()).toBe(512 * MIB);
      // An answer that is lost leaves the larger one, until the roster has told twice what there is.
      edge.mode = 'lose';
      expect((await put({ memoryBytes: 700 * MIB })).status).toBe(503);
      edge.mode = 'ok';
      expect(await used()).toBe(700 * MIB);
      edge.sandboxes.get(body.name)!.amounts = { cpuMilli: 500, memoryBytes: 600 * MIB, diskBytes: 2 ** 31, gpus: 0 };
      for (let times = 0; times < 3; times++) await site.api.parts.reconciler.edge(body.edge);
      expect(await used()).toBe(600 * MIB);
    } finally {
      await quota(null);
    }
    for (const bad of [{}, { memoryBytes: -1 }, { memoryBytes: 'x' }, { nonsense: 1 }]) {
      expect((await put(bad)).status).toBe(400);
    }
  });

  it('counts changes of limits at the same time, each for what it names, and corrects what is in use above the quota', async () => {
    const quota = (limits: object) => site.json('/v1/quotas', { method: 'PUT', body: { project: 'root', limits } });
    const used = async () => (await site.json('/v1/quotas')).body.quotas[0].used as Record<string, number>;
    const { body } = await site.create({ memoryBytes: 100 * MIB, cpus: 1 });
    const put = (limits: object) => site.json(`/v1/sandboxes/${body.id}/limits`, { method: 'PUT', body: limits });
    const edge = site.edges.find((one) => one.edge === body.edge)!;
    await quota({ memoryBytes: 1000 * MIB });
    const other = await site.another();
    try {
      const elsewhere = (limits: object) =>
        fetch(`${other.url}/v1/sandboxes/${body.id}/limits`, {
          method: 'PUT',
          headers: { authorization: `Bearer ${site.token}`, 'content-type': 'application/json' },
          body: JSON.stringify(limits),
        });
      // Both instances have looked before either has changed anything.
      let asked = 0;
      let go = () => {};
      const both = new Promise<void>((done) => {
        go = done;
      });
      edge.onLimits = () => {
        if (++asked === 2) go();
        return both;
      };
      const changes = await Promise.all([put({ memoryBytes: 400 * MIB }), elsewhere({ cpus: 3 })]);
      expect(changes.map(({ status }) => status)).toEqual([200, 200]);
      edge.onLimits = undefined;
      expect(await used()).toMatchObject({ memoryBytes: 400 * MIB, cpuMilli: 3000 });
      expect(edge.sandboxes.get(body.name)!.amounts).toMatchObject({ memoryBytes: 400 * MIB, cpuMilli: 3000 });
      // By one instance they go one after the other, and what counts is what the last one left.
      await Promise.all([700, 300, 900, 200].map((mib) => put({ memoryBytes: mib * MIB })));
      expect((edge.sandboxes.get(body.name)!.amounts as { memoryBytes: number }).memoryBytes).toBe(
        (await used()).memoryBytes,
      );
      // A row that cannot be corrected keeps no other one from it, and what is in use counts, whatever the quota.
      const second = (await site.create({ memoryBytes: 50 * MIB })).body;
      const there = site.edges.find((one) => one.edge === second.edge)!;
      const amounts = { cpuMilli: 1, memoryBytes: 5000 * MIB, diskBytes: 1, gpus: 0 };
      edge.sandboxes.get(body.name)!.amounts = { ...amounts, memoryBytes: Number.MAX_SAFE_INTEGER };
      there.sandboxes.get(second.name)!.amounts = amounts;
      for (let times = 0; times < 2; times++)
        for (const one of site.edges) await site.api.parts.reconciler.edge(one.edge);
      expect((await used()).memoryBytes).toBeGreaterThanOrEqual(5000 * MIB);
    } finally {
      await other.close(0);
      await quota({ memoryBytes: null });
    }
  });

  it('counts a machine without limits as what it has', async () => {
    const amountsOfOne = (body: object) => amountsOf(body, site.api.parts.defaults);
    expect(amountsOfOne({})).toMatchObject({ cpuMilli: 500, memoryBytes: 512 * MIB });
    expect(amountsOfOne({ backend: 'microvm' })).toMatchObject({ cpuMilli: 2000, memoryBytes: 1024 * MIB });
    expect(amountsOfOne({ backend: 'vm', memoryBytes: 64 * MIB })).toMatchObject({
      cpuMilli: 1000,
      memoryBytes: 64 * MIB,
    });
    // A full machine is made of a disk: of no other image anything is reserved.
    expect((await site.create({ backend: 'vm' })).body.error.code).toBe('CATALOG_NOT_DISK');
    expect(await site.used()).toBe(0);
    const limits = { memoryBytes: 300 * MIB };
    expect(promisedOf({ backend: 'microvm', limits })).toMatchObject({
      backend: 'microvm',
      amounts: { cpuMilli: 2000, memoryBytes: 300 * MIB },
    });
    expect(promisedOf({ backend: 'crun', limits: {} })).toMatchObject({
      backend: 'container',
      amounts: { cpuMilli: 500, memoryBytes: 512 * MIB },
    });
  });

  it('keeps no child of a fork that counts for nobody', async () => {
    const { body } = await site.create();
    const edge = site.edges.find((one) => one.edge === body.edge)!;
    const fork = (asked: object) => site.json(`/v1/sandboxes/${body.id}/fork`, { method: 'POST', body: asked });
    edge.onFork = async () => {};
    expect((await fork({ count: 2 })).body.sandboxes).toHaveLength(2);
    expect(await site.used()).toBe(3);
    for (const name of [`${body.name}-1`, `${body.name}-2`]) edge.sandboxes.delete(name);
    await site.api.parts.reconciler.edge(edge.edge);
    edge.onFork = async ([first]) => site.iam.release(first!);
    expect((await fork({ count: 2 })).status).toBe(409);
    // Nobody knows of the other one either.
    expect([...edge.sandboxes.keys()]).toEqual([body.name]);
    expect(await site.used()).toBe(1);
    // By a request id it is found again.
    expect((await fork({ count: 2, requestId: 'r' })).status).toBe(409);
    expect([...edge.sandboxes.keys()]).toEqual([body.name, `${body.name}-2`]);
    expect(await site.used()).toBe(2);
  });

  it('says again and again that an edge is asked, as long as it is', async () => {
    const asked: string[] = [];
    let enough = () => {};
    const often = new Promise<void>((done) => {
      enough = done;
    });
    const asking = async (id: string, edge: string) => {
      asked.push(`${id} ${edge}`);
      if (asked.length >= 6) enough();
      if (id === 'b') throw fail('IAM_RESERVATION_GONE', { id });
    };
    const notes: string[] = [];
    const parts = { iam: { asking }, note: (text: string) => void notes.push(text), everyMs: 5 };
    const made = await whileAsking(parts, ['a', 'b'], 'e1', async () => {
      await often;
      return 'made';
    });
    const times = asked.length;
    expect([made, new Set(asked), notes]).toEqual(['made', new Set(['a e1', 'b e1']), []]);
    await site.json('/v1/quotas');
    expect(asked.length).toBe(times);
  });

  it('lets operators make pools of tasks, but share no machine and name no store, and says which nodes failed', async () => {
    const token = await member(site, 'root', ['operator']);
    const put = (body: object) =>
      site.json('/v1/fncall/pools/p', { method: 'PUT', token, body: { image: 'small:1', ...body } });
    expect((await put({})).body.error.code).toBe('FNCALL_NO_NODE');
    for (const edge of site.edges) edge.hasTasks = true;
    await site.api.parts.edges.poll();
    try {
      const asked = () => site.edges.flatMap(({ heard }) => heard.filter(({ url }) => url.includes('fncall'))).length;
      expect((await put({ userns: 'host' })).body.error.code).toBe('IAM_DENIED');
      expect((await put({ store: 'file:///elsewhere' })).body.error.code).toBe('SANDBOX_BAD_REQUEST');
      expect(asked()).toBe(0);
      expect((await put({})).body.map(({ edge }: { edge: string }) => edge)).toEqual(['e1', 'e2', 'e3']);
      site.edges[1]!.mode = 'fail';
      const some = await put({});
      expect(some).toMatchObject({ status: 502, body: { error: { code: 'FNCALL_NODES' } } });
      expect(some.body.error.message).toMatch(/e2: it is busy; done on: .*e1/);
      for (const edge of site.edges) edge.mode = 'fail';
      expect((await put({})).body.error.code).toBe('RUNTIME_FNCALL_BUSY');
      const rows = await site.iam.readAudit(await site.iam.authenticate(site.token), { project: 'root', limit: 50 });
      const of = rows.filter(({ target, outcome }) => target === 'p' && outcome !== 'denied');
      expect(of.map(({ outcome }) => outcome).sort()).toEqual(['done', 'failed', 'failed', 'failed']);
    } finally {
      for (const edge of site.edges) edge.hasTasks = false;
      await site.api.parts.edges.poll();
    }
  });

  it('answers a request id whose sandbox has ended with that, and makes no other one', async () => {
    const { body } = await site.create({ requestId: 'once' });
    expect((await site.json(`/v1/sandboxes/${body.id}/stop`, { method: 'POST', body: {} })).status).toBe(200);
    const again = await site.create({ requestId: 'once' });
    expect(again).toMatchObject({ status: 410, body: { error: { code: 'SANDBOX_GONE', retryable: false } } });
    expect(again.body.error.message).toContain(body.id);
    expect(site.sandboxes).toBe(0);
    // One that has its name now is another one.
    const taken = await site.create({ name: body.name, requestId: 'other' });
    expect(taken.status).toBe(201);
    expect((await site.create({ requestId: 'once' })).status).toBe(410);
    // Without room anywhere, what is there is the answer all the same.
    for (const edge of site.edges) edge.mode = 'refuse';
    expect((await site.create({ requestId: 'other' })).body.id).toBe(taken.body.id);
    expect((await site.create({ requestId: 'once' })).status).toBe(410);
    expect((await site.create({ requestId: 'none' })).body.error.code).toBe('PLACEMENT_NO_ROOM');
    expect(await site.used()).toBe(1);
  });

  it('lets nobody share the machine who may not', async () => {
    const token = await member(site, 'root/free', ['developer']);
    for (const shared of [{ network: { mode: 'host' } }, { userns: 'host' }]) {
      const denied = await site.create({ ...shared, project: 'root/free' }, { token });
      expect(denied).toMatchObject({ status: 403, body: { error: { code: 'IAM_DENIED' } } });
      expect(denied.body.error.message).toContain('sandbox.host');
      const lines = await site.ask('/v1/sandboxes/batch', {
        method: 'POST',
        token,
        body: { request: { image: 'small:1', ...shared }, count: 2 },
      });
      for (const line of (await lines.text()).trim().split('\n'))
        expect(JSON.parse(line).error.code).toBe('IAM_DENIED');
      const { body, status } = await site.create({ ...shared, project: 'root/free' });
      expect(status).toBe(201);
      // Nor by a fork of one that somebody else has made.
      Object.assign(site.edges.find((one) => one.edge === body.edge)!.sandboxes.get(body.name)!, shared);
      const fork = await site.json(`/v1/sandboxes/${body.id}/fork`, { method: 'POST', token, body: {} });
      expect(fork.body.error.code).toBe('IAM_DENIED');
    }
    expect((await site.create({ network: { mode: 'none' } }, { token })).status).toBe(201);
  });

  it('packs into names of the sandbox’s project alone', async () => {
    const store = await openStore(`file://${site.folder}/store`);
    expect(await packTarget(store, 'root/a', 'work:1')).toBe('root/a/work:1');
    expect(await packTarget(store, 'root/a', 'root/a/work:1')).toBe('root/a/work:1');
    for (const name of ['root/b/work:1', 'root/a/b/work:1', 'b/work:1', '/work:1', '../work:1', 'root/work:1']) {
      await expect(packTarget(store, 'root/a', name)).rejects.toMatchObject({ code: 'API_IMAGE_NAME', http: 400 });
    }
    const token = await member(site, 'root/packs', ['developer']);
    const { body } = await site.create({}, { token });
    const edge = site.edges.find((one) => one.edge === body.edge)!;
    const pack = (name: string) =>
      site.json(`/v1/sandboxes/${body.id}/pack-diff`, { method: 'POST', token, body: { name } });
    expect((await pack('small:1')).status).toBe(200);
    expect(JSON.parse(edge.heard.at(-1)!.body).name).toBe('root/packs/small:1');
    expect((await pack('root/other/small:1')).body.error.code).toBe('API_IMAGE_NAME');
    const fork = (snapshot: string) =>
      site.json(`/v1/sandboxes/${body.id}/fork`, { method: 'POST', token, body: { snapshot } });
    expect((await fork('root/other/small:1')).body.error.code).toBe('API_IMAGE_NAME');
  });

  it('says why a sandbox has gone, for programs', async () => {
    const { body } = await site.create();
    const edge = site.edges.find((one) => one.edge === body.edge)!;
    edge.ended.set(body.name, { reason: 'expired', detail: 'its time was up at noon' });
    edge.sandboxes.delete(body.name);
    site.api.parts.owners.forget(body.id);
    const gone = await site.json(`/v1/sandboxes/${body.id}`);
    expect(gone).toMatchObject({ status: 410, body: { error: { code: 'SANDBOX_GONE', reason: 'expired' } } });
    expect(gone.body.error.message).toContain('its time was up at noon');
    const never = await site.json(`/v1/sandboxes/never.${edge.edge}`);
    expect(never.status).toBe(410);
    expect('reason' in never.body.error).toBe(false);
  });
});

async function member(site: ApiSite, project: string, grants: string[]): Promise<string> {
  const name = `of-${project.replace(/\W/g, '-')}`;
  await site.json('/v1/projects', { method: 'POST', body: { path: project } });
  await site.json('/v1/principals', { method: 'POST', body: { name, kind: 'user', project } });
  await site.json('/v1/policies', { method: 'POST', body: { principal: name, project, grants } });
  const made = await site.json('/v1/tokens', { method: 'POST', body: { principal: name, project, grants } });
  expect(made.status).toBe(201);
  return made.body.secret as string;
}
