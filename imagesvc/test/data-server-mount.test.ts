/**
 * Images mounted lazily through a data server, through EROFS: what is shown is what a local mount shows, whatever happens to the
 * processes that serve it. Set DSEC_KILLS=50 for the long run.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  cpSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  realpathSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { hexOf } from '#base';
import { cachedBytes, processIdentity, readMountInfo, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import {
  type DataServer,
  type DataServerOptions,
  type DataServerPrograms,
  ensureDataServer,
  listDataServers,
  reclaimDataServers,
  stopDataServers,
} from '../data-server/data-server.ts';
import { lazyBlobFiles } from '../data-server/lazy-blob-files.ts';
import { nativeUnavailable } from '../data-server/native-transport.ts';
import { listMounts, mountImage, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { bundlePrograms } from './bundled-programs.ts';
import { writeSmallLayout } from './small-layout.ts';
import { attributesOf, differences } from './tree-attributes.ts';
import { hash, hashUntil } from './tree-hash.ts';

const KILLS = Number(process.env.DSEC_KILLS ?? 20);
const isRoot = process.getuid?.() === 0;
const noNative = nativeUnavailable();
if (!isRoot) console.log('data server: skipped: it needs root');

const HALF_AN_HOUR_MS = 30 * 60_000;

describe.skipIf(!isRoot)('a lazy mount', { timeout: 180_000 }, () => {
  let root: string;
  let storeFolder: string;
  let store: BlobStore;
  let image: Image;
  let expected: Map<string, string>;
  let expectedHash: string;
  let count = 0;
  let programs: DataServerPrograms | undefined;
  let folders: { runDir: string; cacheDir: string };
  const hashers: ChildProcess[] = [];

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-lazy-')));
    programs = await bundlePrograms(join(root, 'bundle'));
    storeFolder = join(root, 'store');
    store = await openStore(`file://${storeFolder}`);
    const layout = join(root, 'layout');
    mkdirSync(layout);
    await convertToStore(store, `oci:${writeSmallLayout(layout, 3)}`, 'small:1', { collapseLimitBytes: 0 });
    image = await openImage(store, 'small:1');
    const target = folder('local');
    folders = { runDir: join(root, 'run-local'), cacheDir: join(root, 'cache-local') };
    await mountImage({ store, image, target, ...folders });
    expected = attributesOf(target);
    const hashed = await hash(target, 1);
    expectedHash = hashed.hashes[0]!;
    await unmount(target, folders);
  }, 120_000);

  const folder = (name: string) => {
    const path = join(root, name);
    mkdirSync(path, { recursive: true });
    return path;
  };

  /** A node of its own: nothing is running or cached there. */
  const freshNode = () => {
    count++;
    folders = { runDir: join(root, `run${count}`), cacheDir: join(root, `cache${count}`) };
    return folders;
  };

  const mountLazily = async (target: string, options: DataServerOptions & { store?: BlobStore } = {}) => {
    const files = lazyBlobFiles({ store, threads: 2, programs, ...folders, ...options });
    return mountImage({ store, files, image, target, ...folders });
  };

  const server = (options: DataServerOptions = {}): Promise<DataServer> =>
    ensureDataServer(store.url, { programs, ...folders, ...options });

  afterEach(async () => {
    for (const child of hashers.splice(0)) child.kill('SIGKILL');
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, { ...folders, lazy: true });
    await stopDataServers({ ...folders, force: true });
  });

  afterAll(() => {
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  it('shows what a local mount shows, and fetches only what is read', async () => {
    freshNode();
    const target = folder('same');
    await mountLazily(target);
    const before = await (await server()).stats();
    expect(before.transport.readBytes).toBe(0);
    expect(differences(expected, attributesOf(target))).toEqual([]);
    const after = await (await server()).stats();
    expect(after.transport.readBytes).toBeGreaterThan(1_000_000);
    expect(after.transport.failures).toBe(0);
    const [mounted] = await listMounts(folders);
    expect(mounted?.lazy?.map(({ served }) => served)).toEqual(image.layers.map(() => true));
  });

  it('caches pages once, and reads 1 MiB ahead', async () => {
    freshNode();
    const target = folder('once');
    await mountLazily(target);
    const path = 'data/layer-2/noise-1';
    const bytes = readFileSync(join(target, path)).length;
    // OverlayFS keeps no pages: EROFS below it does.
    const file = join(folders.runDir, 'layers', hexOf(image.layers[2]!.meta.digest), path);
    const data = await server();
    const served = image.layers.flatMap((layer) => layer.devices.map(({ blob }) => hexOf(blob.digest)));
    if (cachedBytes(file) !== undefined) {
      expect(cachedBytes(file)).toBeGreaterThanOrEqual(bytes);
      for (const name of served) expect(cachedBytes(join(data.mountPoint, name))).toBe(0);
    }
    // What the kernel has for each file-backed EROFS is not tied to its mount by any name.
    const settings = readdirSync('/sys/class/bdi').filter((name) => name.startsWith('erofs-'));
    const raised = settings.filter(
      (name) => readFileSync(`/sys/class/bdi/${name}/read_ahead_kb`, 'latin1').trim() === '1024',
    );
    expect(raised.length).toBeGreaterThanOrEqual(image.layers.length);
  });

  it(`goes on with every byte right while its server is killed ${KILLS} times`, async () => {
    freshNode();
    const target = folder('killed');
    await mountLazily(target);
    const data = await server();
    const until = join(root, 'killed-until');
    const readers = [
      hashUntil(target, until, hashers),
      hashUntil(target, until, hashers),
      hashUntil(target, until, hashers),
    ];
    let killed = 0;
    let resent = 0;
    for (let last = 0; killed < KILLS; ) {
      const { ready, server: pid, restarts } = await data.status();
      if (!ready || pid === undefined || pid === last) {
        await delay(10);
        continue;
      }
      // At some moment of its work, the first ones right at the start.
      await delay(killed % 4 === 0 ? 0 : 20 * (killed % 7));
      resent += (await data.stats()).transport.resent;
      process.kill(pid, 'SIGKILL');
      last = pid;
      killed++;
      expect(restarts).toBe(killed - 1);
    }
    await waitFor(async () => (await data.status()).ready);
    writeFileSync(until, '');
    for (const hashed of await Promise.all(readers)) {
      expect(hashed.errors).toEqual([]);
      expect(hashed.hashes).toEqual([expectedHash]);
    }
    expect((await data.status()).restarts).toBe(KILLS);
    // Whether requests were in its hands when it died is a matter of luck here; lazy-faults.test.ts makes sure of it.
    console.log(`${KILLS} kills, ${resent} requests sent again`);
    expect(differences(expected, attributesOf(target))).toEqual([]);
  });

  it('goes on while its server is replaced by a new version', async () => {
    freshNode();
    const target = folder('replaced');
    await mountLazily(target);
    const data = await server();
    const until = join(root, 'replaced-until');
    const reader = hashUntil(target, until, hashers);
    const first = (await data.status()).server;
    for (let i = 0; i < 3; i++) await data.replace(programs!.server);
    expect((await data.status()).server).not.toBe(first);
    writeFileSync(until, '');
    expect(await reader).toMatchObject({ errors: [], hashes: [expectedHash] });
  });

  it('goes on without its supervisor, and the next command gives it a new one', async () => {
    freshNode();
    const target = folder('orphaned');
    await mountLazily(target, { orphanMs: HALF_AN_HOUR_MS });
    const data = await server();
    const until = join(root, 'orphaned-until');
    const reader = hashUntil(target, until, hashers);
    const before = await data.status();
    process.kill(before.supervisor, 'SIGKILL');
    await waitFor(() => listDataServers(folders)[0]?.state === 'orphaned');
    expect((await hash(target, 1)).hashes).toEqual([expectedHash]);
    const report = await reclaimDataServers({ programs, ...folders });
    expect(report.adopted.map(({ id, state }) => ({ id, state }))).toEqual([{ id: data.id, state: 'orphaned' }]);
    expect(processIdentity(before.server)).toBeUndefined();
    const after = await data.status();
    expect(after.ready).toBe(true);
    process.kill(after.server!, 'SIGKILL');
    await waitFor(async () => (await data.status()).restarts === 1 && (await data.status()).ready);
    writeFileSync(until, '');
    expect(await reader).toMatchObject({ errors: [], hashes: [expectedHash] });
  });

  it('gets another supervisor by itself, though no command comes', async () => {
    freshNode();
    const target = folder('alone');
    await mountLazily(target, { orphanMs: 100, idleMs: 300 });
    const data = await server();
    const until = join(root, 'alone-until');
    const reader = hashUntil(target, until, hashers);
    const before = await data.status();
    process.kill(before.supervisor, 'SIGKILL');
    const renewed = async () => {
      const status = await data.status().catch(() => undefined);
      return status?.ready === true && status.supervisor !== before.supervisor;
    };
    await waitFor(renewed);
    expect(processIdentity(before.server)).toBeUndefined();
    writeFileSync(until, '');
    expect(await reader).toMatchObject({ errors: [], hashes: [expectedHash] });
    // So it ends when nobody uses it any more, as ever.
    for (const mounted of await listMounts(folders)) await unmount(mounted.id, folders);
    await waitFor(() => listDataServers(folders).length === 0);
  });

  it('is reclaimed when everything that served it is gone', async () => {
    freshNode();
    const target = folder('gone');
    const { id } = await mountLazily(target);
    const data = await server();
    const until = join(root, 'gone-until');
    const reader = hashUntil(target, until, hashers);
    await delay(300);
    const { supervisor, server: pid } = await data.status();
    process.kill(supervisor, 'SIGKILL');
    process.kill(pid!, 'SIGKILL');
    await waitFor(() => listDataServers(folders)[0]?.state === 'dead');
    expect(listDataServers(folders)).toMatchObject([{ id: data.id, mounts: [id] }]);
    writeFileSync(until, '');
    // It may have read errors; it has not read anything else, and it ends.
    const hashed = await reader;
    if (hashed.errors.length === 0) expect(hashed.hashes).toEqual([expectedHash]);
    const report = await reclaimDataServers({ programs, ...folders });
    expect(report.removed).toMatchObject([{ id: data.id, state: 'dead', mounts: [id] }]);
    expect(await listMounts(folders)).toEqual([]);
    expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(`${folders.runDir}/`))).toEqual([]);
    expect(listDataServers(folders)).toEqual([]);
    // And all of it works again.
    await mountLazily(target);
    expect((await hash(target, 1)).hashes).toEqual([expectedHash]);
  });

  it('reads a blob that is whole in the cache straight from its file', async () => {
    freshNode();
    const target = folder('whole');
    await mountLazily(target);
    const data = await server();
    const blobs = image.layers.flatMap((layer) => layer.devices.map(({ blob }) => blob.digest));
    for (const digest of blobs)
      execFileSync('cat', [join(data.mountPoint, hexOf(digest))], { stdio: ['ignore', 'ignore', 'inherit'] });
    await unmount(target, folders);
    await delay(500);
    await mountLazily(target);
    const [mounted] = await listMounts(folders);
    expect(mounted?.lazy?.map(({ served }) => served)).toEqual(image.layers.map(() => false));
    const before = (await data.stats()).transport.readBytes;
    expect(differences(expected, attributesOf(target))).toEqual([]);
    expect((await data.stats()).transport.readBytes).toBe(before);
  });

  it('ends its server when nothing has used it for a while, and not before', async () => {
    freshNode();
    const target = folder('idle');
    await mountLazily(target, { idleMs: 300 });
    await delay(1500);
    expect(listDataServers(folders)).toMatchObject([{ state: 'serving' }]);
    const { supervisor, server: pid } = await (await server()).status();
    // Another mount namespace with a mount of its own: files may be open through it.
    const other = spawn('unshare', ['-m', '--propagation', 'private', 'sleep', '60'], { stdio: 'ignore' });
    await waitFor(() => readlinkSync(`/proc/${other.pid}/ns/mnt`) !== readlinkSync('/proc/self/ns/mnt'));
    await unmount(target, folders);
    await delay(1000);
    expect(listDataServers(folders)).toMatchObject([{ state: 'serving' }]);
    other.kill('SIGKILL');
    await waitFor(() => listDataServers(folders).length === 0);
    await waitFor(() => processIdentity(supervisor) === undefined && processIdentity(pid) === undefined);
    expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(`${folders.runDir}/`))).toEqual([]);
  });

  it('does not stop a server that is in use', async () => {
    freshNode();
    const target = folder('used');
    await mountLazily(target);
    const data = await server();
    await expect(data.stop()).rejects.toMatchObject({ code: 'DATA_IN_USE' });
    expect((await hash(target, 1)).hashes).toEqual([expectedHash]);
    await unmount(target, folders);
    await data.stop();
    expect(listDataServers(folders)).toEqual([]);
  });

  it.skipIf(noNative !== undefined)('works through fuse-native too, also after its server died', async () => {
    freshNode();
    const target = folder('native');
    await mountLazily(target, { transport: 'native' });
    const data = await server();
    expect(await data.status()).toMatchObject({ transport: 'native', canResend: false });
    expect(differences(expected, attributesOf(target))).toEqual([]);
    // What is mounted is dead with its server; what is mounted next works.
    await unmount(target, folders);
    process.kill((await data.status()).server!, 'SIGKILL');
    await waitFor(async () => (await data.status()).restarts === 1 && (await data.status()).ready);
    await mountLazily(target, { transport: 'native' });
    expect((await hash(target, 1)).hashes).toEqual([expectedHash]);
  });

  it('gives errors for a damaged chunk, never its bytes, and right ones for the others', async () => {
    const damagedFolder = join(root, 'damaged');
    cpSync(storeFolder, damagedFolder, { recursive: true });
    const damaged = await openStore(`file://${damagedFolder}`);
    const { blob } = image.layers[2]!.devices[0]!;
    const path = damaged.localPath(blob.digest)!;
    const bytes = readFileSync(path);
    // The second chunk of the blob.
    bytes.fill(0xee, 300_000, 300_100);
    writeFileSync(path, bytes);
    freshNode();
    const target = folder('damaged-target');
    await mountLazily(target, { store: damaged });
    const hashed = await hash(target, 1);
    expect(hashed.errors.length).toBeGreaterThan(0);
    for (const error of hashed.errors) expect(error).toMatch(/: EIO$/);
    const unreadable = new Set(hashed.errors.map((error) => error.slice(target.length, error.lastIndexOf(':'))));
    let compared = 0;
    for (const [path, line] of expected) {
      const whole = join(target, path);
      if (unreadable.has(path) || !lstatSync(whole).isFile()) continue;
      expect(line).toContain(createHash('sha256').update(readFileSync(whole)).digest('hex').slice(0, 32));
      compared++;
    }
    expect(compared).toBe(hashed.files - unreadable.size);
    expect(hashed.errors.length).toBeLessThan(hashed.files);
  });
});

async function waitFor(condition: () => boolean | Promise<boolean>, timeoutMs = 30_000): Promise<void> {
  for (const until = Date.now() + timeoutMs; ; await delay(20)) {
    if (await condition()) return;
    if (Date.now() > until) throw new Error(`not within ${timeoutMs / 1000} s`);
  }
}
