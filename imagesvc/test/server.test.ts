/** The image service's routes over real HTTP: who may do what, the catalog, browsing, ranges, errors, figures, documents. */
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { digestOf } from '#base';
import { convertToStore } from '../convert/convert-to-store.ts';
import { stopDataServers } from '../data-server/data-server.ts';
import { AllowedPaths } from '../server/allowed-paths.ts';
import { parseRange } from '../server/byte-range.ts';
import { listen, parseListenAddress } from '../server/listen.ts';
import { Metrics } from '../server/metrics.ts';
import { parseTokenFile, Tokens } from '../server/tokens.ts';
import { HandRunner, ServiceFixture } from './service-fixture.ts';
import { someBytes } from './store-conformance.ts';

const large = someBytes(700_000, 'large');
let fixture: ServiceFixture;
let image: string;

beforeAll(async () => {
  fixture = await ServiceFixture.start({ runner: new HandRunner() });
  const first = fixture.tree('first', { 'etc/motd': 'welcome\n', large, 'a b/ü': 'name' });
  const second = fixture.tree('second', { 'etc/motd': 'changed\n', large, 'a b/ü': 'name', new: '1' });
  await convertToStore(fixture.store, `dir:${first}`, 'team/web:1');
  await convertToStore(fixture.store, `dir:${second}`, 'team/web:2');
  image = `/v1/images/${encodeURIComponent('team/web:1')}`;
});
afterAll(() => fixture.stop());

const linesOf = (text: string) =>
  text
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line));

describe('catalog', () => {
  it('lists and inspects by name and by digest', async () => {
    const { json } = await fixture.ask('/v1/images');
    expect(json.images.map(({ name }: { name: string }) => name)).toEqual(['team/web:1', 'team/web:2']);
    const { digest } = json.images[0];
    for (const path of [image, `/v1/images/${digest}`, `/v1/images/${digest.slice(7, 20)}`]) {
      expect((await fixture.ask(path)).json).toMatchObject({ digest, kind: 'base', manifest: { schemaVersion: 2 } });
    }
  });

  it('answers 404 for what is not there', async () => {
    for (const path of ['/v1/images/none:1', '/v1/images/none/ls', `${image}/cat?path=/none`, '/v1/nothing', '/']) {
      const { status, json } = await fixture.ask(path);
      expect([path, status]).toEqual([path, 404]);
      expect(json.error).toMatchObject({ code: expect.stringMatching(/NOT_FOUND$/), requestId: expect.any(String) });
    }
    expect((await fixture.ask('/v1/images/none:1', { method: 'DELETE' })).status).toBe(404);
    expect((await fixture.ask('/v1/mounts/0123456789ab', { method: 'DELETE' })).status).toBe(404);
  });

  it('removes an image and its blobs, after saying what would go', async () => {
    const source = `dir:${fixture.tree('third', { only: someBytes(300_000, 'only') })}`;
    await convertToStore(fixture.store, source, 'gone:1');
    const would = (await fixture.ask('/v1/images/gone:1?dryRun=true', { method: 'DELETE' })).json;
    expect(would.freedBytes).toBeGreaterThan(300_000);
    expect((await fixture.ask('/v1/images/gone:1')).status).toBe(200);
    const gone = (await fixture.ask('/v1/images/gone:1', { method: 'DELETE' })).json;
    expect(gone).toEqual(would);
    expect((await fixture.ask('/v1/images/gone:1')).status).toBe(404);
  });

  it('collects garbage, or says what it would', async () => {
    const orphan = await fixture.store.put(Buffer.from('nobody names this'));
    const gc = (body: object) => fixture.ask('/v1/gc', { method: 'POST', body });
    expect((await gc({})).json).toMatchObject({ deleted: [], kept: 1 });
    expect((await gc({ graceMs: 0, dryRun: true })).json).toMatchObject({ deleted: [orphan], freedBytes: 17 });
    expect(await fixture.store.stat(orphan)).toBeDefined();
    expect((await gc({ graceMs: 0 })).json).toMatchObject({ deleted: [orphan], kept: 0 });
    expect(await fixture.store.stat(orphan)).toBeUndefined();
  });
});

