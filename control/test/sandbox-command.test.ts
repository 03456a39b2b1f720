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
    const app = sandboxApp({ get: () => ({ command: () => command }) } as unknown as SandboxNode);
    const send = (signal: string) =>
      app.inject({ method: 'POST', url: '/v1/sandboxes/x/commands/1/signal', payload: { signal } });
    expect((await send('SIGHUP')).statusCode).toBe(200);
    expect((await send('SIGFOO')).json()).toMatchObject({ error: { code: 'SANDBOX_BAD_REQUEST' } });
    expect(sent).toEqual(['SIGHUP']);
    await app.close();
  });

  it('refuse what they do not know, and never fail of themselves', async () => {
    const gone = () => {
      throw Object.assign(new Error('no such thing'), { statusCode: 404 });
    };
    const app = sandboxApp({ list: () => [], get: gone, create: gone, stop: gone } as unknown as SandboxNode);
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
});
