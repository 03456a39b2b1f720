/** A server of a ublk device that is killed or leaves: the next one goes on, under load and with every byte; or the device is removed. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { processEntry } from '#base';
import { createDisk, openDisk } from '../disk-folder.ts';
import { listUblk, recoverUblk, removeUblk, serveUblk } from '../target/ublk/device.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
/** Emulated, each takes minutes on a busy machine. */
const [KILLS, LOAD_MIB] = process.env.CI ? [2, 4] : [4, 16];
const children = new Set<ChildProcess>();
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));
afterEach(async () => {
  for (const child of children) await end(child, 'SIGKILL');
  for (const { id } of await listUblk()) await removeUblk(id);
});

function rawDisk(name: string, sizeBytes: number): string {
  const path = join(folder, name);
  writeFileSync(path, '');
  truncateSync(path, sizeBytes);
  return path;
}

async function layeredDisk(name: string, sizeBytes: number): Promise<string> {
  const path = join(folder, name);
  await createDisk(path, { sizeBytes });
  return path;
}

async function start(...args: string[]): Promise<{ child: ChildProcess; id: number; path: string }> {
  const entry = processEntry('ublk-server', new URL('./ublk-server-process.ts', import.meta.url));
  const child = spawn(process.execPath, [...entry, ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  const [line] = (await Promise.race([
    once(child.stdout!.setEncoding('utf8'), 'data'),
    once(child, 'exit').then(() => ['ended']),
  ])) as [string];
  const id = Number(/live (\d+)/.exec(line)?.[1]);
  if (Number.isNaN(id)) throw new Error(`the server said ${line}`);
  return { child, id, path: `/dev/ublkb${id}` };
}

async function end(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
  children.delete(child);
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = once(child, 'exit');
  child.kill(signal);
  await ended;
}

/** fio writes and reads back; meanwhile the server goes, and another one comes. */
async function replacedUnderLoad(disk: string, signal: NodeJS.Signals): Promise<void> {
  let { child, id, path } = await start(disk);
  const fio = run(
    'fio',
    ...[
      '--name=verify',
      '--ioengine=libaio',
      `--filename=${path}`,
      '--direct=1',
      '--size=64m',
      `--io_size=${LOAD_MIB}m`,
    ],
    ...['--rw=randwrite', '--bs=4k', '--iodepth=16', '--verify=crc32c', '--verify_fatal=1', '--rate_iops=800'],
  );
  let over = false;
  const watched = fio.finally(() => {
    over = true;
  });
  watched.catch(() => {});
  let gone = 0;
  for (let kills = 0; kills < KILLS; kills++) {
    await Promise.race([delay(500), watched.catch(() => {})]);
    if (over) break;
    await end(child, signal);
    gone++;
    ({ child, id, path } = await start(disk, String(id)));
  }
  await watched;
  expect(gone).toBeGreaterThan(0);
  await end(child, 'SIGTERM');
  expect((await listUblk()).map((device) => device.id)).not.toContain(id);
}

test('killed and replaced under load: every byte of a raw file', async () => {
  await replacedUnderLoad(rawDisk('recovery.raw', 64 * MIB), 'SIGKILL');
});

test('killed and replaced under load: every byte of a disk of layers, flushed or not', async () => {
  await replacedUnderLoad(await layeredDisk('recovery', 64 * MIB), 'SIGKILL');
});

test('leaves and is replaced under load', async () => {
  await replacedUnderLoad(await layeredDisk('leaves', 64 * MIB), 'SIGUSR1');
});

/** A request on its way to a thread that leaves was with nobody, sometimes, when threads closed their rings themselves. */
test('leaves and comes back again and again while requests arrive: none is lost', async () => {
  const { disk } = await openDisk(await layeredDisk('again', 64 * MIB));
  let device = await serveUblk({ target: disk, queues: 2 });
  let over = false;
  // Slower than they are answered: they arrive at any moment, not after an answer.
  const fio = run(
    'fio',
    ...['--name=verify', '--ioengine=libaio', `--filename=${device.path}`, '--direct=1', '--size=64m'],
    ...[`--io_size=${LOAD_MIB / 4}m`, '--rw=randwrite', '--bs=4k', '--iodepth=16', '--rate_iops=200'],
    ...['--verify=crc32c', '--verify_fatal=1'],
  ).finally(() => {
    over = true;
  });
  fio.catch(() => {});
  let times = 0;
  for (; times < 4 * KILLS && !over; times++) {
    await delay(50 + 30 * times);
    await device.leave();
    device = await recoverUblk(device.id, disk);
  }
  await fio;
  expect(times).toBeGreaterThan(0);
  await device.stop();
  await disk.close();
});

test('killed under ext4, replaced: nothing is missing, synced or not', async () => {
  const disk = await layeredDisk('mounted-disk', 128 * MIB);
  const mounted = join(folder, 'mounted');
  mkdirSync(mounted);
  let { child, id, path } = await start(disk);
  await run('mkfs.ext4', '-q', path);
  await run('mount', path, mounted);
  const data = join(folder, 'data');
  writeFileSync(data, randomBytes(8 * MIB));
  // Written to the device, and not flushed there.
  await run('dd', `if=${data}`, `of=${mounted}/a`, 'bs=1M', 'oflag=direct', 'status=none');
  await end(child, 'SIGKILL');
  const copy = run('sh', '-c', `cp ${data} ${mounted}/b && sync -f ${mounted}`);
  ({ child, id, path } = await start(disk, String(id)));
  await copy;
  await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
  for (const name of ['a', 'b']) await run('cmp', data, join(mounted, name));
  await run('umount', mounted);
  await run('e2fsck', '-fn', path);
  await end(child, 'SIGTERM');
});

test('killed under ext4 and never replaced: removed, opened again, e2fsck, what was synced is there', async () => {
  const disk = await layeredDisk('abrupt', 128 * MIB);
  const mounted = join(folder, 'abruptly');
  mkdirSync(mounted);
  let { child, id, path } = await start(disk);
  await run('mkfs.ext4', '-q', path);
  await run('mount', '-o', 'errors=remount-ro', path, mounted);
  const data = join(folder, 'synced');
  writeFileSync(data, randomBytes(4 * MIB));
  await run('sh', '-c', `cp ${data} ${mounted}/synced && sync -f ${mounted} && cp ${data} ${mounted}/unsynced`);
  await end(child, 'SIGKILL');
  expect(await removeUblk(id)).toBe(true);
  await run('umount', mounted);
  expect(await removeUblk(id)).toBe(false);
  ({ child, id, path } = await start(disk));
  // 1: the journal was applied.
  await run('sh', '-c', `e2fsck -fp ${path} || [ $? = 1 ]`);
  await run('e2fsck', '-fn', path);
  await run('mount', path, mounted);
  await run('cmp', data, join(mounted, 'synced'));
  await run('umount', mounted);
  await end(child, 'SIGTERM');
});

test('killed and never replaced: its device is found, and what waits on it fails when it is removed', async () => {
  const { child, id, path } = await start(rawDisk('orphan.raw', 8 * MIB));
  // One that is served is nobody's to remove, even if its server does nothing.
  child.kill('SIGSTOP');
  await expect(removeUblk(id)).rejects.toMatchObject({ code: 'UBLK_SERVED' });
  await end(child, 'SIGKILL');
  const orphan = (await listUblk()).find((device) => device.id === id);
  expect(orphan?.pid).toBe(child.pid);
  const reading = run('dd', `if=${path}`, 'of=/dev/null', 'bs=4k', 'count=1', 'iflag=direct', 'status=none');
  reading.catch(() => {});
  expect(await removeUblk(id)).toBe(true);
  await expect(reading).rejects.toThrow();
  expect(await removeUblk(id)).toBe(false);
  expect(readFileSync('/proc/partitions', 'latin1')).not.toContain('ublkb');
});