describe('browsing', () => {
  it('lists folders, a line an entry', async () => {
    const { text, headers } = await fixture.ask(`${image}/ls`);
    expect(headers['content-type']).toBe('application/x-ndjson');
    expect(linesOf(text).map(({ path }) => path)).toEqual(['/a b', '/etc', '/large']);
    const all = await fixture.ask(`${image}/ls?recursive=true`);
    expect(
      linesOf(all.text)
        .map(({ path }) => path)
        .sort(),
    ).toEqual(['/a b', '/a b/ü', '/etc', '/etc/motd', '/large']);
    expect((await fixture.ask(`${image}/ls?path=/large/x`)).status).toBe(404);
  });

  it('shows attributes; names may be given in base64', async () => {
    expect((await fixture.ask(`${image}/stat?path=/large`)).json).toMatchObject({ kind: 'file', sizeBytes: 700_000 });
    const name = encodeURIComponent(Buffer.from('/a b/ü').toString('base64'));
    expect((await fixture.ask(`${image}/stat?pathBase64=${name}`)).json).toMatchObject({
      path: '/a b/ü',
      sizeBytes: 4,
    });
    expect((await fixture.ask(`${image}/cat?path=${encodeURIComponent('/a b/ü')}`)).text).toBe('name');
  });

  it('compares two images', async () => {
    const { text } = await fixture.ask(`${image}/diff?with=team/web:2&ignoreMtime=true`);
    expect(linesOf(text).map(({ path, change }) => [path, change])).toEqual([
      ['/etc/motd', 'changed'],
      ['/new', 'added'],
    ]);
    expect((await fixture.ask(`${image}/diff?with=none`)).status).toBe(404);
    expect((await fixture.ask(`${image}/diff`)).status).toBe(400);
  });

  it('opens a tree once for all, however many ask', async () => {
    const answers = await Promise.all(Array.from({ length: 20 }, () => fixture.ask(`${image}/cat?path=/large`)));
    expect(answers.every(({ bytes }) => bytes.equals(large))).toBe(true);
    expect((await fixture.ask('/metrics')).text).toMatch(/^dsec_open_trees [12]$/m);
  });
});

describe('ranges', () => {
  const cat = (range: string, headers: Record<string, string> = {}, method = 'GET') =>
    fixture.ask(`${image}/cat?path=/large`, { headers: { range, ...headers }, method });

  it.each([
    ['bytes=0-0', 0, 1],
    ['bytes=262000-263000', 262_000, 263_001],
    ['bytes=699999-', 699_999, 700_000],
    ['bytes=-10', 699_990, 700_000],
    ['bytes=-9999999', 0, 700_000],
    ['bytes=5-9999999', 5, 700_000],
  ])('%s', async (range, start, end) => {
    const { status, headers, bytes } = await cat(range);
    expect([status, headers['content-range']]).toEqual([206, `bytes ${start}-${end - 1}/700000`]);
    expect(headers['content-length']).toBe(String(end - start));
    expect(bytes.equals(large.subarray(start, end))).toBe(true);
  });

  it.each(['bytes=5-2', 'bytes=-', 'items=0-1', 'bytes=0-1,5-6', 'bytes=a-b'])('ignores %s', async (range) => {
    const { status, bytes } = await cat(range);
    expect([status, bytes.length]).toEqual([200, 700_000]);
  });

  it.each(['bytes=700000-', 'bytes=-0', 'bytes=99999999999999999999-'])('416 for %s', async (range) => {
    const { status, headers, json } = await cat(range);
    expect([status, headers['content-range'], json.error.code]).toEqual([416, 'bytes */700000', 'SERVER_RANGE']);
  });

  it('takes If-Range, If-None-Match and HEAD', async () => {
    const head = await cat('', {}, 'HEAD');
    expect([head.status, head.headers['content-length'], head.bytes.length]).toEqual([200, '700000', 0]);
    const etag = head.headers.etag as string;
    expect((await cat('bytes=0-9', { 'if-range': etag })).status).toBe(206);
    expect((await cat('bytes=0-9', { 'if-range': '"other"' })).status).toBe(200);
    expect((await cat('', { 'if-none-match': etag })).status).toBe(304);
    const other = await fixture.ask('/v1/images/team%2Fweb:2/cat?path=/large', { headers: { 'if-none-match': etag } });
    expect(other.status).toBe(200);
  });

  it('are of files alone', async () => {
    expect(await fixture.ask(`${image}/cat?path=/etc`)).toMatchObject({
      status: 400,
      json: { error: { code: 'TREE_NOT_A_FILE' } },
    });
    expect(parseRange('bytes=0-', 0)).toBe('unsatisfiable');
  });
});

