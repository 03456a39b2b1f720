/** A watcher over real HTTP, with edges whose answers are lost, late and out of order. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import type { NodeReportJson } from '../placement/report-json.ts';
import { PeerClient } from '../service-base/peer-client.ts';
import { type ClusterJson, clusterNodes } from '../watcher/cluster-json.ts';
import { parseEdgeOption, readEdgesFile } from '../watcher/edge-list.ts';
import { type ServingWatcher, serveWatcher, type WatcherOptions } from '../watcher/serve-watcher.ts';
import { until } from './edge-site.ts';

const TOKEN = 'the-token-of-a-test-cluster';
const POLL_MS = 40;

const open: { close(): unknown }[] = [];
afterEach(async () => {
  for (const one of open.splice(0).reverse()) await one.close();
});

function reportOf(edge: string, admitted: number): NodeReportJson {
  const none = { cpuMilli: 0, memoryBytes: 0, diskBytes: 0, gpus: 0 };
  return {
    edge,
    epoch: 'e',
    admitted,
    state: 'healthy',
    backends: { container: { sandboxes: admitted, limit: 100 } },
    labels: ['ssd'],
    capacity: { ...none, cpuMilli: 1000 },
    reserved: none,
    load: { cpu: 0, memory: 0, disk: 0 },
    users: { ann: admitted },
    jobs: {},
    layers: [],
  };
}

/** What an edge does with the `poll`-th question: answers, at once or later, or not at all. */
type Behaviour = (answer: (body?: object, status?: number) => void, poll: number) => void;

class FakeEdge {
  readonly edge: string;
  behaviour: Behaviour = (answer, poll) => answer(reportOf(this.edge, poll));
  polls = 0;
  private server: Server;
  private port = 0;

  constructor(edge: string) {
    this.edge = edge;
    this.server = this.make();
  }

  async listen(): Promise<string> {
    await new Promise<void>((done) => this.server.listen(this.port, '127.0.0.1', done));
    this.port = (this.server.address() as AddressInfo).port;
    return `http://127.0.0.1:${this.port}`;
  }

  close(): Promise<void> {
    this.server.closeAllConnections();
    return new Promise((done) => this.server.close(() => done()));
  }

  /** As a process that ended and is started again. */
  async reopen(): Promise<void> {
    this.server = this.make();
    await this.listen();
  }

  private make(): Server {
    return createServer((request, reply: ServerResponse) => {
      expect(request.headers.authorization).toBe(`Bearer ${TOKEN}`);
      const answer = (body: object = reportOf(this.edge, this.polls), status = 200) =>
        reply.writeHead(status).end(JSON.stringify(body));
      this.behaviour(answer, ++this.polls);
    });
  }
}

async function edge(name: string): Promise<FakeEdge & { url: string }> {
  const made = new FakeEdge(name);
  open.push(made);
  return Object.assign(made, { url: await made.listen() });
}

async function watching(
  edges: Record<string, string> | (() => ReadonlyMap<string, string>),
  options: Partial<WatcherOptions> = {},
) {
  const watcher = await serveWatcher({
    listen: '127.0.0.1:0',
    token: TOKEN,
    logLevel: 'silent',
    pollMs: POLL_MS,
    silenceMs: 400,
    edges: typeof edges === 'function' ? edges : () => new Map(Object.entries(edges)),
    ...options,
  });
  const client = new PeerClient({ url: watcher.url, token: TOKEN });
  open.push({ close: () => watcher.close(0) }, client);
  const cluster = () => client.json<ClusterJson>({ method: 'GET', path: '/v1/cluster' });
  return { watcher, client, cluster };
}

const node = (watcher: ServingWatcher, name: string) => watcher.cluster().nodes.find((one) => one.edge === name);
const alive = (watcher: ServingWatcher, name: string) => node(watcher, name)?.alive === true;

