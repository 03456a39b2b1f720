/** Creations over one open request: what is asked and answered is what POST gives, however the connection goes. */
import { once } from 'node:events';
import { createServer, type ServerResponse } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { EdgeConnections } from '../apiserver/edge-connection.ts';
import { EdgeCreates } from '../apiserver/edge-creates.ts';
import { type ServingSimulatedEdge, serveSimulatedEdge } from '../edge/simulated-edge.ts';
import { ClusterToken } from '../service-base/cluster-token.ts';
import { LineReader } from '../service-base/ndjson.ts';
import { connectionProblem } from '../service-base/peer-client.ts';
import { until } from './edge-site.ts';

const TOKEN = 'the-token-of-a-test-cluster';
const body = { image: 'x', owner: { project: 'root', user: 'ann' } };

describe('creations over one request', () => {
  let edge: ServingSimulatedEdge;
  let connections: EdgeConnections;
  let creates: EdgeCreates;
  let url = '';
  const serve = (createMs = 0) =>
    serveSimulatedEdge(
      {
        edge: 'sim-1',
        createMs,
        limits: {
          capacity: { cpuMilli: 1e9, memoryBytes: 1e15, diskBytes: 1e15, gpus: 0 },
          sandboxes: new Map([['container', 2000]]),
          memoryReserve: 0,
          diskReserve: 0,
          mostWaiting: { cpu: 1, memory: 1, io: 1 },
        },
      },
      { listen: '127.0.0.1:0', token: TOKEN },
    );
  beforeEach(async () => {
    edge = await serve();
    url = edge.url;
    connections = new EdgeConnections(new ClusterToken({ token: TOKEN }));
    creates = new EdgeCreates({ connections, urlOf: () => url });
  });
  afterEach(async () => {
    creates.close();
    connections.close();
    await edge.close();
  });
  const thrown = (work: Promise<unknown>) =>
    work.then(
      () => undefined,
      (error: unknown) => error,
    );

  it('gives each its own answer, many at once', async () => {
    const asked = Array.from({ length: 1000 }, (_, at) => creates.create('sim-1', { ...body, name: `n${at}` }, 'r'));
    const made = await Promise.all(asked);
    expect(made.map(({ name }) => name)).toEqual(Array.from({ length: 1000 }, (_, at) => `n${at}`));
    expect(new Set(made.map(({ admission }) => admission?.number)).size).toBe(1000);
    expect(edge.host.size).toBe(1000);
  });

  it('gives errors as they are there, and what is wrong is that one’s alone', async () => {
    const [good, wrong, taken] = await Promise.all([
      creates.create('sim-1', { ...body, name: 'one' }, 'r'),
      thrown(creates.create('sim-1', { ...body, nonsense: 1 }, 'r')),
      thrown(creates.create('sim-1', { ...body, name: 'one' }, 'r')),
    ]);
    expect(good.name).toBe('one');
    expect(wrong).toMatchObject({ code: 'SERVICE_BAD_REQUEST', http: 400 });
    expect(taken).toMatchObject({ code: 'RUNTIME_SANDBOX_EXISTS', http: 409 });
    edge.host.drain(true);
    expect(await thrown(creates.create('sim-1', body, 'r'))).toMatchObject({ code: 'EDGE_REFUSED', retryable: true });
  });

  it('says that nothing was done where nobody is, or the token is not taken', async () => {
    await edge.close();
    expect(await thrown(creates.create('sim-1', body, 'r'))).toMatchObject({ code: 'SERVICE_UNREACHABLE' });
    edge = await serve();
    url = edge.url;
    const other = new EdgeConnections(new ClusterToken({ token: 'a-token-of-another-cluster' }));
    const refused = new EdgeCreates({ connections: other, urlOf: () => url });
    expect(await thrown(refused.create('sim-1', body, 'r'))).toMatchObject({ code: 'SERVICE_TOKEN' });
    refused.close();
    other.close();
    // One that is there again is asked anew.
    expect((await creates.create('sim-1', { ...body, name: 'again' }, 'r')).name).toBe('again');
  });

  it('tells whoever waits for an edge that is known to be away, or silent, that nobody knows', async () => {
    await edge.close();
    edge = await serve(3_600_000);
    url = edge.url;
    const waiting = thrown(creates.create('sim-1', body, 'r'));
    await until('it is under way', () => edge.host.roster().sandboxes.length === 1);
    creates.lost('sim-1', 'the watcher says so');
    expect(await waiting).toMatchObject({ code: 'SERVICE_LOST' });
    const impatient = new EdgeCreates({ connections, urlOf: () => url, answerMs: 50 });
    expect(await thrown(impatient.create('sim-1', body, 'r'))).toMatchObject({ code: 'SERVICE_LOST' });
    impatient.close();
  });

  it('leaves nobody waiting on a stream that was replaced, and trusts no connection that is silent', async () => {
    const opened: ServerResponse[] = [];
    const silent = createServer((request, answer) => {
      opened.push(answer);
      request.resume();
      answer.writeHead(200, { 'content-type': 'application/x-ndjson' });
      // It takes no more, and never says what became of the first.
      if (opened.length === 1) answer.write('{"end":true}\n');
      else answer.flushHeaders();
    }).listen(0, '127.0.0.1');
    await once(silent, 'listening');
    url = `http://127.0.0.1:${(silent.address() as AddressInfo).port}`;
    let nowMs = 1000;
    const timed = new EdgeCreates({ connections, urlOf: () => url, answerMs: 40, now: () => nowMs });
    const orphan = thrown(timed.create('sim-1', body, 'r'));
    await until('it is told that no more is taken', () => {
      void thrown(timed.create('sim-1', body, 'r'));
      return opened.length === 2;
    });
    timed.lost('sim-1', 'the watcher says so');
    expect(await orphan).toMatchObject({ code: 'SERVICE_LOST' });
    // The first that is not answered in time costs the connection.
    const late = thrown(timed.create('sim-1', body, 'r'));
    await until('it is open', () => opened.length === 3);
    nowMs += 50;
    expect(await late).toMatchObject({ code: 'SERVICE_LOST' });
    const next = thrown(timed.create('sim-1', body, 'r'));
    await until('another one is open', () => opened.length === 4);
    timed.close();
    expect(await next).toMatchObject({ code: 'SERVICE_LOST' });
    silent.closeAllConnections();
    await new Promise((done) => silent.close(done));
    url = edge.url;
  });

  it('knows what broke before it was taken from what broke later', () => {
    const of = (code: string, syscall: string) =>
      connectionProblem('http://e', Object.assign(new Error(code), { code, syscall })).code;
    for (const code of ['ETIMEDOUT', 'EHOSTUNREACH', 'ENETUNREACH']) {
      expect(of(code, 'connect')).toBe('SERVICE_UNREACHABLE');
      expect(of(code, 'read')).toBe('SERVICE_LOST');
      expect(of(code, 'write')).toBe('SERVICE_LOST');
    }
  });

  it('ends with the edge: what is under way is answered, what comes then goes elsewhere', async () => {
    await edge.close();
    edge = await serve(300);
    url = edge.url;
    const first = creates.create('sim-1', { ...body, name: 'first' }, 'r');
    await until('it is under way', () => edge.host.roster().sandboxes.length === 1);
    const ended = edge.close(60_000);
    expect((await first).name).toBe('first');
    await ended;
    expect(await thrown(creates.create('sim-1', body, 'r'))).toMatchObject({ code: 'SERVICE_UNREACHABLE' });
    edge = await serve();
  });

  it('breaks off with whoever sends what is no line of it', async () => {
    for (const junk of ['not json\n', '{"create":{}}\n', '[]\n', 'null\n']) {
      const { hostname, port } = new URL(url);
      const socket = connect(Number(port), hostname);
      const head = `POST /v1/creates HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${TOKEN}\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n`;
      socket.write(`${head}${junk.length.toString(16)}\r\n${junk}\r\n`);
      socket.on('error', () => {});
      await new Promise((gone) => socket.once('close', gone).resume());
    }
    expect((await creates.create('sim-1', { ...body, name: 'still' }, 'r')).name).toBe('still');
  });

  it('puts lines together again, however they were cut', () => {
    const text = 'ä'.repeat(10);
    const whole = Buffer.from(`${text}\nsecond\n${text}\n`);
    for (let size = 1; size < whole.length; size++) {
      const reader = new LineReader(1000);
      const lines: string[] = [];
      for (let at = 0; at < whole.length; at += size) lines.push(...reader.take(whole.subarray(at, at + size)));
      expect(lines).toEqual([text, 'second', text]);
    }
    expect(() => new LineReader(10).take(Buffer.alloc(11))).toThrow(/more than 10 bytes/);
  });
});
