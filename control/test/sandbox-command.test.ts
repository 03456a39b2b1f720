/** `dsec sandbox create`, `exec`, `cp`, `logs`, `stop`, as typed, with a service that is killed in between. */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { findAgent, type SandboxNode } from '#runtime';
import { outputFrame, parseOutput } from '../runtime-service/output-frames.ts';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';
import { runCommand } from './command-run.ts';

const root = join(import.meta.dirname, '../..');
const can = process.getuid?.() === 0 && findAgent() !== undefined && fs.existsSync('/bin/busybox');
if (!can) console.log('skipped: not root, or no dsec-agent, or no busybox');

describe('output frames', () => {
  it('are the same however they are cut', async () => {
    const bytes = Buffer.concat([
      outputFrame.part({ stream: 'stdout', offset: 0, bytes: Buffer.from('abc') }),
      outputFrame.part({ stream: 'stderr', offset: 7, missingBytes: 2 ** 40 }),
      outputFrame.error({ code: 'X', message: 'y' }),
    ]);
    for (const size of [1, 3, 1000]) {
      const pieces = Array.from({ length: Math.ceil(bytes.length / size) }, (_, n) =>
        bytes.subarray(n * size, (n + 1) * size),
      );
      const news = [];
      for await (const one of parseOutput(
        (async function* () {
          yield* pieces;
        })(),
      ))
        news.push(one);
      expect(news).toEqual([
        { part: { stream: 'stdout', offset: 0, bytes: Buffer.from('abc') } },
        { part: { stream: 'stderr', offset: 7, missingBytes: 2 ** 40 } },
        { error: { code: 'X', message: 'y' } },
      ]);
    }
  });
});

