/**
 * A cluster as it is installed: the services as processes of their own, each asking the others for certificates, two apiservers over one PostgreSQL. Edges
 * are simulated ones, over the same TLS.
 */
import type { ChildProcess } from 'node:child_process';
import { spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { convertToStore, openStore } from '#imagesvc';
import { type ServingSimulatedEdge, serveSimulatedEdge } from '../edge/simulated-edge.ts';
import { PeerClient } from '../service-base/peer-client.ts';
import { hasOpenssl, makeCertificates } from './certificates.ts';
import { bundled, CLUSTER_TOKEN, until } from './edge-site.ts';
import { postgresDatabases, postgresMissing, type TestDatabases } from './iam-databases.ts';

const missing = hasOpenssl ? postgresMissing() : 'there is no openssl';
if (missing !== undefined) console.log(`skipped: ${missing}`);

const root = join(import.meta.dirname, '../..');

interface Made {
  readonly id: string;
}

describe.skipIf(missing !== undefined)('a cluster with TLS on all sides, over PostgreSQL', { timeout: 300_000 }, () => {
  let folder: string;
  let databases: TestDatabases;
  let database: string;
  let program: string;
  const children = new Set<ChildProcess>();
  const edges: ServingSimulatedEdge[] = [];
  const clients: PeerClient[] = [];
  let certificates: ReturnType<typeof makeCertificates>;
  let watcherUrl: string;
  let tokenFile: string;

  const serve = async (...args: string[]): Promise<{ url: string; child: ChildProcess }> => {
    const env = { ...process.env, DSEC_STORE: join(folder, 'store'), DSEC_STATE: join(folder, 'state') };
    const child = spawn(process.execPath, [program, 'serve', ...args], { cwd: root, env, stdio: 'pipe' });
    children.add(child);
    child.once('exit', () => children.delete(child));
    let said = '';
    for (const stream of [child.stdout, child.stderr]) stream?.on('data', (bytes) => (said += bytes));
    await until(`${args[0]} serves`, () => /^\w+ at https/m.test(said) || child.exitCode !== null);
    const url = /^\w+ at (\S+)$/m.exec(said)?.[1];
    if (url === undefined) throw new Error(`it did not start: ${said}`);
    return { url, child };
  };
  const withTls = (): string[] => {
    const { ca, server, client } = certificates;
    const clusterToken = join(folder, 'cluster-token');
    return [
      ...['--listen', '127.0.0.1:0', '--cluster-token-file', clusterToken, '--log-level', 'warn'],
      ...['--tls-cert', server.certFile, '--tls-key', server.keyFile, '--tls-client-ca', ca],
      ...['--cluster-ca', ca, '--cluster-cert', client.certFile, '--cluster-key', client.keyFile],
    ];
  };
  const apiserver = () =>
    serve('apiserver', ...withTls(), '--watcher', watcherUrl, '--database', database, '--admin-token-file', tokenFile);
  const clientOf = (url: string, tls: object = { caFile: certificates.ca, ...certificates.client }) => {
    const token = fs.existsSync(tokenFile) ? fs.readFileSync(tokenFile, 'utf8').trim() : CLUSTER_TOKEN;
    const client = new PeerClient({ url, token, tls });
    clients.push(client);
    return client;
  };
  const create = (client: PeerClient, body: object = {}) =>
    client.json<Made>({ method: 'POST', path: '/v1/sandboxes', body: { image: 'small:1', ...body } });
  const used = async (client: PeerClient) => {
    const { quotas } = await client.json<{ quotas: { project: string; used: { sandboxes: number } }[] }>({
      method: 'GET',
      path: '/v1/quotas',
    });
    return quotas[0]!.used.sandboxes;
  };
  const there = () => edges.reduce((sum, { host }) => sum + host.size, 0);
  const thrown = (work: Promise<unknown>) =>
    work.then(
      () => undefined,
      (error: unknown) => error,
    );

  beforeAll(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-secure-'));
    tokenFile = join(folder, 'admin-token');
    fs.writeFileSync(join(folder, 'cluster-token'), CLUSTER_TOKEN);
    certificates = makeCertificates(folder);
    const tree = join(folder, 'tree');
    fs.mkdirSync(tree);
    fs.writeFileSync(join(tree, 'file'), 'content');
    await convertToStore(await openStore(`file://${folder}/store`), `dir:${tree}`, 'small:1');
    databases = postgresDatabases();
    database = await databases.make();
    program = bundled();
    for (const edge of ['one', 'two']) {
      const many = Number.MAX_SAFE_INTEGER;
      const capacity = { cpuMilli: many, memoryBytes: many, diskBytes: many, gpus: 0 };
      const mostWaiting = { cpu: 1, memory: 1, io: 1 };
      const limits = {
        capacity,
        sandboxes: new Map([['container', 10_000]]),
        memoryReserve: 0,
        diskReserve: 0,
        mostWaiting,
      };
      const tls = { ...certificates.server, clientCaFile: certificates.ca };
      edges.push(await serveSimulatedEdge({ edge, limits }, { listen: '127.0.0.1:0', token: CLUSTER_TOKEN, tls }));
    }
    const list = edges.flatMap(({ host, url }) => ['--edge', `${host.edge}=${url}`]);
    watcherUrl = (await serve('watcher', ...withTls(), ...list)).url;
  }, 300_000);
  afterAll(async () => {
    for (const client of clients) await client.close();
    for (const child of children) {
      const gone = new Promise((done) => child.once('exit', done));
      child.kill('SIGKILL');
      await gone;
    }
    for (const edge of edges) await edge.close();
    databases?.stop();
    if (program !== undefined) fs.rmSync(program, { force: true });
    fs.rmSync(folder, { recursive: true, force: true });
  }, 300_000);

  it('serves whoever shows a certificate and a token, and nobody else', async () => {
    const api = await apiserver();
    const client = clientOf(api.url);
    await until('both edges are known', async () => {
      const { nodes } = await client.json<{ nodes: { report?: object; alive: boolean }[] }>({
        method: 'GET',
        path: '/v1/nodes',
      });
      return nodes.length === 2 && nodes.every(({ alive }) => alive);
    });
    const { id } = await create(client);
    expect((await client.json<Made>({ method: 'GET', path: `/v1/sandboxes/${id}` })).id).toBe(id);
    // What is passed on goes through the other way of connecting.
    await client.json({ method: 'DELETE', path: `/v1/sandboxes/${id}` });
    expect(there()).toBe(0);
    expect(await used(client)).toBe(0);
    for (const url of [api.url, watcherUrl, edges[0]!.url]) {
      const path = '/healthz';
      expect(await clientOf(url).json({ method: 'GET', path })).toEqual({ status: 'ok' });
      // Without a certificate, and without knowing whose theirs is.
      expect(await thrown(clientOf(url, { caFile: certificates.ca }).json({ method: 'GET', path }))).toMatchObject({
        retryable: true,
      });
      expect(await thrown(clientOf(url, certificates.client).json({ method: 'GET', path }))).toMatchObject({
        code: 'SERVICE_UNREACHABLE',
      });
    }
    // The token of a client of the API is none of the cluster's.
    expect(await thrown(clientOf(edges[0]!.url).json({ method: 'GET', path: '/v1/roster' }))).toMatchObject({
      code: 'SERVICE_TOKEN',
    });
    api.child.kill('SIGTERM');
    await until('it has ended', () => api.child.exitCode !== null);
    expect(api.child.exitCode).toBe(0);
  });

  it('is one service, whichever apiserver is asked: one request id, one quota, and nothing lost when one is killed', async () => {
    const [a, b] = [await apiserver(), await apiserver()];
    const [atA, atB] = [clientOf(a.url), clientOf(b.url)];
    const both = await Promise.all([atA, atB, atA, atB].map((client) => create(client, { requestId: 'same' })));
    expect(new Set(both.map(({ id }) => id)).size).toBe(1);
    expect(there()).toBe(1);
    await atA.json({ method: 'POST', path: '/v1/projects', body: { path: 'root/small' } });
    const limits = { sandboxes: 5 };
    await atB.json({ method: 'PUT', path: '/v1/quotas', body: { project: 'root/small', limits } });
    const asked = Array.from({ length: 20 }, (_, at) => create(at % 2 === 0 ? atA : atB, { project: 'root/small' }));
    const settled = await Promise.allSettled(asked);
    expect(settled.filter(({ status }) => status === 'fulfilled')).toHaveLength(5);
    for (const one of settled) {
      if (one.status === 'rejected') expect(one.reason).toMatchObject({ code: 'IAM_QUOTA', http: 429 });
    }
    // Connections to the database end in the middle.
    const during = Array.from({ length: 40 }, (_, at) =>
      thrown(create(at % 2 === 0 ? atA : atB, { requestId: `cut ${at}` })),
    );
    await databases.cut?.();
    for (const error of await Promise.all(during)) {
      if (error !== undefined)
        expect(error).toMatchObject({ code: expect.stringMatching(/^(IAM_DATABASE|CREATE_UNSETTLED)$/) });
    }
    await until('the database is reached again', async () => (await thrown(used(atA))) === undefined);
    const again = await Promise.all(Array.from({ length: 40 }, (_, at) => create(atB, { requestId: `cut ${at}` })));
    expect(new Set(again.map(({ id }) => id)).size).toBe(40);
    // One is killed while it makes many.
    const batch = atA.request({
      method: 'POST',
      path: '/v1/sandboxes/batch',
      body: { request: { image: 'small:1', requestId: 'many' }, count: 3000 },
    });
    const { body } = await batch;
    await until('some are made', () => there() > 100);
    a.child.kill('SIGKILL');
    await thrown(body.dump());
    const rest = await atB.request({
      method: 'POST',
      path: '/v1/sandboxes/batch',
      body: { request: { image: 'small:1', requestId: 'many' }, count: 3000 },
    });
    const ids = new Set<string>();
    for (const line of (await rest.body.text()).trim().split('\n'))
      ids.add((JSON.parse(line) as { sandbox: Made }).sandbox.id);
    expect(ids.size).toBe(3000);
    expect(there()).toBe(3000 + 40 + 5 + 1);
    expect(await used(atB)).toBe(there());
  });
});
