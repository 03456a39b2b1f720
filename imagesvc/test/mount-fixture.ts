/**
 * Real EROFS layers for the mount tests, made with mkfs.erofs out of small trees, and a folder of blobs to mount them
 * from. mkfs.erofs leaves the device slot's tag empty: the digest is written in, and the superblock's checksum renewed.
 */
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Digest, digestOf, hexOf } from '#base';
import { erofs, superblockChecksum } from '#converter';
import { listLoops, readMountInfo, umount } from '#linux';
import type { ErofsLayer } from '../catalog/image.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';

export function haveMkfs(): boolean {
  try {
    execFileSync('sh', ['-c', 'command -v mkfs.erofs'], { stdio: 'ignore' });
    return true;
  } catch {
    console.log('skipped: mkfs.erofs is not installed (apt-get install erofs-utils)');
    return false;
  }
}

export const isRoot = process.getuid?.() === 0;

export interface Bench {
  readonly root: string;
  readonly runDir: string;
  readonly cacheDir: string;
  readonly store: BlobStore;
  blobPath(digest: Digest): string;
  put(bytes: Buffer): Descriptor;
  /** `make` fills the folder that becomes the layer. */
  layer(make: (folder: string) => void, options?: { device?: boolean; dataBytes?: number }): ErofsLayer;
  /** A fresh folder. */
  folder(name: string): string;
  /** Mount points, loop devices' files and records of this bench that are there now. */
  leftovers(): { mounts: string[]; loops: string[]; records: string[]; layerFolders: string[] };
  remove(): void;
}

export function makeBench(): Bench {
  const root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-mount-')));
  const blobs = join(root, 'store', 'blobs', 'sha256');
  mkdirSync(blobs, { recursive: true });
  const runDir = join(root, 'run');
  const cacheDir = join(root, 'cache');
  const blobPath = (digest: Digest) => join(blobs, hexOf(digest));
  let count = 0;

  const put = (bytes: Buffer): Descriptor => {
    const digest = digestOf(bytes);
    writeFileSync(blobPath(digest), bytes);
    return { mediaType: 'application/vnd.erofs', digest, size: bytes.length };
  };
  const mounts = () =>
    readMountInfo()
      .map((row) => row.mountPoint)
      .filter((path) => path.startsWith(`${root}/`));

  return {
    root,
    runDir,
    cacheDir,
    store: { url: `file://${root}/store`, localPath: blobPath } as Partial<BlobStore> as BlobStore,
    blobPath,
    put,
    layer(make, { device = true } = {}) {
      const folder = join(root, `tree${count++}`);
      mkdirSync(folder);
      make(folder);
      const meta = join(root, 'meta.img');
      const data = join(root, 'data.img');
      rmSync(meta, { force: true });
      rmSync(data, { force: true });
      const extra = device ? ['--chunksize=4096', `--blobdev=${data}`] : [];
      const uuid = `00000000-0000-0000-0000-${String(count).padStart(12, '0')}`;
      execFileSync('mkfs.erofs', ['-T0', '-U', uuid, ...extra, meta, folder], { stdio: 'pipe' });
      const image = readFileSync(meta);
      if (!device) return { meta: put(image), devices: [] };
      const blob = put(readFileSync(data));
      bindDevice(image, blob.digest);
      return { meta: put(image), devices: [{ blob, chunkDigests: put(Buffer.from(`chunks of ${blob.digest}`)) }] };
    },
    folder(name) {
      const path = join(root, name);
      mkdirSync(path, { recursive: true });
      return path;
    },
    leftovers() {
      const list = (folder: string) =>
        execFileSync('sh', ['-c', 'ls -A "$1" 2>/dev/null || true', 'sh', folder], { encoding: 'utf8' })
          .split('\n')
          .filter((name) => name !== '');
      return {
        mounts: mounts(),
        loops: listLoops()
          .map((loop) => loop.file)
          .filter((file) => file.startsWith(`${root}/`)),
        records: list(join(runDir, 'mounts')),
        layerFolders: list(join(runDir, 'layers')),
      };
    },
    remove() {
      for (const path of mounts().reverse()) umount(path, { lazy: true });
      rmSync(root, { recursive: true, force: true });
    },
  };
}

export const NOTHING = { mounts: [], loops: [], records: [], layerFolders: [] };

/** Writes the digest into slot 1 and renews the checksum. */
export function bindDevice(image: Buffer, digest: Digest): void {
  const slots = image.readUInt16LE(erofs.SUPER_OFFSET + erofs.SB.devtSlotOff) * erofs.DEVICE_SLOT_SIZE;
  image.write(hexOf(digest), slots + erofs.DEVICE_SLOT.tag, erofs.DEVICE_SLOT.tagSize, 'latin1');
  const checksum = erofs.SUPER_OFFSET + erofs.SB.checksum;
  image.writeUInt32LE(0, checksum);
  image.writeUInt32LE(superblockChecksum(image, erofs.BLOCK_BYTES), checksum);
}