describe('a watcher', () => {
  it('tells what its edges say of themselves', async () => {
    const one = await edge('one');
    const { watcher, cluster, client } = await watching(
      { one: one.url, never: 'http://127.0.0.1:9' },
      { silenceMs: 60_000 },
    );
    await until('it is heard', () => alive(watcher, 'one'));
    const told = await cluster();
    expect(told.nodes).toMatchObject([
      {
        edge: 'one',
        url: one.url,
        labels: ['ssd'],
        alive: true,
        report: { edge: 'one', state: 'healthy', users: { ann: expect.any(Number) } },
      },
      { edge: 'never', url: 'http://127.0.0.1:9', labels: [], alive: false },
    ]);
    expect(told.nodes[0]!.heardMsAgo).toBeLessThan(60_000);
    expect(told.nodes[1]).not.toHaveProperty('report');
    const [first] = clusterNodes(told);
    expect(first!.report!.backends.get('container')!.limit).toBe(100);
    expect(await (await client.request({ method: 'GET', path: '/metrics' })).body.text()).toContain(
      'dsec_watcher_edges{state="alive"} 1',
    );
  });

  it('takes no edge for dead that loses four answers of five, nor one whose answers are late', async () => {
    const [lossy, late] = [await edge('lossy'), await edge('late')];
    lossy.behaviour = (answer, poll) => {
      if (poll % 5 === 0) answer();
      else if (poll % 5 === 1) answer({ error: { code: 'X', message: 'x' } }, 500);
      else if (poll % 5 === 2) answer({ edge: 'lossy', half: true });
    };
    // Each is answered long after the next ones were sent.
    late.behaviour = (answer) => setTimeout(answer, POLL_MS * 4);
    const { watcher } = await watching({ lossy: lossy.url, late: late.url }, { silenceMs: 5000, answersToLive: 2 });
    await until('both are heard', () => alive(watcher, 'lossy') && alive(watcher, 'late'));
    let flaps = 0;
    await until('each was asked fifty times', () => {
      if (!alive(watcher, 'lossy') || !alive(watcher, 'late')) flaps++;
      return lossy.polls > 50 && late.polls > 50;
    });
    expect(flaps).toBe(0);
  });

  it('never goes back to an older answer that came later', async () => {
    const one = await edge('one');
    // The answer to every odd poll comes after that to the even one behind it.
    let held: (() => void) | undefined;
    one.behaviour = (answer, poll) => {
      if (poll % 2 === 1) {
        held = () => answer(reportOf('one', poll));
        return;
      }
      answer(reportOf('one', poll));
      setTimeout(held!, 5);
    };
    const { watcher } = await watching({ one: one.url }, { silenceMs: 60_000 });
    let last = 0;
    await until('it was asked forty times', () => {
      const admitted = node(watcher, 'one')?.report?.admitted ?? 0;
      expect(admitted).toBeGreaterThanOrEqual(last);
      last = admitted;
      return one.polls > 40;
    });
    expect(last % 2).toBe(0);
  });

  it('finds an edge dead that says nothing, whether it is gone or hangs, and lets it live after several answers', async () => {
    const [gone, hangs, fine] = [await edge('gone'), await edge('hangs'), await edge('fine')];
    const { watcher } = await watching(
      { gone: gone.url, hangs: hangs.url, fine: fine.url },
      { silenceMs: 2000, answersToLive: 3 },
    );
    const both = (state: boolean) => alive(watcher, 'gone') === state && alive(watcher, 'hangs') === state;
    await until('they live', () => both(true));
    await gone.close();
    hangs.behaviour = () => {};
    const since = Date.now();
    await until('they are dead', () => both(false));
    // Not before its time is up: the last answer came at most one poll before.
    expect(Date.now() - since).toBeGreaterThan(2000 - 10 * POLL_MS - 200);
    expect(node(watcher, 'gone')!.report!.state).toBe('dead');
    expect(alive(watcher, 'fine')).toBe(true);
    const before = gone.polls;
    await gone.reopen();
    await until('it lives', () => alive(watcher, 'gone'));
    expect(gone.polls - before).toBeGreaterThanOrEqual(3);
  });

  it('knows nothing at its start, says so, and has asked everybody within a round', async () => {
    const edges = await Promise.all(Array.from({ length: 20 }, (_, k) => edge(`edge-${k}`)));
    let release = () => {};
    const gate = new Promise<void>((done) => {
      release = done;
    });
    for (const one of edges) one.behaviour = (answer) => gate.then(() => answer(reportOf(one.edge, 7)));
    const list = Object.fromEntries(edges.map(({ edge: name, url }) => [name, url]));
    const first = await watching(list, { silenceMs: 60_000 });
    const readyOf = (client: PeerClient) =>
      client.request({ method: 'GET', path: '/readyz' }).then(({ status, body }) => body.dump().then(() => status));
    expect(await readyOf(first.client)).toBe(503);
    release();
    await until('all are heard', () => first.watcher.cluster().nodes.every((one) => one.alive));
    expect(await readyOf(first.client)).toBe(200);
    await first.watcher.close(0);
    const polls = edges.map((one) => one.polls);
    const second = await watching(list, { silenceMs: 60_000 });
    await until('all are heard again', () => second.watcher.cluster().nodes.every((one) => one.alive));
    expect(second.watcher.cluster().epoch).not.toBe(first.watcher.cluster().epoch);
    expect(second.watcher.cluster().nodes.map(({ report }) => report!.admitted)).toEqual(edges.map(() => 7));
    expect(edges.every((one, k) => one.polls > polls[k]!)).toBe(true);
  });

  it('takes edges that make themselves known, and forgets those that have gone for good', async () => {
    const one = await edge('one');
    const moved = await edge('one');
    const { watcher, client } = await watching({}, { forgetMs: 500 });
    const register = (name: string, url: string) =>
      client.json({ method: 'POST', path: '/v1/edges', body: { edge: name, url } });
    expect(await register('one', one.url)).toEqual({ edge: 'one', url: one.url });
    await until('it lives', () => alive(watcher, 'one'));
    expect(await register('one', moved.url)).toEqual({ edge: 'one', url: moved.url });
    await until('it is asked at its new address', () => moved.polls > 0);
    await expect(register('Not An Id', one.url)).rejects.toMatchObject({ code: 'EDGE_ID' });
    await expect(register('two', 'ftp://x')).rejects.toMatchObject({ code: 'SERVICE_URL' });
    await moved.close();
    await one.close();
    await until('it is forgotten', () => node(watcher, 'one') === undefined);
  });

  it('reads its list again, and lets no edge take the place of one that stands there', async () => {
    const [one, two, impostor] = [await edge('one'), await edge('two'), await edge('one')];
    let list = new Map([['one', one.url]]);
    const { watcher, client } = await watching(() => list);
    await until('the first lives', () => alive(watcher, 'one'));
    expect(await client.json({ method: 'POST', path: '/v1/edges', body: { edge: 'one', url: impostor.url } })).toEqual({
      edge: 'one',
      url: one.url,
    });
    list = new Map([['two', two.url]]);
    watcher.reload();
    await until('the second lives', () => alive(watcher, 'two'));
    expect(watcher.cluster().nodes.map((each) => each.edge)).toEqual(['two']);
    expect(impostor.polls).toBe(0);
  });

  it('hears no edge that says it is another one', async () => {
    const liar = await edge('liar');
    liar.behaviour = (answer) => answer(reportOf('other', 1));
    const { watcher } = await watching({ liar: liar.url });
    await until('it was asked', () => liar.polls > 5);
    expect(node(watcher, 'liar')).toMatchObject({ alive: false });
    expect(node(watcher, 'liar')!.report).toBeUndefined();
  });
});

describe('a list of edges', () => {
  it('is read, and its mistakes are told by line', () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-edges-'));
    const file = join(folder, 'edges');
    const read = (text: string) => {
      writeFileSync(file, text);
      return [...readEdgesFile(file)];
    };
    expect(read('# edges\n\n a http://h:1\nb-2  unix:/run/b.sock\n')).toEqual([
      ['a', 'http://h:1'],
      ['b-2', 'unix:/run/b.sock'],
    ]);
    expect(() => read('a http://h:1\na http://h:2\n')).toThrow(/edges:2: a was there before/);
    expect(() => read('a\n')).toThrow(/edges:1/);
    expect(() => read('A.b http://h:1\n')).toThrow(/edges:1/);
    expect(() => readEdgesFile(join(folder, 'none'))).toThrow(/cannot be read/);
    expect(parseEdgeOption('a=http://h:1')).toEqual(['a', 'http://h:1']);
    expect(() => parseEdgeOption('http://h:1')).toThrow(/--edge/);
    rmSync(folder, { recursive: true });
  });
});
