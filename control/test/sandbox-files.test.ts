/** Watches and uploads of sandboxes' files over HTTP, and `dsec sandbox watch`; what is inside is made up. */
import { execFileSync } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { text } from 'node:stream/consumers';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { DsecError } from '#base';
import { type FileEvent, runtimeErrors, type SandboxNode, type UploadSpec, type WatchOptions } from '#runtime';
import { runCommandLine } from '../cli/main.ts';
import { Output } from '../cli/output.ts';
import { fetchFile, fetchWhole, sendFile } from '../runtime-service/file-transfer.ts';
import { SandboxClient, sandboxSocket } from '../runtime-service/sandbox-client.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';
import { runCommand } from './command-run.ts';

let folder: string;
let app: Awaited<ReturnType<typeof sandboxApp>>;
let events: AsyncGenerator<FileEvent>;
let closed: number;
const asked: unknown[] = [];
const saved = process.env.DSEC_RUN;

const files = {
  uploadState: async (spec: UploadSpec) => {
    asked.push(['state', spec]);
    return { offset: 5, complete: false };
  },
  uploadPart: async (spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>) => {
    let bytes = 0;
    for await (const part of content) bytes += part.length;
    asked.push(['part', spec, offset, bytes]);
    return { offset: offset + bytes, complete: offset + bytes === spec.size };
  },
  digest: async (path: string) => {
    if (path === '/none')
      throw new DsecError('RUNTIME_FILE', runtimeErrors.RUNTIME_FILE, { path, reason: 'no', code: 'ENOENT' });
    return 'ab'.repeat(32);
  },
};

beforeEach(async () => {
  folder = fs.mkdtempSync(join(tmpdir(), 'dsec-files-'));
  process.env.DSEC_RUN = folder;
  closed = 0;
  asked.length = 0;
  const watch = async (path: string, options: WatchOptions) => {
    asked.push(['watch', path, options.recursive]);
    const stopped = new Promise<never>((_, reject) => {
      options.signal?.addEventListener('abort', () => {
        closed++;
        reject(options.signal?.reason);
      });
    });
    stopped.catch(() => {});
    return {
      async *[Symbol.asyncIterator]() {
        for (;;) {
          const next = await Promise.race([events.next(), stopped]);
          if (next.done === true) return;
          yield next.value;
        }
      },
    };
  };
  app = await sandboxApp({ get: () => ({ files, watch }) } as unknown as SandboxNode);
  await app.listen({ path: sandboxSocket(folder) });
});

afterEach(async () => {
  await app.close();
  if (saved === undefined) delete process.env.DSEC_RUN;
  else process.env.DSEC_RUN = saved;
  fs.rmSync(folder, { recursive: true, force: true });
});

async function* made(...names: (string | Buffer)[]): AsyncGenerator<FileEvent> {
  for (const name of names) yield { event: 'made', path: Buffer.from(name), directory: false };
}

