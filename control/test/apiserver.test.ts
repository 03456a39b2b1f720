/** The apiserver over edges that refuse, lose answers and die: one request id is one sandbox, and what is reserved is what lives. */
import { connect } from 'node:net';
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { ApiSite } from './api-site.ts';
import { until } from './edge-site.ts';

describe('the apiserver', () => {
  let site: ApiSite;
  beforeAll(async () => {
    site = await ApiSite.make(3);
  });
  beforeEach(async () => {
    for (const edge of site.edges) {
      edge.mode = 'ok';
      edge.sandboxes.clear();
      edge.heard.length = 0;
      edge.creates = 0;
    }
    site.dead.clear();
    await site.api.parts.edges.poll();
    for (const { edge } of site.edges) await site.api.parts.reconciler.edge(edge);
    expect(await site.used()).toBe(0);
  });
  afterAll(() => site?.remove());

  it('makes a sandbox whose id names its edge, with owner, amounts and reservation', async () => {
    const { status, body } = await site.create({ memoryBytes: 1 << 20, cpus: 1.5, job: 'j' });
    expect(status).toBe(201);
    expect(body.id).toBe(`${body.name}.${body.edge}`);
    expect(body).toMatchObject({ project: 'root', user: 'admin', job: 'j', state: 'running' });
    const edge = site.edges.find((one) => one.edge === body.edge)!;
    const sent = JSON.parse(edge.heard.find(({ url }) => url === '/v1/sandboxes')!.body);
    expect(sent.amounts).toEqual({ cpuMilli: 1500, memoryBytes: 1 << 20, diskBytes: 2 * 2 ** 30, gpus: 0 });
    expect(sent.requestId).toBe(sent.owner.reservation);
    expect(sent.project).toBeUndefined();
    expect(await site.used()).toBe(1);
    const listed = await site.json('/v1/sandboxes');
    expect(listed.body.sandboxes.map((one: { id: string }) => one.id)).toEqual([body.id]);
    expect((await site.json(`/v1/sandboxes/${body.id}`)).body).toMatchObject({ id: body.id, edge: body.edge });
  });

  it('gives the same sandbox for the same request id, at once and later, from any instance', async () => {
    const other = await site.another();
    try {
      const ask = (url: string) =>
        fetch(`${url}/v1/sandboxes`, {
          method: 'POST',
          headers: { authorization: `Bearer ${site.token}`, 'content-type': 'application/json' },
          body: JSON.stringify({ image: 'small:1', requestId: 'same' }),
        }).then((answer) => answer.json() as Promise<{ id: string }>);
      const all = await Promise.all([site.api.url, other.url, site.api.url, other.url].map(ask));
      expect(new Set(all.map(({ id }) => id)).size).toBe(1);
      expect((await ask(other.url)).id).toBe(all[0]!.id);
      expect(site.sandboxes).toBe(1);
      expect(await site.used()).toBe(1);
    } finally {
      await other.close(0);
    }
  });

  it('asks the next edge when one refuses, and says why when none takes it', async () => {
    site.edges[0]!.mode = 'refuse';
    site.edges[1]!.mode = 'refuse';
    expect((await site.create()).body.edge).toBe('e3');
    site.edges[2]!.mode = 'refuse';
    const { status, body, headers } = await site.create();
    expect(status).toBe(503);
    expect(body.error.code).toBe('PLACEMENT_NO_ROOM');
    expect(body.error.message).toContain('no memory is left');
    expect(headers.get('retry-after')).toBe('1');
    expect(await site.used()).toBe(1);
  });

  it('says at once that no node has a backend, which waiting does not help', async () => {
    const { status, body } = await site.create({ backend: 'microvm' });
    expect([status, body.error.code, body.error.retryable]).toEqual([501, 'PLACEMENT_NO_BACKEND', false]);
    expect(await site.used()).toBe(0);
  });

  it('says so not while edges may be unknown', async () => {
    const codes = async () => [
      (await site.create({ backend: 'microvm' })).body.error.code,
      (await site.create({ gpus: 1 })).body.error.code,
    ];
    site.watcherUpMs = 1000;
    await site.api.parts.edges.poll();
    expect(await codes()).toEqual(['PLACEMENT_NO_ROOM', 'PLACEMENT_NO_ROOM']);
    site.watcherUpMs = 60_000;
    await site.api.parts.edges.poll();
    expect(await codes()).toEqual(['PLACEMENT_NO_BACKEND', 'PLACEMENT_NO_GPU']);
    expect(await site.used()).toBe(0);
  });

  it('answers with what was made for a request id when no node has its backend or GPUs any more', async () => {
    const [edge] = site.edges;
    edge!.backends = ['microvm'];
    edge!.gpus = 1;
    await site.api.parts.edges.poll();
    const wanted = [
      { backend: 'microvm', requestId: 'kept-vm' },
      { gpus: 1, requestId: 'kept-gpu' },
    ];
    const made = await Promise.all(wanted.map((one) => site.create(one)));
    expect(made.map(({ status }) => status)).toEqual([201, 201]);
    edge!.backends = [];
    edge!.gpus = 0;
    await site.api.parts.edges.poll();
    const again = await Promise.all(wanted.map((one) => site.create(one)));
    expect(again.map(({ body }) => body.id)).toEqual(made.map(({ body }) => body.id));
    expect((await site.create({ backend: 'microvm', requestId: 'new' })).body.error.code).toBe('PLACEMENT_NO_BACKEND');
    expect(await site.used()).toBe(2);
  });

  it('asks the same edge again when the answer was lost: one sandbox, not two', async () => {
    for (const edge of site.edges) edge.mode = 'lose';
    const asking = site.create({ requestId: 'lost' });
    while (site.edges.every(({ creates }) => creates === 0)) await new Promise((go) => setTimeout(go, 5));
    for (const edge of site.edges) edge.mode = 'ok';
    const { status, body } = await asking;
    expect(status).toBe(201);
    expect(site.sandboxes).toBe(1);
    expect(site.edges.filter(({ creates }) => creates > 0).map(({ edge }) => edge)).toEqual([body.edge]);
    expect(await site.used()).toBe(1);
  });

  it('releases what a failed creation had reserved', async () => {
    for (const edge of site.edges) edge.mode = 'fail';
    const { status, body } = await site.create();
    expect([status, body.error.code]).toEqual([409, 'RUNTIME_ENV']);
    expect(await site.used()).toBe(0);
    expect((await site.create({ image: 'nothing:1' })).body.error.code).toBe('CATALOG_NOT_FOUND');
    expect(await site.used()).toBe(0);
  });

  it('holds the quota, whoever asks at once', async () => {
    const admin = await site.iam.authenticate(site.token);
    await site.iam.createProject(admin, 'root/small').catch(() => {});
    await site.iam.setQuota(admin, 'root/small', { sandboxes: 3 });
    const all = await Promise.all(Array.from({ length: 10 }, () => site.create({ project: 'root/small' })));
    expect(all.filter(({ status }) => status === 201)).toHaveLength(3);
    const refused = all.filter(({ status }) => status === 429);
    expect(refused).toHaveLength(7);
    expect(refused[0]!.body.error.code).toBe('IAM_QUOTA');
    const one = all.find(({ status }) => status === 201)!.body;
    expect((await site.json(`/v1/sandboxes/${one.id}/stop`, { method: 'POST', body: {} })).status).toBe(200);
    expect((await site.create({ project: 'root/small' })).status).toBe(201);
  });

  it('reconciles: what an edge has not any more is released, what counts for nobody is not touched in a moment', async () => {
    await Promise.all(Array.from({ length: 6 }, () => site.create()));
    expect(await site.used()).toBe(6);
    const [edge] = site.edges.filter(({ sandboxes }) => sandboxes.size > 0);
    const were = edge!.sandboxes.size;
    edge!.sandboxes.clear();
    await new Promise((go) => setTimeout(go, 5));
    await site.api.parts.reconciler.edge(edge!.edge);
    expect(await site.used()).toBe(6 - were);
    // Released behind its back: older sandboxes without a reservation go at the second look, new ones stay.
    const made = (await site.create()).body;
    const on = site.edges.find((one) => one.edge === made.edge)!;
    const kept = on.sandboxes.get(made.name)!;
    await site.iam.release(kept.owner.reservation!);
    await site.api.parts.reconciler.edge(on.edge);
    await site.api.parts.reconciler.edge(on.edge);
    expect(on.sandboxes.has(made.name)).toBe(true);
    on.sandboxes.set(made.name, { ...kept, createdAt: new Date(Date.now() - 600_000).toISOString() });
    await site.api.parts.reconciler.edge(on.edge);
    expect(on.sandboxes.has(made.name)).toBe(false);
  });

  it('makes many by one request, each as it becomes ready, and the same ones again', async () => {
    const batch = async () => {
      const answer = await site.ask('/v1/sandboxes/batch', {
        method: 'POST',
        body: { request: { image: 'small:1', requestId: 'many' }, count: 700 },
      });
      expect(answer.headers.get('content-type')).toContain('ndjson');
      const lines = (await answer.text())
        .trim()
        .split('\n')
        .map((line) => JSON.parse(line));
      expect(lines.map(({ index }) => index).sort((a, b) => a - b)).toEqual(Array.from({ length: 700 }, (_, at) => at));
      return lines.map(({ sandbox }) => sandbox.id).sort();
    };
    const first = await batch();
    expect(site.sandboxes).toBe(700);
    expect(await batch()).toEqual(first);
    expect(await site.used()).toBe(700);
    const counts = site.edges.map(({ sandboxes }) => sandboxes.size);
    expect(Math.max(...counts)).toBeLessThan(300);
  });

  it('tells each failure of a batch by its index', async () => {
    const requests = [{ image: 'small:1' }, { image: 'nothing:1' }, { image: 'small:1' }];
    const answer = await site.ask('/v1/sandboxes/batch', { method: 'POST', body: { requests } });
    const lines = (await answer.text())
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line));
    expect(lines.find(({ index }) => index === 1).error.code).toBe('CATALOG_NOT_FOUND');
    expect(lines.filter(({ sandbox }) => sandbox !== undefined)).toHaveLength(2);
    for (const body of [{}, { count: 3 }, { request: requests[0], requests }]) {
      expect((await site.json('/v1/sandboxes/batch', { method: 'POST', body })).status).toBe(400);
    }
  });

  it('stops a batch whose reader has gone, and leaves nothing that he did not learn of', async () => {
    const leaving = new AbortController();
    const answer = await site.ask('/v1/sandboxes/batch', {
      method: 'POST',
      body: { request: { image: 'small:1' }, count: 20_000 },
      signal: leaving.signal,
    });
    const reader = answer.body!.getReader();
    await reader.read();
    leaving.abort();
    // What had begun is finished, and taken away again, or told by a line that may have been read.
    await until('nothing is under way', async () => {
      const { inHand, waiting } = site.api.parts.work;
      return inHand === 0 && waiting === 0;
    });
    expect(site.edges.reduce((sum, { creates }) => sum + creates, 0)).toBeLessThan(20_000);
    expect(await site.used()).toBe(site.sandboxes);
  });

  it('passes on what is asked of a sandbox: bodies, answers, streams, errors', async () => {
    const { id } = (await site.create()).body;
    const echo = await site.json(`/v1/sandboxes/${id}/files?path=%2Fa%20b`, {
      method: 'PUT',
      body: 'the body',
      headers: { 'content-type': 'application/octet-stream', 'x-dsec-operation': 'op-1', 'x-request-id': 'r-77' },
    });
    expect(echo.headers.get('x-request-id')).toBe('r-77');
    expect(echo.body).toMatchObject({ method: 'PUT', body: 'the body' });
    expect(echo.body.url).toMatch(/^\/v1\/sandboxes\/[^/.]+\/files\?path=%2Fa%20b$/);
    expect(echo.body.headers).toMatchObject({ 'x-dsec-operation': 'op-1', 'x-request-id': 'r-77' });
    const output = await site.ask(`/v1/sandboxes/${id}/commands/1/output`);
    const reader = output.body!.getReader();
    expect(Buffer.from((await reader.read()).value!).toString()).toBe('first ');
    expect(Buffer.from((await reader.read()).value!).toString()).toBe('second');
    // One that breaks off is not taken for a whole one.
    await expect(site.ask(`/v1/sandboxes/${id}/commands/1/broken`).then((answer) => answer.text())).rejects.toThrow();
    const missing = await site.json(`/v1/sandboxes/none.e1/commands`);
    expect([missing.status, missing.body.error.code]).toEqual([410, 'SANDBOX_GONE']);
    expect((await site.json('/v1/sandboxes/none.e9')).body.error.code).toBe('EDGE_UNKNOWN');
    expect((await site.json('/v1/sandboxes/noedge/stop', { method: 'POST' })).body.error.code).toBe('SANDBOX_ID');
    const inside = await site.json(`/v1/sandboxes/${id}/ports/80/x`);
    expect([inside.status, inside.body.error.message]).toEqual([404, 'of the service inside']);
  });

  it('gives an answer that comes before the body was sent, and ends what nobody waits for', async () => {
    const { id, edge: name } = (await site.create()).body;
    const edge = site.edges.find((one) => one.edge === name)!;
    const { port } = new URL(site.api.url);
    const socket = connect(Number(port), '127.0.0.1');
    socket.write(
      `POST /v1/sandboxes/${id}/commands/1/stdin?early HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${site.token}\r\n` +
        'Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n',
    );
    const answer = await new Promise<string>((resolve) => socket.once('data', (bytes) => resolve(bytes.toString())));
    expect(answer).toContain('200 OK');
    socket.destroy();
    const cut = edge.cut;
    const leaving = new AbortController();
    const held = await site.ask(`/v1/sandboxes/${id}/commands/1/output?hold`, { signal: leaving.signal });
    await held.body!.getReader().read();
    leaving.abort();
    while (edge.cut === cut) await new Promise((go) => setTimeout(go, 5));
  });

  it('passes on upgrades', async () => {
    const { id } = (await site.create()).body;
    const { port } = new URL(site.api.url);
    const upgrade = async (token: string, target = id) => {
      const socket = connect(Number(port), '127.0.0.1');
      socket.write(
        `POST /v1/sandboxes/${target}/ports/80 HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${token}\r\n` +
          'Connection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\n',
      );
      const head = await new Promise<string>((resolve) => socket.once('data', (bytes) => resolve(bytes.toString())));
      return { socket, head };
    };
    const { socket, head } = await upgrade(site.token);
    expect(head).toContain('101 Switching Protocols');
    socket.write('there and back');
    expect(String(await new Promise((resolve) => socket.once('data', resolve)))).toBe('there and back');
    socket.destroy();
    expect((await upgrade('wrong')).head).toContain('401 IAM_TOKEN_INVALID');
    expect((await upgrade(site.token, 'none.e1')).head).toContain('410 SANDBOX_GONE');
  });

  it('lets nobody do what he may not', async () => {
    const admin = await site.iam.authenticate(site.token);
    await site.iam.createProject(admin, 'root/a').catch(() => {});
    await site.iam.createProject(admin, 'root/b').catch(() => {});
    const token = async (project: string, grants: string[]) =>
      (await site.iam.createToken(admin, { principal: 'admin', project, grants })).secret;
    const a = await token('root/a', ['developer']);
    const reader = await token('root/a', ['reader']);
    const b = await token('root/b', ['developer']);
    const made = await site.create({}, { token: a });
    expect(made.body.project).toBe('root/a');
    const { id } = made.body;
    const status = async (path: string, method: string, who: string) =>
      (await site.json(path, { method, token: who, body: method === 'GET' ? undefined : {} })).status;
    expect(await status(`/v1/sandboxes/${id}`, 'GET', reader)).toBe(200);
    expect(await status(`/v1/sandboxes/${id}/commands`, 'POST', reader)).toBe(403);
    expect(await status(`/v1/sandboxes/${id}/stop`, 'POST', reader)).toBe(403);
    expect(await status(`/v1/sandboxes/${id}/ports/80/x`, 'GET', reader)).toBe(403);
    expect(await status(`/v1/sandboxes/${id}`, 'GET', b)).toBe(403);
    expect(await status(`/v1/sandboxes/${id}`, 'DELETE', b)).toBe(403);
    expect(await status(`/v1/sandboxes/${id}/commands`, 'POST', a)).toBe(200);
    expect(await status('/v1/nodes', 'GET', b)).toBe(403);
    expect((await site.create({ project: 'root/b' }, { token: a })).status).toBe(403);
    expect((await site.json('/v1/sandboxes', { token: b })).body.sandboxes).toEqual([]);
    expect((await site.json('/v1/sandboxes', { token: a })).body.sandboxes).toHaveLength(1);
    for (const wrong of ['', 'x', 'a'.repeat(2000)]) {
      const answer = await site.json('/v1/sandboxes', { token: wrong });
      expect([answer.status, answer.body.error.code]).toEqual([401, 'IAM_TOKEN_INVALID']);
    }
    const audit = await site.iam.readAudit(admin, { project: 'root', limit: 200 });
    expect(audit.some(({ outcome, target }) => outcome === 'denied' && target === id)).toBe(true);
    expect(audit.some(({ action, target }) => action === 'sandbox.create' && target === id)).toBe(true);
  });

  it('drains nodes, and says which edges are away', async () => {
    await site.create();
    expect((await site.json('/v1/nodes/e1/drain', { method: 'POST', body: { on: true } })).status).toBe(200);
    for (let made = 0; made < 6; made++) expect((await site.create()).body.edge).not.toBe('e1');
    expect((await site.json('/v1/nodes/e1/drain', { method: 'POST', body: { on: false } })).status).toBe(200);
    expect((await site.json('/v1/nodes/e9/drain', { method: 'POST', body: { on: true } })).status).toBe(404);
    site.dead.add('e2');
    await site.api.parts.edges.poll();
    expect((await site.json('/v1/sandboxes')).body.unreachable).toEqual(['e2']);
    expect((await site.json('/v1/nodes')).body.nodes.map((one: { alive: boolean }) => one.alive)).toEqual([
      true,
      false,
      true,
    ]);
    expect((await site.json('/v1/nodes/e1/reservations', { method: 'DELETE' })).body.error.code).toBe('EDGE_ALIVE');
    const were = site.edges[1]!.sandboxes.size;
    const used = await site.used();
    await new Promise((go) => setTimeout(go, 5));
    expect((await site.json('/v1/nodes/e2/reservations', { method: 'DELETE' })).body.released).toBe(were);
    expect(await site.used()).toBe(used - were);
  });

  it('shows images, denied attempts, events', async () => {
    expect((await site.json('/v1/images')).body.images.map((one: { name: string }) => one.name)).toEqual(['small:1']);
    expect((await site.json('/v1/images/small%3A1')).body.kind).toBe('base');
    expect((await site.json('/v1/images/small%3A1/stats')).status).toBe(200);
    const svg = await site.ask('/v1/images/small%3A1/stats.svg');
    expect([svg.headers.get('content-type'), (await svg.text()).slice(0, 4)]).toEqual(['image/svg+xml', '<svg']);
    const events = await site.ask('/v1/events');
    const reader = events.body!.getReader();
    let text = '';
    const heard = async (what: string) => {
      while (!text.includes(what)) text += Buffer.from((await reader.read()).value ?? []).toString();
    };
    await heard('listening');
    const { id } = (await site.create()).body;
    await heard('event: sandbox.created');
    expect(text).toContain(id);
    await site.json(`/v1/sandboxes/${id}?force=true`, { method: 'DELETE' });
    await heard('event: sandbox.gone');
    site.dead.add('e3');
    await site.api.parts.edges.poll();
    await heard('event: node.down');
    await reader.cancel();
    expect((await site.json('/v1/denied')).status).toBe(200);
  });

  it('describes all that clients may ask for', async () => {
    const { paths, components } = (await site.json('/openapi.json', { token: '' })).body;
    expect(Object.keys(paths)).toEqual(
      expect.arrayContaining([
        '/v1/sandboxes',
        '/v1/sandboxes/batch',
        '/v1/sandboxes/{id}/commands/{number}/output',
        '/v1/whoami',
        '/v1/nodes',
      ]),
    );
    expect(Object.keys(paths).filter((path) => /upload|download/.test(path))).toEqual([]);
    expect(components.schemas.Sandbox).toBeDefined();
    const bare = Object.entries(paths).flatMap(([path, item]) =>
      Object.entries(item as Record<string, { summary?: string }>).flatMap(([method, { summary }]) =>
        summary === undefined ? `${method} ${path}` : [],
      ),
    );
    expect(bare).toEqual([]);
    expect(await (await site.ask('/docs', { token: '' })).text()).toContain('/v1/sandboxes/{id}/shells');
  });
});

describe('back-pressure', () => {
  it('takes so much and no more, and says when to come again', async () => {
    const site = await ApiSite.make(1, { creates: { atOnce: 2, waiting: 2 }, rateLimit: 5 });
    try {
      const all = await Promise.all(Array.from({ length: 20 }, () => site.create()));
      const codes = new Set(all.map(({ status, body }) => (status === 201 ? 'made' : body.error.code)));
      expect([...codes].sort()).toEqual(['API_BUSY', 'API_RATE', 'made']);
      for (const { status, headers } of all)
        if (status !== 201) expect(Number(headers.get('retry-after'))).toBeGreaterThan(0);
      expect(await site.used()).toBe(site.sandboxes);
    } finally {
      await site.remove();
    }
  });
});
