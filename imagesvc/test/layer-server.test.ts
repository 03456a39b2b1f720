/**
 * Images mounted through our reader behind FUSE, in place of the kernel's EROFS: what is shown is what the kernel shows, alone and
 * below OverlayFS, from a folder and lazily, whatever happens to the processes that serve it.
 */
import { type ChildProcess, execFile, execFileSync } from 'node:child_process';
import {
  appendFileSync,
  chmodSync,
  closeSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { hexOf } from '#base';
import {
  dataRuns,
  lgetxattr,
  llistxattr,
  lsetxattr,
  mknod,
  processIdentity,
  readMountInfo,
  S_IFCHR,
  umount,
} from '#linux';
import type { Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { LAYERS } from '../data-server/data-folders.ts';
import {
  type DataServerPrograms,
  ensureDataServer,
  listDataServers,
  reclaimDataServers,
  stopDataServers,
} from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { listMounts, type MountOptions, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { hasMkfs, makeFolder, mkfs, putLayer } from './reader-fixture.ts';
import { writeSmallLayout } from './small-layout.ts';
import { attributesOf, differences } from './tree-attributes.ts';
import { hash, hashUntil } from './tree-hash.ts';

const KILLS = Number(process.env.DSEC_KILLS ?? 10);
const isRoot = process.getuid?.() === 0;
if (!isRoot) console.log('layer server: skipped: it needs root');

describe.skipIf(!isRoot)('our reader behind FUSE', { timeout: 180_000 }, () => {
  let root: string;
  let store: BlobStore;
  let programs: DataServerPrograms;
  /** Every kind of file, and above it what OverlayFS acts upon. */
  let images: { name: string; image: Image }[];
  let small: Image;
  let changed: Image;
  let count = 0;
  let folders: { runDir: string; cacheDir: string };
  const children: ChildProcess[] = [];

  const folder = (name: string) => {
    const path = join(root, name);
    mkdirSync(path, { recursive: true });
    return path;
  };

  const freshNode = () => {
    count++;
    folders = { runDir: join(root, `run${count}`), cacheDir: join(root, `cache${count}`) };
  };

  const mountWith = (backing: MountOptions['backing'], more: Omit<MountOptions, 'backing'>) =>
    mountImage({ ...(more.files ? {} : { store }), ...folders, programs, backing, ...more });

  const layerServer = () => ensureDataServer(LAYERS, { programs, ...folders });

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-trees-')));
    programs = await bundlePrograms(join(root, 'bundle'));
    store = await openStore(`file://${root}/store`);
    const everything = join(root, 'everything');
    makeFolder(everything);
    // Beside the owner, user 12345 may read it.
    lsetxattr(join(everything, 'text-65536'), 'system.posix_acl_access', acl(12345));
    chmodSync(root, 0o755);
    images = [];
    for (const [name, options] of [
      ['plain', {}],
      ['lz4', { compress: 'lz4' }],
      ['deflate', { compress: 'deflate' }],
      ['whole blocks', { inlineLimitBytes: 0 }],
    ] as const) {
      const tag = name.replace(' ', '-');
      images.push({ name, image: (await convertToStore(store, `dir:${everything}`, `${tag}:1`, options)).image });
    }
    const upper = join(root, 'upper');
    mkdirSync(join(upper, 'many'), { recursive: true });
    mknod(join(upper, 'text-100'), S_IFCHR, 0, 0);
    mknod(join(upper, 'many', 'a rather long file name, number 7'), S_IFCHR, 0, 0);
    writeFileSync(join(upper, 'many', 'new'), 'new');
    mkdirSync(join(upper, 'deep/er'), { recursive: true });
    lsetxattr(join(upper, 'deep/er'), 'trusted.overlay.opaque', Buffer.from('y'));
    writeFileSync(join(upper, 'deep/er/alone'), 'alone');
    lsetxattr(join(upper, 'deep'), 'user.of.the.top', Buffer.from('yes'));
    const layout = folder('layout');
    const source = `oci:${writeSmallLayout(layout, 3)}`;
    small = (await convertToStore(store, source, 'small:1', { collapseLimitBytes: 0 })).image;
    images.push({ name: 'three layers', image: small });
    images.push({
      name: 'three layers, one metadata',
      image: (await convertToStore(store, source, 'small:2', { collapse: 'metadata' })).image,
    });
    if (hasMkfs) {
      mkfs(`${upper}.erofs`, upper);
      const layers = [...images[0]!.image.layers, await putLayer(store, `${upper}.erofs`)];
      changed = { ...images[0]!.image, layers };
      images.push({ name: 'deletions and opaque folders', image: changed });
    }
  }, 180_000);

  afterEach(async () => {
    for (const child of children.splice(0)) child.kill('SIGKILL');
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
  });

  afterAll(() => {
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  it('shows of every image what the kernel shows, attribute by attribute', async () => {
    for (const { name, image } of images) {
      freshNode();
      const target = folder('target');
      await mountWith('file', { image, target });
      const expected = attributesOf(target);
      await unmount(target, folders);
      expect(expected.size).toBeGreaterThan(700);
      await mountWith('reader', { image, target });
      expect(readMountInfo().filter(({ type, mountPoint }) => type === 'erofs' && mountPoint.startsWith(root))).toEqual(
        [],
      );
      expect({ name, differences: differences(expected, attributesOf(target)) }).toEqual({ name, differences: [] });
      await unmount(target, folders);
      await stopDataServers(folders);
    }
  });

  it.skipIf(!hasMkfs)(
    'shows a layer alone as the kernel does: whiteouts, marks for OverlayFS, numbers, blocks, holes, ACLs',
    async () => {
      const image = changed;
      const seen: unknown[] = [];
      for (const backing of ['file', 'reader'] as const) {
        freshNode();
        const target = folder('target');
        await mountWith(backing, { image, target });
        const layers = image.layers.map(({ meta }) => join(folders.runDir, 'layers', hexOf(meta.digest)));
        const [bottom, top] = layers as [string, string];
        const stats = (path: string) => {
          const { mode, nlink, rdev, blocks, size, blksize } = lstatSync(join(bottom, path));
          return { path, mode, nlink, rdev, blocks, size, blksize };
        };
        const sparse = openSync(join(bottom, 'sparse'), 'r');
        seen.push({
          top: [...attributesOf(top)],
          whiteout: lstatSync(join(top, 'text-100')).rdev,
          opaque: lgetxattr(join(top, 'deep/er'), 'trusted.overlay.opaque')?.toString(),
          none: lgetxattr(join(top, 'deep'), 'trusted.overlay.opaque'),
          names: llistxattr(join(bottom, 'deep')),
          stats: ['', 'deep', 'many', 'char', 'block', 'fifo', 'sparse', 'zeros', 'text-300000', 'deep/long-link'].map(
            stats,
          ),
          runs: [...dataRuns(sparse, statSync(join(bottom, 'sparse')).size)],
          readByAcl: accessAs(12345, target),
          readByNobody: accessAs(54321, target),
          listedByNobody: asUser(54321, `ls -la ${target}/deep/link`).includes('text-100'),
        });
        closeSync(sparse);
        await unmount(target, folders);
        await stopDataServers(folders);
      }
      expect(seen[1]).toEqual(seen[0]);
      expect(seen[0]).toMatchObject({
        whiteout: 0,
        opaque: 'y',
        none: undefined,
        readByAcl: true,
        readByNobody: false,
      });
    },
  );

  it('stands below a writable mount: changes, copies and inode numbers behave as over the kernel’s own', async () => {
    freshNode();
    const { image } = images[0]!;
    const target = folder('writable');
    const upper = join(root, `changes${count}`);
    await mountWith('reader', { image, target, upper });
    const number = (name: string) => statSync(join(target, name), { bigint: true }).ino;
    const before = number('text-4096');
    expect(number('text-10000')).toBe(number('deep/er/hard'));
    appendFileSync(join(target, 'text-4096'), 'more');
    chmodSync(join(target, 'noise-1'), 0o600);
    rmSync(join(target, 'deep'), { recursive: true });
    writeFileSync(join(target, 'many', 'another'), 'x');
    expect(number('text-4096')).toBe(before);
    expect(readFileSync(join(upper, 'text-4096')).length).toBe(4100);
    await unmount(target, folders);
    await stopDataServers(folders);
    await mountWith('reader', { image, target, upper });
    expect(readFileSync(join(target, 'text-4096')).length).toBe(4100);
    expect(existsSync(join(target, 'deep'))).toBe(false);
    expect(readdirSync(join(target, 'many')).length).toBe(701);
    const first = attributesOf(target);
    await unmount(target, folders);
    await mountWith('file', { image, target, upper });
    expect(differences(first, attributesOf(target))).toEqual([]);
  });

  it(`goes on with every byte right while its server is killed ${KILLS} times`, async () => {
    freshNode();
    const target = folder('killed');
    await mountWith('reader', { image: small, target });
    const wanted = (await hash(target, 1)).hashes[0]!;
    const server = await layerServer();
    const until = join(root, 'killed-until');
    const readers = [hashUntil(target, until, children), hashUntil(target, until, children)];
    for (let killed = 0, last = 0; killed < KILLS; ) {
      const { ready, server: pid } = await server.status();
      if (!ready || pid === undefined || pid === last) {
        await delay(10);
        continue;
      }
      await delay(20 + killed * 10);
      // What is cached is not asked for again.
      if (killed % 2 === 0) writeFileSync('/proc/sys/vm/drop_caches', '3');
      process.kill(pid, 'SIGKILL');
      last = pid;
      killed++;
    }
    writeFileSync(until, '');
    for (const hashed of await Promise.all(readers)) {
      expect(hashed.errors).toEqual([]);
      expect(new Set(hashed.hashes)).toEqual(new Set([wanted]));
    }
    rmSync(until);
  });

  it('reads lazily through the data server, which fetches what is read', async () => {
    freshNode();
    const target = folder('lazy');
    await mountWith('file', { image: small, target });
    const expected = attributesOf(target);
    await unmount(target, folders);
    freshNode();
    const files = lazyBlobFiles({ store, programs, ...folders });
    await mountWith('reader', { files, image: small, target });
    const data = await ensureDataServer(store.url, { programs, ...folders });
    expect((await data.stats()).transport.readBytes).toBe(0);
    expect(differences(expected, attributesOf(target))).toEqual([]);
    expect((await data.stats()).transport.readBytes).toBeGreaterThan(1_000_000);
    const [mounted] = await listMounts(folders);
    expect(mounted?.lazy?.filter(({ reader }) => reader).length).toBe(3);
    expect(mounted?.lazy?.filter(({ reader }) => !reader).length).toBe(3);
    // Both servers die at once: nothing hangs, and the next command clears away what read through them.
    for (const server of [data, await layerServer()]) {
      const { supervisor, server: pid } = await server.status();
      process.kill(supervisor, 'SIGKILL');
      process.kill(pid!, 'SIGKILL');
    }
    await waitFor(() => listDataServers(folders).every(({ state }) => state === 'dead'));
    const report = await reclaimDataServers({ programs, ...folders });
    expect(report.removed.length).toBe(2);
    expect(await listMounts(folders)).toEqual([]);
    expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(`${folders.runDir}/`))).toEqual([]);
    await mountWith('reader', { files: lazyBlobFiles({ store, programs, ...folders }), image: small, target });
    expect(differences(expected, attributesOf(target))).toEqual([]);
  });

  it('outlives its supervisor, which the next command replaces', async () => {
    freshNode();
    const target = folder('orphan');
    await ensureDataServer(LAYERS, { programs, ...folders, orphanMs: 30 * 60_000 });
    await mountWith('reader', { image: small, target });
    const wanted = (await hash(target, 1)).hashes;
    const { supervisor } = await (await layerServer()).status();
    process.kill(supervisor, 'SIGKILL');
    await waitFor(() => listDataServers(folders)[0]?.state === 'orphaned');
    writeFileSync('/proc/sys/vm/drop_caches', '3');
    expect((await hash(target, 1)).hashes).toEqual(wanted);
    const { adopted } = await reclaimDataServers({ programs, ...folders });
    expect(adopted.length).toBe(1);
    writeFileSync('/proc/sys/vm/drop_caches', '3');
    expect((await hash(target, 1)).hashes).toEqual(wanted);
  });

  it('ends when nothing shows its layers any more; who is still inside a detached mount reads on', async () => {
    freshNode();
    const target = folder('fading');
    const first = await ensureDataServer(LAYERS, { programs, ...folders, idleMs: 300 });
    const { supervisor } = await first.status();
    await mountWith('reader', { image: small, target });
    await delay(1500);
    expect(listDataServers(folders)).toMatchObject([{ state: 'serving' }]);
    const inside = openSync(join(target, 'data'), 'r');
    await unmount(target, { ...folders, lazy: true });
    await waitFor(() => listDataServers(folders).length === 0);
    writeFileSync('/proc/sys/vm/drop_caches', '3');
    expect(readFileSync(`/proc/self/fd/${inside}/layer-2/noise-1`).length).toBe(300_000);
    // Another one has its place meanwhile.
    await mountWith('reader', { image: small, target });
    expect((await (await layerServer()).status()).supervisor).not.toBe(supervisor);
    expect(readFileSync(join(target, 'data/layer-2/noise-1')).length).toBe(300_000);
    closeSync(inside);
    await waitFor(() => processIdentity(supervisor) === undefined);
    expect(readdirSync(join(folders.runDir, 'data')).filter((name) => name.startsWith('.'))).toEqual([]);
    expect(readFileSync(join(target, 'data/layer-1/noise-1')).length).toBe(300_000);
  });

  it('refuses a blob that is not what its layer names, and a metadata image that cannot be read', async () => {
    freshNode();
    const { image } = images[0]!;
    const target = folder('refused');
    await mountWith('reader', { image, target });
    await unmount(target, folders);
    const path = store.localPath(image.layers[0]!.devices[0]!.blob.digest)!;
    const bytes = readFileSync(path);
    const damaged = Buffer.from(bytes);
    damaged[damaged.length >> 1]! ^= 1;
    writeFileSync(path, damaged);
    await expect(mountWith('reader', { image, target })).rejects.toMatchObject({ code: 'MOUNT_DIGEST_MISMATCH' });
    writeFileSync(path, bytes);
    await mountWith('reader', { image, target });
    expect(readdirSync(join(target, 'many')).length).toBe(700);
  });

  it('gives errors for hostile metadata, and serves on', async () => {
    freshNode();
    const { image } = images[1]!;
    const layer = image.layers[0]!;
    const bytes = await store.readVerified(layer.meta.digest);
    const target = folder('hostile');
    let refused = 0;
    for (let round = 0; round < 12; round++) {
      const hostile = Buffer.from(bytes);
      // Behind the superblock, whose checksum would tell.
      for (let flip = 0; flip < 200; flip++) {
        const at = 4096 + ((round * 7_919_317 + flip * 104_729) % (hostile.length - 4096));
        hostile[at]! ^= 1 << (flip % 8);
      }
      const meta = { ...layer.meta, digest: await store.put(hostile), size: hostile.length };
      try {
        await mountWith('reader', { layers: [{ ...layer, meta }], target });
      } catch {
        refused++;
        continue;
      }
      // Every name, every attribute, every byte: whatever they give, it ends.
      const { killed } = await new Promise<{ killed: boolean }>((done) => {
        const command = `ls -lR . > /dev/null; find . -type f -exec cat {} + > /dev/null; getfattr -dRhm - . > /dev/null`;
        const child = execFile('sh', ['-c', command], { cwd: target, timeout: 100_000, killSignal: 'SIGKILL' }, () =>
          done({ killed: child.killed }),
        );
      });
      expect(killed).toBe(false);
      await unmount(target, folders);
    }
    expect(refused).toBeLessThan(12);
    expect(await (await layerServer()).status()).toMatchObject({ restarts: 0, ready: true });
    await mountWith('reader', { image: small, target });
    expect(readFileSync(join(target, 'data/layer-2/noise-1')).length).toBe(300_000);
  });

  it('is chosen by DSEC_MOUNT_WITH, which knows what there is', async () => {
    freshNode();
    const target = folder('chosen');
    try {
      process.env.DSEC_MOUNT_WITH = 'reader';
      await mountWith(undefined, { image: small, target });
      expect((await listMounts(folders))[0]?.lazy?.map(({ reader }) => reader)).toEqual([true, true, true]);
      await unmount(target, folders);
      process.env.DSEC_MOUNT_WITH = 'magic';
      await expect(mountWith(undefined, { image: small, target })).rejects.toMatchObject({ code: 'MOUNT_WITH' });
    } finally {
      delete process.env.DSEC_MOUNT_WITH;
    }
  });

  const asUser = (uid: number, command: string): string => {
    try {
      return execFileSync('setpriv', [`--reuid=${uid}`, `--regid=${uid}`, '--clear-groups', 'sh', '-c', command], {
        encoding: 'latin1',
        stdio: ['ignore', 'pipe', 'ignore'],
      });
    } catch {
      return 'refused';
    }
  };

  const accessAs = (uid: number, target: string) => asUser(uid, `cat ${target}/text-65536`) !== 'refused';
});

async function waitFor(condition: () => boolean | Promise<boolean>, timeoutMs = 60_000): Promise<void> {
  for (const until = Date.now() + timeoutMs; ; await delay(20)) {
    if (await condition()) return;
    if (Date.now() > until) throw new Error(`not within ${timeoutMs / 1000} s`);
  }
}

/** rw for the owner, r for this user, nothing for others. */
function acl(uid: number): Buffer {
  const entries = [
    [1, 6, 0xffffffff],
    [2, 4, uid],
    [4, 0, 0xffffffff],
    [16, 4, 0xffffffff],
    [32, 0, 0xffffffff],
  ] as const;
  const value = Buffer.alloc(4 + 8 * entries.length);
  value.writeUInt32LE(2, 0);
  entries.forEach(([tag, permissions, id], index) => {
    value.writeUInt16LE(tag, 4 + 8 * index);
    value.writeUInt16LE(permissions, 6 + 8 * index);
    value.writeUInt32LE(id, 8 + 8 * index);
  });
  return value;
}
