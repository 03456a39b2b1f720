/**
 * Trees read through a lazy mount while everything below it fails: a store behind a proxy that spoils 5 % of all requests, a local
 * disk that fills up in the middle, other bytes under the right name. Every byte read is right, or the mount is refused.
 */
import { execFileSync } from 'node:child_process';
import {
  closeSync,
  cpSync,
  ftruncateSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { readFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { type Digest, hexOf } from '#base';
import { readMountInfo, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { pushImage } from '../catalog/push.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { type DataServerPrograms, ensureDataServer, stopDataServers } from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { FaultyProxy } from './faulty-proxy.ts';
import { LoopbackRegistry } from './loopback-registry.ts';
import { findS3Server, LoopbackS3, S3_KEYS } from './loopback-s3.ts';
import { someBytes } from './store-conformance.ts';
import { hash } from './tree-hash.ts';

const MIB = 2 ** 20;
const FILES = 200;
/** Ends in the middle of a chunk, so that neighbours share one. */
const FILE_BYTES = 300_000;
const isRoot = process.getuid?.() === 0;
const s3Program = isRoot ? findS3Server('lazy-faults') : undefined;
const withRegistry = isRoot && haveRegistry();
if (!isRoot) console.log('lazy faults: skipped: it needs root');

describe.skipIf(!isRoot)('a lazy mount', { timeout: 300_000 }, () => {
  let root: string;
  let tree: string;
  let local: BlobStore;
  let programs: DataServerPrograms;
  let expectedHash: string;
  let count = 0;
  let folders: { runDir: string; cacheDir: string };
  const before = { ...process.env };
  const ends: (() => Promise<void> | void)[] = [];

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-faults-')));
    Object.assign(process.env, S3_KEYS);
    programs = await bundlePrograms(join(root, 'bundle'));
    tree = folder('tree');
    for (let i = 0; i < FILES; i++) {
      const into = folder(`tree/part-${i % 7}`);
      writeFileSync(join(into, `file-${i}`), contentOf(i));
    }
    local = await openStore(`file://${root}/store`);
    await convertToStore(local, `dir:${tree}`, 'noise:1');
    expectedHash = (await hash(tree)).hashes[0]!;
    folders = { runDir: join(root, 'run'), cacheDir: join(root, 'cache') };
  }, 180_000);

  afterEach(async () => {
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
    for (const end of ends.splice(0).reverse()) await end();
  }, 120_000);

  afterAll(() => {
    for (const name of Object.keys(S3_KEYS)) delete process.env[name];
    Object.assign(process.env, before);
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  const folder = (name: string) => {
    const path = join(root, name);
    mkdirSync(path, { recursive: true });
    return path;
  };

  /** A node of its own: nothing is running or cached there. */
  const freshNode = (cacheDir?: string) => {
    count++;
    folders = { runDir: join(root, `run${count}`), cacheDir: cacheDir ?? join(root, `cache${count}`) };
    return folder(`target${count}`);
  };

  const mountLazily = (target: string, store: BlobStore, image: Image, memoryBytes?: number) =>
    mountImage({
      files: lazyBlobFiles({ store, programs, threads: 2, memoryBytes, ...folders }),
      image,
      target,
      ...folders,
    });

  const statsOf = async (store: BlobStore) => (await ensureDataServer(store.url, { programs, ...folders })).stats();

  /** Files in no order, several at a time: small reads, which nothing foresees. */
  const readAtRandom = async (target: string, readers: number) => {
    const order = Array.from({ length: FILES }, (_, i) => (i * 83) % FILES);
    const wrong: string[] = [];
    await Promise.all(
      Array.from({ length: readers }, async () => {
        for (let i = order.pop(); i !== undefined; i = order.pop()) {
          const bytes = await readFile(join(target, `part-${i % 7}/file-${i}`));
          if (!bytes.equals(contentOf(i))) wrong.push(`file-${i}`);
        }
      }),
    );
    expect(wrong).toEqual([]);
  };

  const startS3 = async () => {
    const s3 = await LoopbackS3.start(s3Program!, folder(`s3-${count}`), 'bucket');
    ends.push(() => s3.stop());
    return s3;
  };

  const behindProxy = async (target: string, seed: number) => {
    const proxy = await FaultyProxy.start(target, { seed });
    ends.push(() => proxy.stop());
    return proxy;
  };

  const expectFaults = (proxy: FaultyProxy) => {
    console.log(
      `${proxy.requests} requests, ${proxy.spoilt} spoilt: ${JSON.stringify(Object.fromEntries(proxy.counts))}`,
    );
    expect(proxy.spoilt).toBeGreaterThanOrEqual(5);
  };

  it.skipIf(s3Program === undefined)('reads every byte right from S3 where 5 % of requests go wrong', async () => {
    const target = freshNode();
    const s3 = await startS3();
    await convertToStore(await openStore(s3.url('bucket', 'images')), `dir:${tree}`, 'noise:1');
    const proxy = await behindProxy(s3.endpoint, 11);
    const store = await openStore(`s3://bucket/images?endpoint=${encodeURIComponent(`http://${proxy.host}`)}`);
    const image = await openImage(store, 'noise:1');
    await mountLazily(target, store, image);
    await readAtRandom(target, 3);
    const first = await statsOf(store);
    expect(first.transport.failures).toBe(0);
    // The fetches of a reader that goes straight on are larger and come ahead of it.
    await unmount(target, folders);
    await stopDataServers({ ...folders, force: true });
    const again = freshNode();
    await mountLazily(again, store, image);
    expect(await hash(again)).toMatchObject({ errors: [], hashes: [expectedHash] });
    const second = await statsOf(store);
    expect(second.transport.failures).toBe(0);
    expectFaults(proxy);
    expect(proxy.counts.get('corrupt')).toBeGreaterThan(0);
  });

  it.skipIf(!withRegistry)('and from a registry', async () => {
    const target = freshNode();
    const registry = await LoopbackRegistry.start(folder(`registry-${count}`));
    ends.push(() => registry.stop());
    await pushImage(local, 'noise:1', `docker://${registry.host}/test/noise:1`);
    const proxy = await behindProxy(`http://${registry.host}`, 5);
    const store = await openStore(`docker://${proxy.host}/test/noise`);
    await mountLazily(target, store, await openImage(store, 'noise:1'));
    await readAtRandom(target, 3);
    expect((await statsOf(store)).transport.failures).toBe(0);
    expectFaults(proxy);
  });

  it.skipIf(s3Program === undefined)('goes on when its server is killed with requests in its hands', async () => {
    const target = freshNode();
    const s3 = await startS3();
    await convertToStore(await openStore(s3.url('bucket', 'images')), `dir:${tree}`, 'noise:1');
    // Every answer takes a while: whoever dies meanwhile leaves readers waiting.
    const proxy = await FaultyProxy.start(s3.endpoint, { share: 1, faults: ['drip'] });
    ends.push(() => proxy.stop());
    proxy.spoils = false;
    const store = await openStore(`s3://bucket/images?endpoint=${encodeURIComponent(`http://${proxy.host}`)}`);
    await mountLazily(target, store, await openImage(store, 'noise:1'));
    const data = await ensureDataServer(store.url, { programs, ...folders });
    proxy.spoils = true;
    const reading = readAtRandom(target, 3);
    let resent = 0;
    for (let killed = 0; killed < 5; killed++) {
      await waitFor(async () => (await data.status()).restarts === killed && (await data.status()).ready);
      await waitFor(() => proxy.underWay > 0);
      const { server } = await data.status();
      process.kill(server!, 'SIGKILL');
      await waitFor(async () => (await data.status()).restarts === killed + 1 && (await data.status()).ready);
      // Its threads have begun: what was sent again came first.
      await waitFor(async () => (await data.stats()).transport.reads > 0);
      resent += (await data.stats()).transport.resent;
    }
    proxy.spoils = false;
    await reading;
    expect((await data.stats()).transport.failures).toBe(0);
    expect(resent).toBeGreaterThan(0);
  });

  it('reads on while its disk is full, and caches again when there is space', async () => {
    const disk = folder('small-disk');
    const file = join(root, 'small-disk.ext4');
    const fd = openSync(file, 'w');
    ftruncateSync(fd, 48 * MIB);
    closeSync(fd);
    execFileSync('mkfs.ext4', ['-q', '-m0', file]);
    execFileSync('mount', ['-o', 'loop', file, disk]);
    ends.push(() => umount(disk, { lazy: true }));
    const target = freshNode(join(disk, 'cache'));
    const image = await openImage(local, 'noise:1');
    // Far less memory than the tree takes, or nothing more would ever be fetched.
    await mountLazily(target, local, image, 4 * MIB);
    for (let i = 0; i < 20; i++) {
      expect((await readFile(join(target, `part-${i % 7}/file-${i}`))).equals(contentOf(i))).toBe(true);
    }
    const cacheNow = async () => (await statsOf(local)).cache as CacheNumbers;
    const { bypassedBytes } = await cacheNow();
    // Somebody else takes all there is, and whatever the cache gives up for it, until nothing is left.
    for (const until = Date.now() + 120_000; (await cacheNow()).bypassedBytes === bypassedBytes; ) {
      fillUp(join(disk, 'ballast'));
      expect(await hash(target)).toMatchObject({ errors: [], hashes: [expectedHash] });
      expect(Date.now()).toBeLessThan(until);
    }
    const { storedBytes } = await cacheNow();
    rmSync(join(disk, 'ballast'));
    for (const until = Date.now() + 120_000; ; await delay(100)) {
      expect(await hash(target)).toMatchObject({ errors: [], hashes: [expectedHash] });
      if ((await cacheNow()).storedBytes > storedBytes + 4 * MIB) break;
      expect(Date.now()).toBeLessThan(until);
    }
    expect((await statsOf(local)).transport.failures).toBe(0);
  });

  describe('refuses, before anything is mounted,', () => {
    const spoilt = async (name: string, spoil: (pathOf: (digest: Digest) => string, image: Image) => void) => {
      const copy = join(root, `spoilt-${name}`);
      cpSync(join(root, 'store'), copy, { recursive: true });
      const store = await openStore(`file://${copy}`);
      const image = await openImage(store, 'noise:1');
      spoil((digest) => store.localPath(digest)!, image);
      return { store, image };
    };

    const refused = async (name: string, code: string, spoil: Parameters<typeof spoilt>[1]) => {
      const target = freshNode();
      const { store, image } = await spoilt(name, spoil);
      await expect(mountLazily(target, store, image)).rejects.toMatchObject({ code });
      expect(await listMounts(folders)).toEqual([]);
      expect(readdirSync(target)).toEqual([]);
    };

    it('other metadata under the right name', () =>
      refused('meta', 'MOUNT_DIGEST_MISMATCH', (pathOf, image) => {
        const path = pathOf(image.layers[0]!.meta.digest);
        const bytes = readFileSync(path);
        bytes[bytes.length - 100]! ^= 1;
        writeFileSync(path, bytes);
      }));

    it('other chunk digests under the right name', () =>
      refused('table', 'STORE_DIGEST_MISMATCH', (pathOf, image) => {
        const path = pathOf(image.layers[0]!.devices[0]!.chunkDigests.digest);
        const bytes = readFileSync(path);
        bytes[40]! ^= 1;
        writeFileSync(path, bytes);
      }));

    it('a data blob that is gone', () =>
      refused('gone', 'MOUNT_BLOB_MISSING', (pathOf, image) => {
        rmSync(pathOf(image.layers[0]!.devices[0]!.blob.digest));
      }));

    it('a data blob of another size', () =>
      refused('cut', 'MOUNT_DIGEST_MISMATCH', (pathOf, image) => {
        const { blob } = image.layers[0]!.devices[0]!;
        truncateSync(pathOf(blob.digest), blob.size - 5);
      }));
  });

  it('gives no byte of another blob of the same size under the right name', async () => {
    const copy = join(root, 'swapped');
    cpSync(join(root, 'store'), copy, { recursive: true });
    const store = await openStore(`file://${copy}`);
    const image = await openImage(store, 'noise:1');
    const { blob } = image.layers[0]!.devices[0]!;
    const path = store.localPath(blob.digest)!;
    writeFileSync(path, someBytes(blob.size, hexOf(blob.digest)));
    const target = freshNode();
    await mountLazily(target, store, image);
    const { errors } = await hash(target);
    expect(errors.length).toBe(FILES);
    for (const error of errors) expect(error).toMatch(/: EIO$/);
  });
});

interface CacheNumbers {
  readonly storedBytes: number;
  readonly bypassedBytes: number;
}

function contentOf(index: number): Buffer {
  return someBytes(FILE_BYTES, `file ${index}`);
}

async function waitFor(condition: () => boolean | Promise<boolean>): Promise<void> {
  for (const until = Date.now() + 60_000; !(await condition()); await delay(5)) {
    if (Date.now() > until) throw new Error('not within a minute');
  }
}

/** Appends until nothing more fits. */
function fillUp(path: string): void {
  const fd = openSync(path, 'a');
  const zeros = Buffer.alloc(MIB);
  try {
    for (const size of [MIB, 4096]) {
      try {
        for (;;) writeSync(fd, zeros, 0, size);
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== 'ENOSPC') throw error;
      }
    }
  } finally {
    closeSync(fd);
  }
}

function haveRegistry(): boolean {
  try {
    execFileSync('sh', ['-c', 'command -v docker-registry']);
    return true;
  } catch {
    console.log('lazy faults: no docker-registry here: the test against one is skipped');
    return false;
  }
}
