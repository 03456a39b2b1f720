/** Damaged and hostile images: every way of reading ends, with a DsecError or with bytes, and never takes much memory. */
import { existsSync, linkSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { isDsecError } from '#base';
import { erofs } from '#converter';
import { lsetxattr } from '#linux';
import { MemoryBytes, MemorySource } from '../reader/byte-source.ts';
import { diffTrees } from '../reader/diff-trees.ts';
import { dump } from '../reader/dump.ts';
import { ErofsReader } from '../reader/erofs-reader.ts';
import { ImageTree } from '../reader/image-tree.ts';
import { list } from '../reader/list.ts';
import { verifyStructure } from '../reader/verify-structure.ts';
import { hasMkfs, mkfs, scratch, seal, someText } from './reader-fixture.ts';
import { someBytes } from './store-conformance.ts';

const FLIPS = Number(process.env.DSEC_FUZZ_FLIPS ?? 1000);

interface Sample {
  readonly meta: Buffer;
  readonly blob: Buffer | undefined;
}

function treeOf(sample: Sample): ImageTree {
  const devices = sample.blob === undefined ? [] : [new MemorySource(sample.blob)];
  const reader = new ErofsReader(new MemoryBytes(sample.meta), devices, 'damaged');
  return new ImageTree('damaged', [{ reader, id: 'damaged', deviceIds: ['blob'], blobs: [] }]);
}

/** Reads all there is; a file that claims to be huge only at its ends. */
async function readAll(sample: Sample): Promise<void> {
  const tree = treeOf(sample);
  verifyStructure(tree.layers[0]!.reader, [], () => {});
  let seen = 0;
  await tolerating(async () => {
    for (const { node, path } of tree.walk()) {
      tree.stat(node);
      await tolerating(() => tree.xattrs(node));
      if (seen++ % 16 === 0) await tolerating(() => dump(tree, { path }));
      if (node.kind === 'symlink') await tolerating(() => tree.readlink(node));
      if (node.kind !== 'file') continue;
      await tolerating(() => tree.read(node, 0, 150_000));
      await tolerating(() => tree.read(node, node.inode.sizeBytes - 3000, 5000));
    }
  });
  await tolerating(() => [...list(tree, '/', { long: true, recursive: true })].length);
}

async function tolerating(work: () => unknown): Promise<void> {
  try {
    await work();
  } catch (error) {
    if (!isDsecError(error)) throw error;
    noticed++;
  }
}

/** Errors that reading met and reported, over all images. */
let noticed = 0;

/** xorshift: the same damage on every run. */
function dice(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % below;
  };
}

describe.skipIf(!hasMkfs)('an image with damaged bytes', () => {
  const place = scratch();
  const folder = join(place.path, 'folder');
  beforeAll(() => {
    mkdirSync(join(folder, 'dir/below'), { recursive: true });
    for (const size of [0, 10, 4000, 5000, 20_000, 120_000])
      writeFileSync(join(folder, `text-${size}`), someText(size));
    writeFileSync(join(folder, 'noise'), someBytes(9000, 'noise'));
    writeFileSync(join(folder, 'zeros'), Buffer.alloc(100_000));
    for (let k = 0; k < 150; k++) writeFileSync(join(folder, `dir/a name that takes a little space ${k}`), '');
    symlinkSync('some/where', join(folder, 'link'));
    linkSync(join(folder, 'noise'), join(folder, 'dir/hard'));
    for (let k = 0; k < 4; k++)
      lsetxattr(join(folder, ['noise', 'dir', 'zeros', 'text-10'][k]!), 'user.shared', Buffer.from('x'));
    lsetxattr(join(folder, 'noise'), 'user.of.its.own', someBytes(100, 'x'));
  });
  afterAll(() => place.remove());

  const layouts = [
    [],
    ['-zlz4'],
    ['-zlz4hc', '-C65536'],
    ['-zlz4', '-Eztailpacking'],
    ['-zlz4', '-Elegacy-compress'],
    ['--chunksize=4096', '--blobdev=BLOB'],
  ];
  for (const [k, layout] of layouts.entries()) {
    test(`${layout.join(' ') || 'by default'}: nothing but DsecErrors from ${FLIPS} of them`, {
      timeout: 300_000,
    }, async () => {
      const image = join(place.path, `${k}.erofs`);
      const blobPath = `${image}.blob`;
      // The same image in every run, so that the same damage is done to it.
      const fixed = ['-T1700000000', '-U6cbfa1d2-0f59-4d4a-9f0c-3d0f5c1b7a11'];
      mkfs(image, folder, ...fixed, ...layout.map((option) => option.replace('BLOB', blobPath)));
      const meta = readFileSync(image);
      const blob = existsSync(blobPath) ? readFileSync(blobPath) : undefined;
      await readAll({ meta, blob });
      const roll = dice(k + 1);
      const interesting = interestingBytes(meta);
      const before = noticed;
      for (let round = 0; round < FLIPS / layouts.length; round++) {
        const damaged = Buffer.from(meta);
        for (let n = 1 + roll(3); n > 0; n--) {
          const at = roll(8) === 0 ? roll(meta.length) : interesting[roll(interesting.length)]!;
          damaged[at] = roll(3) === 0 ? [0, 0xff, 0x7f, 0x80][roll(4)]! : damaged[at]! ^ (1 << roll(8));
        }
        if (roll(4) !== 0) seal(damaged);
        try {
          await readAll({ meta: damaged, blob });
        } catch (error) {
          if (!isDsecError(error)) throw new Error(`round ${round}`, { cause: error });
          noticed++;
        }
      }
      expect(noticed).toBeGreaterThan(before);
    });
  }

  test('cut off anywhere: nothing but DsecErrors', async () => {
    const image = join(place.path, 'cut.erofs');
    mkfs(image, folder, '-zlz4');
    const meta = readFileSync(image);
    for (let length = 0; length < meta.length; length += 509) {
      await tolerating(() => readAll({ meta: meta.subarray(0, length), blob: undefined }));
    }
  });
});

