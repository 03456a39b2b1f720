/** `dsec run` with rules for its network, with a service in a network of its own, as typed. */
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { canServe, ServiceSite } from './service-site.ts';

describe.skipIf(!canServe('nft', 'unshare'))('dsec run with a network policy', { timeout: 240_000 }, () => {
  let site: ServiceSite;
  beforeAll(async () => {
    const applets = ['sh', 'cat', 'sleep', 'nc', 'ip'];
    site = await ServiceSite.open({ name: 'rules', applets, wrap: ['unshare', '--net'] });
  }, 120_000);
  afterAll(() => site?.remove(), 120_000);
  const dsec = (...args: string[]) => site.dsec(...args);
  const names = (all = false) =>
    (JSON.parse(dsec('sandbox', 'ls', '--json').stdout) as { name: string; state: string }[])
      .filter(({ state }) => all || state === 'running')
      .map(({ name }) => name);

  it('gives it a network of its own, passes streams and status, and leaves nothing', () => {
    const script = 'cat; cat /etc/resolv.conf; ip -o -4 addr show eth0 | cat; echo oops >&2; exit 7';
    const ran = dsec('run', '--allow', '192.0.2.1:80', 'bb:1', '--', 'sh', '-c', script);
    expect(ran).toMatchObject({ status: 7, stderr: 'oops\n' });
    expect(ran.stdout).toMatch(/^typed\nnameserver 10\.209\.0\.1\n[\s\S]*inet 10\.209\./);
    expect(names(true)).toEqual([]);
  });

  it('denies what no rule allows, and says so in --json what came of it', () => {
    const script = 'nc -w 5 192.0.2.1 81 2>&1; exit 3';
    const ran = dsec('run', '--network', 'policy', '--json', '--name', 'closed', 'bb:1', '--', 'sh', '-c', script);
    expect(ran.stdout).toContain('refused');
    expect(JSON.parse(ran.stderr.trim().split('\n').at(-1)!)).toEqual({
      exitCode: 3,
      outOfMemory: false,
      name: 'closed',
    });
    expect(ran.status).toBe(3);
  });

  it('keeps its changes, and replaces what was kept', () => {
    const write = (text: string, ...more: string[]) =>
      dsec(
        'run',
        '--allow',
        '@pypi',
        '--name',
        'kept',
        '--keep',
        ...more,
        'bb:1',
        '--',
        'sh',
        '-c',
        `echo ${text} > /f`,
      );
    expect(write('one')).toMatchObject({ status: 0, stderr: expect.stringContaining('kept as kept') });
    expect(names(true)).toEqual(['kept']);
    expect(write('two')).toMatchObject({ status: 125, stderr: expect.stringContaining('kept') });
    expect(write('three', '--replace').status).toBe(0);
    expect(dsec('pack-diff', 'kept', '--name', 'kept:1').status).toBe(0);
    expect(dsec('cat', 'kept:1', '/f').stdout).toBe('three\n');
    expect(dsec('sandbox', 'rm', 'kept').status).toBe(0);
  });

  it('is ended by the service when it was killed', async () => {
    const args = ['run', '--allow', '192.0.2.1', '--name', 'orphan', 'bb:1', '--', 'sh', '-c', 'echo up; sleep 1000'];
    const child = site.start(args);
    await new Promise((resolve) => child.stdout!.once('data', resolve));
    expect(names()).toEqual(['orphan']);
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill('SIGKILL');
    await ended;
    const deadline = Date.now() + 120_000;
    while (names().length > 0 && Date.now() < deadline) await delay(500);
    expect(names()).toEqual([]);
    dsec('sandbox', 'rm', '--force', 'orphan');
  });

  it('refuses what makes no sense, and says what it needs', () => {
    expect(dsec('run', '--network', 'none', '--allow', '192.0.2.1', 'bb:1').status).toBe(2);
    expect(dsec('run', '--network', 'some', 'bb:1').status).toBe(2);
    expect(dsec('run', '--allow', '[', 'bb:1').status).toBe(2);
    expect(dsec('run', '--allow', '@nonsense', 'bb:1', '--', 'cat').status).not.toBe(0);
    expect(dsec('trace', '--network', 'policy', 'bb:1', '--', 'cat').status).toBe(2);
    expect(dsec('run', '--allow', '192.0.2.1', 'bb:1', '--', 'nope')).toMatchObject({
      status: 127,
      stderr: expect.stringContaining('nope'),
    });
    site.env.DSEC_RUN = join(site.folder, 'elsewhere');
    const alone = dsec('run', '--allow', '192.0.2.1', 'bb:1', '--', 'cat');
    site.env.DSEC_RUN = join(site.folder, 'run');
    expect(alone).toMatchObject({ status: 125, stderr: expect.stringContaining('dsec serve runtime') });
  });
});