describe('the routes', () => {
  it('take signals by names that there are', async () => {
    const sent: string[] = [];
    const command = { kill: (signal: string) => sent.push(signal) };
    const app = await sandboxApp({ get: () => ({ command: () => command }) } as unknown as SandboxNode);
    const send = (signal: string) =>
      app.inject({ method: 'POST', url: '/v1/sandboxes/x/commands/1/signal', payload: { signal } });
    expect((await send('SIGHUP')).statusCode).toBe(200);
    expect((await send('SIGFOO')).json()).toMatchObject({ error: { code: 'SANDBOX_BAD_REQUEST' } });
    expect(sent).toEqual(['SIGHUP']);
    await app.close();
  });

  it('are all described', async () => {
    const app = await sandboxApp({ list: () => [] } as unknown as SandboxNode);
    const document = (await app.inject('/openapi.json')).json();
    const described = Object.entries(document.paths as Record<string, Record<string, { summary?: string }>>).flatMap(
      ([path, item]) => Object.entries(item).map(([method, { summary }]) => ({ route: `${method} ${path}`, summary })),
    );
    expect(described.length).toBeGreaterThan(25);
    expect(described.filter(({ summary }) => summary === undefined)).toEqual([]);
    expect((await app.inject('/docs')).body).toContain('/v1/sandboxes/{name}/shells/{id}/expect');
    await app.close();
  });

  it('wait for text and patterns in a shell, and give it input', async () => {
    const asked: unknown[] = [];
    const session = {
      expect: async (...args: unknown[]) => {
        asked.push(...args);
        return Buffer.from('$ ');
      },
      write: async (bytes: Buffer) => void asked.push(String(bytes)),
    };
    const app = await sandboxApp({ get: () => ({ shell: () => session }) } as unknown as SandboxNode);
    const url = '/v1/sandboxes/x/shells/1';
    const expected = (payload: object) => app.inject({ method: 'POST', url: `${url}/expect`, payload });
    expect((await expected({ text: '$ ', from: 3 })).json()).toEqual({ outputBase64: 'JCA=' });
    expect((await expected({ regex: '\\$ $', timeoutMs: 5 })).json()).toEqual({ outputBase64: 'JCA=' });
    const headers = { 'content-type': 'application/octet-stream' };
    expect((await app.inject({ method: 'POST', url: `${url}/stdin`, payload: 'ls\n', headers })).statusCode).toBe(200);
    expect(asked).toEqual(['$ ', { from: 3 }, /\$ $/, { timeoutMs: 5 }, 'ls\n']);
    for (const wrong of [{}, { text: 'a', regex: 'b' }, { regex: '(' }]) {
      expect((await expected(wrong)).json()).toMatchObject({ error: { code: 'SANDBOX_BAD_REQUEST' } });
    }
    await app.close();
  });

  it('refuse what they do not know, and never fail of themselves', async () => {
    const gone = () => {
      throw Object.assign(new Error('no such thing'), { statusCode: 404 });
    };
    const app = await sandboxApp({
      list: () => [],
      get: gone,
      create: gone,
      stop: gone,
      remove: gone,
    } as unknown as SandboxNode);
    const urls = [
      '/v1/sandboxes',
      '/v1/sandboxes/x',
      '/v1/sandboxes/x/commands',
      '/v1/sandboxes/x/commands/1/stdin',
      '/v1/sandboxes/%00/files?path=/',
      '/v1/sandboxes/x/files',
      '/v1/sandboxes/x/shells/1/run',
      '/v1/nothing',
    ];
    const bodies = [
      undefined,
      '{',
      '[]',
      'null',
      '{"args":[]}',
      '{"args":["x"],"timeoutMs":-1}',
      '{"args":["x"],"more":1}',
      '{"store":"x"}',
      '{"command":1e999}',
    ];
    for (const url of urls) {
      for (const method of ['GET', 'POST', 'PUT', 'DELETE'] as const) {
        for (const payload of method === 'POST' ? bodies : [undefined]) {
          const headers = payload === undefined ? {} : { 'content-type': 'application/json' };
          const { statusCode, body } = await app.inject({ method, url, payload, headers });
          if (method === 'GET' && url === '/v1/sandboxes') expect(body).toBe('[]');
          else
            expect({ url, method, payload, statusCode: statusCode >= 400 && statusCode < 500 }).toEqual({
              url,
              method,
              payload,
              statusCode: true,
            });
        }
      }
    }
    await app.close();
  });
});

