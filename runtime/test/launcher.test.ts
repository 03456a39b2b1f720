/** The launcher by itself: what it does with orders that are wrong, a control group of the v2 kind, and the death of either side. */
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Duplex } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { umount } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { FRAME, frameBytes } from '../backend/agent-wire.ts';
import type { LaunchSpec } from '../backend/backend.ts';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { deviceProgram } from '../backend/device-rules.ts';
import { launchOrder, preparation } from '../backend/launch-order.ts';
import { LauncherChannel, LaunchFailure } from '../backend/launcher-channel.ts';
import { openOwnBackend } from '../backend/own-backend.ts';
import { type SandboxCgroup, sandboxCgroups } from '../backend/sandbox-cgroups.ts';
import { busybox, canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('the launcher', () => {
  let folder: string;
  let root: string;
  let count = 0;
  beforeAll(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-launcher-'));
    root = join(folder, 'root');
    fs.mkdirSync(root);
    busybox(root);
    for (const name of ['proc', 'dev', 'sys']) fs.mkdirSync(join(root, name));
    for (const name of ['mknod', 'head']) fs.symlinkSync('busybox', join(root, 'bin', name));
    execFileSync('mount', ['--bind', root, root]);
  });
  afterAll(() => {
    umount(root, { lazy: true });
    fs.rmSync(folder, { recursive: true, force: true });
  });

  const start = () => {
    const child = spawn(agent!.path, ['launch'], { stdio: ['ignore', 'pipe', 'inherit', 'pipe'], env: {}, cwd: '/' });
    let output = '';
    child.stdout!.on('data', (bytes) => {
      output += bytes;
    });
    const exited = new Promise<number | null>((resolve) => child.once('close', (code) => resolve(code)));
    return { child, socket: child.stdio[3] as Duplex, exited, output: () => output };
  };
  const specOf = (args: readonly string[]): LaunchSpec => ({
    id: `launcher-${process.pid}-${count++}`,
    folder,
    root,
    hostname: 'h',
    network: 'none',
    binds: [],
    process: { args, env: ['PATH=/bin'], cwd: '/', uid: 0, gid: 0, additionalGids: [], terminal: false },
    stdio: 'inherit',
  });

  const alive = (pid: number) => {
    try {
      return !/^State:\s+[ZX]/m.test(fs.readFileSync(`/proc/${pid}/status`, 'latin1'));
    } catch {
      return false;
    }
  };

  it('says which it is, and runs one sandbox after the other', async () => {
    const { socket, exited, output } = start();
    const channel = new LauncherChannel(socket);
    expect((await channel.ready).build).toBe(agent!.build);
    for (const code of [0, 3, 255]) {
      const spec = specOf(['sh', '-c', `echo ${code}; exit ${code}`]);
      const one = channel.prepare(preparation(spec, 'own'));
      one.order(launchOrder(spec));
      expect(await one.started).toBeGreaterThan(1);
      expect((await one.ended) >> 8).toBe(code);
      expect(cgroupsOf(spec.id)).toEqual([]);
    }
    channel.close();
    expect(await exited).toBe(0);
    expect(output()).toBe('0\n3\n255\n');
  });

  it('runs from a sealed copy of itself', async () => {
    const { child, socket, exited } = start();
    const channel = new LauncherChannel(socket);
    await channel.ready;
    expect(fs.readlinkSync(`/proc/${child.pid}/exe`)).toContain('memfd:');
    channel.close();
    await exited;
  });

  it('tells what failed, and where', async () => {
    const { socket, exited } = start();
    const channel = new LauncherChannel(socket);
    const fails = async (change: (spec: LaunchSpec) => LaunchSpec) => {
      const spec = change(specOf(['true']));
      const one = channel.prepare(preparation(spec, 'own'));
      one.order(launchOrder(spec));
      const error = await one.started.catch((reason: unknown) => reason);
      expect(error).toBeInstanceOf(LaunchFailure);
      expect(cgroupsOf(spec.id).length).toBe(0);
      return error as LaunchFailure;
    };
    const withProcess = (part: Partial<LaunchSpec['process']>) => (spec: LaunchSpec) => ({
      ...spec,
      process: { ...spec.process, ...part },
    });
    expect((await fails(withProcess({ args: ['nope'] }))).message).toBe('executing nope: no such file or directory');
    expect((await fails(withProcess({ args: ['/etc/passwd'] }))).code).toBe('EACCES');
    expect((await fails(withProcess({ cwd: '/none' }))).message).toBe(
      'entering the working directory /none: no such file or directory',
    );
    expect((await fails((spec) => ({ ...spec, root: '/none' }))).message).toBe(
      'entering its root /none: no such file or directory',
    );
    expect((await fails((spec) => ({ ...spec, binds: [{ source: '/none', target: '/etc/passwd' }] }))).message).toBe(
      'mounting /none: no such file or directory',
    );
    channel.close();
    await exited;
  });

  it('refuses a root whose /proc is a link', async () => {
    fs.renameSync(join(root, 'proc'), join(root, 'other'));
    fs.symlinkSync('other', join(root, 'proc'));
    const { socket, exited } = start();
    const channel = new LauncherChannel(socket);
    try {
      const spec = specOf(['true']);
      const one = channel.prepare(preparation(spec, 'own'));
      one.order(launchOrder(spec));
      await expect(one.started).rejects.toThrow('mounting /proc: not a directory');
    } finally {
      fs.rmSync(join(root, 'proc'));
      fs.renameSync(join(root, 'other'), join(root, 'proc'));
      channel.close();
      await exited;
    }
  });

  it('ends what was prepared and is cancelled before its order', async () => {
    const { socket, exited } = start();
    const channel = new LauncherChannel(socket);
    const spec = specOf(['true']);
    const one = channel.prepare(preparation(spec, 'own'));
    one.cancel();
    expect((await one.ended) & 0x7f).toBe(9);
    expect(cgroupsOf(spec.id)).toEqual([]);
    channel.close();
    await exited;
  });

  it('holds nothing but its own streams while it waits for its order', async () => {
    const { child, socket, exited } = start();
    const channel = new LauncherChannel(socket);
    const one = channel.prepare(preparation(specOf(['true']), 'own'));
    const waiting = () => {
      const [pid] = fs.readFileSync(`/proc/${child.pid}/task/${child.pid}/children`, 'latin1').trim().split(' ');
      return pid === undefined || pid === '' ? [] : fs.readdirSync(`/proc/${pid}/fd`);
    };
    // Those of the launcher's other clients would stay open with it. The fourth is where its order comes from.
    const deadline = Date.now() + 30_000;
    while (waiting().length !== 4 && Date.now() < deadline) await delay(5);
    expect(waiting()).toEqual(expect.arrayContaining(['0', '1', '2']));
    expect(waiting()).toHaveLength(4);
    one.cancel();
    await one.ended;
    channel.close();
    await exited;
  });

  it('fails for what is too long, and for a folder it cannot write to, without a trace', async () => {
    const backend = openOwnBackend(agent);
    for (const spec of [
      {
        ...specOf(['true']),
        process: {
          ...specOf(['true']).process,
          env: Array.from({ length: 90 }, (_, i) => `V${i}=${'x'.repeat(100_000)}`),
        },
      },
      { ...specOf(['sleep', '1000']), folder: join(folder, 'missing') },
    ]) {
      await expect(backend.launch(spec)).rejects.toThrow(/take \d+ bytes|ENOENT/);
      await backend.remove(spec.id);
      expect(cgroupsOf(spec.id)).toEqual([]);
    }
  });

  it('bears orders cut short, with every bit changed, and noise', async () => {
    const spec = specOf(['true']);
    const [first, second] = [preparation(spec, 'own'), launchOrder(spec)];
    const { socket, exited } = start();
    const channel = new LauncherChannel(socket);
    await channel.ready;
    for (let cut = 0; cut < first.length; cut += 97) {
      await expect(channel.prepare(first.subarray(0, cut)).started).rejects.toThrow(/order/);
    }
    for (let cut = 0; cut < second.length; cut += 701) {
      const one = channel.prepare(first);
      one.order(second.subarray(0, cut));
      await expect(one.started).rejects.toThrow(/order/);
    }
    let state = 1;
    for (let round = 0; round < 40; round++) {
      const bytes = Buffer.from(second);
      // The sizes and counts are in the first part.
      for (let i = 0; i < 3; i++) {
        state = (state * 1103515245 + 12345) % 0x80000000;
        bytes[state % 400]! ^= 1 << (round % 8);
      }
      const one = channel.prepare(first);
      one.order(bytes);
      await one.ended.catch(() => {});
    }
    // It serves on.
    const last = channel.prepare(preparation(spec, 'own'));
    last.order(launchOrder(spec));
    expect(await last.ended).toBe(0);
    channel.close();
    expect(await exited).toBe(0);
    expect(cgroupsOf(spec.id)).toEqual([]);
  });

  it.each([
    ['an unknown frame', frameBytes(77, 0, Buffer.alloc(0))],
    ['a frame without end', Buffer.from([0xff, 0xff, 0xff, 0xff, FRAME.prepare, 0, 0, 0, 0])],
  ])('ends at %s', async (_what, bytes) => {
    const { socket, exited } = start();
    socket.on('error', () => {});
    socket.resume();
    socket.write(bytes);
    expect(await exited).toBe(0);
  });

  it('takes its sandboxes with it, however it ends', async () => {
    for (const how of ['close', 'SIGKILL'] as const) {
      const { child, socket, exited } = start();
      const channel = new LauncherChannel(socket);
      const spec = specOf(['sh', '-c', 'sleep 1000 & sleep 1000']);
      const one = channel.prepare(preparation(spec, 'own'));
      one.order(launchOrder(spec));
      const pid = await one.started;
      if (how === 'close') channel.close();
      else child.kill(how);
      await exited;
      while (alive(pid)) await delay(5);
      await expect(one.ended).rejects.toMatchObject({ code: 'RUNTIME_LAUNCHER_GONE' });
      for (const group of cgroupsOf(spec.id)) {
        while (fs.readFileSync(join(group, 'cgroup.procs'), 'latin1') !== '') await delay(5);
        fs.rmdirSync(group);
      }
    }
  });

  it('keeps devices closed by a program in a v2 group', async () => {
    const unified = ['/sys/fs/cgroup/unified', '/sys/fs/cgroup'].find((path) =>
      fs.existsSync(join(path, 'cgroup.subtree_control')),
    );
    if (unified === undefined) return console.log('skipped: no v2 hierarchy');
    const { socket, exited, output } = start();
    const channel = new LauncherChannel(socket);
    const script =
      'mknod /dev/fuse-node c 10 229; head -c 0 /dev/fuse-node && echo open; echo x > /dev/null && echo null; head -c 2 /dev/zero | wc -c';
    const results: string[] = [];
    for (const program of [undefined, deviceProgram()]) {
      const spec = specOf(['sh', '-c', script]);
      const other = sandboxCgroups(spec.id).filter(({ folder: path }) => !path.startsWith(`${unified}/`));
      const cgroups: SandboxCgroup[] = [
        ...other.map((group) => ({ ...group, writes: [] })),
        { folder: `${unified}/dsec/${spec.id}`, isCpuset: false, writes: [], deviceProgram: program },
      ];
      const one = channel.prepare(preparation(spec, 'own', cgroups));
      one.order(launchOrder(spec));
      const status = await one.ended;
      results.push(`status ${status}`);
    }
    channel.close();
    await exited;
    expect([output(), results]).toEqual(['open\nnull\n2\nnull\n2\n', ['status 0', 'status 0']]);
  });
});
