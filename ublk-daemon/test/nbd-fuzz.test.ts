/** The NBD server against bytes that nobody sends on purpose, and conversations in crumbs. */
import { randomBytes } from 'node:crypto';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, expect, test } from 'vitest';
import { COMMAND, OPTION } from '../target/nbd/protocol.ts';
import { type NbdServer, serveNbd } from '../target/nbd/server.ts';
import { ImmediateMemoryTarget } from './memory-target.ts';
import { encodeRequest, goData, metaQuery, NbdClient } from './nbd-client.ts';

const MIB = 2 ** 20;
const folder = mkdtempSync(join(tmpdir(), 'dsec-nbd-'));
let server: NbdServer;

afterEach(() => server.close(1000));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function serve(listen: string): Promise<ImmediateMemoryTarget> {
  const target = new ImmediateMemoryTarget(MIB);
  server = await serveNbd({ listen, exports: [{ name: '', target }] });
  return target;
}

/** Waits until it is so. */
async function until(condition: () => boolean): Promise<void> {
  for (let i = 0; !condition(); i++) {
    if (i > 3000) throw new Error('it never came');
    await new Promise((done) => setTimeout(done, 10));
  }
}

test('random bytes after any prefix of a good conversation end in errors, never in a crash or a hang', async () => {
  await serve(`unix:${folder}/fuzz.sock`);
  const flags = Buffer.from([0, 0, 0, 3]);
  const option = (code: number, data: Buffer) => {
    const header = Buffer.alloc(16);
    header.write('IHAVEOPT', 'latin1');
    header.writeUInt32BE(code, 8);
    header.writeUInt32BE(data.length, 12);
    return Buffer.concat([header, data]);
  };
  const good = Buffer.concat([
    flags,
    option(OPTION.STRUCTURED_REPLY, Buffer.alloc(0)),
    option(OPTION.SET_META_CONTEXT, metaQuery('', ['base:allocation'])),
    option(OPTION.GO, goData('', [3])),
    encodeRequest(COMMAND.WRITE, 0, 512, { cookie: 1 }),
    randomBytes(512),
    encodeRequest(COMMAND.READ, 0, 512, { cookie: 2 }),
    encodeRequest(COMMAND.BLOCK_STATUS, 0, 4096, { cookie: 3 }),
    encodeRequest(COMMAND.FLUSH, 0, 0, { cookie: 4 }),
  ]);
  const clients: Promise<void>[] = [];
  for (let i = 0; i < 400; i++) {
    const bytes = Buffer.from(good);
    // One to four bytes changed, or the rest replaced by noise.
    if (i % 4 === 0) randomBytes(bytes.length).copy(bytes, (i * 7) % bytes.length);
    else for (let k = 0; k < i % 4; k++) bytes[(i * 31 + k * 97) % bytes.length]! ^= 1 << (i % 8);
    const client = await NbdClient.raw(server.address);
    client.socket.resume();
    client.socket.end(bytes);
    clients.push(client.closed().then(() => void client.socket.destroy()));
    if (clients.length === 40) await Promise.all(clients.splice(0));
  }
  await Promise.all(clients);
  await until(() => server.connections === 0);
  const client = await NbdClient.open(server.address);
  expect((await client.read(0, 512)).length).toBe(512);
  await client.disconnect();
});

test('a conversation cut into single bytes is the same conversation', async () => {
  const target = await serve('tcp:127.0.0.1:0');
  const client = await NbdClient.open(server.address);
  const data = randomBytes(1024);
  const bytes = Buffer.concat([encodeRequest(COMMAND.WRITE, 512, 1024, { cookie: 77 }), data]);
  for (const byte of bytes) {
    client.socket.write(Buffer.from([byte]));
    await new Promise((done) => setImmediate(done));
  }
  await until(() => target.calls.length === 1);
  expect(target.bytes.subarray(512, 1536).equals(data)).toBe(true);
  client.socket.destroy();
});