describe('what requests must be', () => {
  it.each([
    ['no JSON', { raw: '{', headers: { 'content-type': 'application/json' } }, 400, 'SERVER_BAD_REQUEST'],
    ['a field too many', { body: { source: 'dir:/', name: 'a', sources: 1 } }, 400, 'SERVER_BAD_REQUEST'],
    ['a field missing', { body: { source: 'dir:/' } }, 400, 'SERVER_BAD_REQUEST'],
    ['a bad name', { body: { source: 'docker://a/b', name: 'UPPER' } }, 400, 'STORE_NAME'],
    ['a bad source', { body: { source: 'ftp://a/b', name: 'a' } }, 400, 'SOURCE_SCHEME'],
    ['a relative path', { body: { source: 'dir:x', name: 'a' } }, 403, 'SERVER_PATH_DENIED'],
    ['a path elsewhere', { body: { source: 'dir:/etc', name: 'a' } }, 403, 'SERVER_PATH_DENIED'],
    [
      'another type',
      { raw: 'a=b', headers: { 'content-type': 'application/x-www-form-urlencoded' } },
      415,
      'SERVER_MEDIA_TYPE',
    ],
    ['too long', { body: { source: 'x'.repeat(100_000), name: 'a' } }, 413, 'SERVER_BODY_TOO_LARGE'],
  ])('%s', async (_, ask, status, code) => {
    const answer = await fixture.ask('/v1/convert', { method: 'POST', ...(ask as object) });
    expect([answer.status, answer.json.error.code]).toEqual([status, code]);
    expect(answer.json.error.requestId).toBe(answer.headers['x-request-id']);
  });

  it('a mount needs an allowed folder', async () => {
    const mount = (body: object) => fixture.ask('/v1/mounts', { method: 'POST', body });
    expect(await mount({ image: 'team/web:1', target: '/mnt' })).toMatchObject({ status: 403 });
    expect(await mount({ image: 'none:1', target: fixture.root })).toMatchObject({ status: 404 });
    expect(await mount({ image: 'team/web:1', target: '/a\u0000b' })).toMatchObject({ status: 400 });
    expect((await fixture.ask('/v1/mounts')).json).toEqual({ mounts: [] });
  });
});

describe.skipIf(process.getuid?.() !== 0)('mounts', () => {
  it('come, are listed, keep their image from being collected, and go', async () => {
    const target = join(fixture.root, 'mnt');
    mkdirSync(target);
    const tree = fixture.tree('mounted', { 'etc/motd': 'mounted\n', data: someBytes(300_000, 'mounted') });
    await convertToStore(fixture.store, `dir:${tree}`, 'mounted:1');
    const post = () => fixture.ask('/v1/mounts', { method: 'POST', body: { image: 'mounted:1', target } });
    const made = await post();
    expect(made).toMatchObject({ status: 201, json: { target, image: { name: 'mounted:1' } } });
    const { id } = made.json;
    try {
      expect(readFileSync(join(target, 'etc/motd'), 'utf8')).toBe('mounted\n');
      expect(await post()).toMatchObject({ status: 409, json: { error: { code: 'MOUNT_TARGET_TAKEN' } } });
      expect((await fixture.ask('/v1/mounts')).json.mounts).toMatchObject([{ id, target, state: 'mounted' }]);
      expect((await fixture.ask('/v1/images/mounted:1', { method: 'DELETE' })).json).toMatchObject({ deleted: [] });
      const gc = await fixture.ask('/v1/gc', { method: 'POST', body: { graceMs: 0 } });
      expect(gc.json.deleted).toEqual([]);
      expect(readFileSync(join(target, 'data')).length).toBe(300_000);
    } finally {
      expect((await fixture.ask(`/v1/mounts/${id}`, { method: 'DELETE' })).status).toBe(200);
    }
    expect((await fixture.ask('/v1/mounts')).json).toEqual({ mounts: [] });
    const gc = await fixture.ask('/v1/gc', { method: 'POST', body: { graceMs: 0 } });
    expect(gc.json.deleted.length).toBeGreaterThan(3);
  });

  it('come lazily, and are served by the data server', async () => {
    const target = join(fixture.root, 'lazy');
    mkdirSync(target);
    const tree = fixture.tree('lazily', { 'etc/motd': 'lazily\n', data: someBytes(300_000, 'lazily') });
    await convertToStore(fixture.store, `dir:${tree}`, 'lazy:1');
    const made = await fixture.ask('/v1/mounts', { method: 'POST', body: { image: 'lazy:1', target, lazy: true } });
    expect(made).toMatchObject({ status: 201, json: { target, image: { name: 'lazy:1' } } });
    try {
      const { mounts } = (await fixture.ask('/v1/mounts')).json;
      expect(mounts).toMatchObject([{ target, lazy: true }]);
      expect(readFileSync(join(target, 'data')).equals(someBytes(300_000, 'lazily'))).toBe(true);
    } finally {
      expect((await fixture.ask(`/v1/mounts/${made.json.id}`, { method: 'DELETE' })).status).toBe(200);
      await stopDataServers({ runDir: join(fixture.root, 'run'), cacheDir: join(fixture.root, 'cache') });
    }
  });
});

