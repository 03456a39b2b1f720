/** The NBD server against clients that behave, misbehave, vanish and flood. */
import { randomBytes } from 'node:crypto';
import { existsSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, describe, expect, test } from 'vitest';
import { parseNbdAddress } from '../target/nbd/address.ts';
import { COMMAND, COMMAND_FLAG, INFO, OPTION, OPTION_REPLY, TRANSMISSION } from '../target/nbd/protocol.ts';
import { type NbdServer, type NbdServerOptions, serveNbd } from '../target/nbd/server.ts';
import { ImmediateMemoryTarget, MemoryTarget } from './memory-target.ts';
import { encodeRequest, goData, metaQuery, NbdClient } from './nbd-client.ts';

const MIB = 2 ** 20;
const folder = mkdtempSync(join(tmpdir(), 'dsec-nbd-'));
const servers: NbdServer[] = [];
let sockets = 0;

afterEach(async () => {
  await Promise.all(servers.splice(0).map((server) => server.close(1000)));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function serve(exports: NbdServerOptions['exports'], more: Partial<NbdServerOptions> = {}): Promise<NbdServer> {
  const server = await serveNbd({ listen: `unix:${folder}/${sockets++}.sock`, exports, ...more });
  servers.push(server);
  return server;
}

/** Waits until it is so. */
async function until(condition: () => boolean): Promise<void> {
  for (let i = 0; !condition(); i++) {
    if (i > 3000) throw new Error('it never came');
    await new Promise((done) => setTimeout(done, 10));
  }
}

describe('addresses', () => {
  test.each([
    ['unix:', 'no socket'],
    [`unix:/${'x'.repeat(108)}`, '107 bytes'],
    ['tcp:0.0.0.0:10809', 'loopback'],
    ['tcp:192.168.1.1:10809', 'loopback'],
    ['tcp:127.0.0.1:99999', '65535'],
    ['tcp:127.0.0.1', 'neither'],
    ['127.0.0.1:10809', 'neither'],
    ['', 'neither'],
  ])('%s is refused', (text, problem) => {
    expect(() => parseNbdAddress(text)).toThrow(problem);
  });

  test('URIs that other programs take', async () => {
    const unix = await serve([{ name: 'a b', target: new MemoryTarget(MIB) }]);
    expect(unix.uri('a b')).toBe(`nbd+unix:///a%20b?socket=${unix.addressText.slice(5)}`);
    const tcp = await serve([{ name: '', target: new MemoryTarget(MIB) }], { listen: 'tcp:127.0.0.1:0' });
    expect(tcp.uri()).toMatch(/^nbd:\/\/127\.0\.0\.1:\d+\/$/);
    expect(tcp.address).toMatchObject({ kind: 'tcp', host: '127.0.0.1' });
  });

  test('a socket is its user’s alone, a dead one is replaced, a live one is not', async () => {
    const path = join(folder, 'one.sock');
    const listen = `unix:${path}`;
    const dead = createServer().listen(path);
    await until(() => dead.listening);
    // As a killed server leaves it: the file there, nobody behind it.
    const first = await serveNbd({ listen: `unix:${path}2`, exports: [] });
    await first.close();
    await expect(serve([], { listen })).rejects.toMatchObject({ code: 'NBD_LISTEN' });
    await new Promise((done) => dead.close(done));
    const server = await serve([{ name: '', target: new MemoryTarget(MIB) }], { listen });
    expect(statSync(path).mode & 0o777).toBe(0o600);
    await server.close();
    expect(existsSync(path)).toBe(false);
    writeFileSync(path, 'a file');
    await expect(serve([], { listen })).rejects.toMatchObject({ code: 'NBD_LISTEN' });
    expect(statSync(path).size).toBe(6);
  });
});

describe('handshake', () => {
  test('lists, describes and chooses among several exports', async () => {
    const server = await serve([
      { name: 'one', target: new MemoryTarget(MIB), description: 'the first' },
      { name: 'två', target: new MemoryTarget(2 * MIB, { blockSize: 4096 }), readOnly: true },
    ]);
    const client = await NbdClient.raw(server.address);
    await client.greet();
    const listed = await client.option(OPTION.LIST);
    expect(listed.map(({ data }) => data.subarray(4).toString())).toEqual(['onethe first', 'två', '']);
    const unknown = await client.option(OPTION.INFO, goData('three'));
    expect(unknown.map(({ type }) => type)).toEqual([OPTION_REPLY.ERR_UNKNOWN]);
    expect(unknown[0]!.data.toString()).toContain('three');
    const infos = await client.option(OPTION.INFO, goData('one', [INFO.NAME, INFO.DESCRIPTION]));
    expect(infos.map(({ data }) => (data.length > 0 ? data.readUInt16BE(0) : -1))).toEqual([0, 1, 2, 3, -1]);
    client.socket.destroy();
    const second = await NbdClient.open(server.address, { name: 'två' });
    expect(second.sizeBytes).toBe(2 * MIB);
    expect(second.blockSize).toEqual({ minimum: 4096, preferred: 4096, maximum: 32 * MIB });
    expect(second.flags & TRANSMISSION.READ_ONLY).not.toBe(0);
    expect(second.flags & TRANSMISSION.SEND_TRIM).toBe(0);
    await second.disconnect();
    // The first is what a client gets that names none.
    expect((await NbdClient.open(server.address)).sizeBytes).toBe(MIB);
  });

  test('the old option, with and without zeros', async () => {
    const server = await serve([{ name: 'x', target: new MemoryTarget(MIB) }]);
    for (const [flags, zeros] of [
      [1, 124],
      [3, 0],
    ] as const) {
      const client = await NbdClient.raw(server.address);
      await client.greet(flags);
      client.sendOption(OPTION.EXPORT_NAME, Buffer.from('x'));
      const answer = await client.bytes(10 + zeros);
      expect(Number(answer.readBigUInt64BE(0))).toBe(MIB);
      client.listen();
      expect((await client.read(0, 512)).length).toBe(512);
      await client.disconnect();
    }
    const client = await NbdClient.raw(server.address);
    await client.greet();
    client.sendOption(OPTION.EXPORT_NAME, Buffer.from('y'));
    await client.closed();
  });

  test('what is malformed is answered with an error, and the talk goes on', async () => {
    const server = await serve([{ name: '', target: new ImmediateMemoryTarget(MIB) }]);
    const client = await NbdClient.raw(server.address);
    await client.greet();
    const errorOf = async (code: number, data?: Buffer) => (await client.option(code, data)).at(-1)!.type;
    expect(await errorOf(5)).toBe(OPTION_REPLY.ERR_UNSUP);
    expect(await errorOf(0xffff)).toBe(OPTION_REPLY.ERR_UNSUP);
    expect(await errorOf(OPTION.LIST, Buffer.from('x'))).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.GO)).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.GO, Buffer.from('ffffffff0000', 'hex'))).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.GO, goData('', [1, 2]).subarray(0, 8))).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.GO, goData('x'.repeat(5000)))).toBe(OPTION_REPLY.ERR_TOO_BIG);
    expect(await errorOf(OPTION.STRUCTURED_REPLY, Buffer.from('x'))).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.SET_META_CONTEXT, metaQuery('', ['base:allocation']))).toBe(OPTION_REPLY.ERR_INVALID);
    expect(await errorOf(OPTION.STRUCTURED_REPLY)).toBe(OPTION_REPLY.ACK);
    expect(await errorOf(OPTION.SET_META_CONTEXT, Buffer.from('00000000ffffffff', 'hex'))).toBe(
      OPTION_REPLY.ERR_INVALID,
    );
    expect(await errorOf(OPTION.SET_META_CONTEXT, metaQuery('none', []))).toBe(OPTION_REPLY.ERR_UNKNOWN);
    const listed = await client.option(OPTION.LIST_META_CONTEXT, metaQuery('', ['base:']));
    expect(listed[0]!.data.subarray(4).toString()).toBe('base:allocation');
    expect((await client.option(OPTION.SET_META_CONTEXT, metaQuery('', ['qemu:dirty']))).length).toBe(1);
    // 100 KiB: skipped; the next option is understood.
    expect(await errorOf(99, Buffer.alloc(100 * 1024))).toBe(OPTION_REPLY.ERR_TOO_BIG);
    expect(await errorOf(OPTION.ABORT)).toBe(OPTION_REPLY.ACK);
    await client.closed();
  });

  test('what cannot be understood ends the connection', async () => {
    const server = await serve([{ name: '', target: new MemoryTarget(MIB) }]);
    for (const bytes of [
      Buffer.alloc(4, 0xff),
      Buffer.concat([Buffer.from([0, 0, 0, 3]), Buffer.from('GET / HTTP/1.1\r\n\r\n')]),
    ]) {
      const client = await NbdClient.raw(server.address);
      client.socket.write(bytes);
      await client.closed();
    }
    const client = await NbdClient.raw(server.address);
    await client.greet();
    client.sendOption(OPTION.LIST, Buffer.alloc(0), 0xffffffff);
    await client.closed();
    // A client that lists for ever and reads nothing.
    const flood = await NbdClient.raw(server.address);
    await flood.greet();
    for (let i = 0; i < 2000; i++) flood.sendOption(OPTION.LIST);
    await flood.closed();
  });

  test('a client that says nothing is cut off, and one too many is turned away', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }], { handshakeMs: 100 });
    const silent = await NbdClient.raw(server.address);
    await silent.closed();
    const small = await serve([{ name: '', target }], { maxConnections: 1 });
    const one = await NbdClient.open(small.address);
    const two = await NbdClient.raw(small.address);
    await two.closed();
    expect((await one.read(0, 512)).length).toBe(512);
    await one.disconnect();
    await until(() => small.connections === 0);
    await (await NbdClient.open(small.address)).disconnect();
  });
});