/** Where the bytes are that are not zero: flips elsewhere mostly change nothing. */
function interestingBytes(meta: Buffer): number[] {
  const out: number[] = [];
  for (let at = erofs.SUPER_OFFSET; at < meta.length; at++) if (meta[at] !== 0) out.push(at);
  // Metadata comes first in these images, data after it: keep both, but not a flood of data.
  return out.filter((_, k) => k < 8000 || k % 8 === 0);
}

/** A minimal image by hand: the root at nid 0 in block 1, its entries in block 2. */
function handMade(entries: readonly { name: string; nid: number; type: number }[]): Buffer {
  const meta = Buffer.alloc(3 * 4096);
  const sb = erofs.SUPER_OFFSET;
  meta.writeUInt32LE(erofs.SUPER_MAGIC, sb);
  meta[sb + erofs.SB.blockBits] = 12;
  meta.writeUInt32LE(3, sb + erofs.SB.blocks);
  meta.writeUInt32LE(1, sb + erofs.SB.metaBlkAddr);
  directoryInode(meta, 0);
  let nameAt = entries.length * 12;
  for (const [k, { name, nid, type }] of entries.entries()) {
    const at = 2 * 4096 + k * 12;
    meta.writeBigUInt64LE(BigInt(nid), at);
    meta.writeUInt16LE(nameAt, at + 8);
    meta[at + 10] = type;
    meta.write(name, 2 * 4096 + nameAt, 'latin1');
    nameAt += name.length;
  }
  return meta;
}

function directoryInode(meta: Buffer, nid: number): void {
  const at = 4096 + nid * 32;
  meta.writeUInt16LE(0o40755, at + 4);
  meta.writeUInt16LE(2, at + 6);
  meta.writeUInt32LE(4096, at + 8);
  meta.writeUInt32LE(2, at + 16);
}