describe('random requests, made to fit the schemas and not to', () => {
  it('never get a 500, and every error says what it is', async () => {
    const random = mulberry(7);
    const pick = <T>(values: readonly T[]): T => values[Math.floor(random() * values.length)]!;
    const nasty = [
      '',
      '/',
      '..',
      '%2e%2e',
      'a'.repeat(600),
      '\u0000',
      'ü',
      '{}',
      '-1',
      '1e99',
      'null',
      "'",
      'sha256:0',
      '%',
      '[1]',
    ];
    const strings = [
      ...nasty,
      'team/web:1',
      '/etc/motd',
      '/large',
      'true',
      'done',
      'docker://127.0.0.1:1/x',
      fixture.root,
    ];
    const values: unknown[] = [...strings, 0, -1, 1e20, 1.5, null, true, [], {}, [null], { a: { b: {} } }];
    const document = (await fixture.ask('/openapi.json')).json as { paths: Record<string, Record<string, Op>> };
    interface Op {
      parameters?: { name: string; in: string }[];
      requestBody?: { content: { 'application/json': { schema: { properties: Record<string, unknown> } } } };
    }
    const operations = Object.entries(document.paths).flatMap(([path, item]) =>
      Object.entries(item).map(([method, op]) => ({ path, method: method.toUpperCase(), op })),
    );
    const statuses = new Set<number>();
    for (let i = 0; i < 1200; i++) {
      const { path, method, op } = pick(operations);
      if (path.endsWith('/events') || path === '/docs' || path === '/openapi.json') continue;
      const url = path.replace(/\{\w+\}/g, () => encodeURIComponent(pick(strings)));
      const query = new URLSearchParams();
      for (const { name, in: where } of op.parameters ?? [])
        if (where === 'query' && random() < 0.6) query.append(name, pick(strings));
      if (random() < 0.1) query.append(pick(['path', 'x', '__proto__']), pick(strings));
      const schema = op.requestBody?.content['application/json'].schema;
      const body =
        schema === undefined
          ? undefined
          : random() < 0.1
            ? pick(values)
            : Object.fromEntries(
                Object.keys(schema.properties)
                  .filter(() => random() < 0.7)
                  .map((key) => [key, pick(values)]),
              );
      // What a garbage collection or a removal would do to the images is tested above.
      if (path === '/v1/gc' && body && typeof body === 'object') Object.assign(body, { dryRun: true });
      if (method === 'DELETE' && path.startsWith('/v1/images')) query.set('dryRun', 'true');
      // Nor what a mount would.
      if (path === '/v1/mounts' && body && typeof body === 'object') Object.assign(body, { target: '/proc/none' });
      const headers: Record<string, string> =
        random() < 0.3 ? { range: `bytes=${pick(['0-1', '-', '-5', '9-1', 'x'])}` } : {};
      const answer = await fixture.ask(`${url}?${query}`, { method, body, headers });
      statuses.add(answer.status);
      expect(answer.status, `${method} ${url}?${query} ${JSON.stringify(body)}: ${answer.text}`).toBeLessThan(500);
      if (answer.status >= 400 && method !== 'HEAD') expect(answer.json.error.code).toMatch(/^[A-Z_]+$/);
    }
    expect([...statuses]).toEqual(expect.arrayContaining([200, 400, 404]));
    expect((await fixture.ask('/readyz')).status).toBe(200);
  });
});