describe('requests', () => {
  test('what is wrong is answered with its error, and the connection goes on', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    const errnoOf = async (promise: Promise<unknown>) => {
      const error = await promise.then(
        () => undefined,
        (failure: { errno?: number }) => failure,
      );
      return error?.errno;
    };
    expect(await errnoOf(client.read(MIB, 512))).toBe(22);
    expect(await errnoOf(client.read(100, 512))).toBe(22);
    expect(await errnoOf(client.read(0, 100))).toBe(22);
    expect(await errnoOf(client.write(MIB, Buffer.alloc(512)))).toBe(28);
    expect(await errnoOf(client.write(1, Buffer.alloc(512)))).toBe(22);
    expect(await errnoOf(client.request(COMMAND.TRIM, MIB - 512, 1024))).toBe(28);
    expect(await errnoOf(client.request(42, 0, 0))).toBe(22);
    expect(await errnoOf(client.request(COMMAND.CACHE, 0, 512))).toBe(22);
    expect(await errnoOf(client.request(COMMAND.BLOCK_STATUS, 0, 512))).toBe(22);
    expect(await errnoOf(client.request(COMMAND.FLUSH, 0, 0, { flags: 0x80 }))).toBe(22);
    expect(await errnoOf(client.request(COMMAND.TRIM, 0, 512, { flags: COMMAND_FLAG.DF }))).toBe(22);
    expect(target.calls).toEqual([]);
    await client.write(512, Buffer.alloc(512, 5));
    expect((await client.read(512, 512)).equals(Buffer.alloc(512, 5))).toBe(true);
    expect((await client.read(0, 0)).length).toBe(0);
    await client.write(0, Buffer.alloc(0));
    await client.disconnect();
  });

  test('hostile lengths and offsets', async () => {
    const target = new MemoryTarget(64 * MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    const before = process.memoryUsage.rss();
    // 4 GiB: past the end.
    client.socket.write(encodeRequest(COMMAND.READ, 0, 0xfffffe00, { cookie: 999_998 }));
    client.socket.write(encodeRequest(COMMAND.READ, 0xffffffffffffffffn, 512, { cookie: 999_999 }));
    // 40 MiB that are refused travel all the same; what comes behind them is understood.
    const refused = client.request(COMMAND.WRITE, 0, 40 * MIB, { data: Buffer.alloc(40 * MIB) });
    // The client falls over the answers to what it did not ask for.
    await expect(refused).rejects.toThrow('nobody asked');
    expect(process.memoryUsage.rss() - before).toBeLessThan(512 * MIB);
    client.socket.destroy();
    const other = await NbdClient.open(server.address);
    const wrong = other.request(COMMAND.WRITE, 0, 40 * MIB, { data: Buffer.alloc(40 * MIB) });
    await expect(wrong).rejects.toMatchObject({ errno: 75 });
    await expect(other.request(COMMAND.READ, 0, 48 * MIB)).rejects.toMatchObject({ errno: 75 });
    expect((await other.read(0, 512)).length).toBe(512);
    await other.disconnect();
  });

  test('flags of a write reach the target', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    await client.write(0, Buffer.alloc(512), COMMAND_FLAG.FUA);
    await client.request(COMMAND.WRITE_ZEROES, 0, 4096, { flags: COMMAND_FLAG.NO_HOLE | COMMAND_FLAG.FUA });
    await client.request(COMMAND.WRITE_ZEROES, 0, 4096);
    await client.request(COMMAND.TRIM, 0, 4096, { flags: COMMAND_FLAG.FUA });
    expect(target.calls).toEqual([
      { name: 'write', offset: 0, length: 512, fua: true },
      { name: 'writeZeroes', offset: 0, length: 4096, fua: true, mayUnmap: false },
      { name: 'writeZeroes', offset: 0, length: 4096, fua: false, mayUnmap: true },
      { name: 'discard', offset: 0, length: 4096 },
      { name: 'flush', offset: 0, length: 0 },
    ]);
    await client.disconnect();
  });

  test('holes travel as holes, and block status tells of them', async () => {
    const target = new ImmediateMemoryTarget(MIB);
    target.bytes.fill(7, 128 * 1024, 256 * 1024);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address, { allocation: true });
    const mixed = await client.request(COMMAND.READ, 0, 512 * 1024);
    expect(mixed.holes).toBe(384 * 1024);
    expect(mixed.data.equals(target.bytes.subarray(0, 512 * 1024))).toBe(true);
    const whole = await client.request(COMMAND.READ, 0, 512 * 1024, { flags: COMMAND_FLAG.DF });
    expect(whole.holes).toBe(0);
    expect(whole.data.equals(mixed.data)).toBe(true);
    const { runs } = await client.request(COMMAND.BLOCK_STATUS, 0, MIB);
    expect(runs).toEqual([
      { length: 128 * 1024, flags: 3 },
      { length: 128 * 1024, flags: 0 },
      { length: 768 * 1024, flags: 3 },
    ]);
    const one = await client.request(COMMAND.BLOCK_STATUS, 0, MIB, { flags: COMMAND_FLAG.REQ_ONE });
    expect(one.runs).toHaveLength(1);
    await client.disconnect();
  });

  test('a flush on one connection covers writes answered on another', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }]);
    const [one, two] = [await NbdClient.open(server.address), await NbdClient.open(server.address)];
    expect(one.flags & TRANSMISSION.CAN_MULTI_CONN).not.toBe(0);
    await one.write(0, Buffer.alloc(512, 1));
    expect((await two.read(0, 512)).equals(Buffer.alloc(512, 1))).toBe(true);
    await two.flush();
    expect(target.calls.map(({ name }) => name)).toEqual(['write', 'read', 'flush']);
    await one.disconnect();
    await two.disconnect();
  });
});

