/** The NBD server under the kernel's own client: a block device with ext4 on it, flushed, discarded, read again from the server. */
import { execFileSync, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import { openFileTarget } from '../target/file-target.ts';
import { type NbdServer, serveNbd } from '../target/nbd/server.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
const LOAD_MIB = process.env.CI ? 4 : 16;
const DEVICE = '/dev/nbd0';
const client = spawnSync('sh', ['-c', 'command -v nbd-client']).status === 0;
if (!client) console.log('skipped: nbd-client is missing (apt-get install nbd-client)');

describe.skipIf(!client)('the kernel’s NBD client', () => {
  let folder: string;
  let server: NbdServer;
  let disk: string;
  let mounted: string;

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
    disk = join(folder, 'disk.raw');
    mounted = join(folder, 'mounted');
    mkdirSync(mounted);
    writeFileSync(disk, '');
    truncateSync(disk, 128 * MIB);
    execFileSync('modprobe', ['nbd', 'nbds_max=1', 'max_part=0']);
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  test('mkfs, mount, write, drop caches, compare, discard, e2fsck, detach', async () => {
    const target = await openFileTarget(disk);
    server = await serveNbd({ listen: `unix:${folder}/nbd.sock`, exports: [{ name: 'disk', target }] });
    await run('nbd-client', '-unix', join(folder, 'nbd.sock'), DEVICE, '-N', 'disk', '-connections', '2');
    expect(readFileSync('/sys/block/nbd0/size', 'latin1').trim()).toBe(String((128 * MIB) / 512));
    await run('mkfs.ext4', '-q', DEVICE);
    await run('mount', DEVICE, mounted);
    const data = randomBytes(20 * MIB);
    const before = join(folder, 'data');
    writeFileSync(before, data);
    await run('cp', before, join(mounted, 'file'));
    await run('sync', '-f', mounted);
    await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
    await run('cmp', before, join(mounted, 'file'));
    const full = statSync(disk).blocks;
    await run('rm', join(mounted, 'file'));
    await run('sync', '-f', mounted);
    await run('fstrim', mounted);
    await run('umount', mounted);
    expect(statSync(disk).blocks).toBeLessThan(full - (16 * MIB) / 512);
    await run('e2fsck', '-fn', DEVICE);
    await run('nbd-client', '-d', DEVICE);
    await server.close();
    await target.close();
    // As a file it is the same file system.
    await run('e2fsck', '-fn', disk);
    expect(existsSync(join(folder, 'nbd.sock'))).toBe(false);
  });

  test('ext4 on a disk of layers under load, and its server ends in the middle of it', async () => {
    const place = join(folder, 'layers');
    await createDisk(place, { sizeBytes: 128 * MIB });
    const start = async () => {
      const { disk: target } = await openDisk(place);
      server = await serveNbd({ listen: `unix:${folder}/load.sock`, exports: [{ name: 'disk', target }] });
      await run('nbd-client', '-unix', join(folder, 'load.sock'), DEVICE, '-N', 'disk', '-connections', '2');
      return target;
    };
    let target = await start();
    await run('mkfs.ext4', '-q', DEVICE);
    await run('mount', '-o', 'errors=remount-ro', DEVICE, mounted);
    const fio = (...args: string[]) =>
      run(
        'fio',
        ...['--name=load', '--ioengine=libaio', `--directory=${mounted}`, '--direct=1', '--size=32m', '--bs=4k'],
        ...['--rw=randwrite', '--iodepth=8', ...args],
      );
    await fio(`--io_size=${LOAD_MIB}m`, '--fsync=64', '--verify=crc32c', '--verify_fatal=1');
    const synced = join(folder, 'synced');
    writeFileSync(synced, randomBytes(2 * MIB));
    await run('sh', '-c', `cp ${synced} ${mounted}/synced && sync -f ${mounted}`);
    const load = fio('--time_based', '--runtime=600');
    load.catch(() => {});
    const written = () => Number(readFileSync('/sys/block/nbd0/stat', 'latin1').trim().split(/\s+/)[4]);
    for (const before = written(); written() < before + 200; ) await delay(20);
    // As a process that dies: nothing is answered any more, nothing is flushed.
    await server.close(0);
    await target.abandon();
    await expect(load).rejects.toThrow();
    await run('umount', mounted);
    await run('nbd-client', '-d', DEVICE);
    target = await start();
    // 1: the journal was applied.
    await run('sh', '-c', `e2fsck -fp ${DEVICE} || [ $? = 1 ]`);
    await run('e2fsck', '-fn', DEVICE);
    await run('mount', DEVICE, mounted);
    await run('cmp', synced, join(mounted, 'synced'));
    await run('umount', mounted);
    await run('nbd-client', '-d', DEVICE);
    await server.close();
    await target.close();
  });
});
