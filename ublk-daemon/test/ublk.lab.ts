/** A ublk device: ext4 on it, its end whatever it is doing, many that come and go, and what users that are not root may do. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  constants,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { open } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { processEntry } from '#base';
import { openFileTarget } from '../target/file-target.ts';
import { UblkControl } from '../target/ublk/control.ts';
import { listUblk, removeUblk, serveUblk } from '../target/ublk/device.ts';
import { aligned, O_DIRECT } from './aligned-buffer.ts';
import { MemoryTarget } from './memory-target.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
/** Each costs seconds where everything is emulated. */
const CYCLES = process.env.CI ? 8 : 50;
const USER = 1234;
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function mapsOf(kind: RegExp): number {
  return readFileSync('/proc/self/maps', 'latin1')
    .split('\n')
    .filter((line) => kind.test(line)).length;
}

function diskFile(name: string, sizeBytes: number): string {
  const path = join(folder, name);
  writeFileSync(path, '');
  truncateSync(path, sizeBytes);
  return path;
}

const devices = () => readdirSync('/dev').filter((name) => /^ublk[bc]/.test(name));

async function until(what: string, is: () => boolean | Promise<boolean>): Promise<void> {
  for (let i = 0; !(await is()); i++) {
    if (i > 6000) throw new Error(`not in a minute and more: ${what}`);
    await delay(10);
  }
}

test('the driver tells what it has', async () => {
  const control = new UblkControl();
  const features = await control.features();
  await control.close();
  for (const name of ['user recovery', 'reissue', 'unprivileged', 'ioctl encoding']) expect(features).toContain(name);
});

test('mkfs, mount, write, drop caches, compare, discard, e2fsck', async () => {
  const disk = diskFile('ext4.raw', 128 * MIB);
  const target = await openFileTarget(disk);
  const device = await serveUblk({ target, queues: 2 });
  expect(device.recoverable).toBe(true);
  // Before Linux 6.16 a device keeps its size.
  expect(typeof (await device.resized())).toBe('boolean');
  const mounted = join(folder, 'mounted');
  mkdirSync(mounted);
  await run('mkfs.ext4', '-q', device.path);
  await run('mount', device.path, mounted);
  const before = join(folder, 'data');
  writeFileSync(before, randomBytes(20 * MIB));
  await run('cp', before, join(mounted, 'file'));
  await run('sync', '-f', mounted);
  await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
  await run('cmp', before, join(mounted, 'file'));
  await run('rm', join(mounted, 'file'));
  await run('fstrim', mounted);
  await run('umount', mounted);
  await run('e2fsck', '-fn', device.path);
  await device.stop();
  await device.stop();
  await target.close();
  await run('e2fsck', '-fn', disk);
  expect(devices()).toEqual([]);
});

describe('a device ends', () => {
  test('whose target never answers', async () => {
    const target = new MemoryTarget(8 * MIB);
    const device = await serveUblk({ target });
    const handle = await open(device.path, constants.O_RDONLY | O_DIRECT);
    target.before = () => new Promise<void>(() => {});
    const stuck = handle.read(aligned(4096), 0, 4096, 0);
    stuck.catch(() => {});
    await until('the read comes', () => target.calls.length > 0);
    const stopping = device.stop(200);
    await expect(stuck).rejects.toMatchObject({ code: 'EIO' });
    await handle.close();
    await stopping;
    expect(devices()).toEqual([]);
  });

  test('that somebody has open, and its number is free when it is closed', async () => {
    const target = new MemoryTarget(8 * MIB);
    const device = await serveUblk({ target });
    const handle = await open(device.path, constants.O_RDONLY | O_DIRECT);
    await device.stop();
    expect(devices()).toEqual([]);
    try {
      // What is left of it is an empty device.
      const { bytesRead } = await handle.read(aligned(4096), 0, 4096, 0);
      expect(bytesRead).toBe(0);
    } finally {
      await handle.close();
    }
    let next = await serveUblk({ target, id: device.id }).catch(() => undefined);
    await until('the number is free', async () => {
      next ??= await serveUblk({ target, id: device.id }).catch(() => undefined);
      return next !== undefined;
    });
    expect(next!.path).toBe(device.path);
    await next!.stop();
  });

  test('under load', async () => {
    const target = await openFileTarget(diskFile('load.raw', 64 * MIB));
    const device = await serveUblk({ target });
    const load = run(
      'fio',
      ...['--name=load', '--ioengine=libaio', `--filename=${device.path}`, '--direct=1', '--size=64m', '--time_based'],
      ...['--runtime=600', '--rw=randrw', '--bs=4k', '--iodepth=32'],
    );
    load.catch(() => {});
    const stat = () => readFileSync(`/sys/block/ublkb${device.id}/stat`, 'latin1').trim().split(/\s+/).map(Number);
    await until('it is under load', () => stat()[4]! > 200);
    await device.stop();
    await expect(load).rejects.toThrow();
    await target.close();
    expect(devices()).toEqual([]);
  });
});