describe('back-pressure', () => {
  test.each([
    ['later', MemoryTarget],
    ['at once', ImmediateMemoryTarget],
  ] as const)('a client that reads no replies is not read from; target answers %s', async (_, Target) => {
    const target = new Target(8 * MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address, { structured: false });
    client.socket.pause();
    const total = 500;
    for (let i = 1; i <= total; i++) client.socket.write(encodeRequest(COMMAND.READ, 0, MIB, { cookie: i }));
    await until(() => target.calls.length > 20);
    await new Promise((done) => setTimeout(done, 200));
    // 32 MiB held, and what the socket's own buffers take.
    expect(target.calls.length).toBeLessThan(60);
    client.socket.destroy();
    await until(() => server.connections === 0);
  });

  test('requests that are refused are bounded too', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    client.socket.pause();
    const before = process.memoryUsage().arrayBuffers;
    const burst = Buffer.concat(Array.from({ length: 5000 }, (_, i) => encodeRequest(99, 0, 0, { cookie: i + 1 })));
    let unsent = false;
    for (let i = 0; i < 1000 && !unsent; i++) {
      unsent = !client.socket.write(burst) && client.socket.writableLength > 64 * MIB;
      if (i % 20 === 0) await new Promise((done) => setImmediate(done));
    }
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(300 * MIB);
    client.socket.destroy();
    await until(() => server.connections === 0);
  });

  test.each([
    ['at once, unix', ImmediateMemoryTarget, {}],
    ['later, unix', MemoryTarget, {}],
    ['later, TCP', MemoryTarget, { listen: 'tcp:127.0.0.1:0' }],
  ] as const)(
    'writes of all sizes, one behind the other, arrive whole and where they belong: %s',
    async (_, Target, more) => {
      const size = 96 * MIB;
      const target = new Target(size);
      // Some are held, so that others come meanwhile and the connection has to wait for room.
      let calls = 0;
      target.before = () => new Promise((done) => (calls++ % 3 === 0 ? setTimeout(done, 5) : done()));
      const server = await serve([{ name: '', target }], more);
      const client = await NbdClient.open(server.address);
      const expected = Buffer.alloc(size);
      const all: Promise<void>[] = [];
      const sizes = [512, 65_024, 65_536, 66_048, 131_072, MIB, MIB + 512, 4096, 3 * MIB, 20 * MIB];
      for (let at = 0, n = 0; ; n++) {
        const length = sizes[n % sizes.length]!;
        if (at + length > size) break;
        const data = randomBytes(length);
        data.copy(expected, at);
        all.push(client.write(at, data));
        at += length;
      }
      await Promise.all(all);
      expect(target.bytes.equals(expected)).toBe(true);
      // Half of a large one, and gone: as if it had never come.
      const torn = encodeRequest(COMMAND.WRITE, 0, MIB, { cookie: 1 });
      client.socket.write(Buffer.concat([torn, Buffer.alloc(MIB / 2, 1)]));
      client.socket.end();
      await client.closed();
      client.socket.destroy();
      await until(() => server.connections === 0);
      expect(target.bytes.equals(expected)).toBe(true);
    },
  );

  test('more requests than may be at work at once are all answered', async () => {
    const target = new MemoryTarget(MIB);
    let release: () => void = () => {};
    const held = new Promise<void>((done) => {
      release = done;
    });
    target.before = () => held;
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    const all = Array.from({ length: 5000 }, () => client.flush());
    await until(() => target.calls.length >= 1024);
    expect(target.calls.length).toBe(1024);
    release();
    await Promise.all(all);
    expect(target.calls.length).toBe(5000);
    await client.disconnect();
  });
});

