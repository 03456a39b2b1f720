/** The merged view: what OverlayFS shows of the same layers, and what is verified before it is returned. */
import { execFileSync } from 'node:child_process';
import { chmodSync, existsSync, linkSync, mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { type Digest, digestOf } from '#base';
import { lsetxattr, mount, umount } from '#linux';
import { cat } from '../reader/cat.ts';
import { ImageTree, openTree } from '../reader/image-tree.ts';
import { list } from '../reader/list.ts';
import { openLayerFiles } from '../reader/open-layer.ts';
import { statJson, statPath, statText } from '../reader/stat.ts';
import { MemoryStore } from '../store/memory-store.ts';
import {
  bytesFrom,
  differences,
  hasMkfs,
  isRoot,
  makeFolder,
  mkfs,
  putImage,
  putLayer,
  scratch,
  someText,
} from './reader-fixture.ts';
import { someBytes } from './store-conformance.ts';

function file(path: string, text: string): void {
  mkdirSync(join(path, '..'), { recursive: true });
  writeFileSync(path, text);
}

function whiteout(path: string): void {
  mkdirSync(join(path, '..'), { recursive: true });
  execFileSync('mknod', [path, 'c', '0', '0']);
}

function opaque(path: string): void {
  mkdirSync(path, { recursive: true });
  lsetxattr(path, 'trusted.overlay.opaque', Buffer.from('y'));
}

/** Three layers with every way in which an upper one can change a lower one. */
function makeLayers(root: string): string[] {
  const [bottom, middle, top] = ['bottom', 'middle', 'top'].map((name) => join(root, name)) as [string, string, string];
  file(`${bottom}/both/low`, 'low');
  file(`${bottom}/both/covered`, 'covered by a file');
  file(`${bottom}/both/gone`, 'gone');
  file(`${bottom}/both/back`, 'gone and back');
  file(`${bottom}/file-to-dir`, 'was a file');
  file(`${bottom}/dir-to-file/inside`, 'x');
  file(`${bottom}/dir-to-link/inside`, 'x');
  file(`${bottom}/cut/low`, 'x');
  file(`${bottom}/cut/deep/low`, 'x');
  file(`${bottom}/removed-dir/low`, 'x');
  file(`${bottom}/recreated/low`, 'x');
  file(`${bottom}/three/low`, 'x');
  file(`${bottom}/three/deep/low`, 'x');
  chmodSync(`${bottom}/three`, 0o700);
  linkSync(`${bottom}/both/low`, `${bottom}/hard-of-low`);

  file(`${middle}/both/covered`, 'by this');
  file(`${middle}/both/middle`, 'm');
  whiteout(`${middle}/both/gone`);
  whiteout(`${middle}/both/back`);
  whiteout(`${middle}/never-there`);
  file(`${middle}/file-to-dir/inside`, 'now a directory');
  file(`${middle}/dir-to-file`, 'now a file');
  symlinkSync('both', `${middle}/dir-to-link`);
  opaque(`${middle}/cut`);
  file(`${middle}/cut/new`, 'n');
  file(`${middle}/cut/deep/new`, 'n');
  whiteout(`${middle}/removed-dir`);
  whiteout(`${middle}/recreated`);
  file(`${middle}/three/middle`, 'm');
  chmodSync(`${middle}/three`, 0o711);

  file(`${top}/both/back`, 'back again');
  file(`${top}/recreated/new`, 'n');
  file(`${top}/dir-to-file/inside-again`, 'and a directory again');
  file(`${top}/three/top`, 't');
  file(`${top}/three/deep/top`, 't');
  whiteout(`${top}/three/middle`);
  chmodSync(`${top}/three`, 0o1755);
  lsetxattr(`${top}/three`, 'user.of.the.top', Buffer.from('yes'));
  chmodSync(top, 0o750);
  return [bottom, middle, top];
}

describe.skipIf(!hasMkfs || !isRoot)('the merged view of three layers', () => {
  const place = scratch();
  let tree: ImageTree;
  let folders: string[];
  beforeAll(async () => {
    folders = makeLayers(place.path);
    for (const folder of folders) mkfs(`${folder}.erofs`, folder, '-zlz4');
    tree = new ImageTree('three layers', await Promise.all(folders.map((folder) => openLayerFiles(`${folder}.erofs`))));
  });
  afterAll(async () => {
    await tree.close();
    place.remove();
  });

  test('is what OverlayFS shows', async () => {
    const target = join(place.path, 'merged');
    const lowers = folders.map((folder) => `${folder}.mount`);
    mkdirSync(target);
    const mounted: string[] = [];
    try {
      for (const folder of folders) {
        mkdirSync(`${folder}.mount`);
        mount(`${folder}.erofs`, `${folder}.mount`, 'erofs', 1);
        mounted.push(`${folder}.mount`);
      }
      mount('overlay', target, 'overlay', 1, `lowerdir=${lowers.reverse().join(':')}`);
      mounted.push(target);
      expect(await differences(tree, target, { dirNlink: true })).toEqual([]);
    } finally {
      for (const path of mounted.reverse()) umount(path);
    }
  });

  test('shows these names', () => {
    expect([...tree.walk()].map((item) => item.path)).toEqual([
      '/',
      '/both',
      '/both/back',
      '/both/covered',
      '/both/low',
      '/both/middle',
      '/cut',
      '/cut/deep',
      '/cut/deep/new',
      '/cut/new',
      '/dir-to-file',
      '/dir-to-file/inside-again',
      '/dir-to-link',
      '/file-to-dir',
      '/file-to-dir/inside',
      '/hard-of-low',
      '/recreated',
      '/recreated/new',
      '/three',
      '/three/deep',
      '/three/deep/low',
      '/three/deep/top',
      '/three/low',
      '/three/top',
    ]);
    expect([...tree.walk(tree.lookup('/three/deep'))].map((item) => item.path)).toEqual([
      '/three/deep',
      '/three/deep/low',
      '/three/deep/top',
    ]);
  });

  test('says where a path comes from, and hides what is only for OverlayFS', () => {
    expect(statPath(tree, '/both/covered')).toMatchObject({ layer: 1, sizeBytes: 7, kind: 'file' });
    expect(statPath(tree, '/three')).toMatchObject({ layer: 2, mode: 0o41755, mergedLayers: [2, 1, 0] });
    expect([...tree.xattrs(tree.lookup('/three'))]).toEqual([['user.of.the.top', Buffer.from('yes')]]);
    expect(tree.xattrs(tree.lookup('/cut')).size).toBe(0);
    expect(tree.lookup('/cut').parts.map((part) => part.layer)).toEqual([1]);
    expect(tree.find('/both/gone')).toBeUndefined();
    expect(tree.find('/never-there')).toBeUndefined();
    expect(statText(statPath(tree, '/three'))).toContain('Merged: layers 3, 2, 1');
    expect(statJson(statPath(tree, '/three'))).toMatchObject({ layer: 3, mergedLayers: [3, 2, 1] });
  });

  test('follows links inside the image, and finds hard links', async () => {
    expect(await bytesFrom(cat(tree, '/dir-to-link/low'))).toEqual(Buffer.from('low'));
    expect(tree.lookup('/dir-to-link/../three/./top').path).toBe('/three/top');
    expect(tree.lookup('/../../both').path).toBe('/both');
    expect(tree.lookup('/dir-to-link').kind).toBe('symlink');
    expect(tree.lookup('/dir-to-link', true).path).toBe('/both');
    expect([...tree.walk()].filter((item) => item.linkTo !== undefined)).toMatchObject([
      { path: '/hard-of-low', linkTo: '/both/low' },
    ]);
  });

  test('names what is not there or something else', async () => {
    expect(() => tree.lookup('/nope')).toThrow(expect.objectContaining({ code: 'TREE_NOT_FOUND' }));
    expect(tree.find('/both/low/')).toBeUndefined();
    expect(tree.find('/both/low/x')).toBeUndefined();
    await expect(bytesFrom(cat(tree, '/both'))).rejects.toMatchObject({ code: 'TREE_NOT_A_FILE' });
    expect(() => tree.readdir(tree.lookup('/both/low'))).toThrow(
      expect.objectContaining({ code: 'TREE_NOT_A_DIRECTORY' }),
    );
  });
});

describe.skipIf(!hasMkfs)('links', () => {
  test('in circles are TREE_LINK_LOOP', async () => {
    const place = scratch();
    try {
      const folder = join(place.path, 'folder');
      mkdirSync(folder);
      symlinkSync('b', join(folder, 'a'));
      symlinkSync('/a', join(folder, 'b'));
      symlinkSync('self/self', join(folder, 'self'));
      mkfs(join(place.path, 'image'), folder);
      const tree = new ImageTree('links', [await openLayerFiles(join(place.path, 'image'))]);
      for (const path of ['/a/x', '/self/x']) {
        expect(() => tree.lookup(path)).toThrow(expect.objectContaining({ code: 'TREE_LINK_LOOP' }));
      }
      expect(tree.lookup('/a').kind).toBe('symlink');
      await tree.close();
    } finally {
      place.remove();
    }
  });
});

describe.skipIf(!hasMkfs)('an image in a store', () => {
  const place = scratch();
  const folder = join(place.path, 'folder');
  const store = new (class extends MemoryStore {
    reads: { digest: Digest; offset: number; length: number }[] = [];
    damaged: { digest: Digest; offset: number } | undefined;
    override async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
      this.reads.push({ digest, offset, length });
      const bytes = await super.read(digest, offset, length);
      const at = this.damaged?.digest === digest ? this.damaged.offset - offset : -1;
      if (at >= 0 && at < length) bytes[at]! ^= 1;
      return bytes;
    }
  })();
  beforeAll(() => {
    makeFolder(folder);
    writeFileSync(join(folder, 'large'), someBytes(3_000_000, 'large'));
    mkfs(join(place.path, 'image'), folder, '--chunksize=4096', `--blobdev=${join(place.path, 'blob')}`);
  });
  afterAll(() => place.remove());
  beforeEach(() => {
    store.reads = [];
  });
  afterEach(() => {
    store.damaged = undefined;
  });
  const layer = () => putLayer(store, join(place.path, 'image'), join(place.path, 'blob'));

  test('reads as the folder it came from', async () => {
    expect(existsSync(join(place.path, 'blob'))).toBe(true);
    const tree = await openTree(store, await putImage(store, 'a:1', [await layer()]));
    expect(await differences(tree, folder)).toEqual([]);
    await tree.close();
  });

  test('reads whole chunks, each once, several in one go', async () => {
    const one = await layer();
    const tree = await openTree(store, await putImage(store, 'a:1', [one]));
    const bytes = await bytesFrom(cat(tree, '/large'));
    expect(bytes.equals(someBytes(3_000_000, 'large'))).toBe(true);
    const size = one.devices[0]!.blob.size;
    for (const { offset, length } of store.reads) {
      expect(offset % 262144).toBe(0);
      expect(length % 262144 === 0 || offset + length === size).toBe(true);
    }
    const total = store.reads.reduce((sum, read) => sum + read.length, 0);
    expect(total).toBeLessThanOrEqual(size);
    expect(store.reads.length).toBeLessThan(total / 262144);
    const before = store.reads.length;
    await tree.read(tree.lookup('/large'), 1_000_000, 200_000);
    expect(store.reads.length).toBe(before);
    await tree.close();
  });

  test('never returns a wrong byte: STORE_CHUNK_MISMATCH names blob and chunk', async () => {
    const one = await layer();
    const { digest } = one.devices[0]!.blob;
    const tree = await openTree(store, await putImage(store, 'a:1', [one]));
    const node = tree.lookup('/large');
    const place = [...tree.extents(node)].find((extent) => extent.encoding === 'raw')!;
    store.damaged = { digest, offset: place.offset + 5 };
    await expect(tree.read(node, place.logical, 100)).rejects.toMatchObject({
      code: 'STORE_CHUNK_MISMATCH',
      params: { blob: digest, chunk: Math.floor((place.offset + 5) / 262144) },
    });
    // Nothing of it was kept: undamaged, it reads again.
    store.damaged = undefined;
    expect(await tree.read(node, place.logical, 100)).toEqual(
      someBytes(3_000_000, 'large').subarray(place.logical, place.logical + 100),
    );
    await tree.close();
  });

  test('whose device slot names another blob is refused', async () => {
    const one = await layer();
    const bytes = someText(one.devices[0]!.blob.size);
    const other = { ...one.devices[0]!, blob: { ...one.devices[0]!.blob, digest: await store.put(bytes) } };
    const image = await putImage(store, 'a:2', [{ ...one, devices: [other] }]);
    await expect(openTree(store, image)).rejects.toMatchObject({
      code: 'EROFS_DEVICE_MISMATCH',
      message: expect.stringContaining(digestOf(bytes)),
    });
    const none = await putImage(store, 'a:3', [{ ...one, devices: [] }]);
    await expect(openTree(store, none)).rejects.toMatchObject({ code: 'EROFS_DEVICE_MISMATCH' });
  });

  test('lists as ls does', async () => {
    const tree = await openTree(store, await putImage(store, 'a:1', [await layer()]));
    const text = (path: string, options = {}) => [...list(tree, path, options)].join('');
    expect(text('/deep')).toBe('er\nlink\nlong-link\n');
    expect(text('/deep', { recursive: true })).toBe(
      '/deep:\ner\nlink\nlong-link\n\n/deep/er:\nand\nhard\n\n/deep/er/and:\ndeeper\n\n/deep/er/and/deeper:\n',
    );
    expect(text('/text-1', { long: true })).toMatch(/^-rwsr-x--x 1 \d+ \d+ 1 \d{4}-\d\d-\d\d \d\d:\d\d text-1\n$/);
    expect(text('/deep/link', { long: true })).toMatch(/^lrwxrwxrwx .* link -> \.\.\/text-100\n$/);
    expect(text('/text-100', { long: true })).toContain(' 100 1970-01-01 00:16 text-100\n');
    const rows = text('/', { json: true, recursive: true })
      .trimEnd()
      .split('\n')
      .map((line) => JSON.parse(line));
    expect(rows.map((row) => row.path).sort()).toEqual(
      [...tree.walk()]
        .slice(1)
        .map((item) => (item.path.includes('\n') ? '/not utf-8 \\xff\\xfe\\x0a' : item.path))
        .sort(),
    );
    expect(rows.find((row) => row.path === '/text-100')).toMatchObject({
      kind: 'file',
      sizeBytes: 100,
      layer: 1,
      mtimeSec: 1000,
      mtimeNsec: 250_000_000,
    });
    expect(rows.find((row) => row.pathBase64 !== undefined).pathBase64).toBe(
      Buffer.from('/not utf-8 \xff\xfe\n', 'latin1').toString('base64'),
    );
    expect(statJson(statPath(tree, '/text-4096'))).toMatchObject({ path: '/text-4096', mode: '0644' });
    await tree.close();
  });
});
