/** Images in a real S3 server, where there is one, mounted as they lie there. */
import { execFile } from 'node:child_process';
import { mkdirSync, mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { chunkFacts } from '#chunk-cache';
import { readMountInfo, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import { CHUNK_BYTES, type Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { type DataServerPrograms, ensureDataServer, stopDataServers } from '../data-server/data-server.ts';
import { blobFilesFor } from '../data-server/lazy-blob-files.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { findS3Server, LoopbackS3, S3_KEYS } from './loopback-s3.ts';
import { writeSmallLayout } from './small-layout.ts';
import { attributesOf, differences } from './tree-attributes.ts';

const run = promisify(execFile);
const program = process.getuid?.() === 0 ? findS3Server('data-server-s3') : undefined;

describe.skipIf(program === undefined)('a mount of an S3 store', { timeout: 120_000 }, () => {
  let root: string;
  let s3: LoopbackS3;
  let store: BlobStore;
  let image: Image;
  let programs: DataServerPrograms;
  let expected: Map<string, string>;
  let folders: { runDir: string; cacheDir: string };
  const before = { ...process.env };

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-lazy-s3-')));
    // The data server finds its credentials where every program does.
    Object.assign(process.env, S3_KEYS);
    programs = await bundlePrograms(join(root, 'bundle'));
    s3 = await LoopbackS3.start(program!, root, 'bucket');
    const layout = join(root, 'layout');
    mkdirSync(layout);
    const source = `oci:${writeSmallLayout(layout, 2)}`;
    const local = await openStore(`file://${root}/local`);
    await convertToStore(local, source, 'small:1');
    const target = folder('local-target');
    folders = { runDir: join(root, 'run'), cacheDir: join(root, 'cache') };
    await mountImage({ store: local, image: await openImage(local, 'small:1'), target, ...folders });
    expected = attributesOf(target);
    await unmount(target, folders);
    store = await openStore(s3.url('bucket', 'images'));
    await convertToStore(store, source, 'small:1');
    image = await openImage(store, 'small:1');
  }, 180_000);

  afterAll(async () => {
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
    await s3?.stop();
    for (const name of Object.keys(S3_KEYS)) delete process.env[name];
    Object.assign(process.env, before);
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    if (root !== undefined) rmSync(root, { recursive: true, force: true });
  });

  const folder = (name: string) => {
    const path = join(root, name);
    mkdirSync(path, { recursive: true });
    return path;
  };

  it('is lazy without being asked, waits for a store that is away, and shows what a local mount shows', async () => {
    const target = folder('target');
    await mountImage({ files: blobFilesFor({ store, programs, ...folders }), image, target, ...folders });
    const data = await ensureDataServer(store.url, { programs, ...folders });
    expect((await data.stats()).transport.readBytes).toBe(0);
    await s3.stop();
    const path = 'data/layer-1/noise-2';
    const reading = run('sha256sum', [join(target, path)]);
    await delay(700);
    await s3.restart();
    const line = expected.get(`/${path}`)!;
    expect(line).toContain((await reading).stdout.slice(0, 32));
    expect(differences(expected, attributesOf(target))).toEqual([]);
    expect((await data.stats()).transport.failures).toBe(0);
  });

  it('goes on fetching ahead when the server is killed that was at it', async () => {
    folders = { runDir: join(root, 'run-ahead'), cacheDir: join(root, 'cache-ahead') };
    const target = folder('ahead');
    await mountImage({ files: blobFilesFor({ store, programs, ...folders }), image, target, ...folders });
    const data = await ensureDataServer(store.url, { programs, ...folders });
    const { digest, size } = image.layers[0]!.devices[0]!.blob;
    const presentOnes = async () => [...(await data.chunks(digest))!].filter((byte) => chunkFacts(byte).present).length;
    const { goOn } = s3.pause();
    try {
      await data.prefetch(digest, [{ offset: 0, length: size }]);
      expect((await data.stats()).prefetching).toBe(1);
      expect(await presentOnes()).toBe(0);
      process.kill((await data.status()).server!, 'SIGKILL');
      while ((await data.status()).restarts === 0) await delay(20);
    } finally {
      goOn();
    }
    // Nobody reads: what comes is what was asked for before.
    while ((await presentOnes()) < Math.ceil(size / CHUNK_BYTES)) await delay(50);
    while ((await data.stats()).prefetching !== 0) await delay(50);
    // What is over is not asked of the next server.
    process.kill((await data.status()).server!, 'SIGKILL');
    while ((await data.status()).restarts === 1 || !(await data.status()).ready) await delay(20);
    expect((await data.stats()).cache).toMatchObject({ prefetchReads: 0 });
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
    folders = { runDir: join(root, 'run'), cacheDir: join(root, 'cache') };
  });
});
