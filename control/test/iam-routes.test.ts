/** IAM over HTTP: the whole way once, and whatever a schema allows or forbids is never an internal error. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import swagger from '@fastify/swagger';
import { type FastifyInstance, fastify } from 'fastify';
import { pino } from 'pino';
import { afterAll, beforeAll, expect, test, vi } from 'vitest';
import { DsecError } from '#base';
import { bootstrapAdmin, type OpenIam, openIam } from '../iam/open-iam.ts';
import { iamRoutes } from '../iam/routes.ts';

vi.setConfig({ testTimeout: 600_000, hookTimeout: 600_000 });

const folder = mkdtempSync(join(tmpdir(), 'dsec-iam-routes-'));
const log: string[] = [];
let iam: OpenIam;
let app: FastifyInstance;
let secret = '';

beforeAll(async () => {
  iam = await openIam({ database: join(folder, 'iam.db') });
  secret = (await bootstrapAdmin(iam)) as string;
  const logger = pino({ level: 'trace' }, { write: (line: string) => void log.push(line) });
  app = fastify({ loggerInstance: logger as never, ajv: { customOptions: { removeAdditional: false } } }) as never;
  app.setErrorHandler((error, request, reply) => {
    request.log.info({ err: error }, 'request');
    const known = error instanceof DsecError;
    const invalid = (error as { statusCode?: number }).statusCode ?? 500;
    return reply
      .status(known ? error.http : invalid)
      .send({ error: { code: known ? error.code : 'OTHER', message: String(error) } });
  });
  await app.register(swagger, { openapi: { info: { title: 'test', version: '0' } } });
  await app.register(async (scope) => iamRoutes(scope, iam));
  await app.ready();
});

afterAll(async () => {
  await app?.close();
  await iam?.close();
  rmSync(folder, { recursive: true, force: true });
});

async function call(method: string, url: string, payload?: unknown, token = secret) {
  const headers = { authorization: `Bearer ${token}` };
  const answer = await app.inject({ method: method as 'GET', url, headers, payload: payload as object });
  return { status: answer.statusCode, body: answer.body === '' ? undefined : answer.json() };
}

test('the whole way: project, principal, policy, quota, token, what it may do, and its end', async () => {
  expect(await call('POST', '/v1/projects', { path: 'root/web' })).toMatchObject({
    status: 201,
    body: { path: 'root/web' },
  });
  const bot = { name: 'bot', kind: 'agent', project: 'root/web' };
  expect(await call('POST', '/v1/principals', bot)).toMatchObject({ status: 201, body: { ...bot, disabled: false } });
  const grant = { principal: 'bot', project: 'root/web', grants: ['developer'] };
  const policy = await call('POST', '/v1/policies', grant);
  expect(policy).toMatchObject({ status: 201, body: { ...grant, grantedBy: 'admin' } });
  const limits = { sandboxes: 5, cpuMilli: null, memoryBytes: null };
  expect(
    await call('PUT', '/v1/quotas', { project: 'root/web', limits: { cpuMilli: 0, memoryBytes: 0 } }),
  ).toMatchObject({
    body: { limits: { cpuMilli: 0, memoryBytes: 0 } },
  });
  expect(await call('PUT', '/v1/quotas', { project: 'root/web', limits })).toMatchObject({
    status: 200,
    body: { limits: { sandboxes: 5 }, used: { sandboxes: 0 } },
  });
  const token = await call('POST', '/v1/tokens', { principal: 'bot', project: 'root/web', grants: ['developer'] });
  expect(token.status).toBe(201);
  const own = token.body.secret;
  const who = await call('GET', '/v1/whoami', undefined, own);
  expect(who).toMatchObject({ status: 200, body: { principal: 'bot', kind: 'agent', project: 'root/web' } });
  expect(who.body.policies).toHaveLength(1);
  expect((await call('GET', '/v1/projects', undefined, own)).body).toMatchObject({ projects: [{ path: 'root/web' }] });
  expect((await call('GET', '/v1/quotas?project=root/web', undefined, own)).body.quotas[0].limits).toEqual({
    sandboxes: 5,
  });
  expect((await call('POST', '/v1/projects', { path: 'root/web/x' }, own)).body.error.code).toBe('IAM_DENIED');
  expect((await call('GET', '/v1/audit', undefined, own)).status).toBe(403);
  expect((await call('PATCH', '/v1/principals/bot', { disabled: true })).body.disabled).toBe(true);
  expect((await call('GET', '/v1/whoami', undefined, own)).status).toBe(401);
  await call('PATCH', '/v1/principals/bot', { disabled: false });
  expect((await call('DELETE', `/v1/tokens/${token.body.id}`)).body.revokedAtMs).toBeGreaterThan(0);
  expect((await call('GET', '/v1/whoami', undefined, own)).status).toBe(401);
  expect((await call('DELETE', `/v1/policies/${policy.body.id}`)).status).toBe(204);
  await call('PATCH', '/v1/principals/bot', { disabled: true });
  expect((await call('DELETE', '/v1/projects?path=root/web')).status).toBe(204);
  const { records } = (await call('GET', '/v1/audit?limit=3')).body;
  expect(records[0]).toMatchObject({
    action: 'project.remove',
    project: 'root/web',
    outcome: 'done',
    principal: 'admin',
  });
});

test('a stranger gets one answer, whatever he asks', async () => {
  const answers = new Set<string>();
  for (const token of ['', 'x', 'dsec_x', `${secret}x`, 'Bearer']) {
    for (const [method, url] of [
      ['GET', '/v1/whoami'],
      ['POST', '/v1/tokens'],
      ['PUT', '/v1/quotas'],
    ]) {
      answers.add(JSON.stringify(await call(method as string, url as string, { nonsense: 1 }, token)));
    }
  }
  expect(answers.size).toBe(1);
  expect([...answers][0]).toContain('"status":401');
});

/** From schemas: what they allow, what is just outside, and what has nothing to do with them. */
function* values(schema: { type?: string; enum?: string[]; anyOf?: object[] } | undefined): Generator<unknown> {
  yield* [
    undefined,
    null,
    '',
    'root',
    'root/a',
    'admin',
    'x'.repeat(2000),
    '\u0000',
    '\ud800',
    "'; DROP TABLE iam_tokens; --",
  ];
  yield* [
    0,
    -1,
    1.5,
    2 ** 53,
    1e300,
    true,
    [],
    {},
    ['admin'],
    ['nonsense'],
    [null],
    { sandboxes: 1 },
    { sandboxes: null },
  ];
  yield* [{ sandboxes: -1 }, { __proto__: null, constructor: 1 }, Number.MAX_SAFE_INTEGER, '%00', '../..', 'root%2Fa'];
  yield* schema?.enum ?? [];
}