function mulberry(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

describe('the OpenAPI document', () => {
  it('holds every route, with what each needs, and schemas that are schemas', async () => {
    const document = (await fixture.ask('/openapi.json')).json;
    expect(document.openapi).toBe('3.1.0');
    expect(document.info).toMatchObject({ title: expect.any(String), version: expect.any(String) });
    const listed = Object.entries(document.paths as Record<string, object>).flatMap(([path, item]) =>
      Object.keys(item).map((method) => `${method.toUpperCase()} ${path}`),
    );
    const routes = fixture.service.app.printRoutes({ commonPrefix: false });
    for (const line of listed)
      expect(routes).toContain(
        line
          .split('/')
          .at(-1)!
          .replace(/\{(\w+)\}/, ':$1'),
      );
    expect(listed.sort()).toEqual(
      [
        'GET /healthz',
        'GET /readyz',
        'GET /metrics',
        'GET /openapi.json',
        'GET /docs',
        'GET /v1/images',
        'GET /v1/images/{image}',
        'DELETE /v1/images/{image}',
        'GET /v1/images/{image}/ls',
        'GET /v1/images/{image}/stat',
        'GET /v1/images/{image}/cat',
        'HEAD /v1/images/{image}/cat',
        'GET /v1/images/{image}/diff',
        'GET /v1/images/{image}/merged-trace',
        'GET /v1/images/{image}/traces',
        'GET /v1/images/{image}/traces/{trace}',
        'PUT /v1/images/{image}/traces/{trace}',
        'DELETE /v1/images/{image}/traces/{trace}',
        'POST /v1/convert',
        'POST /v1/pack-diff',
        'GET /v1/jobs',
        'GET /v1/jobs/{id}',
        'DELETE /v1/jobs/{id}',
        'GET /v1/jobs/{id}/events',
        'GET /v1/mounts',
        'POST /v1/mounts',
        'DELETE /v1/mounts/{id}',
        'POST /v1/gc',
      ].sort(),
    );
    const { Ajv2020 } = createRequire(import.meta.url)('ajv/dist/2020.js') as {
      Ajv2020: new (options: object) => { compile(schema: object): unknown };
    };
    const ajv = new Ajv2020({ strict: false });
    const ids = new Set<string>();
    for (const [path, item] of Object.entries(document.paths as Record<string, Record<string, Operation>>)) {
      for (const [method, operation] of Object.entries(item)) {
        const { operationId, summary, parameters = [], responses, requestBody, security } = operation;
        if (method !== 'head') {
          expect(ids.has(operationId), operationId).toBe(false);
          ids.add(operationId);
        }
        expect(summary).toMatch(/./);
        for (const name of [...path.matchAll(/\{(\w+)\}/g)].map((match) => match[1])) {
          expect(parameters).toContainEqual(expect.objectContaining({ name, in: 'path', required: true }));
        }
        for (const { schema } of parameters) ajv.compile(schema);
        expect(Object.keys(responses).some((status) => status.startsWith('2'))).toBe(true);
        expect(responses.default).toBeDefined();
        for (const { description, content = {} } of Object.values(responses)) {
          expect(description).toEqual(expect.any(String));
          for (const { schema } of Object.values(content)) ajv.compile(schema);
        }
        for (const { schema } of Object.values(requestBody?.content ?? {})) ajv.compile(schema);
        if (path.startsWith('/v1/')) expect(security).toEqual([{ token: [] }]);
      }
    }
  });

  interface Operation {
    operationId: string;
    summary: string;
    security?: unknown;
    parameters?: { name: string; in: string; required?: boolean; schema: object }[];
    requestBody?: { content: Record<string, { schema: object }> };
    responses: Record<string, { description: string; content?: Record<string, { schema: object }> }>;
  }

  it('is a page, too, that loads nothing from elsewhere', async () => {
    const { text, headers } = await fixture.ask('/docs');
    expect(headers['content-type']).toBe('text/html; charset=utf-8');
    expect(text).toContain('<code>/v1/convert</code>');
    expect(text).not.toMatch(/<script|https?:\/\/|src=/);
  });
});

describe('figures', () => {
  it('count requests by route, and are in the text format', async () => {
    await fixture.ask('/healthz');
    const { text, headers } = await fixture.ask('/metrics');
    expect(headers['content-type']).toBe('text/plain; version=0.0.4');
    expect(text).toMatch(/^dsec_http_requests_total\{method="GET",route="\/healthz",status="200"\} \d+$/m);
    expect(text).toMatch(/^dsec_jobs\{state="queued"\} \d+$/m);
    for (const line of text.trimEnd().split('\n')) {
      expect(line).toMatch(/^(# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{([a-z]+="([^"\\]|\\.)*",?)+\})? [-+0-9.e]+)$/);
    }
  });

  it('buckets hold all that is not greater', () => {
    const metrics = new Metrics();
    const seconds = metrics.histogram('h', 'help', [1, 2]);
    for (const value of [0.5, 1, 1.5, 3]) seconds.observe({ a: 'x"\n\\' }, value);
    expect(metrics.text()).toBe(
      [
        '# HELP h help',
        '# TYPE h histogram',
        'h_bucket{a="x\\"\\n\\\\",le="1"} 2',
        'h_bucket{a="x\\"\\n\\\\",le="2"} 3',
        'h_bucket{a="x\\"\\n\\\\",le="+Inf"} 4',
        'h_sum{a="x\\"\\n\\\\"} 6',
        'h_count{a="x\\"\\n\\\\"} 4',
        '',
      ].join('\n'),
    );
  });
});

describe('callers', () => {
  let guarded: ServiceFixture;
  let folder: string;
  let tokens: Tokens;
  const write = (lines: string[]) => writeFileSync(join(folder, 'tokens'), `# comment\n${lines.join('\n')}\n`);

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-tokens-'));
    const roles = { reader: 'read', writer: 'write', admin: 'admin' };
    write(Object.entries(roles).map(([name, role]) => `${name} ${role} ${digestOf(`${name}-token`)}`));
    tokens = new Tokens({ file: join(folder, 'tokens') });
    guarded = await ServiceFixture.start({ runner: new HandRunner(), tokens, limits: { requestsPerCaller: 3 } });
  });
  afterAll(async () => {
    await guarded.stop();
    rmSync(folder, { recursive: true });
  });

  it('need a token for all but health and documents', async () => {
    for (const path of ['/healthz', '/readyz', '/docs', '/openapi.json']) {
      expect((await guarded.ask(path)).status).toBe(200);
    }
    for (const headers of [
      {},
      { authorization: 'Bearer wrong' },
      { authorization: 'Basic reader-token' },
      { authorization: '' },
    ]) {
      const answer = await guarded.ask('/v1/images', { headers: headers as Record<string, string> });
      expect([answer.status, answer.json.error.code, answer.headers['www-authenticate']]).toEqual([
        401,
        'SERVER_UNAUTHORIZED',
        'Bearer',
      ]);
    }
    expect((await guarded.ask('/metrics')).status).toBe(401);
  });

  it('may do what their role allows', async () => {
    const body = { source: 'docker://registry.example/a', name: 'a:1' };
    const status = async (method: string, path: string, token: string, sent?: unknown) =>
      (await guarded.ask(path, { method, token, body: sent })).status;
    expect(await status('GET', '/v1/images', 'reader-token')).toBe(200);
    expect(await status('POST', '/v1/convert', 'reader-token', body)).toBe(403);
    expect(await status('POST', '/v1/convert', 'writer-token', body)).toBe(202);
    expect(await status('POST', '/v1/gc', 'writer-token', {})).toBe(403);
    expect(await status('POST', '/v1/mounts', 'writer-token', {})).toBe(403);
    expect(await status('DELETE', '/v1/images/a', 'writer-token')).toBe(403);
    expect(await status('POST', '/v1/gc', 'admin-token', {})).toBe(200);
    expect((await guarded.ask('/v1/jobs', { token: 'reader-token' })).json.jobs[0].caller).toBe('writer');
  });

  it('have a bounded number of requests at work', async () => {
    const { id } = (
      await guarded.ask('/v1/convert', {
        method: 'POST',
        token: 'writer-token',
        body: { source: 'docker://registry.example/b', name: 'b:1' },
      })
    ).json;
    const stop = new AbortController();
    const watching = Array.from({ length: 3 }, () =>
      fetch(`${guarded.url}/v1/jobs/${id}/events`, {
        headers: { authorization: 'Bearer reader-token' },
        signal: stop.signal,
      }),
    );
    await Promise.all(watching);
    const refused = await guarded.ask('/v1/images', { token: 'reader-token' });
    expect([refused.status, refused.json.error.code]).toEqual([429, 'SERVER_BUSY']);
    expect((await guarded.ask('/v1/images', { token: 'writer-token' })).status).toBe(200);
    stop.abort();
    await expect.poll(async () => (await guarded.ask('/v1/images', { token: 'reader-token' })).status).toBe(200);
  });

  it('are read again when asked for, and a bad file changes nothing', async () => {
    write([`fresh read ${digestOf('fresh-token')}`]);
    expect((await guarded.ask('/v1/images', { token: 'fresh-token' })).status).toBe(401);
    tokens.reload();
    expect((await guarded.ask('/v1/images', { token: 'fresh-token' })).status).toBe(200);
    expect((await guarded.ask('/v1/images', { token: 'admin-token' })).status).toBe(401);
    write(['fresh read fresh-token']);
    expect(() => tokens.reload()).toThrow(expect.objectContaining({ code: 'SERVER_TOKEN_FILE' }));
    expect((await guarded.ask('/v1/images', { token: 'fresh-token' })).status).toBe(200);
  });

  it.each([
    'a',
    'a read',
    'a read secret',
    'a king sha256:00',
    `a read ${digestOf('x')} more`,
    `-a read ${digestOf('x')}`,
    '',
  ])('a token file with "%s" is refused, and the line is not repeated', (line) => {
    try {
      parseTokenFile('/tokens', line);
      expect.unreachable();
    } catch (error) {
      expect(error).toMatchObject({ code: 'SERVER_TOKEN_FILE', exit: 2 });
      expect(String(error)).not.toContain('secret');
    }
  });

  it('without tokens, over TCP, must call the service by its name', async () => {
    const open = await ServiceFixture.start({
      runner: new HandRunner(),
      openCaller: { name: 'local', role: 'write' },
      hostNames: ['127.0.0.1', 'localhost'],
    });
    try {
      expect((await open.ask('/v1/images')).status).toBe(200);
      expect((await open.ask('/v1/images', { headers: { host: 'evil.example' } })).status).toBe(403);
      expect((await open.ask('/v1/gc', { method: 'POST', body: {} })).status).toBe(403);
    } finally {
      await open.stop();
    }
  });
});

describe('AllowedPaths', () => {
  it('looks through links, and at whole names', () => {
    const folder = fixture.tree('paths', { 'in/file': '', 'inner/file': '' });
    const paths = new AllowedPaths([join(folder, 'in')]);
    expect(paths.check(join(folder, 'in/file'))).toBe(join(folder, 'in/file'));
    expect(paths.check(join(folder, 'in/not/yet'))).toBe(join(folder, 'in/not/yet'));
    for (const path of ['inner/file', 'in/../inner/file', 'in/..']) {
      expect(() => paths.check(`${folder}/${path}`)).toThrow(expect.objectContaining({ code: 'SERVER_PATH_DENIED' }));
    }
    expect(() => new AllowedPaths().check('/')).toThrow(expect.objectContaining({ code: 'SERVER_PATH_DENIED' }));
    expect(paths.checkSource('docker://a/b:1')).toBe('docker://a/b:1');
    expect(paths.checkSource(`oci:${folder}/in/x:web:1`)).toBe(`oci:${folder}/in/x:web:1`);
    expect(() => paths.checkSource('tar:/etc/passwd')).toThrow(expect.objectContaining({ http: 403 }));
  });
});

describe('parseListenAddress', () => {
  it('knows ports and sockets', () => {
    expect(parseListenAddress('127.0.0.1:7070')).toEqual({
      kind: 'tcp',
      host: '127.0.0.1',
      port: 7070,
      loopback: true,
    });
    expect(parseListenAddress('[::]:80')).toEqual({ kind: 'tcp', host: '::', port: 80, loopback: false });
    expect(parseListenAddress('unix:/run/x')).toEqual({ kind: 'unix', path: '/run/x' });
    for (const text of ['', '7070', 'host', 'a:99999', 'unix:', `unix:/${'x'.repeat(120)}`]) {
      expect(() => parseListenAddress(text)).toThrow(expect.objectContaining({ code: 'SERVER_LISTEN' }));
    }
  });
});

describe('listen', () => {
  it('does not remove a file that is no socket', async () => {
    const path = join(fixture.tree('listen', { file: 'precious' }), 'file');
    const app = { listen: () => Promise.reject(new Error('in use')) } as unknown as Parameters<typeof listen>[0];
    await expect(listen(app, { kind: 'unix', path })).rejects.toMatchObject({ code: 'SERVER_LISTEN' });
    expect(readFileSync(path, 'utf8')).toBe('precious');
  });
});
