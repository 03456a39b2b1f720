/** Trees, images made from them by mkfs.erofs, and the comparison of what the reader sees with what is on disk. */
import { execFileSync, spawnSync } from 'node:child_process';
import {
  chmodSync,
  chownSync,
  existsSync,
  linkSync,
  lstatSync,
  lutimesSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type ByteString, bytesOf, digestOf } from '#base';
import { erofs, superblockChecksum } from '#converter';
import { lsetxattr, lxattrs } from '#linux';
import { publishImage } from '../catalog/catalog.ts';
import { CHUNK_BYTES, type ErofsLayer, type Image } from '../catalog/image.ts';
import { CHUNK_DIGESTS_TYPE, EROFS_TYPE } from '../catalog/manifest.ts';
import type { ImageTree } from '../reader/image-tree.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { someBytes } from './store-conformance.ts';

export const isRoot = process.getuid?.() === 0;
export const hasMkfs = spawnSync('mkfs.erofs', ['--help']).error === undefined;
if (!hasMkfs) console.warn('skipped: mkfs.erofs is missing (apt install erofs-utils)');

export function scratch(): { path: string; remove(): void } {
  const path = mkdtempSync(join(tmpdir(), 'dsec-reader-'));
  return { path, remove: () => rmSync(path, { recursive: true, force: true }) };
}

/** Compressible, and never the same in two places. */
export function someText(sizeBytes: number): Buffer {
  let text = '';
  for (let k = 0; text.length < sizeBytes; k++) text += `line ${k} says ${(k * 7919) % 1000} and no more\n`;
  return Buffer.from(text.slice(0, sizeBytes));
}

/** A folder with every kind of file and the sizes at which layouts change. What needs root is left out without it. */
export function makeFolder(root: string): void {
  mkdirSync(root);
  for (const size of [0, 1, 100, 4095, 4096, 4097, 10_000, 65_536, 300_000]) {
    writeFileSync(join(root, `text-${size}`), someText(size));
    writeFileSync(join(root, `noise-${size}`), someBytes(size, `${size}`));
    writeFileSync(
      join(root, `mixed-${size}`),
      Buffer.concat([someText(size >> 1), someBytes(size - (size >> 1), 'm')]),
    );
  }
  writeFileSync(join(root, 'zeros'), Buffer.alloc(500_000));
  writeFileSync(join(root, 'sparse'), 'begin');
  truncateSync(join(root, 'sparse'), 1_000_000);
  mkdirSync(join(root, 'many'));
  for (let k = 0; k < 700; k++)
    writeFileSync(join(root, 'many', `a rather long file name, number ${k}`), 'x'.repeat(k % 40));
  mkdirSync(join(root, 'deep/er/and/deeper'), { recursive: true });
  mkdirSync(join(root, 'empty'));
  symlinkSync('../text-100', join(root, 'deep/link'));
  symlinkSync('x'.repeat(3000), join(root, 'deep/long-link'));
  linkSync(join(root, 'text-10000'), join(root, 'deep/er/hard'));
  linkSync(join(root, 'text-10000'), join(root, 'zz-hard'));
  writeFileSync(Buffer.concat([Buffer.from(`${root}/not utf-8 `), Buffer.from([0xff, 0xfe, 0x0a])]), 'x');
  chmodSync(join(root, 'text-1'), 0o4751);
  chmodSync(join(root, 'empty'), 0o1777);
  utimesSync(join(root, 'text-100'), 1000, 1000.25);
  execFileSync('mkfifo', [join(root, 'fifo')]);
  for (let k = 0; k < 6; k++) {
    lsetxattr(join(root, 'text-4096'), `user.number${k}`, someBytes(k * 60, `${k}`));
    lsetxattr(
      join(root, `noise-${[1, 100, 4095, 4096, 4097, 10_000][k]}`),
      'user.shared',
      Buffer.from('the same in all'),
    );
  }
  if (!isRoot) return;
  lsetxattr(join(root, 'deep'), 'trusted.of.a.directory', Buffer.from([0, 1, 2, 255]));
  lsetxattr(
    join(root, 'text-4097'),
    'security.capability',
    Buffer.from('0100000200200000000000000000000000000000', 'hex'),
  );
  execFileSync('mknod', [join(root, 'char'), 'c', '5', '300']);
  execFileSync('mknod', [join(root, 'block'), 'b', '259', '70000']);
  chownSync(join(root, 'noise-100'), 70_000, 80_000);
}

/** All times to one: what the compact inodes of an image can hold. */
export function settle(path: string | Buffer, seconds = 1_700_000_000): void {
  const stat = lstatSync(path);
  if (stat.isDirectory()) {
    for (const name of readdirSync(path, 'buffer'))
      settle(Buffer.concat([Buffer.from(path), Buffer.from('/'), name]), seconds);
  }
  if (stat.isSymbolicLink()) lutimesSync(path, seconds, seconds);
  else utimesSync(path, seconds, seconds);
}

export function mkfs(image: string, folder: string, ...options: string[]): void {
  execFileSync('mkfs.erofs', [...options, image, folder], { stdio: ['ignore', 'ignore', 'pipe'] });
}

function kindOfStat(mode: bigint): number {
  return Number(mode & 0o170000n);
}

