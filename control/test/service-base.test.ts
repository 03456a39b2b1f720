/** What all services of the cluster share: the token, TLS, request ids, errors on their way, health, and an end that drops no answer. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pino } from 'pino';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { fail } from '../errors.ts';
import { clusterToken } from '../service-base/cluster-token.ts';
import { PeerClient, type PeerOptions } from '../service-base/peer-client.ts';
import { createService, type Service, type ServiceOptions } from '../service-base/service-app.ts';
import { hasOpenssl, makeCertificates } from './certificates.ts';

const TOKEN = 'a-token-of-the-cluster';
const logger = pino({ level: 'silent' });

let folder: string;
const open: { close(): Promise<void> }[] = [];
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-service-base-'));
});
afterEach(async () => {
  for (const one of open.splice(0).reverse()) await one.close();
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function serving(options: Partial<ServiceOptions> = {}, routes: (service: Service) => void = () => {}) {
  const service = createService({ name: 'test', listen: '127.0.0.1:0', token: TOKEN, logger, ...options });
  routes(service);
  open.push({ close: () => service.close(0) });
  return { service, url: await service.listen() };
}

function client(options: PeerOptions): PeerClient {
  const made = new PeerClient({ token: TOKEN, ...options });
  open.push(made);
  return made;
}

const thrownBy = (work: Promise<unknown>) =>
  work.then(
    () => undefined,
    (error: unknown) => error as Error & { code: string; http: number },
  );

describe('a service of the cluster', () => {
  it('answers whoever shows the token, and nobody else but for its health', async () => {
    const { url } = await serving({}, ({ app }) => {
      app.get('/v1/thing', async () => ({ thing: 1 }));
    });
    expect(await client({ url }).json({ method: 'GET', path: '/v1/thing' })).toEqual({ thing: 1 });
    for (const token of [undefined, `${TOKEN}x`, 'x'.repeat(400), TOKEN.slice(1)]) {
      const stranger = client({ url, token });
      for (const path of ['/v1/thing', '/metrics', '/v1/nothing']) {
        const error = await thrownBy(stranger.json({ method: 'GET', path }));
        expect(error).toMatchObject({ code: 'SERVICE_TOKEN', http: 401 });
      }
      expect(await stranger.json({ method: 'GET', path: '/healthz' })).toEqual({ status: 'ok' });
      expect(await stranger.json({ method: 'GET', path: '/readyz' })).toEqual({ status: 'ready' });
    }
  });

  it('gives the request id back, or makes one', async () => {
    const { url } = await serving();
    const { headers } = await client({ url }).request({
      method: 'GET',
      path: '/healthz',
      headers: { 'x-request-id': 'mine-1' },
    });
    expect(headers['x-request-id']).toBe('mine-1');
    const {
      status,
      headers: other,
      body,
    } = await client({ url }).request({
      method: 'GET',
      path: '/nothing',
      headers: { 'x-request-id': 'bad id with blanks' },
    });
    expect([status, String(other['x-request-id'])]).toEqual([404, expect.stringMatching(/^[0-9a-f-]{36}$/)]);
    expect(await body.json()).toEqual({
      error: {
        code: 'SERVICE_ROUTE',
        message: 'there is no GET /nothing',
        hint: 'docs/cluster.md has what this service takes',
        retryable: false,
        exit: 4,
        requestId: other['x-request-id'],
      },
    });
  });

  it('passes errors on as they are, and says when to come again', async () => {
    const { url } = await serving({}, ({ app }) => {
      app.get('/busy', async () => {
        throw fail('PLACEMENT_NO_ROOM', { backend: 'container', reasons: 'none', retryAfter: 7 });
      });
      app.get('/broken', async () => {
        throw new Error('a secret of ours');
      });
      app.post('/body', async () => ({}));
    });
    const answer = await client({ url }).request({ method: 'GET', path: '/busy' });
    expect([answer.status, answer.headers['retry-after']]).toEqual([503, '7']);
    await answer.body.dump();
    const asked = (method: 'GET' | 'POST', path: string, body?: string | object, headers?: Record<string, string>) =>
      thrownBy(client({ url }).json({ method, path, body, headers }));
    expect(await asked('GET', '/busy')).toMatchObject({
      code: 'PLACEMENT_NO_ROOM',
      retryable: true,
      exit: 1,
      http: 503,
    });
    const broken = await asked('GET', '/broken');
    expect(broken).toMatchObject({ code: 'SERVICE_INTERNAL', http: 500 });
    expect(broken!.message).not.toContain('secret');
    const json = { 'content-type': 'application/json' };
    expect(await asked('POST', '/body', '{', json)).toMatchObject({ code: 'SERVICE_BAD_REQUEST', http: 400 });
    expect(await asked('POST', '/body', 'x', { 'content-type': 'x/y' })).toMatchObject({
      code: 'SERVICE_MEDIA_TYPE',
      http: 415,
    });
    expect(await asked('POST', '/body', { much: 'x'.repeat(2 << 20) })).toMatchObject({
      code: 'SERVICE_BODY_TOO_LARGE',
    });
  });

  it('lets what is being answered be answered when it ends, and takes nothing new', async () => {
    let arrived!: () => void;
    let go!: () => void;
    const here = new Promise<void>((done) => {
      arrived = done;
    });
    const gate = new Promise<void>((done) => {
      go = done;
    });
    const { service, url } = await serving({}, ({ app }) => {
      app.post('/slow', async () => {
        arrived();
        await gate;
        return { done: true };
      });
    });
    const peer = client({ url });
    const slow = peer.json({ method: 'POST', path: '/slow' });
    await here;
    const closing = service.close(60_000);
    expect(await thrownBy(client({ url }).json({ method: 'POST', path: '/slow' }))).toMatchObject({ http: 503 });
    go();
    expect(await slow).toEqual({ done: true });
    await closing;
  });

  it('cuts off what does not end in time', async () => {
    let arrived!: () => void;
    const here = new Promise<void>((done) => {
      arrived = done;
    });
    const { service, url } = await serving({}, ({ app }) => {
      app.get('/never', () => {
        arrived();
        return new Promise(() => {});
      });
    });
    const never = thrownBy(client({ url }).json({ method: 'GET', path: '/never' }));
    await here;
    await service.close(50);
    expect(await never).toMatchObject({ code: 'SERVICE_LOST' });
  });

  it('is told from one that is not there', async () => {
    const { service, url } = await serving();
    await service.close(0);
    expect(await thrownBy(client({ url }).json({ method: 'GET', path: '/healthz' }))).toMatchObject({
      code: 'SERVICE_UNREACHABLE',
    });
    const socket = `unix:${join(folder, 'none.sock')}`;
    expect(await thrownBy(client({ url: socket }).json({ method: 'GET', path: '/' }))).toMatchObject({
      code: 'SERVICE_UNREACHABLE',
    });
  });

  it('needs a token over TCP, and none on a socket file', async () => {
    expect(() => createService({ name: 'edge', listen: '127.0.0.1:0', logger })).toThrow(/no token/);
    const { url } = await serving({ listen: `unix:${join(folder, 'one.sock')}`, token: undefined });
    expect(await client({ url, token: undefined }).json({ method: 'GET', path: '/healthz' })).toEqual({ status: 'ok' });
  });

  it('says why it is not ready', async () => {
    const { url } = await serving({ notReady: () => 'no edge has answered' });
    expect(await thrownBy(client({ url }).json({ method: 'GET', path: '/readyz' }))).toMatchObject({
      code: 'SERVICE_NOT_READY',
      message: 'the test is not ready: no edge has answered',
    });
  });

  it.skipIf(!hasOpenssl)('speaks TLS, and asks for a certificate where it is told to', async () => {
    const { ca, server, client: own } = makeCertificates(folder);
    const path = '/healthz';
    const { url } = await serving({ tls: server });
    expect(url).toMatch(/^https:/);
    expect(await client({ url, tls: { caFile: ca } }).json({ method: 'GET', path })).toEqual({ status: 'ok' });
    expect(await thrownBy(client({ url }).json({ method: 'GET', path }))).toMatchObject({
      code: 'SERVICE_UNREACHABLE',
    });

    const mutual = await serving({ tls: { ...server, clientCaFile: ca } });
    const known = client({ url: mutual.url, tls: { caFile: ca, ...own } });
    expect(await known.json({ method: 'GET', path })).toEqual({ status: 'ok' });
    const unknown = client({ url: mutual.url, tls: { caFile: ca } });
    expect(await thrownBy(unknown.json({ method: 'GET', path }))).toMatchObject({ retryable: true });
    mutual.service.reload();
    expect(await known.json({ method: 'GET', path })).toEqual({ status: 'ok' });
    writeFileSync(join(folder, 'junk'), 'junk');
    expect(() =>
      createService({
        name: 'x',
        listen: '127.0.0.1:0',
        token: TOKEN,
        tls: { ...server, keyFile: join(folder, 'junk') },
      }),
    ).toThrow(/cannot be used/);
  });

  it('keeps figures', async () => {
    const { url } = await serving();
    const peer = client({ url });
    await peer.json({ method: 'GET', path: '/healthz' });
    const { body } = await peer.request({ method: 'GET', path: '/metrics' });
    expect(await body.text()).toContain('dsec_http_requests_total{method="GET",route="/healthz",status="200"} 1\n');
  });
});

describe('the token of the cluster', () => {
  it('is a file’s or the environment’s', () => {
    const file = join(folder, 'token');
    writeFileSync(file, `${TOKEN}\n`);
    expect(clusterToken(file)?.shown).toBe(TOKEN);
    expect(clusterToken(undefined, { DSEC_CLUSTER_TOKEN: TOKEN })?.shown).toBe(TOKEN);
    expect(clusterToken(undefined, {})).toBeUndefined();
    for (const bad of ['', 'short', 'two words of one token', 'x'.repeat(600)]) {
      writeFileSync(file, bad);
      expect(() => clusterToken(file)).toThrow(/no token in/);
    }
    expect(() => clusterToken(join(folder, 'nothing'))).toThrow(/ENOENT/);
  });

  it('is replaced while services run: the file is read again, and what stands below the first line is taken too', async () => {
    const [old, next] = ['the-old-token-of-the-cluster', 'the-new-token-of-the-cluster'];
    const file = (name: string, ...tokens: string[]) => {
      writeFileSync(join(folder, name), tokens.join('\n'));
      return join(folder, name);
    };
    const ofServer = clusterToken(file('server', old))!;
    const ofClient = clusterToken(file('client', old))!;
    const { url, service } = await serving({ token: ofServer }, ({ app }) => {
      app.get('/asked', async () => ({}));
    });
    const peer = client({ url, token: ofClient });
    const asks = () => peer.json({ method: 'GET', path: '/asked' });
    expect(await asks()).toEqual({});
    // Whichever of them hears of it first, nobody is refused.
    for (const [server, shown] of [
      [
        [old, next],
        [old, next],
      ],
      [
        [next, old],
        [old, next],
      ],
      [
        [next, old],
        [next, old],
      ],
      [[next], [next, old]],
    ] as const) {
      file('server', ...server);
      service.reload();
      file('client', ...shown);
      ofClient.reload();
      expect(await asks()).toEqual({});
    }
    file('client', old);
    ofClient.reload();
    expect(await thrownBy(asks())).toMatchObject({ code: 'SERVICE_TOKEN' });
    // What is no token changes nothing.
    file('server', 'short');
    expect(() => service.reload()).toThrow(/no token in/);
    file('client', next);
    ofClient.reload();
    expect(await asks()).toEqual({});
  });
});
