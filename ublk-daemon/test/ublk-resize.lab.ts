/** An attached disk grows: at once where the driver can (Linux 6.16), and is what it was where it cannot. */
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import { UblkControl } from '../target/ublk/control.ts';
import { serveUblk } from '../target/ublk/device.ts';
import { FEATURE } from '../target/ublk/features.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;

test('a mounted ext4 grows with its disk', async () => {
  execFileSync('modprobe', ['ublk_drv']);
  const folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  const control = new UblkControl();
  const able = await control.has(FEATURE.UPDATE_SIZE);
  await control.close();
  const mounted = join(folder, 'mounted');
  mkdirSync(mounted);
  await createDisk(join(folder, 'disk'), { sizeBytes: 32 * MIB });
  const { disk, resize } = await openDisk(join(folder, 'disk'));
  const device = await serveUblk({ target: disk });
  const sizeBytes = () => Number(readFileSync(`/sys/block/ublkb${device.id}/size`, 'latin1')) * 512;
  try {
    await run('mkfs.ext4', '-q', device.path);
    await run('mount', device.path, mounted);
    const data = join(folder, 'data');
    writeFileSync(data, Buffer.alloc(MIB, 'x'));
    await run('cp', data, join(mounted, 'before'));
    await resize(128 * MIB);
    expect(await device.resized()).toBe(able);
    expect(sizeBytes()).toBe((able ? 128 : 32) * MIB);
    if (able) {
      await run('resize2fs', device.path);
      await run('dd', 'if=/dev/urandom', `of=${mounted}/after`, 'bs=1M', 'count=64', 'conv=fsync', 'status=none');
    }
    await run('cmp', data, join(mounted, 'before'));
    await run('umount', mounted);
    await run('e2fsck', '-fn', device.path);
  } finally {
    await device.stop();
    await disk.close();
    rmSync(folder, { recursive: true, force: true });
  }
});
