/** Connections to ports inside a sandbox that has no network but loopback: what must hold for every backend that has them. */
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import type { Duplex } from 'node:stream';
import { text } from 'node:stream/consumers';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { ECHO, InsideService } from './inside-service.ts';
import { processesOf, ResidentSite, say, until } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');
const can = agent !== undefined && canRun();

describe.skipIf(!can).each(TEST_IMAGES)('ports on $name', { timeout: 120_000 }, (image) => {
  let all: ResidentSite;
  let box: NodeSandbox;
  const services: InsideService[] = [];
  beforeAll(async () => {
    all = await ResidentSite.open(image.name);
    box = await all.create();
  }, 120_000);
  afterEach(() => Promise.all(services.splice(0).map((one) => one.stop())));
  afterAll(() => all.remove(), 120_000);
  const serve = async (script: string, address?: string) => {
    const service = await InsideService.start(box, script, address);
    services.push(service);
    return service;
  };

  it('carry bytes both ways, and each way ends by itself', async () => {
    const { port } = await serve(ECHO);
    const connection = await box.connect(port);
    const bytes = randomBytes(3 << 20);
    const back = hashOf(connection);
    connection.end(bytes);
    expect(await back).toEqual({ bytes: bytes.length, hash: createHash('sha256').update(bytes).digest('hex') });
    await closed(connection);
    // A service that says all it has to say, and hears on.
    const hears = await serve(
      `const server = net.createServer({ allowHalfOpen: true }, (socket) => {
         socket.end('first'); let n = 0;
         socket.on('data', (bytes) => (n += bytes.length)).on('end', () => say('heard ' + n));
       });`,
    );
    const later = await box.connect(hears.port);
    // Not as an iterator, which would close the other way too.
    const heard: string[] = [];
    later.on('data', (bytes) => heard.push(String(bytes)));
    await once(later, 'end');
    expect(heard).toEqual(['first']);
    later.write(Buffer.alloc(500_000));
    later.end();
    await until('it heard all', () => hears.told.includes('heard 500000'));
    await closed(later);
  });

  it('are found at ::1 alone too', async () => {
    const { port } = await serve(ECHO, '::1');
    const connection = await box.connect(port);
    connection.end('six');
    expect(await text(connection)).toBe('six');
  });

  it('say when nothing listens there', async () => {
    await expect(box.connect(9)).rejects.toMatchObject({
      code: 'RUNTIME_PORT_CLOSED',
      http: 502,
      params: { port: 9, code: 'ECONNREFUSED' },
    });
  });

  it('hold a service that nobody reads, and a writer that no service reads', async () => {
    const floods = await serve(
      `let n = 0; const server = net.createServer((socket) => {
         socket.on('error', () => {}); const part = Buffer.alloc(65536);
         const go = () => { while (socket.write(part)) n += part.length; socket.once('drain', go); }; go();
       }); setInterval(() => say('wrote ' + n), 50);`,
    );
    const flooded = await box.connect(floods.port);
    const wrote = () => Number(floods.told.at(-1)?.split(' ')[1] ?? 0);
    await until('it stands still', () => floods.told.length > 20 && floods.told.at(-10) === floods.told.at(-1));
    expect(wrote()).toBeLessThan(32 << 20);
    const before = wrote();
    flooded.resume();
    await until('it goes on', () => wrote() > before + (64 << 20));
    flooded.destroy();
    const deaf = await serve('const server = net.createServer({ pauseOnConnect: true }, () => {});');
    const stuffed = await box.connect(deaf.port);
    let written = 0;
    const part = Buffer.alloc(65_536);
    const more = () => {
      while (written < 256 << 20 && stuffed.write(part)) written += part.length;
    };
    stuffed.on('drain', more);
    more();
    let last = -1;
    await until('it stands still', async () => {
      await new Promise((go) => setTimeout(go, 300));
      const still = written === last;
      last = written;
      return still;
    });
    expect(written).toBeLessThan(32 << 20);
    stuffed.destroy();
    expect(agentBytes(box)).toBeLessThan(4 << 20);
  });

  it('of a service that says its last before it breaks lose nothing of it', async () => {
    const { port } = await serve(
      `const server = net.createServer((socket) => {
         socket.on('error', () => {}); socket.once('data', () => { socket.end(Buffer.alloc(200000, 1)); socket.destroySoon(); });
       });`,
    );
    const connection = await box.connect(port);
    const broken: unknown[] = [];
    connection.on('error', (error) => broken.push(error));
    connection.write('go');
    // It comes while nobody reads, and this goes where nobody takes it any more.
    await until('it has come', () => connection.readableLength > 60_000);
    for (let n = 0; n < 5; n++) {
      connection.write(Buffer.alloc(10_000));
      await new Promise((go) => setTimeout(go, 20));
    }
    let bytes = 0;
    connection.on('data', (part: Buffer) => (bytes += part.length));
    if (!connection.readableEnded) await once(connection, 'end');
    expect(bytes).toBe(200_000);
  });

  it('are a hundred at a time, none mixed up with another', async () => {
    const service = await serve(ECHO);
    await Promise.all(
      Array.from({ length: 100 }, async (_, n) => {
        const connection = await box.connect(service.port);
        const sent = Buffer.alloc(50_000 + n, String(n));
        connection.end(sent);
        expect(await hashOf(connection)).toEqual({ bytes: sent.length, hash: sha256(sent) });
      }),
    );
    await until('all are closed inside', () => service.told.filter((line) => line === 'closed').length === 100);
  });

  it('are closed inside when the client goes, and outside when the service does', async () => {
    const service = await serve(ECHO);
    const going = await box.connect(service.port);
    going.destroy();
    await until('it is closed inside', () => service.told.includes('closed'));
    const left = await box.connect(service.port);
    left.write('x');
    await once(left, 'data');
    const end = once(left.resume(), 'end');
    await service.stop();
    await end;
    left.write('nobody takes it');
    await expect(closed(left)).rejects.toMatchObject({ code: 'RUNTIME_PORT_CLOSED' });
    await expect(box.connect(service.port)).rejects.toMatchObject({ code: 'RUNTIME_PORT_CLOSED' });
  });

  it('know nothing of connections from before the service was started again', async () => {
    const service = await serve(ECHO);
    await box.connect(service.port);
    await all.restart();
    box = all.node.get(box.name);
    await until('it is closed inside', () => service.told.includes('closed'));
    const connection = await box.connect(service.port);
    connection.end('again');
    expect(await text(connection)).toBe('again');
  });

  it('end with the sandbox', async () => {
    const short = await all.create();
    const service = await InsideService.start(short, ECHO);
    services.push(service);
    const connection = await short.connect(service.port);
    const ended = closed(connection);
    ended.catch(() => {});
    await short.stop({ timeMs: 0 });
    await expect(ended).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
    await expect(short.connect(service.port)).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
  });

  it.skipIf(image.name !== 'busybox')('wake a sandbox that is paused', async () => {
    await say(box, 'mkdir -p /tmp/www; echo page > /tmp/www/x');
    await say(box, 'httpd -p 127.0.0.1:8080 -h /tmp/www');
    const ask = async () => {
      const connection = await box.connect(8080);
      connection.end('GET /x HTTP/1.0\r\n\r\n');
      return (await text(connection)).split('\r\n\r\n')[1];
    };
    expect(await ask()).toBe('page\n');
    await box.pause();
    expect(await ask()).toBe('page\n');
    expect(box.state).toBe('running');
  });
});

function sha256(bytes: Buffer): string {
  return createHash('sha256').update(bytes).digest('hex');
}

async function hashOf(stream: Duplex): Promise<{ bytes: number; hash: string }> {
  const hash = createHash('sha256');
  let bytes = 0;
  for await (const part of stream) {
    hash.update(part as Buffer);
    bytes += (part as Buffer).length;
  }
  return { bytes, hash: hash.digest('hex') };
}

/** Resolves when it is closed, rejects with its error. */
function closed(stream: Duplex): Promise<void> {
  return new Promise((resolve, reject) => {
    if (stream.destroyed) return stream.errored === null ? resolve() : reject(stream.errored);
    stream.resume();
    stream.once('error', reject);
    stream.once('close', resolve);
  });
}

/** Memory of the first process that is its own. */
function agentBytes(box: NodeSandbox): number {
  const status = readFileSync(`/proc/${processesOf(box)[0]}/status`, 'utf8');
  return Number(/RssAnon:\s+(\d+)/.exec(status)![1]) * 1024;
}
