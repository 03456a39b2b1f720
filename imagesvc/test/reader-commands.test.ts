/** diff, export, verify and dump over images in a store. */
import { execFileSync } from 'node:child_process';
import {
  appendFileSync,
  chmodSync,
  lutimesSync,
  mkdirSync,
  renameSync,
  rmSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { Digest } from '#base';
import { lsetxattr } from '#linux';
import type { Image } from '../catalog/image.ts';
import { changeJson, changeText, type DiffOptions, diffTrees } from '../reader/diff-trees.ts';
import { dump, dumpText } from '../reader/dump.ts';
import { exportTar } from '../reader/export-tar.ts';
import { ImageTree, openTree } from '../reader/image-tree.ts';
import { openLayerFiles } from '../reader/open-layer.ts';
import { sameContent } from '../reader/same-content.ts';
import { verifyImage } from '../reader/verify.ts';
import { MemoryStore } from '../store/memory-store.ts';
import { bytesFrom, differences, hasMkfs, makeFolder, mkfs, putImage, putLayer, scratch } from './reader-fixture.ts';
import { someBytes } from './store-conformance.ts';

/** Counts what is read, and can damage it. */
class WatchedStore extends MemoryStore {
  readBytes = 0;
  readonly wrongBytes = new Map<Digest, number>();

  override async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
    this.readBytes += length;
    return super.read(digest, offset, length);
  }

  override async *stream(digest: Digest): AsyncIterable<Buffer> {
    let at = 0;
    const wrong = this.wrongBytes.get(digest) ?? -1;
    for await (const piece of super.stream(digest)) {
      if (wrong >= at && wrong < at + piece.length) piece[wrong - at]! ^= 0x40;
      at += piece.length;
      yield piece;
    }
  }
}