test('devices come and go, and leave nothing', { timeout: 1_800_000 }, async () => {
  const target = await openFileTarget(diskFile('cycles.raw', 8 * MIB));
  const state = () => ({
    descriptors: readdirSync('/proc/self/fd').length,
    threads: readdirSync('/proc/self/task').length,
    anonymous: mapsOf(/rw-[sp].* 00:00 0 *$/),
  });
  const cycle = async (read: boolean) => {
    const device = await serveUblk({ target });
    if (read) await run('dd', `if=${device.path}`, 'of=/dev/null', 'bs=1M', 'count=2', 'status=none');
    await device.stop();
  };
  // What the first ones make for good.
  for (let i = 0; i < 3; i++) await cycle(true);
  const before = state();
  for (let i = 0; i < CYCLES; i++) await cycle(i % 10 === 0);
  const after = state();
  expect(devices()).toEqual([]);
  expect(after.descriptors).toBeLessThanOrEqual(before.descriptors + 2);
  expect(after.threads).toBeLessThanOrEqual(before.threads + 2);
  expect(mapsOf(/io_uring|ublkc/)).toBe(0);
  // The allocator keeps some of what threads had, so few devices say nothing; a device's own maps would be three each.
  if (CYCLES >= 50) expect(after.anonymous - before.anonymous).toBeLessThan(CYCLES);
  await target.close();
});

describe('users that are not root', () => {
  const children = new Set<ChildProcess>();
  let disk: string;

  beforeAll(() => {
    chmodSync(folder, 0o755);
    disk = diskFile('user.raw', 8 * MIB);
    chownSync(disk, USER, USER);
    chmodSync('/dev/ublk-control', 0o666);
  });
  afterAll(() => chmodSync('/dev/ublk-control', 0o600));
  afterEach(async () => {
    for (const child of children) {
      const ended = once(child, 'exit');
      if (child.exitCode === null && child.signalCode === null && child.kill('SIGKILL')) await ended;
    }
    children.clear();
    for (const { id } of await listUblk()) await removeUblk(id);
  });

  function serve(): { child: ChildProcess; output: () => string } {
    const entry = processEntry('ublk-server', new URL('./ublk-server-process.ts', import.meta.url));
    const child = spawn(process.execPath, [...entry, disk], {
      uid: USER,
      gid: USER,
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    children.add(child);
    let output = '';
    for (const stream of [child.stdout!, child.stderr!]) {
      stream.setEncoding('utf8').on('data', (text: string) => {
        output += text;
      });
    }
    return { child, output: () => output };
  }

  test('serve devices of their own, which are theirs alone', async () => {
    // What udev does where a rule says so.
    const udev = setInterval(() => {
      for (const name of devices()) {
        const path = `/dev/${name}`;
        const found = statSync(path, { throwIfNoEntry: false }); // it may go between the listing and this
        if (found && found.uid !== USER) chownSync(path, USER, USER);
      }
    }, 20);
    try {
      const { child, output } = serve();
      await until('it serves', () => {
        if (child.exitCode !== null) throw new Error(output());
        return /live \d+/.test(output());
      });
      const id = Number(/live (\d+)/.exec(output())![1]);
      expect(output()).toContain('not recoverable');
      const path = `/dev/ublkb${id}`;
      await until('the device is the user’s', () => statSync(path).uid === USER);
      const as = ['--reuid', String(USER), '--regid', String(USER), '--clear-groups'];
      const data = join(folder, 'user-data');
      writeFileSync(data, randomBytes(MIB));
      const dd = (...args: string[]) => run('setpriv', ...as, 'dd', 'status=none', 'bs=64k', 'count=16', ...args);
      await dd(`if=${data}`, `of=${path}`, 'conv=fsync', 'oflag=direct');
      await dd(`if=${path}`, 'of=/dev/null', 'iflag=direct');
      expect(readFileSync(disk).subarray(0, MIB).equals(readFileSync(data))).toBe(true);
      // Nobody else, whatever the file's mode says: it could be a trap.
      chmodSync(path, 0o666);
      const other = ['--reuid', String(USER + 1), '--regid', String(USER + 1), '--clear-groups'];
      await expect(run('setpriv', ...other, 'dd', `if=${path}`, 'of=/dev/null', 'count=1')).rejects.toThrow(
        'Operation not permitted',
      );
      expect((await listUblk()).find((device) => device.id === id)).toMatchObject({ ownerUid: USER, pid: child.pid });
      const ended = once(child, 'exit');
      child.kill('SIGTERM');
      expect(await ended).toEqual([0, null]);
      await until('it is gone', () => devices().length === 0);
    } finally {
      clearInterval(udev);
    }
  });

  test('are told when nobody gives them the device', async () => {
    const { child, output } = serve();
    await once(child, 'exit');
    expect(output()).toContain('UBLK_NODE');
    // Root can take away what is left.
    for (const { id } of await listUblk()) expect(await removeUblk(id)).toBe(true);
    expect(devices()).toEqual([]);
  });

  test('are told when they may not ask the driver', async () => {
    chmodSync('/dev/ublk-control', 0o600);
    const { child, output } = serve();
    await once(child, 'exit');
    chmodSync('/dev/ublk-control', 0o666);
    expect(output()).toContain('UBLK_UNAVAILABLE');
    expect(existsSync('/dev/ublkc0')).toBe(false);
  });
});
