/** ublk: the suite of every way out, then a disk with ext4 on it, a server that is killed and replaced, devices that come and go. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  constants,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { processEntry } from '#base';
import { addressOf } from '#linux';
import type { BlockTarget } from '../target/block-target.ts';
import { openFileTarget } from '../target/file-target.ts';
import { UblkControl } from '../target/ublk/control.ts';
import { listUblk, removeUblk, serveUblk, type UblkDevice } from '../target/ublk/device.ts';
import { MemoryTarget } from './memory-target.ts';
import { run } from './run-command.ts';
import { type Attached, targetConformance, type WayOut } from './target-conformance.ts';

const MIB = 2 ** 20;
/** Not in Node's constants on every platform. */
const O_DIRECT = 0o40000;
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Around the page cache a buffer has to begin at a multiple of 512. */
function aligned(length: number): Buffer {
  const bytes = Buffer.allocUnsafeSlow(length + 512);
  const at = (512 - (addressOf(bytes) % 512)) % 512;
  return bytes.subarray(at, at + length);
}

async function positiveErrno<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    const { errno } = error as { errno?: number };
    throw Object.assign(new Error(String(error)), { errno: Math.abs(errno ?? 0) });
  }
}

function ublk(): WayOut {
  const devices = new Map<BlockTarget, UblkDevice>();
  const handles = new Set<FileHandle>();
  return {
    name: 'ublk',
    exact: false,
    async attach(target) {
      let device = devices.get(target);
      if (device === undefined) {
        device = await serveUblk({ target });
        devices.set(target, device);
      }
      const { path, id } = device;
      const access = (target.readOnly ? constants.O_RDONLY : constants.O_RDWR) | O_DIRECT;
      const handle = await open(path, access);
      const durable = await open(path, access | constants.O_DSYNC);
      handles.add(handle).add(durable);
      const queue = (name: string) => readFileSync(`/sys/block/ublkb${id}/${name}`, 'latin1').trim();
      const put = async (into: FileHandle, offset: number, data: Buffer) => {
        const bytes = aligned(data.length);
        data.copy(bytes);
        await positiveErrno(into.write(bytes, 0, bytes.length, offset));
      };
      const attached: Attached = {
        sizeBytes: Number(queue('size')) * 512,
        blockSize: Number(queue('queue/logical_block_size')),
        async read(offset, length) {
          const bytes = aligned(length);
          const { bytesRead } = await positiveErrno(handle.read(bytes, 0, length, offset));
          expect(bytesRead).toBe(length);
          return bytes;
        },
        write: (offset, data, options) => put(options?.fua ? durable : handle, offset, data),
        flush: () => positiveErrno(handle.datasync()),
        discard: async (offset, length) =>
          void (await run('blkdiscard', '-o', String(offset), '-l', String(length), path)),
        writeZeroes: async (offset, length) =>
          void (await run('blkdiscard', '-z', '-o', String(offset), '-l', String(length), path)),
        async detach() {
          for (const opened of [handle, durable]) {
            handles.delete(opened);
            await opened.close();
          }
        },
      };
      return attached;
    },
    async stop() {
      for (const handle of handles) await handle.close();
      handles.clear();
      for (const device of devices.values()) await device.stop();
      devices.clear();
    },
  };
}

describe('conformance', () => {
  targetConformance(ublk());
});

function diskFile(name: string, sizeBytes: number): string {
  const path = join(folder, name);
  writeFileSync(path, '');
  truncateSync(path, sizeBytes);
  return path;
}