describe.skipIf(!hasMkfs)('over images in a store', () => {
  const place = scratch();
  const store = new WatchedStore();
  const before = join(place.path, 'before');
  const after = join(place.path, 'after');
  let a: ImageTree;
  let b: ImageTree;
  let imageA: Image;
  let imageB: Image;

  const publish = async (name: string, folder: string): Promise<Image> => {
    const path = join(place.path, name);
    mkfs(path, folder, '--chunksize=4096', `--blobdev=${path}.blob`);
    return putImage(store, `${name}:1`, [await putLayer(store, path, `${path}.blob`)]);
  };

  beforeAll(async () => {
    makeFolder(before);
    writeFileSync(join(before, 'large'), someBytes(2_000_000, 'large'));
    execFileSync('cp', ['-a', before, after]);
    appendFileSync(join(after, 'text-100'), 'more');
    const large = someBytes(2_000_000, 'large');
    large[1_999_999]! ^= 1;
    writeFileSync(join(after, 'large'), large);
    chmodSync(join(after, 'empty'), 0o700);
    renameSync(join(after, 'deep/er/and'), join(after, 'moved'));
    rmSync(join(after, 'deep/link'));
    symlinkSync('elsewhere', join(after, 'deep/link'));
    rmSync(join(after, 'fifo'));
    mkdirSync(join(after, 'fifo'));
    lsetxattr(join(after, 'noise-1'), 'user.shared', Buffer.from('another'));
    for (const path of ['text-100', 'large', 'deep', 'deep/er', '.', 'noise-1']) {
      utimesSync(join(after, path), 1_700_000_000, 1_700_000_000);
      utimesSync(join(before, path), 1_700_000_000, 1_700_000_000);
    }
    for (const folder of [before, after]) lutimesSync(join(folder, 'deep/link'), 1_700_000_000, 1_700_000_000);
    utimesSync(join(after, 'zeros'), 1, 1);
    imageA = await publish('a', before);
    imageB = await publish('b', after);
    a = await openTree(store, imageA);
    b = await openTree(store, imageB);
  });
  afterAll(async () => {
    await a?.close();
    await b?.close();
    place.remove();
  });

  const diff = async (x: ImageTree, y: ImageTree, options?: DiffOptions) => {
    const changes: string[] = [];
    for await (const change of diffTrees(x, y, options)) changes.push(changeText(change));
    return changes;
  };

  test('diff tells what was added, deleted and changed, and how', async () => {
    const expected = [
      'D /deep/er/and/',
      'D /deep/er/and/deeper/',
      'C /deep/link (target)',
      'C /empty/ (mode)',
      'C /fifo/ (type, mode, mtime)',
      'C /large (content) 2000000',
      'A /moved/',
      'A /moved/deeper/',
      'C /noise-1 (xattrs) 1',
      'C /text-100 (content) 100 -> 104',
      'C /zeros (mtime) 500000',
    ];
    expect(await diff(a, b)).toEqual(expected);
    expect(await diff(a, b, { ignoreMtime: true })).toEqual(
      expected.slice(0, -1).map((line) => line.replace(', mtime', '')),
    );
    expect(await diff(b, a)).toHaveLength(expected.length);
  });

  test('diff of an image with itself reads nothing', async () => {
    const again = await openTree(store, imageA);
    store.readBytes = 0;
    expect(await diff(a, again)).toEqual([]);
    expect(store.readBytes).toBe(0);
    await again.close();
  });

  test('contents at the same place of one blob are equal unread', async () => {
    store.readBytes = 0;
    const again = await openTree(store, imageA);
    const side = (tree: ImageTree, path: string) => ({ tree, node: tree.lookup(path) });
    expect(await sameContent(side(a, '/large'), side(again, '/large'))).toBe(true);
    expect(store.readBytes).toBe(0);
    expect(await sameContent(side(a, '/large'), side(b, '/large'))).toBe(false);
    expect(await sameContent(side(a, '/text-300000'), side(b, '/text-300000'))).toBe(true);
    expect(await sameContent(side(a, '/zeros'), side(b, '/sparse'))).toBe(false);
    await again.close();
  });

  test('a change as JSON', () => {
    expect(
      changeJson({ path: '/x', change: 'changed', kind: 'file', what: ['mode'], sizeBefore: 1, sizeAfter: 1 }),
    ).toEqual({ path: '/x', change: 'changed', kind: 'file', what: ['mode'], sizeBefore: 1, sizeAfter: 1 });
  });

  test('export is a tar that unpacks to the folder, the same each time', async () => {
    const bytes = await bytesFrom(exportTar(a));
    expect(bytes.length % 512).toBe(0);
    expect((await bytesFrom(exportTar(a))).equals(bytes)).toBe(true);
    const names = execFileSync('tar', ['-tf', '-'], { input: bytes }).toString().split('\n');
    expect(names[0]).toBe('./');
    expect(names).toHaveLength([...a.walk()].length + 1);
    expect(names.indexOf('deep/er/')).toBeGreaterThan(names.indexOf('deep/'));
    const target = join(place.path, 'unpacked');
    mkdirSync(target);
    execFileSync('tar', ['-xpf', '-', '-C', target, '--xattrs', '--xattrs-include=*', '--numeric-owner'], {
      input: bytes,
    });
    expect(await differences(a, target)).toEqual([]);
  });

  test('export leaves sockets out and says so', async () => {
    const folder = join(place.path, 'with-socket');
    mkdirSync(folder);
    writeFileSync(join(folder, 'file'), 'x');
    const server = createServer().listen(join(folder, 'sock'));
    await new Promise((resolve) => server.once('listening', resolve));
    mkfs(`${folder}.erofs`, folder);
    server.close();
    const tree = new ImageTree('sockets', [await openLayerFiles(`${folder}.erofs`)]);
    const notes: string[] = [];
    const bytes = await bytesFrom(exportTar(tree, (note) => notes.push(note)));
    expect(execFileSync('tar', ['-tf', '-'], { input: bytes }).toString()).toBe('./\nfile\n');
    expect(notes).toEqual(['/sock: left out, a tar cannot hold a socket']);
    await tree.close();
  });

  test('verify finds a sound image sound', async () => {
    const report = await verifyImage(store, imageA);
    expect(report).toMatchObject({ ok: true, problemCount: 0, problems: [], layers: 1, blobs: 5 });
    expect(report.chunks).toBe(Math.ceil(imageA.layers[0]!.devices[0]!.blob.size / 262144));
    expect(report.inodes).toBe(a.layers[0]!.reader.sb.inodes);
    expect(report.directories).toBe([...a.walk()].filter((item) => item.node.kind === 'dir').length);
  });

  test('verify names the damaged blob and chunk, and goes on', async () => {
    const { blob } = imageA.layers[0]!.devices[0]!;
    store.wrongBytes.set(blob.digest, 300_000);
    try {
      const report = await verifyImage(store, imageA);
      expect(report).toMatchObject({ ok: false, problemCount: 2, blobs: 5 });
      expect(report.problems.map((problem) => problem.problem)).toEqual([
        'chunk 1 (from byte 262144) differs from its digest',
        expect.stringMatching(/^its bytes have the digest sha256:/),
      ]);
      expect(report.problems.every((problem) => problem.blob === blob.digest)).toBe(true);
    } finally {
      store.wrongBytes.clear();
    }
  });

  test('verify counts what it does not list, and reports a missing blob', async () => {
    const image = await publish('c', before);
    await store.deleteBlob(image.layers[0]!.devices[0]!.blob.digest);
    await store.deleteBlob(image.config.digest);
    const report = await verifyImage(store, image, { maxProblems: 1 });
    expect(report).toMatchObject({ ok: false, problemCount: 2 });
    expect(report.problems).toEqual([{ blob: image.config.digest, problem: expect.stringContaining('sha256:') }]);
  });

  test('dump shows superblock, device table, inode and extents', () => {
    const out = dump(a, { path: '/large' }) as {
      layers: { superblock: Record<string, unknown>; devices: unknown[] }[];
      inodes: { extents: { blob: string; length: number }[]; kind: string; nid: number; layout: string }[];
    };
    expect(out.layers[0]!.superblock).toMatchObject({ blockSize: 4096, rootNid: a.layers[0]!.reader.rootNid });
    expect(out.layers[0]!.devices).toMatchObject([{ slot: 1, blob: imageA.layers[0]!.devices[0]!.blob.digest }]);
    expect(out.inodes).toMatchObject([{ kind: 'file', layout: '4 (chunk based)', layer: 1, sizeBytes: 2_000_000 }]);
    expect(out.inodes[0]!.extents.reduce((sum, extent) => sum + extent.length, 0)).toBe(2_000_000);
    expect(dump(a, { nid: out.inodes[0]!.nid }).inodes).toEqual(out.inodes);
    const text = dumpText(out);
    expect(text).toContain('blockSize: 4096');
    expect(text).toContain('layout: 4 (chunk based)');
    expect(JSON.parse(JSON.stringify(dump(a, { path: '/deep' })))).toMatchObject({ path: '/deep' });
    expect(() => dump(a, { nid: 1, layer: 7 })).toThrow(expect.objectContaining({ code: 'TREE_NOT_FOUND' }));
    expect(() => dump(a, { nid: 1, layer: 0 })).toThrow(expect.objectContaining({ code: 'TREE_NOT_FOUND' }));
    for (const nid of [1, 123_456_789, Number.MAX_SAFE_INTEGER]) {
      expect(() => dump(a, { nid })).toThrow(
        expect.objectContaining({
          code: 'TREE_NO_INODE',
          exit: 4,
          message: expect.stringContaining(`no inode ${nid} in`),
        }),
      );
    }
  });
});
