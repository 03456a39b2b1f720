/** The control socket: who may speak, and what comes of bad requests. And what of a blob is written down. */
import { execFile } from 'node:child_process';
import { chmodSync, mkdtempSync, readdirSync, realpathSync, rmSync } from 'node:fs';
import { createConnection, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { digestOf } from '#base';
import { BlobRegistry } from '../data-server/blob-registry.ts';
import { askControl, serveControl } from '../data-server/control.ts';
import { fail } from '../errors.ts';

const isRoot = process.getuid?.() === 0;

describe.skipIf(!isRoot)('the control socket', () => {
  let root: string;
  let path: string;
  let control: { close(): void };

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-control-')));
    chmodSync(root, 0o755);
    path = join(root, 'sock');
    control = await serveControl(path, async (request) => {
      if (request.op === 'status') return { fine: true };
      if (request.op === 'stop') throw fail('DATA_IN_USE', { store: 's' });
      throw new Error('no such operation');
    });
  });
  afterAll(() => {
    control.close();
    rmSync(root, { recursive: true, force: true });
  });

  const raw = (text: string): Promise<string> =>
    new Promise((resolve, reject) => {
      const socket = createConnection({ path });
      let got = '';
      socket.setEncoding('utf8').on('data', (more: string) => {
        got += more;
        if (got.endsWith('\n')) socket.end();
      });
      socket.once('error', reject).once('close', () => resolve(got));
      socket.write(text);
    });

  it('answers, also when the path is longer than an address may be', async () => {
    expect(await askControl(path, { op: 'status' })).toEqual({ ok: true, value: { fine: true } });
    const long = join(root, 'x'.repeat(120));
    const server = await serveControl(long, async () => 'far');
    expect(await askControl(long, { op: 'status' })).toEqual({ ok: true, value: 'far' });
    server.close();
  });

  it('fails when the other end is torn off, and nothing more comes of it', async () => {
    const torn = join(root, 'torn');
    // What was sent and not read when a socket is closed resets the other end.
    const server = createServer((socket) => setImmediate(() => socket.destroy()));
    await new Promise<void>((listening) => server.listen(torn, listening));
    for (let i = 0; i < 20; i++) {
      await expect(askControl(torn, { op: 'status' })).rejects.toMatchObject({
        code: expect.stringMatching(/^(ECONNRESET|EPIPE)$/) as string,
      });
    }
    server.close();
    // The same from the asking side: whoever serves goes on.
    for (let i = 0; i < 20; i++) {
      const socket = createConnection({ path });
      socket.on('error', () => {});
      socket.once('connect', () => {
        socket.write('{"op":"status"}\n'.repeat(50));
        setImmediate(() => socket.destroy());
      });
      await new Promise((closed) => socket.once('close', closed));
    }
    expect(await askControl(path, { op: 'status' })).toEqual({ ok: true, value: { fine: true } });
  });

  it('tells an error by its code', async () => {
    expect(await askControl(path, { op: 'stop' })).toMatchObject({ ok: false, code: 'DATA_IN_USE' });
  });

  it('answers what is no request with an error', async () => {
    for (const text of ['{', 'null', '5', '{"op":"x"}', '[]', '"status"']) {
      expect(JSON.parse(await raw(`${text}\n`))).toMatchObject({ ok: false });
    }
  });

  it('answers several requests in their order', async () => {
    const lines = await new Promise<string[]>((resolve) => {
      const socket = createConnection({ path });
      let got = '';
      socket.setEncoding('utf8').on('data', (more: string) => {
        got += more;
        if (got.split('\n').length === 4) {
          socket.destroy();
          resolve(got.trim().split('\n'));
        }
      });
      socket.write('{"op":"status"}\n{"op":"stop"}\n{"op":"status"}\n');
    });
    expect(lines.map((line) => (JSON.parse(line) as { ok: boolean }).ok)).toEqual([true, false, true]);
  });

  it('does not speak with anybody but root', async () => {
    chmodSync(path, 0o777);
    const program = `const s = require('net').createConnection(${JSON.stringify(path)});
      let got = ''; s.on('data', (d) => { got += d; }); s.on('error', (e) => { got += e.code; });
      s.on('close', () => { process.stdout.write('got:' + got); }); s.write('{"op":"status"}\\n');`;
    const said = await new Promise<string>((resolve, reject) => {
      execFile(process.execPath, ['-e', program], { uid: 65534, gid: 65534, cwd: '/' }, (error, stdout) =>
        error === null ? resolve(stdout) : reject(error),
      );
    });
    expect(said).toMatch(/^got:(EPIPE|ECONNRESET)?$/);
  });

  it('fails clearly when nobody serves', async () => {
    await expect(askControl(join(root, 'none'), { op: 'status' })).rejects.toMatchObject({ code: 'ENOENT' });
  });
});

describe('the blob registry', () => {
  it('gives every blob the same number again, and refuses another size', () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-registry-'));
    try {
      const digests = Array.from({ length: 20 }, (_, i) => digestOf(String(i)));
      const first = new BlobRegistry(folder);
      const nodes = digests.map((digest, i) => first.add(digest, i, Buffer.alloc(32, i)).node);
      expect(nodes).toEqual(digests.map((_, i) => i + 2));
      const second = new BlobRegistry(folder);
      expect(second.blobs.map(({ digest }) => digest)).toEqual(digests);
      expect(second.add(digests[7]!, 7, Buffer.alloc(32, 7)).node).toBe(9);
      expect(second.chunkDigests(second.blobs[7]!)).toEqual(Buffer.alloc(32, 7));
      expect(() => second.add(digests[7]!, 8, Buffer.alloc(32, 7))).toThrow(/served with 7 bytes/);
      expect(() => second.add(digests[7]!, 7, Buffer.alloc(32, 1))).toThrow();
      expect(readdirSync(folder).length).toBe(20);
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
});