describe('a device', () => {
  test('the driver tells what it has', async () => {
    const control = new UblkControl();
    const features = await control.features();
    await control.close();
    expect(features).toContain('user recovery');
    expect(features).toContain('reissue');
  });

  test('mkfs, mount, write, drop caches, compare, discard, e2fsck', async () => {
    const disk = diskFile('ext4.raw', 128 * MIB);
    const target = await openFileTarget(disk);
    const device = await serveUblk({ target, queues: 2 });
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
    expect(existsSync(device.path)).toBe(false);
  });

  test('a target that never answers does not keep a device from being stopped', async () => {
    const target = new MemoryTarget(8 * MIB);
    const device = await serveUblk({ target });
    const handle = await open(device.path, constants.O_RDONLY | O_DIRECT);
    target.before = () => new Promise<void>(() => {});
    const stuck = handle.read(aligned(4096), 0, 4096, 0);
    stuck.catch(() => {});
    for (let i = 0; target.calls.length === 0; i++) {
      if (i > 6000) throw new Error('the read never came');
      await new Promise((done) => setTimeout(done, 10));
    }
    const stopping = device.stop(200);
    await expect(stuck).rejects.toMatchObject({ code: 'EIO' });
    await handle.close();
    await stopping;
    expect(existsSync(device.path)).toBe(false);
  });

  test('devices come and go, and leave nothing', async () => {
    const target = await openFileTarget(diskFile('cycles.raw', 8 * MIB));
    const descriptors = readdirSync('/proc/self/fd').length;
    for (let i = 0; i < 50; i++) {
      const device = await serveUblk({ target });
      if (i % 10 === 0) await run('dd', `if=${device.path}`, 'of=/dev/null', 'bs=1M', 'count=2', 'status=none');
      await device.stop();
    }
    expect(readdirSync('/dev').filter((name) => name.startsWith('ublk') && name !== 'ublk-control')).toEqual([]);
    expect(readdirSync('/proc/self/fd').length).toBeLessThanOrEqual(descriptors + 4);
    await target.close();
    // From source each thread learns TypeScript first, which takes seconds where everything is emulated.
  }, 1_800_000);
});

describe('a server that is killed', () => {
  const children = new Set<ChildProcess>();

  async function start(...args: string[]): Promise<{ child: ChildProcess; id: number }> {
    const entry = processEntry('ublk-server', new URL('./ublk-server-process.ts', import.meta.url));
    const child = spawn(process.execPath, [...entry, ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
    children.add(child);
    const [line] = (await once(child.stdout!.setEncoding('utf8'), 'data')) as [string];
    return { child, id: Number(/live (\d+)/.exec(line)![1]) };
  }

  async function kill(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
    const ended = once(child, 'exit');
    child.kill(signal);
    await ended;
    children.delete(child);
  }

  afterAll(async () => {
    for (const child of children) await kill(child, 'SIGKILL');
    for (const { id } of await listUblk()) await removeUblk(id);
  });

  test('is replaced under load: every byte right, no error', async () => {
    const disk = diskFile('recovery.raw', 64 * MIB);
    let { child, id } = await start(disk);
    const fio = run(
      'fio',
      '--name=verify',
      '--ioengine=libaio',
      `--filename=/dev/ublkb${id}`,
      '--direct=1',
      '--size=64m',
      '--io_size=48m',
      '--rw=randwrite',
      '--bs=4k',
      '--iodepth=16',
      '--verify=crc32c',
      '--verify_fatal=1',
      '--rate_iops=1500',
    );
    let over = false;
    const watched = fio.finally(() => {
      over = true;
    });
    watched.catch(() => {});
    let kills = 0;
    while (!over && kills < 5) {
      await new Promise((done) => setTimeout(done, 500));
      if (over) break;
      await kill(child, 'SIGKILL');
      kills++;
      ({ child, id } = await start(disk, String(id)));
    }
    await watched;
    expect(kills).toBeGreaterThan(0);
    await kill(child, 'SIGTERM');
    expect((await listUblk()).map((device) => device.id)).not.toContain(id);
  });

  test('and never replaced: its device is found, and removed', async () => {
    const { child, id } = await start(diskFile('orphan.raw', 8 * MIB));
    await kill(child, 'SIGKILL');
    const orphan = (await listUblk()).find((device) => device.id === id);
    expect(orphan?.pid).toBe(child.pid);
    const reading = run('dd', `if=/dev/ublkb${id}`, 'of=/dev/null', 'bs=4k', 'count=1', 'iflag=direct', 'status=none');
    reading.catch(() => {});
    expect(await removeUblk(id)).toBe(true);
    await expect(reading).rejects.toThrow();
    expect(await removeUblk(id)).toBe(false);
  });
});
