/** What the lab's kernel has, and that our calls to it work: EROFS from a file, loop devices, overlay, the rows of doctor. */
import { mkdirSync, mkdtempSync, readdirSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { release, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { detect, tinyErofs } from '../features.ts';
import { attachLoop, listLoops } from '../loop.ts';
import { MS, mount, umount } from '../mount.ts';
import { mountsAt } from '../mount-info.ts';

let folder: string;
let image: string;
let target: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  image = join(folder, 'tiny.erofs');
  target = join(folder, 'mounted');
  writeFileSync(image, tinyErofs());
  mkdirSync(target);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

test('this is the lab', () => {
  expect(release()).toMatch(/^6\.12\..*deb12/);
});

test('EROFS mounts straight from a file', () => {
  mount(image, target, 'erofs', MS.RDONLY);
  expect(readdirSync(target)).toEqual([]);
  expect(mountsAt(target).at(-1)).toMatchObject({ type: 'erofs' });
  umount(target);
});

test('EROFS mounts from a loop device, which goes with the mount', async () => {
  const loop = attachLoop(image);
  mount(loop.path, target, 'erofs', MS.RDONLY);
  loop.close();
  expect(listLoops().some(({ file }) => file === image)).toBe(true);
  umount(target);
  for (let i = 0; listLoops().some(({ file }) => file === image); i++) {
    if (i > 3000) throw new Error('the loop device stays');
    await new Promise((done) => setTimeout(done, 10));
  }
});

test('a writable loop device holds ext4', () => {
  const disk = join(folder, 'disk');
  writeFileSync(disk, '');
  truncateSync(disk, 16 * 2 ** 20);
  const loop = attachLoop(disk, { readOnly: false });
  expect(loop.path).toMatch(/^\/dev\/loop\d+$/);
  loop.close();
});

test('doctor finds what this kernel is known to have', () => {
  const found = new Map(detect({ folder }).map(({ name, present }) => [name, present]));
  for (const name of [
    'erofs',
    'erofs file-backed',
    'overlay',
    'mount API',
    'overlay lowerdir+',
    'loop devices',
    'fuse',
  ]) {
    expect([name, found.get(name)]).toEqual([name, true]);
  }
});