test('nothing that can be sent is an internal error, and each route has a summary', async () => {
  interface Operation {
    summary?: string;
    parameters?: { name: string; in: string; schema: object }[];
    requestBody?: { content: { 'application/json': { schema: { properties?: Record<string, object> } } } };
  }
  const { paths = {} } = app.swagger() as { paths?: Record<string, Record<string, Operation>> };
  let count = 0;
  const failed: unknown[] = [];
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, { summary, parameters = [], requestBody }] of Object.entries(operations)) {
      expect([path, method, summary?.length ?? 0]).toEqual([path, method, expect.any(Number)]);
      expect(summary).toBeTruthy();
      const fields = requestBody?.content['application/json'].schema.properties ?? {};
      const good: Record<string, unknown> = {
        project: 'root',
        path: 'root/fuzz',
        name: 'fuzz',
        kind: 'agent',
        principal: 'fuzz',
        grants: ['reader'],
        limits: {},
        disabled: false,
      };
      const body = Object.fromEntries(
        Object.keys(fields)
          .filter((name) => name in good)
          .map((name) => [name, good[name]]),
      );
      const attempt = async (query: Record<string, unknown>, payload: unknown) => {
        const url = path.replace(/\{(\w+)\}/g, (_, name) =>
          encodeURIComponent(typeof query[name] === 'string' ? query[name].replace(/\p{Surrogate}/gu, '?') : 'x'),
        );
        const search = new URLSearchParams();
        for (const [name, value] of Object.entries(query))
          if (value !== undefined) search.set(name, typeof value === 'object' ? JSON.stringify(value) : String(value));
        const { status, body: answer } = await call(
          method.toUpperCase(),
          `${url}?${search}`,
          method === 'get' || method === 'delete' ? undefined : payload,
        );
        count++;
        if (status >= 500) failed.push({ method, path, query, payload, status, answer });
      };
      for (const { name, schema } of parameters)
        for (const value of values(schema)) await attempt({ [name]: value }, body);
      for (const [name, schema] of Object.entries(fields)) {
        for (const value of values(schema)) await attempt({}, { ...body, [name]: value });
      }
      for (const value of values(undefined)) await attempt({}, value);
    }
  }
  expect(failed).toEqual([]);
  expect(count).toBeGreaterThan(500);
  expect(await iam.doubts()).toEqual([]);
});

test('no token is ever written to the log, at any level', async () => {
  const made = (await call('POST', '/v1/tokens', {})).body.secret;
  await call('GET', `/v1/tokens?principal=${made}`);
  await call('POST', '/v1/projects', { path: `root/${made}` });
  await call('GET', '/v1/whoami', undefined, made.slice(0, -2));
  const text = log.join('');
  expect(log.length).toBeGreaterThan(500);
  expect(text).not.toContain(secret.slice(5, 48));
  // What a client writes into an address is the application's to keep out of its log: see docs/iam.md.
  expect(text.replaceAll(`/v1/tokens?principal=${made}`, '')).not.toContain(made.slice(5, 48));
});
