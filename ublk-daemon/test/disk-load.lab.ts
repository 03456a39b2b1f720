/** A disk of layers with ext4 on it, over ublk, under fio: snapshots and compaction meanwhile, and what the snapshots hold. */
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import type { BlockTarget } from '../target/block-target.ts';
import { serveUblk } from '../target/ublk/device.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
/** Emulated, each of these takes a minute and more on a busy machine. */
const LOAD_MIB = process.env.CI ? 4 : 12;
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function served(target: BlockTarget, work: (path: string) => Promise<void>): Promise<void> {
  const device = await serveUblk({ target });
  try {
    await work(device.path);
  } finally {
    await device.stop();
  }
}

test('live snapshots and compaction under load', async () => {
  const place = join(folder, 'disk');
  const mounted = join(folder, 'mounted');
  mkdirSync(mounted);
  await createDisk(place, { sizeBytes: 256 * MIB });
  const opened = await openDisk(place);
  const { disk } = opened;
  const snapshots: { lowers: typeof opened.lowers; marker: string }[] = [];
  await served(disk, async (path) => {
    await run('mkfs.ext4', '-q', path);
    await run('mount', path, mounted);
    const load = run(
      'fio',
      ...[
        '--name=load',
        '--ioengine=libaio',
        `--directory=${mounted}`,
        '--direct=1',
        '--size=24m',
        `--io_size=${LOAD_MIB}m`,
      ],
      ...['--rw=randwrite', '--bs=4k', '--iodepth=8', '--fsync=64', '--verify=crc32c', '--verify_fatal=1'],
    );
    let over = false;
    const watched = load.finally(() => {
      over = true;
    });
    watched.catch(() => {});
    for (let i = 0; i < 3 && !over; i++) {
      const marker = `marker ${i}`;
      await run('sh', '-c', `echo ${marker} > ${mounted}/marker && sync -f ${mounted}`);
      const { lowers } = await opened.snapshot(`s${i}`);
      snapshots.push({ lowers, marker });
      await delay(300);
      await disk.compact();
    }
    await watched;
    await run('umount', mounted);
    await run('e2fsck', '-fn', path);
  });
  await disk.close();
  expect(snapshots.length).toBeGreaterThan(0);
  // Each snapshot is what a machine would find that lost power at that moment.
  for (const [i, { lowers, marker }] of snapshots.entries()) {
    const fork = join(folder, `fork-${i}`);
    await createDisk(fork, { sizeBytes: 256 * MIB, lowers });
    const { disk: forked } = await openDisk(fork);
    await served(forked, async (path) => {
      await run('sh', '-c', `e2fsck -fp ${path} || [ $? = 1 ]`);
      await run('e2fsck', '-fn', path);
      await run('mount', '-o', 'ro', path, mounted);
      // By another process: this one serves the disk, and would wait for itself.
      expect((await run('cat', join(mounted, 'marker'))).trim()).toBe(marker);
      await run('umount', mounted);
    });
    await forked.close();
  }
});