describe('a hostile image', () => {
  const dots = [
    { name: '.', nid: 0, type: 2 },
    { name: '..', nid: 0, type: 2 },
  ];
  const walkOf = (meta: Buffer) => [...treeOf({ meta, blob: undefined }).walk()].map((item) => item.path);

  test('whose directory holds itself ends in EROFS_CORRUPT that names the path', () => {
    const meta = handMade([...dots, { name: 'again', nid: 0, type: 2 }]);
    expect(() => walkOf(meta)).toThrow(/nid 0 \(\/again\).*reached by two paths/);
    expect(() => [...list(treeOf({ meta, blob: undefined }), '/', { recursive: true })]).toThrow(/two paths/);
    const tree = treeOf({ meta, blob: undefined });
    expect(tree.lookup('/again/again/again').kind).toBe('dir');
  });

  test('that diffs against itself by cycles ends', async () => {
    const a = treeOf({ meta: handMade([...dots, { name: 'again', nid: 0, type: 2 }]), blob: undefined });
    const meta = handMade([...dots, { name: 'again', nid: 0, type: 2 }]);
    meta.writeUInt16LE(7, 4096 + 24);
    const reader = new ErofsReader(new MemoryBytes(meta), [], 'other');
    const b = new ImageTree('other', [{ reader, id: 'other', deviceIds: [], blobs: [] }]);
    await expect(
      (async () => {
        for await (const _ of diffTrees(a, b)) void _;
      })(),
    ).rejects.toThrow(/two paths/);
  });

  for (const [what, entries, message] of [
    [
      'names out of order',
      [...dots, { name: 'b', nid: 0, type: 2 }, { name: 'a', nid: 0, type: 2 }],
      /entry 3 is not in order/,
    ],
    [
      'a name twice',
      [...dots, { name: 'a', nid: 0, type: 2 }, { name: 'a', nid: 0, type: 2 }],
      /entry 3 is not in order/,
    ],
    ['a slash in a name', [...dots, { name: 'a/b', nid: 0, type: 2 }], /holds a slash/],
    ['a name of 256 bytes', [...dots, { name: 'a'.repeat(256), nid: 0, type: 2 }], /name of 256 bytes/],
    [
      'an inode outside the image',
      [...dots, { name: 'a', nid: 0x7fffffff, type: 2 }],
      /nid 2147483647.*outside the image/,
    ],
    ['an entry of another type than its inode', [...dots, { name: 'a', nid: 0, type: 1 }], /gives it the type 1/],
  ] as const) {
    test(`with ${what} is refused`, () => {
      expect(() => walkOf(handMade(entries))).toThrow(message);
    });
  }

  test('that claims a file of exabytes takes no memory for it', async () => {
    const meta = handMade([...dots, { name: 'big', nid: 2, type: 1 }]);
    const at = 4096 + 2 * 32;
    meta.writeUInt16LE(1, at);
    meta.writeUInt16LE(0o100644, at + 4);
    meta.writeUInt32LE(1, at + 44);
    meta.writeBigUInt64LE(2n ** 52n, at + 8);
    meta.writeUInt32LE(2, at + 16);
    const tree = treeOf({ meta, blob: undefined });
    await expect(tree.read(tree.lookup('/big'), 0, 100)).rejects.toMatchObject({ code: 'EROFS_CORRUPT' });
    meta.writeBigUInt64LE(2n ** 63n, at + 8);
    expect(() => treeOf({ meta, blob: undefined }).lookup('/big')).toThrow(/size 92233720368547/);
    // As a hole it is only a sparse file.
    meta.writeBigUInt64LE(2n ** 52n, at + 8);
    meta.writeUInt32LE(0xffffffff, at + 16);
    const sparse = treeOf({ meta, blob: undefined });
    expect(await sparse.read(sparse.lookup('/big'), 2 ** 52 - 10, 100)).toEqual(Buffer.alloc(10));
  });

  test('with unknown incompatible features, a wrong checksum or another magic is refused', () => {
    const meta = handMade(dots);
    const incompat = erofs.SUPER_OFFSET + erofs.SB.featureIncompat;
    meta.writeUInt32LE(0x8000, incompat);
    expect(() => walkOf(meta)).toThrow(expect.objectContaining({ code: 'EROFS_UNSUPPORTED' }));
    meta.writeUInt32LE(erofs.INCOMPAT.METABOX, incompat);
    expect(() => walkOf(meta)).toThrow(/0x100 \(metadata box\)/);
    meta.writeUInt32LE(0, incompat);
    expect(walkOf(meta)).toEqual(['/']);
    meta.writeUInt32LE(erofs.COMPAT.SB_CHKSUM, erofs.SUPER_OFFSET + erofs.SB.featureCompat);
    expect(() => walkOf(meta)).toThrow(/checksum is/);
    seal(meta);
    expect(walkOf(meta)).toEqual(['/']);
    meta[erofs.SUPER_OFFSET]! ^= 1;
    expect(() => walkOf(meta)).toThrow(/not an EROFS image/);
  });

  test('has its structure reported in full', () => {
    const problemsOf = (meta: Buffer) => {
      const problems: string[] = [];
      const reader = treeOf({ meta, blob: undefined }).layers[0]!.reader;
      verifyStructure(reader, [], (path, problem) => problems.push(`${path}: ${problem}`));
      return problems;
    };
    const sound = handMade([...dots, { name: 'a', nid: 2, type: 3 }]);
    sound.writeUInt16LE(0o20644, 4096 + 64 + 4);
    sound.writeUInt16LE(1, 4096 + 64 + 6);
    sound[erofs.SUPER_OFFSET + erofs.SB.inodes] = 2;
    expect(problemsOf(sound)).toEqual([]);

    const wrong = Buffer.from(sound);
    wrong.writeUInt16LE(5, 4096 + 64 + 6);
    wrong[erofs.SUPER_OFFSET + erofs.SB.inodes] = 9;
    wrong[2 * 4096 + 12] = 2;
    expect(problemsOf(wrong)).toEqual([
      '/: its ".." names nid 2, its parent is 0',
      '/a: nid 2 has 1 names, its link count is 5',
      '/: 2 inodes are reachable, the superblock says 9',
    ]);

    // An extended inode at nid 1 reaches into nid 2.
    const overlapping = handMade([...dots, { name: 'a', nid: 2, type: 3 }, { name: 'b', nid: 1, type: 3 }]);
    for (const at of [4096 + 64, 4096 + 32]) overlapping.writeUInt16LE(0o20644, at + 4);
    overlapping.writeUInt16LE(1, 4096 + 64 + 6);
    overlapping.writeUInt16LE(1, 4096 + 32);
    overlapping.writeUInt32LE(1, 4096 + 32 + 44);
    // Where nlink of nid 1 and the union of nid 2 would clash, 44 - 32 = 12 is the mtime of nid 2.
    overlapping[erofs.SUPER_OFFSET + erofs.SB.inodes] = 3;
    expect(problemsOf(overlapping)).toEqual([
      expect.stringMatching(/^\/: byte 4160 of the metadata belongs to nid 1 and to nid 2/),
    ]);
  });
});
