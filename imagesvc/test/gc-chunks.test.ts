/** Garbage collection of the chunk cache: blobs that the store has not any more go, with a data server or without one. */
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { openChunkCache } from '#chunk-cache';
import { readMountInfo, umount } from '#linux';
import { removeImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { chunksFolder, dataServerId } from '../data-server/data-folders.ts';
import { type DataServerPrograms, ensureDataServer, stopDataServers } from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { collectCaches, collectNode } from '../gc/collect-node.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { someBytes } from './store-conformance.ts';

const isRoot = process.getuid?.() === 0;
if (!isRoot) console.log('gc of chunk caches: skipped: it needs root');

describe.skipIf(!isRoot)('the chunk cache', { timeout: 120_000 }, () => {
  let root: string;
  let store: BlobStore;
  let programs: DataServerPrograms;
  let folders: { runDir: string; cacheDir: string };
  let one: Image;
  let two: Image;
  let target: string;

  beforeEach(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-gc-chunks-')));
    programs = await bundlePrograms(join(root, 'bundle'));
    folders = { runDir: join(root, 'run'), cacheDir: join(root, 'cache') };
    store = await openStore(`file://${root}/store`);
    target = join(root, 'target');
    mkdirSync(target);
    [one, two] = (await Promise.all(['one', 'two'].map(image))) as [Image, Image];
  });

  const image = async (name: string): Promise<Image> => {
    mkdirSync(join(root, name));
    writeFileSync(join(root, name, 'file'), someBytes(600_000, name));
    return (await convertToStore(store, `dir:${root}/${name}`, `${name}:1`)).image;
  };

  afterEach(async () => {
    for (const { id } of await listMounts(folders)) await unmount(id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  const read = async (mounted: Image) => {
    const files = lazyBlobFiles({ store, programs, ...folders });
    await mountImage({ files, image: mounted, target, ...folders });
    readFileSync(join(target, 'file'));
  };
  const blobOf = ({ layers }: Image) => layers[0]!.devices[0]!.blob.digest;
  const onDisk = () =>
    readdirSync(join(chunksFolder(folders.cacheDir, dataServerId(store.url)), 'v1/blobs'))
      .filter((name) => name.endsWith('.data'))
      .map((name) => `sha256:${name.slice(0, 64)}`)
      .sort();
  const remove = (gone: Image) => removeImage(store, gone.name, { inUse: new Set() });
  const flushed = async () => {
    const server = await ensureDataServer(store.url, { programs, ...folders });
    for (let i = 0; i < 3000; i++) {
      const cached = await server.cached();
      if (cached.length > 0 && cached.every(({ storedBytes, sizeBytes }) => storedBytes === sizeBytes)) return;
      await new Promise((done) => setTimeout(done, 10));
    }
    throw new Error('not written');
  };

  it('loses, through its data server, what the store has lost and nothing reads', async () => {
    await read(one);
    await unmount(target, folders);
    await read(two);
    await flushed();
    expect(onDisk()).toEqual([blobOf(one), blobOf(two)].sort());
    // Both are gone from the store; one is mounted.
    await remove(one);
    await remove(two);
    const dry = await collectCaches(store, { ...folders, dryRun: true, graceMs: 0 });
    expect(dry).toMatchObject({ chunkBlobs: 1, busy: false });
    expect(dry.freedBytes).toBeGreaterThan(600_000);
    expect(onDisk().length).toBe(2);
    expect(await collectCaches(store, { ...folders, graceMs: 0 })).toEqual(dry);
    expect(onDisk()).toEqual([blobOf(two)]);
    expect(readFileSync(join(target, 'file')).length).toBe(600_000);
    await unmount(target, folders);
    expect(await collectNode(store, { ...folders, graceMs: 0 })).toMatchObject({ caches: { chunkBlobs: 1 } });
    expect(onDisk()).toEqual([]);
  });

  it('loses it without a data server too; a cache that somebody else owns is left alone', async () => {
    await read(one);
    await flushed();
    await unmount(target, folders);
    await stopDataServers(folders);
    await remove(one);
    const folder = chunksFolder(folders.cacheDir, dataServerId(store.url));
    const owner = await openChunkCache({ folder, source: { readRange: () => Promise.reject(new Error('no')) } });
    expect(await collectCaches(store, { ...folders, graceMs: 0 })).toMatchObject({ chunkBlobs: 0, busy: true });
    await owner.close();
    expect(onDisk()).toEqual([blobOf(one)]);
    expect(await collectCaches(store, { ...folders, graceMs: 0 })).toMatchObject({ chunkBlobs: 1, busy: false });
    expect(onDisk()).toEqual([]);
  });
});