describe('endings', () => {
  test('a client that vanishes in the middle of a write changes nothing', async () => {
    const target = new MemoryTarget(MIB);
    const server = await serve([{ name: '', target }]);
    for (const sent of [0, 1, 27, 28, 100, 4000]) {
      const client = await NbdClient.open(server.address);
      const write = Buffer.concat([encodeRequest(COMMAND.WRITE, 0, 4096, { cookie: 1 }), Buffer.alloc(4096, 1)]);
      client.socket.write(write.subarray(0, sent));
      client.socket.end();
      await client.closed();
      client.socket.destroy();
    }
    await until(() => server.connections === 0);
    expect(target.calls).toEqual([]);
  });

  test('what is at work when the client goes is finished, and the target may be closed then', async () => {
    const target = new MemoryTarget(MIB);
    let release: () => void = () => {};
    const held = new Promise<void>((done) => {
      release = done;
    });
    target.before = () => held;
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    const lost = client.write(0, Buffer.alloc(512, 1));
    lost.catch(() => {});
    await until(() => target.calls.length === 1);
    client.socket.destroy();
    let closed = false;
    const closing = server.close().then(() => {
      closed = true;
    });
    await new Promise((done) => setTimeout(done, 100));
    expect(closed).toBe(false);
    release();
    await closing;
    expect(target.bytes[0]).toBe(1);
  });

  test('closing answers what is at work, and ends clients that do not read', async () => {
    const target = new MemoryTarget(8 * MIB);
    const server = await serve([{ name: '', target }]);
    const client = await NbdClient.open(server.address);
    let release: () => void = () => {};
    const held = new Promise<void>((done) => {
      release = done;
    });
    target.before = () => held;
    const read = client.read(0, 4096);
    await until(() => target.calls.length === 1);
    const closing = server.close();
    release();
    expect((await read).length).toBe(4096);
    await closing;
    await client.closed();
    const stuck = await serve([{ name: '', target }]);
    const deaf = await NbdClient.open(stuck.address);
    deaf.socket.pause();
    for (let i = 1; i < 40; i++) deaf.socket.write(encodeRequest(COMMAND.READ, 0, MIB, { cookie: i }));
    await until(() => target.calls.length > 10);
    await stuck.close(50);
    deaf.socket.destroy();
  });

  test('an export comes and goes while others are served', async () => {
    const [a, b] = [new MemoryTarget(MIB), new MemoryTarget(2 * MIB)];
    const server = await serve([{ name: 'a', target: a }]);
    server.add({ name: 'b', target: b });
    expect(() => server.add({ name: 'b', target: b })).toThrow('taken');
    const [first, second] = [
      await NbdClient.open(server.address, { name: 'a' }),
      await NbdClient.open(server.address, { name: 'b' }),
    ];
    await server.remove('b');
    await second.closed();
    await expect(second.read(0, 512)).rejects.toThrow();
    expect((await first.read(0, 512)).length).toBe(512);
    await first.disconnect();
  });
});
