/** A disk as a device of one owner's folder: by another process and another user, left and served again while somebody reads, ended by the folder alone. */
import { execFile, execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { mountsAt } from '#linux';
import { createDisk, type OpenDisk, openDisk } from '../disk-folder.ts';
import type { FileServerOptions } from '../target/file/file-server.ts';
import { endOwnDevices, type OwnDevice, ownDeviceObstacle, serveOwnDevice } from '../target/own-device.ts';
import { ublkSupport } from '../target/ublk/support.ts';

/** As before Linux 6.9. */
const kernel = vi.hoisted(() => ({ isOld: false }));
vi.mock('../target/file/file-server.ts', async (original) => {
  const real = await original<typeof import('../target/file/file-server.ts')>();
  const serveFile = (options: FileServerOptions) =>
    real.serveFile({ ...options, hold: options.hold === true && !kernel.isOld });
  return { ...real, serveFile };
});

const MIB = 2 ** 20;
const run = promisify(execFile);
const obstacle = ownDeviceObstacle();
const hasUblk = (await ublkSupport()).obstacle === undefined;
if (obstacle !== undefined) console.log(`skipped: ${obstacle}`);

describe.skipIf(obstacle !== undefined)('a device of its owner', { timeout: 120_000 }, () => {
  let folder: string;
  let opened: OpenDisk;
  let device: OwnDevice | undefined;
  beforeEach(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-own-'));
    await createDisk(join(folder, 'disk'), { sizeBytes: 8 * MIB });
    opened = await openDisk(join(folder, 'disk'));
  });
  afterEach(async () => {
    await device?.end();
    await opened.disk.close();
    rmSync(folder, { recursive: true });
  });
  const left = () => readdirSync(folder).filter((name) => name !== 'disk');
  const dd = (...words: string[]) => run('dd', [...words, 'bs=4096', 'count=1', 'status=none'], { encoding: 'buffer' });

  it('is written and read by another user, and gone at its end', async () => {
    device = await serveOwnDevice(opened.disk, folder, 'upper');
    const { path } = device;
    // A jail shows it to one who could not come here.
    execFileSync('chmod', ['711', folder]);
    const bytes = Buffer.alloc(4096, 'bytes ');
    if (!device.isFile) execFileSync('chown', ['65534', path]);
    const as = ['--reuid', '65534', '--clear-groups', 'dd', 'bs=4096', 'count=1', 'status=none', 'conv=notrunc,fsync'];
    const writing = run('setpriv', [...as, `of=${path}`, 'seek=3'], { encoding: 'buffer' });
    writing.child.stdin!.end(bytes);
    await writing;
    expect((await dd(`if=${path}`, 'skip=3')).stdout.equals(bytes)).toBe(true);
    await device.end();
    await device.end();
    expect(left()).toEqual([]);
  });

  it('waits for the next server, which has it at the same place', async () => {
    device = await serveOwnDevice(opened.disk, folder, 'upper');
    const { path } = device;
    await dd('if=/dev/zero', `of=${path}`, 'conv=notrunc,fsync');
    await device.leave();
    await opened.disk.close();
    const reading = dd(`if=${path}`, 'skip=7', 'iflag=direct');
    opened = await openDisk(join(folder, 'disk'));
    device = await serveOwnDevice(opened.disk, folder, 'upper');
    expect(device.path).toBe(path);
    expect((await reading).stdout.length).toBe(4096);
  });

  it.skipIf(hasUblk)('is refused where whoever has it open could not wait, and nothing stays mounted', async () => {
    kernel.isOld = true;
    try {
      await expect(serveOwnDevice(opened.disk, folder, 'upper')).rejects.toMatchObject({ code: 'FILE_UNAVAILABLE' });
    } finally {
      kernel.isOld = false;
    }
    expect(mountsAt(join(folder, 'upper.img'))).toEqual([]);
    await endOwnDevices(folder);
    expect(left()).toEqual([]);
  });

  it('is ended by its folder alone, whoever served it', async () => {
    for (const name of ['upper', 'docker']) await (await serveOwnDevice(opened.disk, folder, name)).leave();
    expect(left().length).toBeGreaterThanOrEqual(2);
    await endOwnDevices(folder);
    await endOwnDevices(folder);
    await endOwnDevices('/nowhere');
    expect(left()).toEqual([]);
    expect(mountsAt(join(folder, 'upper.img'))).toEqual([]);
  });

  it('is ended when there was no more than its record, whole or not', async () => {
    writeFileSync(join(folder, 'device-upper.json'), JSON.stringify({ way: 'file' }));
    writeFileSync(join(folder, 'device-docker.json'), '{"way": "ub');
    writeFileSync(join(folder, 'device-old.json'), JSON.stringify({ way: 'ublk', id: 999_999, mark: 1 }));
    await endOwnDevices(folder);
    expect(left()).toEqual([]);
    writeFileSync(join(folder, 'device-upper.json'), '');
    device = await serveOwnDevice(opened.disk, folder, 'upper');
    expect((await dd(`if=${device.path}`)).stdout.length).toBe(4096);
  });
});
