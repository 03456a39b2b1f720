/** An apiserver in this process, over a watcher and edges that do what a test wants: refuse, lose answers, be away. */
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { pino } from 'pino';
import { convertToStore, openStore } from '#imagesvc';
import { type Apiserver, type ApiserverOptions, serveApi } from '../apiserver/apiserver.ts';
import { amountsAfter } from '../edge/sandbox-owner.ts';
import { bootstrapAdmin, type OpenIam, openIam } from '../iam/open-iam.ts';
import type { Amounts } from '../placement/amounts.ts';
import type { NodeReportJson } from '../placement/report-json.ts';

export const CLUSTER_TOKEN = 'the-token-of-a-test-cluster';

interface FakeSandbox {
  readonly name: string;
  readonly id: string;
  readonly requestId?: string;
  readonly owner: { project: string; user: string; reservation?: string };
  amounts: object;
  readonly createdAt: string;
}

async function listening(server: Server): Promise<string> {
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

export class FakeEdge {
  readonly edge: string;
  readonly sandboxes = new Map<string, FakeSandbox>();
  readonly ended = new Map<string, { readonly reason: string; readonly detail: string }>();
  readonly server: Server;
  url = '';
  epoch = randomUUID();
  admitted = 0;
  creates = 0;
  draining = false;
  limit = 1000;
  labels: string[] = [];
  gpus = 0;
  gpuKinds: Record<string, { cards: number; free: number }> | undefined;
  /** Beside containers. */
  backends: string[] = [];
  /** Runs tasks too. */
  hasTasks = false;
  /** Before other limits hold. */
  onLimits: (() => Promise<void>) | undefined;
  /** Before the children of a fork are told. */
  onFork: ((reservations: readonly string[]) => Promise<void>) | undefined;
  /** `lose`: it is made, and the connection breaks; `break`: nothing is made, and it breaks; `lack`: there is no such image in its store. */
  mode: 'ok' | 'refuse' | 'lose' | 'break' | 'fail' | 'lack' = 'ok';
  /** Bodies and headers of requests, newest last. */
  readonly heard: { method: string; url: string; headers: IncomingMessage['headers']; body: string }[] = [];
  /** Whose client went before the answer was whole. */
  cut = 0;
  private readonly sockets = new Set<Socket>();

  constructor(edge: string) {
    this.edge = edge;
    this.server = createServer((request, answer) => void this.answer(request, answer));
    this.server.on('connection', (socket) => {
      this.sockets.add(socket);
      socket.once('close', () => this.sockets.delete(socket));
    });
    this.server.on('upgrade', (_request, socket) => {
      socket.write('HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\n');
      socket.pipe(socket);
      socket.on('error', () => {});
    });
  }

  report(): NodeReportJson {
    return {
      edge: this.edge,
      epoch: this.epoch,
      admitted: this.admitted,
      state: this.draining ? 'draining' : 'healthy',
      backends: {
        container: { sandboxes: this.sandboxes.size, limit: this.limit },
        ...Object.fromEntries(this.backends.map((name) => [name, { sandboxes: 0, limit: 10 }])),
        ...(this.hasTasks ? { fncall: { sandboxes: 0, limit: 10 } } : {}),
      },
      labels: this.labels,
      capacity: { cpuMilli: 1e9, memoryBytes: 1e15, diskBytes: 1e15, gpus: this.gpus },
      ...(this.gpuKinds === undefined ? {} : { gpuKinds: this.gpuKinds }),
      reserved: { cpuMilli: 0, memoryBytes: 0, diskBytes: 0, gpus: 0 },
      load: { cpu: 0, memory: 0, disk: 0 },
      users: {},
      jobs: {},
      layers: [],
    };
  }

  async start(): Promise<void> {
    this.url = await listening(this.server);
  }

  async stop(): Promise<void> {
    for (const socket of this.sockets) socket.destroy();
    await new Promise((done) => this.server.close(done));
  }

  private async answer(request: IncomingMessage, answer: ServerResponse): Promise<void> {
    const { method = '', url = '' } = request;
    const say = (status: number, body: object) => {
      answer.writeHead(status, { 'content-type': 'application/json' });
      answer.end(JSON.stringify(body));
    };
    const error = (status: number, code: string, message: string) =>
      say(status, { error: { code, message, retryable: status === 503, exit: 1 } });
    if (request.headers.authorization !== `Bearer ${CLUSTER_TOKEN}`) return error(401, 'SERVICE_TOKEN', 'no');
    if (/\/stdin\?early/.test(url)) return say(200, { early: true });
    if (url === '/v1/creates') return this.creations(request, answer);
    const parts: Buffer[] = [];
    try {
      for await (const part of request) parts.push(part as Buffer);
    } catch {
      this.cut++;
      return;
    }
    const body = Buffer.concat(parts).toString();
    this.heard.push({ method, url, headers: request.headers, body });
    if (url === '/v1/sandboxes' && method === 'POST') return this.create(JSON.parse(body), request, say, error);
    if (url.split('?')[0] === '/v1/roster') {
      const called = new URL(url, this.url).searchParams.get('name');
      const sandboxes = [...this.sandboxes.values()]
        .filter(({ name }) => called === null || name === called)
        .map((one) => ({ ...one, state: 'running', backend: 'container' }));
      return say(200, { edge: this.edge, epoch: this.epoch, writtenAtMs: Date.now(), sandboxes });
    }
    if (url === '/v1/drain') {
      this.draining = JSON.parse(body).on;
      return say(200, { edge: this.edge, draining: this.draining });
    }
    if (url.startsWith('/v1/fncall/pools/')) {
      return this.mode === 'fail' ? error(503, 'RUNTIME_FNCALL_BUSY', 'it is busy') : say(200, { name: url.slice(17) });
    }
    const [, name = '', rest = ''] = /^\/v1\/sandboxes\/([^/?]+)\/?([^?]*)/.exec(url) ?? [];
    const found = this.sandboxes.get(name);
    const end = this.ended.get(name);
    if (found === undefined && end !== undefined) {
      const { reason, detail } = end;
      const message = `sandbox ${name} has ended: ${detail}`;
      return say(410, { error: { code: 'RUNTIME_SANDBOX_GONE', message, reason, retryable: false, exit: 1 } });
    }
    if (found === undefined) return error(404, 'RUNTIME_SANDBOX_NOT_FOUND', `no sandbox named ${name}`);
    if (rest === '' && method === 'GET') return say(200, { ...found, state: 'running' });
    if ((rest === '' && method === 'DELETE') || rest === 'stop') {
      this.sandboxes.delete(name);
      return say(200, {});
    }
    if (rest === 'limits' && method === 'PUT') {
      if (this.mode === 'refuse') return error(503, 'EDGE_REFUSED', 'no memory is left');
      if (this.mode === 'lose') return void request.socket.destroy();
      await this.onLimits?.();
      // As an edge does it: what the change names.
      const told = JSON.parse(String(request.headers['x-dsec-amounts'])) as Amounts;
      found.amounts = amountsAfter(found.amounts as Amounts, JSON.parse(body), told);
      return say(200, {});
    }
    if (rest === 'fork' && method === 'POST' && this.onFork !== undefined) {
      const { reservations } = JSON.parse(body) as { reservations: string[] };
      const sandboxes = reservations.map((reservation, at) => {
        const child = { ...found, name: `${name}-${at + 1}`, id: randomUUID(), owner: { ...found.owner, reservation } };
        this.sandboxes.set(child.name, child);
        return { ...child, state: 'running' };
      });
      await this.onFork(reservations);
      return say(201, { snapshot: { name: 'fork:1', digest: `sha256:${'0'.repeat(64)}` }, notes: [], sandboxes });
    }
    if (rest === 'commands/1/output') {
      answer.writeHead(200, { 'content-type': 'application/octet-stream' });
      answer.write('first ');
      answer.once('close', () => {
        if (!answer.writableFinished) this.cut++;
      });
      if (/hold/.test(url)) return;
      return void setTimeout(() => answer.end('second'), 50);
    }
    if (rest === 'commands/1/broken') {
      answer.writeHead(200, { 'content-type': 'application/octet-stream', 'content-length': 1000 });
      answer.write('some');
      return void setTimeout(() => answer.destroy(), 20);
    }
    if (rest.startsWith('ports/80/')) {
      answer.writeHead(404, { 'content-type': 'application/json', 'x-inside': 'yes' });
      answer.end(JSON.stringify({ error: { code: 'RUNTIME_SANDBOX_NOT_FOUND', message: 'of the service inside' } }));
      return;
    }
    say(200, { method, url, body, headers: request.headers });
  }

  /** As control/edge/create-stream.ts: a line for each. What is heard of it looks like a request of its own. */
  private async creations(request: IncomingMessage, answer: ServerResponse): Promise<void> {
    answer.writeHead(200, { 'content-type': 'application/x-ndjson' });
    answer.flushHeaders();
    try {
      for await (const line of createInterface({ input: request })) {
        const { n, requestId, create } = JSON.parse(line);
        const headers = { ...request.headers, 'x-request-id': requestId };
        this.heard.push({ method: 'POST', url: '/v1/sandboxes', headers, body: JSON.stringify(create) });
        const say = (status: number, body: object) => {
          answer.write(`${JSON.stringify({ n, ...(status < 300 ? { sandbox: body } : { status, ...body }) })}\n`);
        };
        const error = (status: number, code: string, message: string) =>
          say(status, { error: { code, message, retryable: status === 503, exit: 1 } });
        this.create(create, request, say, error);
      }
      answer.end();
    } catch {
      answer.destroy();
    }
  }

  private create(
    asked: { requestId?: string; name?: string; owner: FakeSandbox['owner']; amounts: object },
    request: IncomingMessage,
    say: (status: number, body: object) => void,
    error: (status: number, code: string, message: string) => void,
  ): void {
    this.creates++;
    const { mode } = this;
    if (mode === 'break') return void request.socket.destroy();
    const known = [...this.sandboxes.values()].find(({ requestId }) => requestId === asked.requestId);
    if (known === undefined && mode === 'refuse') return void error(503, 'EDGE_REFUSED', 'no memory is left');
    if (known === undefined && mode === 'lack') return void error(404, 'CATALOG_NOT_FOUND', 'no such image');
    if (known === undefined && mode === 'fail') return void error(409, 'RUNTIME_ENV', 'that is no environment');
    const { owner, amounts, requestId } = asked;
    const name = asked.name ?? `s${randomUUID().slice(0, 8)}`;
    const one = known ?? { name, id: randomUUID(), requestId, owner, amounts, createdAt: new Date().toISOString() };
    this.sandboxes.set(one.name, one);
    if (known === undefined) this.admitted++;
    if (mode === 'lose') return void request.socket.destroy();
    say(201, { ...one, state: 'running', admission: { epoch: this.epoch, number: this.admitted } });
  }
}

export class ApiSite {
  readonly folder = fs.mkdtempSync(join(tmpdir(), 'dsec-api-'));
  readonly edges: FakeEdge[] = [];
  /** Those that are told to the apiserver, and whether they live. */
  readonly dead = new Set<string>();
  /** Of the watcher, as it tells it. */
  watcherUpMs: number | undefined;
  iam!: OpenIam;
  api!: Apiserver;
  token = '';
  private watcher!: Server;
  private watcherUrl = '';
  readonly notes: string[] = [];

  static async make(edges: number, options: Partial<ApiserverOptions> = {}): Promise<ApiSite> {
    const site = new ApiSite();
    const tree = join(site.folder, 'tree');
    fs.mkdirSync(tree);
    fs.writeFileSync(join(tree, 'file'), 'content');
    const store = await openStore(`file://${site.folder}/store`);
    await convertToStore(store, `dir:${tree}`, 'small:1');
    for (let at = 1; at <= edges; at++) {
      const edge = new FakeEdge(`e${at}`);
      await edge.start();
      site.edges.push(edge);
    }
    site.watcher = createServer((_request, answer) => {
      const nodes = site.edges.map((one) => {
        const alive = !site.dead.has(one.edge);
        return { edge: one.edge, url: one.url, labels: [], report: one.report(), heardMsAgo: 10, alive };
      });
      answer.writeHead(200, { 'content-type': 'application/json' });
      answer.end(JSON.stringify({ epoch: 'w', upMs: site.watcherUpMs, atMs: Date.now(), nodes }));
    });
    site.watcherUrl = await listening(site.watcher);
    site.iam = await openIam({
      database: join(site.folder, 'iam.db'),
      clockSkewMs: 0,
      askingGraceMs: 0,
    });
    site.token = (await bootstrapAdmin(site.iam))!;
    site.api = await site.another(options);
    return site;
  }

  /** One more instance over the same database. */
  async another(options: Partial<ApiserverOptions> = {}): Promise<Apiserver> {
    return serveApi({
      listen: '127.0.0.1:0',
      iam: this.iam,
      watcherUrl: this.watcherUrl,
      store: await openStore(`file://${this.folder}/store`),
      version: '0',
      token: CLUSTER_TOKEN,
      rateLimit: 0,
      reconcileMs: 3_600_000,
      logger: pino({ level: 'warn' }, { write: (line) => void this.notes.push(line) }),
      ...options,
    });
  }

  get sandboxes(): number {
    return this.edges.reduce((sum, { sandboxes }) => sum + sandboxes.size, 0);
  }

  async used(project = 'root'): Promise<number> {
    return (await this.iam.getQuota(await this.iam.authenticate(this.token), project)).used.sandboxes;
  }

  ask(
    path: string,
    options: {
      method?: string;
      body?: unknown;
      token?: string;
      headers?: Record<string, string>;
      signal?: AbortSignal;
    } = {},
  ) {
    const { method = 'GET', body, token = this.token, headers, signal } = options;
    const raw = body === undefined || typeof body === 'string';
    return fetch(`${this.api.url}${path}`, {
      method,
      signal,
      headers: {
        ...(token === '' ? {} : { authorization: `Bearer ${token}` }),
        ...(raw ? {} : { 'content-type': 'application/json' }),
        ...headers,
      },
      body: raw ? (body as string | undefined) : JSON.stringify(body),
    });
  }

  async json(
    path: string,
    options: Parameters<ApiSite['ask']>[1] = {},
    // biome-ignore lint/suspicious/noExplicitAny: what is asked for is a test's to know
  ): Promise<{ status: number; body: any; headers: Headers }> {
    const answer = await this.ask(path, options);
    const text = await answer.text();
    return { status: answer.status, body: text === '' ? undefined : JSON.parse(text), headers: answer.headers };
  }

  create(body: object = {}, options: Parameters<ApiSite['ask']>[1] = {}) {
    return this.json('/v1/sandboxes', { method: 'POST', body: { image: 'small:1', ...body }, ...options });
  }

  async remove(): Promise<void> {
    await this.api.close(0);
    await Promise.all(this.edges.map((edge) => edge.stop()));
    this.watcher.closeAllConnections();
    await new Promise((done) => this.watcher.close(done));
    await this.iam.close();
    fs.rmSync(this.folder, { recursive: true, force: true });
  }
}