describe('files of a sandbox over HTTP', { timeout: 60_000 }, () => {
  it('are watched, a line an event', async () => {
    events = (async function* () {
      yield* made('a', Buffer.from([0xff, 0x41]));
      yield { event: 'moved-to', path: Buffer.from('b\nc'), directory: true, cookie: 7 } as const;
    })();
    const { body, headers } = await app.inject('/v1/sandboxes/x/files/watch?path=/w&recursive=true');
    expect(headers['content-type']).toBe('application/x-ndjson');
    expect(
      body
        .trim()
        .split('\n')
        .map((line) => JSON.parse(line) as unknown),
    ).toEqual([
      { event: 'watching' },
      { event: 'made', path: 'a', directory: false },
      { event: 'made', path: '\ufffdA', pathBase64: '/0E=', directory: false },
      { event: 'moved-to', path: 'b\nc', directory: true, cookie: 7 },
    ]);
    expect(asked).toEqual([['watch', '/w', true]]);
    // biome-ignore lint/correctness/useYield: it fails before.
    events = (async function* () {
      throw new DsecError('RUNTIME_SANDBOX_GONE', runtimeErrors.RUNTIME_SANDBOX_GONE, { name: 'x', reason: 'stopped' });
    })();
    const last = (await app.inject('/v1/sandboxes/x/files/watch?path=/w')).body.trim().split('\n').at(-1)!;
    expect(JSON.parse(last)).toMatchObject({ error: { code: 'RUNTIME_SANDBOX_GONE' } });
  });

  it('are watched no more when whoever reads has gone', async () => {
    events = (async function* () {
      yield* made('a');
      await new Promise(() => {});
    })();
    const sent = request({ socketPath: sandboxSocket(folder), path: '/v1/sandboxes/x/files/watch?path=/w' });
    sent.on('error', () => {});
    sent.end();
    const [answer] = await once(sent, 'response');
    await once(answer, 'data');
    sent.destroy();
    while (closed === 0) await new Promise((go) => setTimeout(go, 10));
  });

  it('by the command, for people and for programs', async () => {
    const run = async (...more: string[]) => {
      events = made('x', 'y');
      const [stdout, stderr] = [new PassThrough(), new PassThrough()];
      const context = {
        signal: new AbortController().signal,
        output: new Output(stdout, stderr, () => {}),
        progress: () => {},
        defer: () => {},
        takeSignals: () => {},
        exitCode: 0,
      };
      await runCommandLine(['sandbox', 'watch', 'x', '/w', ...more], context);
      stdout.end();
      stderr.end();
      return [await text(stdout), await text(stderr)];
    };
    expect(await run()).toEqual(['made\tx\nmade\ty\n', 'dsec: watching /w\n']);
    const [lines] = await run('--json', '--recursive');
    expect(
      lines!
        .trim()
        .split('\n')
        .map((line) => (JSON.parse(line) as { event: string }).event),
    ).toEqual(['watching', 'made', 'made']);
    events = (async function* () {
      yield* made('x');
      throw new DsecError('RUNTIME_SANDBOX_GONE', runtimeErrors.RUNTIME_SANDBOX_GONE, { name: 'x', reason: 'stopped' });
    })();
    const all = async () => {
      for await (const news of new SandboxClient().watch('x', { path: '/w' })) asked.push(news);
    };
    await expect(all()).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
  });

  it('are uploaded in parts', async () => {
    const spec = `path=${encodeURIComponent('/a b')}&size=10&sha256=${'ab'.repeat(32)}`;
    const parts = '/v1/sandboxes/x/files/parts';
    expect((await app.inject(`${parts}?${spec}`)).json()).toEqual({ offset: 5, complete: false });
    const headers = { 'content-type': 'application/octet-stream' };
    const put = (query: string, payload: Buffer) =>
      app.inject({ method: 'PUT', url: `${parts}?${query}`, headers, payload });
    expect((await put(`${spec}&offset=5&mode=420&uid=7&modifiedMs=1.5`, Buffer.from('56789'))).json()).toEqual({
      offset: 10,
      complete: true,
    });
    const whole = { path: '/a b', size: 10, sha256: 'ab'.repeat(32) };
    expect(asked).toEqual([
      ['state', whole],
      ['part', { ...whole, mode: 420, uid: 7, modifiedMs: 1.5 }, 5, 5],
    ]);
    for (const wrong of [
      spec,
      `${spec}&offset=-1`,
      `${spec.replace('ab', 'xy')}&offset=0`,
      `${spec}&offset=0&size=x`,
    ]) {
      expect((await put(wrong, Buffer.alloc(1))).statusCode).toBe(400);
    }
    expect((await app.inject('/v1/sandboxes/x/files/digest?path=/f')).json()).toEqual({ sha256: 'ab'.repeat(32) });
    expect((await app.inject('/v1/sandboxes/x/files/digest?path=/none')).statusCode).toBe(409);
  });

  it('go on where they were when the connection breaks, both ways', async () => {
    const bytes = randomBytes(2 << 20);
    const sha256 = createHash('sha256').update(bytes).digest('hex');
    const from = join(folder, 'from');
    fs.writeFileSync(from, bytes, { mode: 0o640 });
    let there: Buffer = Buffer.alloc(0);
    let breaks = 3;
    const cut = () => {
      breaks--;
      app.server.closeAllConnections();
    };
    Object.assign(files, {
      stat: async () => ({
        kind: 'file',
        size: there.length,
        mode: 0o100640,
        modifiedMs: 1_000_000_000_000,
        inode: 1n,
      }),
      digest: async () => createHash('sha256').update(there).digest('hex'),
      uploadState: async () => ({ offset: there.length, complete: false }),
      uploadPart: async (spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>) => {
        expect([spec.sha256, offset]).toEqual([sha256, there.length]);
        for await (const part of content) {
          there = Buffer.concat([there, part]);
          if (breaks > 0 && there.length > (4 - breaks) * 400_000) cut();
        }
        return { offset: there.length, complete: there.length === spec.size };
      },
      async *pieces(_path: string, offset: number) {
        for (let at = offset; at < there.length; at += 100_000) {
          yield { offset: at, bytes: there.subarray(at, at + 100_000), size: there.length };
          if (breaks > 0 && at > (4 - breaks) * 400_000) {
            await new Promise((go) => setTimeout(go, 50));
            cut();
          }
        }
      },
    });
    const client = new SandboxClient();
    await sendFile(client, 'x', from, '/to');
    expect([there.equals(bytes), breaks]).toEqual([true, 0]);
    breaks = 3;
    const to = join(folder, 'to');
    await fetchFile(client, 'x', '/to', to);
    expect([fs.readFileSync(to).equals(bytes), breaks]).toEqual([true, 0]);
    expect([fs.statSync(to).mode & 0o777, fs.statSync(to).mtimeMs]).toEqual([0o640, 1_000_000_000_000]);
    // It changes under the copy.
    Object.assign(files, { digest: async () => sha256.replace(/./g, 'a') });
    await expect(fetchFile(client, 'x', '/to', to)).rejects.toMatchObject({ code: 'SANDBOX_FILE_CHANGED' });
    expect(fs.readdirSync(folder).filter((name) => name.startsWith('.dsec-part'))).toEqual([]);
    await expect(sendFile(client, 'x', folder, '/to')).rejects.toMatchObject({ code: 'SANDBOX_NO_FILE' });
  });

  it.skipIf(process.geteuid?.() !== 0)('come out whole or not at all where the disk is full', async () => {
    const bytes = randomBytes(66_000);
    Object.assign(files, {
      stat: async () => ({ kind: 'file', size: bytes.length, mode: 0o100644, modifiedMs: 1, inode: 1n }),
      async *pieces() {
        yield { offset: 0, bytes, size: bytes.length };
      },
    });
    const full = join(folder, 'full');
    fs.mkdirSync(full);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'dsec-test', full]);
    try {
      await expect(fetchWhole(new SandboxClient(), 'x', '/from', join(full, 'to'))).rejects.toMatchObject({
        code: 'ENOSPC',
      });
      expect(fs.readdirSync(full)).toEqual([]);
    } finally {
      execFileSync('umount', [full]);
    }
  });

  it('go in as links that lead nowhere, and say what of this machine cannot be read', async () => {
    const file = (code: string, reason: string) =>
      new DsecError('RUNTIME_FILE', runtimeErrors.RUNTIME_FILE, { path: '/to', reason, code });
    let isWholeMachine = false;
    Object.assign(files, {
      stat: async () => {
        throw file('ENOENT', 'it is not there');
      },
      upload: async (from: string, to: string) => {
        const { RUNTIME_UNSUPPORTED } = runtimeErrors;
        if (isWholeMachine)
          throw new DsecError('RUNTIME_UNSUPPORTED', RUNTIME_UNSUPPORTED, { backend: 'vm', what: '' });
        asked.push([from, to]);
      },
      write: async (_path: string, content: AsyncIterable<Buffer>) => {
        for await (const part of content) asked.push(part.toString());
        return { kind: 'file', size: 0, mode: 0o100644, modifiedMs: 1, inode: 1n };
      },
    });
    const copy = (name: string) => runCommand('sandbox', 'cp', join(folder, name), 'x:/to', '--api', 'local');
    fs.symlinkSync('nowhere', join(folder, 'dangling'));
    fs.writeFileSync(join(folder, 'from'), 'content');
    fs.symlinkSync('from', join(folder, 'link'));
    // Its size is 0, and it cannot be read.
    fs.symlinkSync('/proc/self/mem', join(folder, 'unreadable'));
    await copy('dangling');
    expect(asked).toEqual([[join(folder, 'dangling'), '/to']]);
    asked.length = 0;
    isWholeMachine = true;
    await copy('link');
    expect(asked).toEqual(['content']);
    await expect(copy('dangling')).rejects.toMatchObject({ code: 'RUNTIME_UNSUPPORTED' });
    await expect(copy('unreadable')).rejects.toMatchObject({ code: 'SANDBOX_COPY_HERE' });
  });
});
