/** The disk that a guest has written is taken for nothing but what it is: no link on it leads to files of this machine, and no damaged one is mounted. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { mountsAt } from '#linux';
import { createDisk, openDisk } from '#ublk-daemon';
import { findTool } from '../disk/disk-image.ts';
import { type SandboxFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { keepCompact } from '../vm/disk/keep-compact.ts';
import { attachUpper, checkUpper, forgetUpper } from '../vm/disk/read-upper.ts';
import { closedOnce, withEach } from '../vm/disk/upper-disk.ts';
import { until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

describe('disks that are served no more', () => {
  const late = Object.assign(new Error('the kernel does not let go'), { code: 'UBLK_TIMEOUT' });

  it('stay open while the kernel has them, and are closed when it is asked for again', async () => {
    let closes = 0;
    const closed = closedOnce(async () => {
      closes++;
    });
    await expect(closed(() => Promise.reject(late))).rejects.toBe(late);
    expect(closes).toBe(0);
    await closed(async () => {});
    await closed(() => Promise.reject(new Error('it was ended before')));
    expect(closes).toBe(1);
  });

  it('are closed when their end has failed otherwise', async () => {
    let closes = 0;
    const closed = closedOnce(async () => {
      closes++;
    });
    for (let asked = 0; asked < 2; asked++)
      await expect(closed(() => Promise.reject(new Error('no')))).rejects.toThrow('no');
    expect(closes).toBe(1);
  });

  it('are ended all, whichever of them fails', async () => {
    const ended: number[] = [];
    const work = async (one: number) => {
      ended.push(one);
      if (one === 1) throw new Error('no');
      if (one === 2) throw late;
    };
    await expect(withEach([1, 2, 3], work)).rejects.toBe(late);
    await expect(withEach([1, 3], work)).rejects.toThrow('no');
    await withEach([3], work);
    expect(ended).toEqual([1, 2, 3, 1, 3, 3]);
  });
});

const mkfs = findTool('mkfs.ext4');
if (mkfs === undefined) console.log('skipped: mkfs.ext4 is not installed');

describe.skipIf(!canRun() || mkfs === undefined)('the disk of a guest', { timeout: 120_000 }, () => {
  let folder: string;
  let places: SandboxFolders;
  beforeEach(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-upper-'));
    places = sandboxFolders({ stateDir: folder, runDir: folder, cacheDir: folder }, 'one');
    fs.mkdirSync(places.folder, { recursive: true });
  });
  afterEach(async () => {
    await forgetUpper(places);
    expect(mountsAt(places.disk)).toEqual([]);
    fs.rmSync(folder, { recursive: true, force: true });
  });

  function written(make: (root: string) => void): void {
    const root = join(folder, 'root');
    fs.mkdirSync(root);
    make(root);
    execFileSync(mkfs!, ['-q', '-F', '-d', root, places.diskImage, '8M']);
  }

  it('is read where it has a folder', async () => {
    written((root) => fs.mkdirSync(join(root, 'upper/made'), { recursive: true }));
    await checkUpper(places);
    expect(fs.readdirSync(attachUpper(places, []))).toEqual(['made']);
  });

  it("is refused where a link or nothing is in the folder's place, and nothing behind it is touched", async () => {
    const outside = join(folder, 'outside');
    fs.mkdirSync(join(outside, 'proc'), { recursive: true });
    written((root) => fs.symlinkSync(outside, join(root, 'upper')));
    await checkUpper(places);
    expect(() => attachUpper(places, ['/proc'])).toThrow(expect.objectContaining({ code: 'RUNTIME_DISK' }));
    expect(fs.readdirSync(outside)).toEqual(['proc']);
  });

  it('is refused where it is damaged, before it is mounted', async () => {
    written((root) => fs.mkdirSync(join(root, 'upper')));
    const fd = fs.openSync(places.diskImage, 'r+');
    // Its inodes, and the copy of the superblock stays.
    fs.writeSync(fd, Buffer.alloc(1 << 20, 0xa5), 0, 1 << 20, 8192);
    fs.closeSync(fd);
    await expect(checkUpper(places)).rejects.toMatchObject({ code: 'RUNTIME_DISK' });
  });

  it('takes no room for what was written over', async () => {
    const disk = await createDisk(join(folder, 'disk'), { sizeBytes: 64 << 20 }).then(() =>
      openDisk(join(folder, 'disk')),
    );
    const leave = keepCompact([disk.disk], { everyMs: 20, slackBytes: 2 << 20 });
    const taken = () =>
      fs
        .readdirSync(join(folder, 'disk'))
        .reduce((sum, name) => sum + fs.statSync(join(folder, 'disk', name)).blocks * 512, 0);
    try {
      for (let n = 1; n <= 32; n++) await disk.disk.write(0, Buffer.alloc(1 << 20, n));
      await disk.disk.flush();
      await until('it is compacted', () => taken() < 8 << 20);
      expect((await disk.disk.read(0, 512)).every((byte) => byte === 32)).toBe(true);
    } finally {
      leave();
      await disk.disk.close();
    }
  });
});
