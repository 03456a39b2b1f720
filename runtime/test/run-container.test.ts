/** Real sandboxes over real EROFS layers: what goes in, what comes out, what is left. Root and crun only. */
import { randomBytes } from 'node:crypto';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { findOciRuntime, openOciBackend } from '../backend/oci-runtime.ts';
import { listSandboxes, removeSandbox, withKeptSandbox } from '../index.ts';
import { busybox, canRun, NOTHING, Site } from './sandbox-fixture.ts';

describe.skipIf(!canRun())('a sandbox', () => {
  let site: Site;
  let base: Image;
  beforeAll(async () => {
    site = await new Site().open();
    base = await site.image('bb:1', [busybox], {
      Env: ['GREETING=hello', 'PATH=/bin'],
      Cmd: ['sh', '-c', 'echo from Cmd'],
      WorkingDir: '/work/here',
    });
  });
  afterAll(() => site.remove());
  const sh = (script: string, options: Parameters<Site['run']>[2] = {}) =>
    site.run(base, ['sh', '-c', script], options);
  const out = async (script: string, options: Parameters<Site['run']>[2] = {}) =>
    (await sh(script, options)).stdout.toString();

  it('runs the image’s Cmd, and leaves nothing', async () => {
    const ran = await site.run(base, []);
    expect([ran.exitCode, ran.stdout.toString(), ran.stderr]).toEqual([0, 'from Cmd\n', '']);
    expect(ran.timings.firstOutputMs).toBeGreaterThan(0);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it.each([0, 1, 7, 125, 126, 127, 255])('passes exit status %i on', async (code) => {
    expect((await sh(`exit ${code}`)).exitCode).toBe(code);
  });

  it('tells an end by a signal as 128 + n', async () => {
    expect((await sh('sh -c "kill -9 \\$\\$"; exit $?')).exitCode).toBe(137);
  });

  it('keeps stdout and stderr apart and every byte as it is', async () => {
    const bytes = randomBytes(3_000_000);
    const ran = await sh('cat; echo oops >&2', { stdin: bytes });
    expect(ran.stdout.equals(bytes)).toBe(true);
    expect(ran.stderr).toBe('oops\n');
  });

  it('takes a stream as stdin, and bears a command that does not read it', async () => {
    const endless = Readable.from(
      (function* () {
        for (;;) yield Buffer.alloc(65536);
      })(),
    );
    expect(
      (await sh('dd bs=4 count=1 2>/dev/null | wc -c', { stdin: endless as never })).stdout.toString().trim(),
    ).toBe('4');
  });

  it('lets a program open its standard streams again, also as another user', async () => {
    const ran = await sh('echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin', {
      stdin: 'in',
      user: 'agent',
    });
    expect([ran.stdout.toString(), ran.stderr]).toEqual(['out\nin', 'err\n']);
  });

  it('keeps Entrypoint under a given command, and drops both for a given entrypoint', async () => {
    const image = await site.image('entry:1', [busybox], { Entrypoint: ['/bin/echo', 'E'], Cmd: ['C'] });
    const output = async (...args: Parameters<Site['run']>) => (await site.run(...args)).stdout.toString();
    expect(await output(image, [])).toBe('E C\n');
    expect(await output(image, ['x', 'y'])).toBe('E x y\n');
    expect(await output(image, ['x'], { entrypoint: ['/bin/echo', 'N'] })).toBe('N x\n');
    expect(await output(image, ['/bin/echo', 'plain'], { entrypoint: [''] })).toBe('plain\n');
  });

  it('sets the environment: image, defaults, the caller’s, bytes as they are', async () => {
    process.env.DSEC_TEST_PASSED = 'passed on';
    const env = ['A=x=y  z', 'GREETING=bye', 'NL=one\ntwo', 'U=é→', 'EMPTY=', 'DSEC_TEST_PASSED', 'DSEC_TEST_UNSET'];
    const text = await out('cat /proc/self/environ', { env, name: 'named' });
    const entries = text.split('\0').filter((entry) => !/^(PWD|SHLVL|OLDPWD)=/.test(entry));
    expect(entries.sort()).toEqual(
      [
        '',
        'A=x=y  z',
        'DSEC_TEST_PASSED=passed on',
        'EMPTY=',
        'GREETING=bye',
        'HOME=/root',
        'HOSTNAME=named',
        'NL=one\ntwo',
        'PATH=/bin',
        'U=é→',
        'container=dsec',
      ].sort(),
    );
    expect(await out('hostname', { name: 'named' })).toBe('named\n');
  });

  it('refuses an environment entry without a name', async () => {
    await expect(sh('true', { env: ['=x'] })).rejects.toMatchObject({ code: 'RUNTIME_ENV' });
  });

  it('makes the working directory, and takes another', async () => {
    expect(await out('pwd')).toBe('/work/here\n');
    expect(await out('pwd', { workdir: '/some/where' })).toBe('/some/where\n');
    expect(await out('pwd', { workdir: 'etc' })).toBe('/etc\n');
    await expect(sh('pwd', { workdir: '/etc/passwd' })).rejects.toMatchObject({ code: 'RUNTIME_PATH' });
  });

  it.each([
    [undefined, '0 0 0', '/root'],
    ['agent', '1000 1001 1001 2000 2001', '/home/agent'],
    ['1000', '1000 1001 1001 2000 2001', '/home/agent'],
    ['agent:extra', '1000 2000 2000', '/home/agent'],
    ['4711:4712', '4711 4712 4712', '/'],
    ['4711', '4711 0 0', '/'],
    ['1234', '77 78 78', '/odd'],
  ])('runs as user %s', async (user, ids, home) => {
    expect(await out('echo $(id -u) $(id -g) $(id -G); echo $HOME', { user })).toBe(`${ids}\n${home}\n`);
  });

  it.each(['nobody', 'agent:nogroup', ':x', 'agent:', '99999999999', '4294967295'])('refuses user %s', async (user) => {
    await expect(sh('true', { user })).rejects.toMatchObject({ code: 'RUNTIME_USER', exit: 2 });
  });

  it('looks users up inside the root, whatever /etc/passwd points to', async () => {
    const image = await site.image('evil:1', [
      busybox,
      (folder) => {
        fs.mkdirSync(join(folder, 'etc'));
        fs.symlinkSync('/../../../../../../../../etc/shadow-of-ours', join(folder, 'etc/passwd'));
        fs.writeFileSync(join(folder, 'etc/shadow-of-ours'), 'inner:x:5:6::/i:/bin/sh\n');
      },
    ]);
    expect((await site.run(image, ['/bin/id', '-u'], { user: 'inner' })).stdout.toString()).toBe('5\n');
  });

  describe('a command that cannot be run', () => {
    let image: Image;
    beforeAll(async () => {
      image = await site.image(
        'broken:1',
        [
          busybox,
          (folder) => {
            fs.mkdirSync(join(folder, 'opt'));
            const write = (name: string, text: string, mode = 0o755) => {
              fs.writeFileSync(join(folder, 'opt', name), text);
              fs.chmodSync(join(folder, 'opt', name), mode);
            };
            write('plain', 'text', 0o644);
            write('script', '#!/usr/bin/python9 -x\n');
            write('works', '#! /bin/sh\necho works "$@"\n');
            write('no-magic', '\x01\x02\x03');
            const foreign = fs.readFileSync('/bin/busybox');
            foreign.writeUInt16LE(243, 18);
            fs.writeFileSync(join(folder, 'opt/foreign'), foreign, { mode: 0o755 });
            write('private', '#!/bin/sh\n', 0o700);
            fs.mkdirSync(join(folder, 'shut'), { mode: 0o700 });
            fs.copyFileSync('/bin/busybox', join(folder, 'shut/true'));
            fs.symlinkSync('/opt/loop', join(folder, 'opt/loop'));
            fs.copyFileSync(process.execPath, join(folder, 'opt/dynamic'));
          },
        ],
        { Env: ['PATH=/opt:/bin'] },
      );
    });
    it.each([
      ['nope', 127, 'it is in no folder of PATH (/opt:/bin)'],
      ['/opt/nope', 127, 'there is no /opt/nope'],
      ['./nope', 127, 'there is no //./nope'],
      ['plain', 126, '/opt/plain has no execute permission'],
      ['/opt', 126, '/opt is a directory'],
      ['/dev/../etc/passwd', 126, 'no execute permission'],
      ['script', 127, '/opt/script needs /usr/bin/python9'],
      ['dynamic', 127, 'ld-linux'],
      ['', 127, 'the name is empty'],
    ])('%s: %i', async (command, exit, words) => {
      await expect(site.run(image, [command])).rejects.toMatchObject({ exit, message: expect.stringContaining(words) });
      expect(site.leftovers()).toEqual(NOTHING);
    });
    it('of no known format: 126', async () => {
      await expect(site.run(image, ['no-magic'])).rejects.toMatchObject({ exit: 126 });
      await expect(site.run(image, ['foreign'])).rejects.toMatchObject({
        exit: 126,
        message: expect.stringContaining('another processor'),
      });
    });
    it('without permission for this user: 126', async () => {
      const words = (text: string) => ({ exit: 126, message: expect.stringContaining(text) });
      await expect(site.run(image, ['private'], { user: 'agent' })).rejects.toMatchObject(
        words('user 1000 may not execute'),
      );
      await expect(site.run(image, ['/shut/true'], { user: 'agent' })).rejects.toMatchObject(
        words('user 1000 may not enter /shut'),
      );
      expect((await site.run(image, ['private'])).exitCode).toBe(0);
      expect((await site.run(image, ['private'], { user: '0:0' })).exitCode).toBe(0);
    });
    it('finds scripts along PATH', async () => {
      expect((await site.run(image, ['works', 'a b'])).stdout.toString()).toBe('works a b\n');
    });
    it('none at all: usage', async () => {
      await expect(site.run(image, [])).rejects.toMatchObject({ code: 'RUNTIME_COMMAND_MISSING', exit: 2 });
    });
  });

  it('is isolated: few capabilities, no new privileges, a filter, nobody else’s processes, loopback alone', async () => {
    const text = await out(
      'grep -E "CapBnd|CapEff|NoNewPrivs|Seccomp:" /proc/self/status; ls -d /proc/[0-9]* | wc -l; ip -o addr | grep -c inet; ip -o link | wc -l; mount -t tmpfs x /tmp; unshare -U true; cat /proc/kcore | wc -c; echo 1 > /proc/sys/kernel/hostname',
    );
    const lines = text.split('\n').map((line) => line.replace(/\s+/g, ' ').trim());
    expect(lines.slice(0, 4)).toEqual([
      'CapEff: 00000000a80425fb',
      'CapBnd: 00000000a80425fb',
      'NoNewPrivs: 1',
      'Seccomp: 2',
    ]);
    expect(Number(lines[4])).toBeLessThan(6);
    expect(lines.slice(6, 8)).toEqual(['1', '0']);
    const errors = (await sh('mount -t tmpfs x /tmp; unshare -U true; echo 1 > /proc/sys/kernel/hostname')).stderr;
    expect(errors).toMatch(/mount.*(denied|not permitted)/i);
    expect(errors).toMatch(/unshare.*not permitted/i);
    expect(errors).toMatch(/read-only/i);
  });

  it('takes capabilities from other users', async () => {
    expect(await out('grep CapEff /proc/self/status', { user: 'agent' })).toMatch(/0000000000000000/);
  });

  it('has the host’s network when asked', async () => {
    expect(Number(await out('ls /sys/class/net | wc -l; ', { network: 'none' }))).toBe(1);
    const hosts = await out('cat /etc/hosts', { network: 'host' });
    expect(hosts).toBe(fs.readFileSync('/etc/hosts', 'utf8'));
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('has it where a file of the host is shown in place of a link that leads nowhere', async () => {
    const fill = (folder: string) => {
      busybox(folder);
      fs.mkdirSync(join(folder, 'run'));
      fs.symlinkSync('../../run/resolv.conf', join(folder, 'etc/resolv.conf'));
    };
    const image = await site.image('link:1', [fill], { Env: ['PATH=/bin'] });
    const ran = await site.run(image, ['cat', '/etc/resolv.conf'], { network: 'host', keep: true, name: 'linked' });
    expect([ran.exitCode, ran.stdout.toString()]).toEqual([0, fs.readFileSync('/etc/resolv.conf', 'utf8')]);
    expect(fs.readdirSync(ran.upper!, { recursive: true }).filter((path) => String(path).includes('resolv'))).toEqual(
      [],
    );
    await removeSandbox('linked', site.folders);
  });

  it('refuses NUL bytes in what an image says of its command and folder', async () => {
    const cmd = await site.image('nul:1', [busybox], { Env: ['PATH=/bin'], Cmd: ['echo', 'a\0b'] });
    await expect(site.run(cmd, [])).rejects.toMatchObject({ code: 'RUNTIME_COMMAND_NOT_EXECUTABLE', exit: 126 });
    const folder = await site.image('nul:2', [busybox], { Env: ['PATH=/bin'], WorkingDir: '/a\0b' });
    await expect(site.run(folder, ['true'])).rejects.toMatchObject({ code: 'RUNTIME_PATH' });
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('keeps the upper with what changed in it, and nothing of ours', async () => {
    const ran = await sh('echo new > /work/here/file; rm /bin/tty', {
      keep: true,
      name: 'kept',
      workdir: '/work/here',
    });
    const tree = fs.readdirSync(ran.upper!, { recursive: true }).map(String).sort();
    expect(tree).toEqual(['bin', 'bin/tty', 'work', 'work/here', 'work/here/file']);
    const [record] = listSandboxes(site.folders);
    expect(record).toMatchObject({
      name: 'kept',
      state: 'kept',
      exitCode: 0,
      base: { name: 'bb:1', digest: base.manifestDigest },
    });
    expect(site.leftovers().mounts).toEqual([]);
    expect(await withKeptSandbox('kept', async ({ upper }) => upper, site.folders)).toBe(ran.upper);

    await expect(sh('true', { name: 'kept' })).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_EXISTS' });
    expect((await sh('ls /work/here | wc -l', { name: 'kept', replace: true })).stdout.toString().trim()).toBe('0');
    expect(site.leftovers()).toEqual(NOTHING);
    await expect(removeSandbox('kept', site.folders)).rejects.toMatchObject({
      code: 'RUNTIME_SANDBOX_NOT_FOUND',
      exit: 4,
    });
  });

  it('changes nothing by running alone: the upper stays empty, with the time of the image’s root', async () => {
    const ran = await site.run(base, ['true'], { keep: true, name: 'empty', workdir: '/' });
    expect(fs.readdirSync(ran.upper!)).toEqual([]);
    expect(fs.statSync(ran.upper!).mtimeMs).toBe(0);
    expect(fs.statSync(ran.upper!).mode & 0o777).toBe(0o755);
    await removeSandbox('empty', site.folders);
  });

  it('lays the workspace and the toolkits over the base', async () => {
    const file = (path: string, text: string) => (folder: string) => {
      fs.mkdirSync(join(folder, path, '..'), { recursive: true });
      fs.writeFileSync(join(folder, path), text);
      fs.chmodSync(join(folder, path), 0o755);
    };
    const workspace = await site.image('ws:1', [file('repo/readme', 'ws')], {}, { kind: 'workspace', on: base });
    const one = await site.image('one:1', [file('opt/tool', '#!/bin/sh\necho one\n')], {}, { kind: 'toolkit' });
    const two = await site.image('two:1', [file('opt/tool', '#!/bin/sh\necho two\n')], {}, { kind: 'toolkit' });
    const run = async (toolkits: Image[]) =>
      site.run(base, ['sh', '-c', 'cat /repo/readme; /opt/tool'], { workspace, toolkits });
    expect((await run([one, two])).stdout.toString()).toBe('wstwo\n');
    const ran = await run([two, one]);
    expect([ran.stdout.toString(), ran.layers]).toEqual(['wsone\n', 4]);
  });

  it('runs ten at once', async () => {
    const runs = await Promise.all(Array.from({ length: 10 }, (_, i) => out(`echo ${i} > /f; sleep 0.2; cat /f`)));
    expect(runs).toEqual(Array.from({ length: 10 }, (_, i) => `${i}\n`));
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('ends when it is aborted', async () => {
    const stop = new AbortController();
    const ran = await sh('echo ready; sleep 1000', {
      signal: stop.signal,
      stdio: { onStdout: () => stop.abort() },
    });
    expect(ran.exitCode).toBe(137);
  });

  it('tells the signal that ended it', async () => {
    let send: (signal: NodeJS.Signals) => void = () => {};
    const ran = await sh('echo ready; exec sleep 1000', {
      takeSignals: (handler) => {
        send = handler;
      },
      stdio: { onStdout: () => send('SIGTERM') },
    });
    expect([ran.exitCode, ran.signal]).toEqual([143, 'SIGTERM']);
    expect((await sh('exit 143')).signal).toBeUndefined();
  });

  it('ends by a signal that came before it ran', async () => {
    for (let i = 0; i < 3; i++) {
      const ran = await site.run(base, ['sleep', '1000'], { takeSignals: (handler) => handler('SIGINT') });
      expect([ran.exitCode, ran.signal]).toEqual([130, 'SIGINT']);
    }
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it('removes uppers with paths longer than PATH_MAX', async () => {
    const name = 'd'.repeat(200);
    expect(
      (await sh(`cd /; for i in $(busybox seq 30); do mkdir ${name}; cd -P ./${name} || exit 9; done; echo x > f`))
        .exitCode,
    ).toBe(0);
    expect(site.leftovers()).toEqual(NOTHING);
  });

  it.each(['UP', 'a/b', '..', '', 'x'.repeat(64)])('refuses the name %s', async (name) => {
    await expect(sh('true', { name })).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_NAME', exit: 2 });
  });

  it('runs under runc too', async () => {
    if (!fs.existsSync('/usr/sbin/runc')) return console.log('skipped: runc is not installed');
    const backend = openOciBackend(site.folders.runDir, findOciRuntime('runc'));
    const ran = await sh('id -u; cat; exit 5', { backend, user: 'agent', stdin: 'in' });
    expect([ran.exitCode, ran.stdout.toString()]).toEqual([5, '1000\nin']);
    expect(site.leftovers()).toEqual(NOTHING);
  });
});
