/**
 * Every way in which a lazy mount can be put together: from a folder or a registry, through the raw or the portable FUSE
 * transport, read by the kernel from files or through loop devices, or by our reader. All show the same tree, fetch nothing
 * before it is read, and leave nothing behind.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, realpathSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { hexOf } from '#base';
import { cachedBytes, listLoops, readMountInfo, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { pushImage } from '../catalog/push.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { type DataServerPrograms, ensureDataServer, stopDataServers } from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { nativeUnavailable } from '../data-server/native-transport.ts';
import type { Backing } from '../mount/erofs-mount.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { LoopbackRegistry } from './loopback-registry.ts';
import { writeSmallLayout } from './small-layout.ts';
import { attributesOf, differences } from './tree-attributes.ts';

const isRoot = process.getuid?.() === 0;
const withRegistry = spawnSync('sh', ['-c', 'command -v docker-registry']).status === 0;
const noNative = nativeUnavailable();
if (!isRoot) console.log('lazy ways: skipped: they need root');
if (!withRegistry)
  console.log('lazy ways: docker:// skipped: docker-registry is missing (apt-get install docker-registry)');
if (noNative !== undefined) console.log(`lazy ways: fuse-native skipped: ${noNative}`);

const WAYS = (['folder', 'registry'] as const).flatMap((from) =>
  (['raw', 'native'] as const).flatMap((transport) =>
    (['file', 'loop', 'reader'] as const).map((backing) => ({ from, transport, backing })),
  ),
);

describe.skipIf(!isRoot)('a lazy mount', { timeout: 180_000 }, () => {
  let root: string;
  let programs: DataServerPrograms;
  let expected: Map<string, string>;
  let registry: LoopbackRegistry | undefined;
  const sources = new Map<string, { store: BlobStore; image: Image }>();
  let folders: { runDir: string; cacheDir: string };
  let target: string;
  let count = 0;

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-ways-')));
    programs = await bundlePrograms(join(root, 'bundle'));
    target = join(root, 'target');
    mkdirSync(target);
    mkdirSync(join(root, 'layout'));
    const store = await openStore(`file://${root}/store`);
    const source = `oci:${writeSmallLayout(join(root, 'layout'), 2)}`;
    const { image } = await convertToStore(store, source, 'small:1', { collapseLimitBytes: 0 });
    sources.set('folder', { store, image });
    if (withRegistry) {
      registry = await LoopbackRegistry.start(join(root, 'registry'));
      await pushImage(store, 'small:1', `docker://${registry.host}/team/small:1`);
      const there = await openStore(`docker://${registry.host}/team/small`);
      sources.set('registry', { store: there, image: await openImage(there, 'small:1') });
    }
    freshNode();
    await mountImage({ store, image, target, ...folders, backing: 'file' });
    expected = attributesOf(target);
    await unmount(target, folders);
  }, 180_000);

  const freshNode = () => {
    count++;
    folders = { runDir: join(root, `run${count}`), cacheDir: join(root, `cache${count}`) };
  };

  const mountLazily = async (from: string, transport: 'raw' | 'native', backing: Backing) => {
    const { store, image } = sources.get(from)!;
    const files = lazyBlobFiles({ store, programs, ...folders, transport });
    await mountImage({ files, image, target, ...folders, programs, backing });
    return ensureDataServer(store.url, { programs, ...folders });
  };

  afterEach(async () => {
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
  });

  afterAll(async () => {
    await registry?.stop();
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  for (const { from, transport, backing } of WAYS) {
    const skipped = (from === 'registry' && !withRegistry) || (transport === 'native' && noNative !== undefined);
    it.skipIf(skipped)(`of a ${from}, over ${transport} FUSE, read with ${backing}`, async () => {
      freshNode();
      const data = await mountLazily(from, transport, backing);
      expect(await data.status()).toMatchObject({ transport });
      // The kernel looks at the ends of a block device when it is made.
      expect((await data.stats()).transport.readBytes).toBeLessThan(backing === 'loop' ? 300_000 : 1);
      const shown = join(folders.runDir, 'layers', hexOf(sources.get(from)!.image.layers[1]!.meta.digest));
      const type = readMountInfo().find(({ mountPoint }) => mountPoint === shown)?.type;
      expect(type).toBe(backing === 'reader' ? 'fuse' : 'erofs');
      const loops = listLoops().filter(({ file }) => file.startsWith(root) || file.startsWith(folders.runDir));
      expect(loops.length).toBe(backing === 'loop' ? 4 : 0);
      expect(differences(expected, attributesOf(target))).toEqual([]);
      expect((await data.stats()).transport.failures).toBe(0);
      // Pages are kept where the tree is shown, and not once more where the blob is.
      for (const { devices } of sources.get(from)!.image.layers) {
        const served = join(data.mountPoint, hexOf(devices[0]!.blob.digest));
        expect(cachedBytes(served) ?? 0).toBe(0);
        expect(statSync(served).size).toBe(devices[0]!.blob.size);
      }
      await unmount(target, folders);
      // A loop device lets go of its file some moments after its mount has gone.
      await waitFor(() => listLoops().every(({ file }) => !file.startsWith(root)));
      await stopDataServers(folders);
      expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(`${folders.runDir}/`))).toEqual([]);
    });
  }

  it('through loop devices goes on while its server is killed', async () => {
    freshNode();
    const data = await mountLazily('folder', 'raw', 'loop');
    for (let kill = 0; kill < 5; kill++) {
      const { server, restarts } = await data.status();
      const killed = delay(kill * 15).then(() => process.kill(server!, 'SIGKILL'));
      writeFileSync('/proc/sys/vm/drop_caches', '3');
      expect(differences(expected, attributesOf(target))).toEqual([]);
      await killed;
      for (let i = 0; i < 3000; i++) {
        const status = await data.status();
        if (status.restarts > restarts && status.ready) break;
        await delay(20);
      }
    }
  });
});

async function waitFor(condition: () => boolean, timeoutMs = 60_000): Promise<void> {
  for (const until = Date.now() + timeoutMs; !condition(); await delay(20)) {
    if (Date.now() > until) throw new Error(`not within ${timeoutMs / 1000} s`);
  }
}
