/** `dsec sandbox create` and `exec` as clients of the runtime service: streams, signals and exit statuses as a process of their own has them. */
import type { ChildProcess } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { canServe, ServiceSite } from './service-site.ts';

describe.skipIf(!canServe())('a sandbox asked for through the door of the service', { timeout: 120_000 }, () => {
  let site: ServiceSite;
  beforeAll(async () => {
    const applets = ['sh', 'cat', 'echo', 'sleep', 'head', 'yes', 'wc'];
    site = await ServiceSite.open({ name: 'door', applets });
    // In place of node, for clients: nothing may be declined.
    const { folder } = site;
    fs.mkdirSync(join(folder, 'bin'));
    fs.writeFileSync(join(folder, 'bin/node'), '#!/bin/sh\necho declined\nexit 99\n', { mode: 0o755 });
    site.env = { ...site.env, PATH: `${folder}/bin:/usr/bin:/bin` };
    expect(await client(['create', '--name', 'work', 'bb:1'])).toMatchObject({ stdout: 'work\n', code: 0 });
  }, 120_000);
  afterAll(() => site?.remove('work'), 120_000);

  const start = (args: readonly string[], more: NodeJS.ProcessEnv = {}) => site.start(['sandbox', ...args], more);

  async function client(
    args: readonly string[],
    { input = '', env: more = {} }: { input?: string | Buffer; env?: NodeJS.ProcessEnv } = {},
  ) {
    return ended(start(args, more), input);
  }

  async function ended(child: ChildProcess, input: string | Buffer = '') {
    const told = { stdout: Buffer.alloc(0), stderr: '' };
    child.stdout!.on('data', (bytes: Buffer) => (told.stdout = Buffer.concat([told.stdout, bytes])));
    child.stderr!.on('data', (bytes: Buffer) => (told.stderr += bytes));
    child.stdin!.on('error', () => {});
    child.stdin!.end(input);
    const [code, signal] = await new Promise<[number | null, string | null]>((resolve) =>
      child.once('close', (status, by) => resolve([status, by])),
    );
    return { stdout: told.stdout.toString('latin1'), stderr: told.stderr, code, signal };
  }

  it('passes both streams and the exit status on', async () => {
    const script = 'echo out; echo err >&2; exit 7';
    expect(await client(['exec', 'work', '--', 'sh', '-c', script])).toEqual({
      stdout: 'out\n',
      stderr: 'err\n',
      code: 7,
      signal: null,
    });
  });

  it('passes input of any length on, to its end', async () => {
    const input = Buffer.alloc(3_000_000, 'some bytes\0\xff', 'latin1');
    const { stdout, code } = await client(['exec', 'work', '--', 'cat'], { input });
    expect(code).toBe(0);
    expect(Buffer.from(stdout, 'latin1').equals(input)).toBe(true);
    expect(await client(['exec', '-n', 'work', '--', 'cat'], { input: 'not wanted' })).toMatchObject({
      stdout: '',
      code: 0,
    });
  });

  it('keeps no more than a little ahead of a reader that is slow, and loses nothing', async () => {
    const child = start(['exec', 'work', '--', 'head', '-c', '20000000', '/dev/zero']);
    await delay(1_000);
    const { stdout, code } = await ended(child);
    expect([stdout.length, code]).toEqual([20_000_000, 0]);
  });

  it('ends when its reader has gone', async () => {
    const child = start(['exec', 'work', '--', 'yes']);
    child.stdout!.once('data', () => child.stdout!.destroy());
    const [code, signal] = await new Promise<[number | null, string | null]>((resolve) =>
      child.once('exit', (status, by) => resolve([status, by])),
    );
    expect(signal ?? code).toSatisfy((how) => how === 'SIGPIPE' || how === 141);
  });

  it('passes signals on', async () => {
    const script = 'trap "echo got; exit 5" TERM; echo ready; while :; do sleep 0.1; done';
    const child = start(['exec', '-n', 'work', '--', 'sh', '-c', script]);
    child.stdout!.once('data', () => child.kill('SIGTERM'));
    expect(await ended(child)).toMatchObject({ stdout: 'ready\ngot\n', code: 5 });
  });

  it('has exit statuses of its own', async () => {
    expect(await client(['exec', 'work', '--', 'nowhere'])).toMatchObject({ code: 127 });
    expect(await client(['exec', 'work', '--timeout', '1s', '--', 'sleep', '100'])).toMatchObject({ code: 124 });
    expect(await client(['exec', 'nobody', '--', 'true'])).toMatchObject({ code: 125 });
    expect(await client(['exec'])).toMatchObject({ code: 2 });
  });

  it('passes on variables of its own', async () => {
    const args = ['exec', '-e', 'MINE', '-e', 'SET=here', 'work', '--', 'sh', '-c', 'echo $MINE $SET'];
    expect(await client(args, { env: { MINE: 'there' } })).toMatchObject({ stdout: 'there here\n', code: 0 });
  });
});