/** What differs between the tree and the folder, a line each; contents read whole and in odd ranges. */
export async function differences(
  tree: ImageTree,
  folder: string,
  options: { xattrs?: boolean; dirNlink?: boolean } = {},
): Promise<string[]> {
  const out: string[] = [];
  for (const { path, node } of tree.walk()) {
    const real = Buffer.concat([Buffer.from(folder), bytesOf(path)]);
    const stat = tree.stat(node);
    const expected = lstatSync(real, { bigint: true });
    const check = (what: string, actual: unknown, wanted: unknown) => {
      if (String(actual) !== String(wanted)) out.push(`${path}: ${what} ${actual}, expected ${wanted}`);
    };
    check('type', stat.mode & 0o170000, kindOfStat(expected.mode));
    check('mode', stat.mode, expected.mode);
    check('owner', `${stat.uid}:${stat.gid}`, `${expected.uid}:${expected.gid}`);
    check('mtime', BigInt(stat.mtimeSec) * 1_000_000_000n + BigInt(stat.mtimeNsec), expected.mtimeNs);
    if (stat.kind !== 'dir') {
      check('nlink', stat.nlink, expected.nlink);
      check('size', stat.sizeBytes, expected.size);
    } else if (options.dirNlink) check('nlink', stat.nlink, expected.nlink);
    if (options.xattrs !== false) check('xattrs', xattrText(tree.xattrs(node)), xattrText(lxattrs(real)));
    if (stat.kind === 'symlink') check('target', tree.readlink(node), readlinkSync(real, 'latin1'));
    if (stat.kind === 'char' || stat.kind === 'block') {
      const major = (expected.rdev >> 8n) & 0xfffn;
      const minor = (expected.rdev & 0xffn) | ((expected.rdev >> 12n) & 0xfff00n);
      check('device', `${stat.major}:${stat.minor}`, `${major}:${minor}`);
    }
    if (stat.kind === 'dir') {
      const names = (readdirSync(real, 'latin1') as ByteString[]).sort();
      check('names', JSON.stringify(tree.readdir(node).map((child) => child.name)), JSON.stringify(names));
      for (const name of names)
        if (tree.child(node, name)?.name !== name) out.push(`${path}/${name}: not found by name`);
    }
    if (stat.kind === 'file') {
      const bytes = readFileSync(real);
      const pieces: Buffer[] = [];
      for await (const piece of tree.stream(node)) pieces.push(piece);
      if (!Buffer.concat(pieces).equals(bytes)) out.push(`${path}: content differs`);
      for (const [from, length] of [
        [1, 5000],
        [Math.floor(bytes.length / 3), 70_000],
        [bytes.length - 1, 10],
      ] as const) {
        if (from < 0) continue;
        const got = await tree.read(node, from, length);
        if (!got.equals(bytes.subarray(from, from + length))) out.push(`${path}: bytes from ${from} differ`);
      }
    }
  }
  return out;
}

function xattrText(xattrs: ReadonlyMap<ByteString, Buffer>): string {
  return [...xattrs]
    .map(([name, value]) => `${name}=${value.toString('hex')}`)
    .sort()
    .join(' ');
}

/** Chunk digests of a blob. */
export function chunkDigests(bytes: Buffer): Buffer {
  const digests: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += CHUNK_BYTES) {
    digests.push(Buffer.from(digestOf(bytes.subarray(at, at + CHUNK_BYTES)).slice('sha256:'.length), 'hex'));
  }
  return Buffer.concat(digests);
}

/** Puts an image that mkfs.erofs made into a store as a layer: its device slot gets the blob's digest and size. */
export async function putLayer(store: BlobStore, imagePath: string, blobPath?: string): Promise<ErofsLayer> {
  const meta = readFileSync(imagePath);
  if (blobPath === undefined || !existsSync(blobPath)) return { meta: await putMeta(store, meta), devices: [] };
  const blob = readFileSync(blobPath);
  const digests = chunkDigests(blob);
  const digest = await store.put(blob);
  const slot = meta.readUInt16LE(erofs.SUPER_OFFSET + erofs.SB.devtSlotOff) * erofs.DEVICE_SLOT_SIZE;
  meta.write(digest.slice('sha256:'.length), slot + erofs.DEVICE_SLOT.tag, 'latin1');
  meta.writeUInt32LE(Math.ceil(blob.length / erofs.BLOCK_BYTES), slot + erofs.DEVICE_SLOT.blocks);
  seal(meta);
  return {
    meta: await putMeta(store, meta),
    devices: [
      {
        blob: { mediaType: EROFS_TYPE, digest, size: blob.length },
        chunkDigests: { mediaType: CHUNK_DIGESTS_TYPE, digest: await store.put(digests), size: digests.length },
      },
    ],
  };
}

async function putMeta(store: BlobStore, bytes: Buffer) {
  return { mediaType: EROFS_TYPE, digest: await store.put(bytes), size: bytes.length };
}

/** Computes the superblock checksum anew. */
export function seal(meta: Buffer): void {
  meta.writeUInt32LE(superblockChecksum(meta, erofs.BLOCK_BYTES), erofs.SUPER_OFFSET + erofs.SB.checksum);
}

export function putImage(store: BlobStore, name: string, layers: readonly ErofsLayer[]): Promise<Image> {
  return publishImage(store, {
    name,
    kind: 'base',
    layers,
    config: Buffer.from('{"os":"linux","architecture":"amd64"}'),
  });
}

export async function bytesFrom(pieces: AsyncIterable<Buffer>): Promise<Buffer> {
  const all: Buffer[] = [];
  for await (const piece of pieces) all.push(piece);
  return Buffer.concat(all);
}
