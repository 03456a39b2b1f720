/** Images that mkfs.erofs makes, in every layout that its oldest supported version has, against the folder they came from. */
import { existsSync, mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { mount, umount } from '#linux';
import { MemoryBytes, MemorySource } from '../reader/byte-source.ts';
import { ErofsReader } from '../reader/erofs-reader.ts';
import { ImageTree } from '../reader/image-tree.ts';
import { decodeLz4 } from '../reader/lz4-block.ts';
import { openLayerFiles } from '../reader/open-layer.ts';
import { verifyStructure } from '../reader/verify-structure.ts';
import { differences, hasMkfs, isRoot, makeFolder, mkfs, scratch, settle } from './reader-fixture.ts';

const LAYOUTS: readonly (readonly string[])[] = [
  [],
  ['-zlz4'],
  ['-zlz4hc', '-C65536'],
  ['-zlz4', '-Eztailpacking'],
  ['-zlz4', '-C65536', '-Eztailpacking'],
  ['-zlz4', '-Elegacy-compress'],
  ['-Enoinline_data'],
  ['-x1'],
  ['--chunksize=4096'],
  ['--chunksize=65536', '--blobdev=BLOB'],
  ['-T1700000000', '-Eforce-inode-extended'],
];

describe.skipIf(!hasMkfs)('an image that mkfs.erofs made', () => {
  const place = scratch();
  const folder = join(place.path, 'folder');
  beforeAll(() => {
    makeFolder(folder);
    settle(folder);
  });
  afterAll(() => place.remove());

  for (const [k, layout] of LAYOUTS.entries()) {
    describe(layout.join(' ') || 'by default', () => {
      const image = join(place.path, `${k}.erofs`);
      const blob = join(place.path, `${k}.blob`);
      beforeAll(() => mkfs(image, folder, ...layout.map((option) => option.replace('BLOB', blob))));
      const devices = () => (existsSync(blob) ? [blob] : []);

      test('shows the folder: attributes, names, contents', async () => {
        const layer = await openLayerFiles(image, devices());
        const tree = new ImageTree(image, [layer]);
        expect(await differences(tree, folder)).toEqual([]);
        await tree.close();
      });

      test('has a sound structure', async () => {
        const layer = await openLayerFiles(image, devices());
        const problems: string[] = [];
        const counts = verifyStructure(layer.reader, [], (path, problem) => problems.push(`${path}: ${problem}`));
        expect(problems).toEqual([]);
        expect(counts.inodes).toBe(layer.reader.sb.inodes);
        await layer.reader.close();
      });

      test('reads the same from memory as from its file', async () => {
        const bytes = new MemoryBytes(readFileSync(image));
        const reader = new ErofsReader(
          bytes,
          devices().map((path) => new MemorySource(readFileSync(path))),
          image,
        );
        const tree = new ImageTree(image, [{ reader, id: image, deviceIds: devices(), blobs: [] }]);
        expect(await differences(tree, folder)).toEqual([]);
      });

      test.skipIf(!isRoot)('equals what the kernel mounts', async () => {
        const target = join(place.path, `${k}.mount`);
        mkdirSync(target);
        mount(
          image,
          target,
          'erofs',
          1,
          devices()
            .map((path) => `device=${path}`)
            .join(','),
        );
        try {
          const layer = await openLayerFiles(image, devices());
          const tree = new ImageTree(image, [layer]);
          expect(await differences(tree, target, { dirNlink: true })).toEqual([]);
          await tree.close();
        } finally {
          umount(target);
        }
      });
    });
  }
});

describe('the LZ4 block decoder', () => {
  test('stops after the bytes asked for, in the middle of a literal run or of a match', () => {
    const block = Buffer.from([0x4f, 0x61, 0x62, 0x63, 0x64, 0x04, 0x00, 0x01, 0x50, 1, 2, 3, 4, 5]);
    const whole = Buffer.concat([Buffer.from('abcd'.repeat(6)), Buffer.from([1, 2, 3, 4, 5])]);
    for (let length = 1; length <= whole.length; length++) {
      expect(decodeLz4(block, 0, length)).toEqual(whole.subarray(0, length));
    }
    expect(decodeLz4(block, 0, whole.length + 1)).toBeUndefined();
  });

  test('refuses a match before the start and a run past the end', () => {
    expect(decodeLz4(Buffer.from([0x10, 0x61, 0x02, 0x00]), 0, 10)).toBeUndefined();
    expect(decodeLz4(Buffer.from([0x10, 0x61, 0x00, 0x00]), 0, 10)).toBeUndefined();
    expect(decodeLz4(Buffer.from([0xf0, 0xff, 0xff]), 0, 1000)).toBeUndefined();
    expect(decodeLz4(Buffer.alloc(0), 0, 1)).toBeUndefined();
  });
});