describe.skipIf(!can)('dsec sandbox', { timeout: 240_000 }, () => {
  let folder: string;
  let env: NodeJS.ProcessEnv;
  let service: ChildProcess;
  const saved = { ...process.env };

  beforeAll(async () => {
    folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-stay-')));
    Object.assign(process.env, {
      DSEC_STORE: join(folder, 'store'),
      DSEC_RUN: join(folder, 'run'),
      DSEC_STATE: join(folder, 'state'),
      DSEC_CACHE: join(folder, 'cache'),
    });
    env = { ...process.env, HOME: '/nowhere' };
    const tree = join(folder, 'tree');
    fs.mkdirSync(join(tree, 'bin'), { recursive: true });
    fs.mkdirSync(join(tree, 'tmp'));
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cat', 'echo', 'sleep', 'true', 'env'])
      fs.symlinkSync('busybox', join(tree, 'bin', name));
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    service = await serve();
  }, 120_000);
  afterAll(async () => {
    await end(service, 'SIGTERM');
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = saved;
    fs.rmSync(folder, { recursive: true, force: true });
  }, 120_000);

  async function serve(): Promise<ChildProcess> {
    const script = join(import.meta.dirname, 'service-child.ts');
    const child = spawn(process.execPath, ['--import', 'tsx', script, 'serve', 'runtime'], {
      cwd: root,
      env,
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    await new Promise<void>((resolve, reject) => {
      child.stdout!.once('data', () => resolve());
      child.once('exit', () => reject(new Error('the service ended')));
    });
    return child;
  }
  async function end(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill(signal);
    await ended;
  }
  function dsec(input: string, ...args: string[]) {
    const { status, stdout, stderr } = spawnSync(join(root, 'bin/dsec'), ['sandbox', ...args], {
      cwd: folder,
      env,
      input,
      encoding: 'utf8',
    });
    return { status, stdout, stderr };
  }

  it('does the whole life of one', async () => {
    expect(dsec('', 'create', 'bb:1', '--name', 'work', '-e', 'GIVEN=yes', '--memory', '64MiB')).toEqual({
      status: 0,
      stdout: 'work\n',
      stderr: '',
    });
    expect(dsec('input', 'exec', 'work', '--', 'sh', '-c', 'cat; echo " $GIVEN"; echo err >&2; exit 5')).toEqual({
      status: 5,
      stdout: 'input yes\n',
      stderr: 'err\n',
    });
    expect(dsec('', 'exec', 'work', '--', 'no-such').status).toBe(127);
    expect(dsec('', 'exec', 'no-such', '--', 'true').status).toBe(125);
    expect(dsec('', 'exec', 'work', '--timeout', '200ms', '--', 'sleep', '1000').status).toBe(124);
    expect(dsec('', 'exec', 'work', '--', 'sh', '-c', 'kill -9 $$').status).toBe(137);

    fs.mkdirSync(join(folder, 'up'));
    fs.writeFileSync(join(folder, 'up/file'), 'carried');
    expect(dsec('', 'cp', 'up', 'work:/tmp')).toMatchObject({ status: 0, stderr: '' });
    expect(dsec('', 'exec', 'work', '-n', '--', 'cat', '/tmp/up/file').stdout).toBe('carried');
    expect(dsec('', 'cp', 'work:/tmp/up', 'down').status).toBe(0);
    expect(fs.readFileSync(join(folder, 'down/file'), 'utf8')).toBe('carried');
    expect(dsec('', 'cp', 'a', 'b').status).toBe(2);

    const id = dsec(
      '',
      'exec',
      'work',
      '-d',
      '--',
      'sh',
      '-c',
      'echo before; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo after; exit 3',
    ).stdout.trim();
    expect(id).toMatch(/^\d+$/);
    await end(service, 'SIGKILL');
    expect(dsec('', 'exec', 'work', '--', 'true').stderr).toContain('start it: sudo dsec serve runtime');
    expect(dsec('', 'ls', '--json').stdout).toContain('"running"');
    service = await serve();
    expect(dsec('', 'exec', 'work', '-n', '--', 'sh', '-c', 'echo > /tmp/go').status).toBe(0);
    expect(dsec('', 'logs', 'work', id, '--follow').stdout).toBe('before\nafter\n');
    const commands = JSON.parse(dsec('', 'logs', 'work', '--json').stdout) as {
      id: number;
      result: { exitCode: number };
    }[];
    expect(commands.find((one) => String(one.id) === id)?.result.exitCode).toBe(3);

    expect(dsec('', 'rm', 'work').status).toBe(1);
    expect(dsec('', 'stop', 'work')).toMatchObject({ status: 0, stderr: '' });
    expect(dsec('', 'stop', 'work').status).toBe(0);
    expect(dsec('', 'exec', 'work', '--', 'true')).toMatchObject({
      status: 125,
      stderr: expect.stringContaining('it was stopped'),
    });
    expect(dsec('', 'ls').stdout).toMatch(/work +kept \(stopped\)/);
    expect(dsec('', 'rm', 'work').status).toBe(0);
    expect(JSON.parse(dsec('', 'ls', '--json').stdout)).toEqual([]);
    await delay(0);
  });

  it('pauses one, resumes it by a request, packs it while it runs, and forks it', async () => {
    expect(dsec('', 'create', 'bb:1', '--name', 'parent', '--class', 'be', '--idle', '1h', '--pids', '99').status).toBe(
      0,
    );
    const loop = 'exec 7>/tmp/log; n=0; while :; do n=$((n + 1)); echo $n >&7; echo $n > /tmp/n; sleep 0.01; done';
    expect(dsec('', 'exec', 'parent', '-d', '--', 'sh', '-c', loop).status).toBe(0);
    expect(
      dsec('', 'exec', 'parent', '-n', '--', 'sh', '-c', 'while [ ! -e /tmp/n ]; do sleep 0.01; done').status,
    ).toBe(0);
    expect(dsec('', 'pause', 'parent')).toMatchObject({
      status: 0,
      stdout: expect.stringMatching(/^parent: paused; /),
    });
    expect(dsec('', 'pause', 'parent', '--json').stdout).toContain('"pausedAt"');
    expect(dsec('', 'ls').stdout).toMatch(/parent +paused /);
    const packed = spawnSync(join(root, 'bin/dsec'), ['pack-diff', 'parent', '--name', 'mid:1', '--no-policy'], {
      env,
      encoding: 'utf8',
    });
    expect(packed).toMatchObject({ status: 0, stdout: expect.stringMatching(/^mid:1: sha256:/) });
    expect(packed.stderr).toContain('/tmp/log: open for writing by sh');
    expect(dsec('', 'ls').stdout).toMatch(/parent +paused /);
    expect(spawnSync(join(root, 'bin/dsec'), ['pack-diff', 'parent', '--name', 'mid:2', '--rm'], { env }).status).toBe(
      2,
    );
    const upper = join(folder, 'state/sandboxes/parent/upper/tmp');
    const files = () => ['n', 'log'].map((name) => fs.readFileSync(join(upper, name), 'utf8'));
    const before = files();
    const forked = dsec('', 'fork', 'parent', '--count', '2', '--request-id', 'once');
    expect(forked.status).toBe(0);
    const children = forked.stdout.trim().split('\n');
    expect(children.length).toBe(2);
    expect(files()).toEqual(before);
    for (const child of children) {
      const found = dsec('', 'exec', child, '-n', '--', 'sh', '-c', 'cat /tmp/n /tmp/log; echo $HOSTNAME');
      expect(found).toMatchObject({ status: 0, stdout: `${before.join('')}${child}\n` });
    }
    const listed = JSON.parse(dsec('', 'ls', '--json').stdout) as { name: string; limits: unknown; resident: object }[];
    for (const one of listed) {
      expect(one.limits).toMatchObject({ pids: 99 });
      expect(one.resident).toMatchObject({ class: 'be', idleMs: 3_600_000, idleAction: 'stop' });
    }
    // Asked again with the same id.
    expect(dsec('', 'fork', 'parent', '--count', '2', '--request-id', 'once').stdout).toBe(forked.stdout);
    expect(dsec('', 'resume', 'parent', 'parent').stdout).toBe('parent: running\nparent: running\n');
    const moved = 'read a < /tmp/n; b=$a; while [ $a = $b ]; do read b < /tmp/n; sleep 0.01; done';
    expect(dsec('', 'exec', 'parent', '-n', '--', 'sh', '-c', moved).status).toBe(0);
    const running = dsec('', 'fork', 'parent', '--json');
    expect(JSON.parse(running.stdout).sandboxes.length).toBe(1);
    expect(dsec('', 'fork', 'parent', '--count', '0').status).toBe(2);
    // A container's memory is not to be had; nothing was made.
    expect(dsec('', 'fork', 'parent', '--memory')).toMatchObject({
      status: 5,
      stderr: expect.stringContaining('fork-memory'),
    });
    expect(dsec('', 'pause', 'no-such').status).toBe(4);
    expect(dsec('', 'create', 'bb:1', '--class', 'best').status).toBe(2);
    expect(dsec('', 'create', 'bb:1', '--idle', '1ms').status).toBe(2);
    const names = dsec('', 'ls', '--json').stdout;
    for (const { name } of JSON.parse(names) as { name: string }[])
      expect(dsec('', 'rm', '--force', name).status).toBe(0);
  });
});
