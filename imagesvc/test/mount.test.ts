/** Mounting images with the kernel: what is shown, what is refused, what is shared, and that nothing is left behind. */
import { execFileSync, spawn } from 'node:child_process';
import {
  appendFileSync,
  chmodSync,
  closeSync,
  existsSync,
  linkSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Digest, digestOf } from '#base';
import {
  attachMount,
  bindMount,
  createMount,
  lgetxattr,
  lsetxattr,
  MS,
  mknod,
  mount,
  readMountInfo,
  S_IFCHR,
  umount,
} from '#linux';
import type { ErofsLayer } from '../catalog/image.ts';
import type { BlobFiles } from '../mount/blob-files.ts';
import { listMounts, mountImage, reclaimMounts, unmount } from '../mount/image-mount.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { type Bench, bindDevice, haveMkfs, isRoot, makeBench, NOTHING } from './mount-fixture.ts';

const BASE = 'a'.repeat(9000);

describe.skipIf(!isRoot || !haveMkfs())('image mounts', () => {
  let bench: Bench;
  let options: { store: BlobStore; runDir: string; cacheDir: string };

  beforeEach(() => {
    bench = makeBench();
    options = { store: bench.store, runDir: bench.runDir, cacheDir: bench.cacheDir };
  });
  afterEach(() => bench.remove());

  const base = () =>
    bench.layer((folder) => {
      writeFileSync(join(folder, 'file'), BASE);
      writeFileSync(join(folder, 'gone'), 'gone');
      linkSync(join(folder, 'file'), join(folder, 'link'));
      mkdirSync(join(folder, 'dir'));
      writeFileSync(join(folder, 'dir', 'old'), 'old');
      writeFileSync(join(folder, 'caf\u00e9'), 'text');
      chmodSync(folder, 0o751);
      utimesSync(folder, 7, 7);
    });
  const top = () =>
    bench.layer((folder) => {
      writeFileSync(join(folder, 'file2'), 'b'.repeat(5000));
      mknod(join(folder, 'gone'), S_IFCHR, 0, 0);
      mkdirSync(join(folder, 'dir'));
      lsetxattr(join(folder, 'dir'), 'trusted.overlay.opaque', Buffer.from('y'));
      writeFileSync(join(folder, 'dir', 'new'), 'new');
      chmodSync(folder, 0o755);
    });

  it('shows one layer as a read-only tree, and goes without a trace', async () => {
    const target = bench.folder('target');
    const mounted = await mountImage({ ...options, layers: [base()], target });
    expect(mounted.target).toBe(target);
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    expect(readdirSync(target).sort()).toEqual(['café', 'dir', 'file', 'gone', 'link']);
    expect(() => writeFileSync(join(target, 'x'), 'x')).toThrow(/EROFS/);
    const row = readMountInfo().find((found) => found.mountPoint === target)!;
    expect(row.type).toBe('erofs');
    expect(row.options).toContain('ro');
    expect(await listMounts(options)).toMatchObject([{ id: mounted.id, target, state: 'mounted' }]);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
    expect(await listMounts(options)).toEqual([]);
  });

  it('merges layers: whiteouts and opaque marks act, inode numbers tell hard links', async () => {
    const target = bench.folder('target');
    await mountImage({ ...options, layers: [base(), top()], target });
    expect(readdirSync(target).sort()).toEqual(['café', 'dir', 'file', 'file2', 'link']);
    expect(readdirSync(join(target, 'dir'))).toEqual(['new']);
    expect(statSync(join(target, 'file'), { bigint: true }).ino).toBe(
      statSync(join(target, 'link'), { bigint: true }).ino,
    );
    const devices = ['file', 'file2', 'dir', ''].map((name) => statSync(join(target, name)).dev);
    expect(new Set(devices).size).toBe(1);
    expect(() => writeFileSync(join(target, 'x'), 'x')).toThrow(/EROFS/);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('writes into the upper alone; a fresh upper takes the attributes of the image root', async () => {
    const target = bench.folder('target');
    const upper = join(bench.folder('u,p:p\\er'), 'changes');
    const bottom = base();
    await mountImage({ ...options, layers: [bottom], target, upper });
    expect(statSync(target).mode & 0o7777).toBe(0o751);
    const before = statSync(join(target, 'caf\u00e9'), { bigint: true });
    appendFileSync(join(target, 'caf\u00e9'), 'more');
    appendFileSync(join(target, 'file'), 'more');
    rmSync(join(target, 'gone'));
    const after = statSync(join(target, 'caf\u00e9'), { bigint: true });
    expect([after.dev, after.ino]).toEqual([before.dev, before.ino]);
    expect(readFileSync(join(upper, 'file'), 'utf8')).toBe(`${BASE}more`);
    expect(statSync(join(upper, 'gone')).rdev).toBe(0);
    expect(() => renameSync(join(target, 'dir'), join(target, 'dir2'))).toThrow(/EXDEV/);
    await unmount(target, options);
    expect(existsSync(`${upper}.work`)).toBe(true);
    // Mounted again, the changes are there, and attributes set meanwhile stay.
    chmodSync(upper, 0o700);
    await mountImage({ ...options, layers: [bottom], target, upper });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(`${BASE}more`);
    expect(statSync(target).mode & 0o7777).toBe(0o700);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('refuses an upper that a mount already writes to, and leaves nothing', async () => {
    const layers = [base()];
    const upper = join(bench.root, 'upper');
    await mountImage({ ...options, layers, target: bench.folder('one'), upper });
    const second = mountImage({ ...options, layers, target: bench.folder('two'), upper });
    await expect(second).rejects.toMatchObject({ code: 'MOUNT_UPPER_IN_USE' });
    const inside = mountImage({ ...options, layers, target: bench.folder('two'), upper: join(upper, 'deeper') });
    await expect(inside).rejects.toMatchObject({ code: 'MOUNT_UPPER_IN_USE' });
    expect(existsSync(join(upper, 'deeper'))).toBe(false);
    expect(existsSync(join(upper, 'deeper.work'))).toBe(false);
    expect((await listMounts(options)).length).toBe(1);
    await unmount(bench.folder('one'), options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('mounts a layer once for all that use it', async () => {
    const shared = base();
    const other = top();
    await mountImage({ ...options, layers: [shared], target: bench.folder('one') });
    await mountImage({ ...options, layers: [shared, other], target: bench.folder('two') });
    const layerMounts = () => bench.leftovers().mounts.filter((path) => path.startsWith(join(bench.runDir, 'layers')));
    expect(layerMounts().length).toBe(2);
    await unmount(bench.folder('two'), options);
    expect(layerMounts().length).toBe(1);
    expect(readFileSync(join(bench.root, 'one', 'file'), 'utf8')).toBe(BASE);
    await unmount(bench.folder('one'), options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('takes a layer that is named twice once, at its topmost place', async () => {
    const bottom = base();
    const target = bench.folder('target');
    const mounted = await mountImage({ ...options, layers: [bottom, top(), bottom], target });
    expect(mounted.layers.length).toBe(2);
    expect(mounted.layers[1]).toBe(bottom.meta.digest);
    expect(readdirSync(target)).toContain('gone');
    await unmount(mounted.id, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('goes through loop devices where files are refused, and they end with the mount', async () => {
    const target = bench.folder('target');
    await mountImage({ ...options, layers: [base(), top()], target, backing: 'loop' });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    expect(bench.leftovers().loops.length).toBe(4);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('composes with mount(2) too, and refuses options that it would cut', async () => {
    const target = bench.folder('target');
    const upper = join(bench.folder('u,p:p'), 'changes');
    const first = await mountImage({ ...options, layers: [base(), top()], target, upper, overlayApi: 'mount2' });
    writeFileSync(join(target, 'written'), 'w');
    expect(readFileSync(join(upper, 'written'), 'utf8')).toBe('w');
    expect(await listMounts(options)).toMatchObject([{ id: first.id, mountId: expect.any(Number) }]);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
    const many = Array.from({ length: 60 }, (_, index) =>
      bench.layer((folder) => writeFileSync(join(folder, `f${index}`), String(index)), { device: false }),
    );
    const cut = mountImage({ ...options, layers: many, target, overlayApi: 'mount2' });
    await expect(cut).rejects.toMatchObject({ code: 'LINUX_OPTIONS_TOO_LONG' });
    expect(bench.leftovers()).toEqual(NOTHING);
    await mountImage({ ...options, layers: many, target });
    expect(readdirSync(target).length).toBe(60);
    expect(readFileSync(join(target, 'f59'), 'utf8')).toBe('59');
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('takes files from elsewhere; those that their server verifies are not hashed', async () => {
    const layer = base();
    const { digest } = layer.devices[0]!.blob;
    const served = join(bench.root, 'served');
    const bytes = readFileSync(bench.blobPath(digest));
    bytes[0]! ^= 1;
    writeFileSync(served, bytes);
    const files: BlobFiles = {
      fileFor: async (blob) => (blob.digest === digest ? served : bench.blobPath(blob.digest)),
      verifiedOnRead: (blob) => blob.digest === digest,
    };
    const target = bench.folder('target');
    await mountImage({ files, runDir: bench.runDir, cacheDir: bench.cacheDir, layers: [layer], target });
    expect(readFileSync(join(target, 'dir', 'old'), 'utf8')).toBe('old');
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('refuses more layers than OverlayFS takes', async () => {
    const layer = base();
    const layers = Array.from({ length: 501 }, (_, index) => ({
      ...layer,
      meta: { ...layer.meta, digest: digestOf(String(index)) },
    }));
    const refused = mountImage({ ...options, layers, target: bench.folder('target') });
    await expect(refused).rejects.toMatchObject({ code: 'MOUNT_TOO_MANY_LAYERS' });
  });

  it('mounts from a store on a tmpfs by way of the cache', async () => {
    const layer = base();
    const memory = bench.folder('memory');
    attachMount(createMount('tmpfs', [['size', '16m']]), memory);
    for (const descriptor of [layer.meta, layer.devices[0]!.blob]) {
      writeFileSync(join(memory, descriptor.digest), readFileSync(bench.blobPath(descriptor.digest)));
    }
    const store = { url: 'file:///memory', localPath: (digest: Digest) => join(memory, digest) } as BlobStore;
    const target = bench.folder('target');
    await mountImage({ ...options, store, layers: [layer], target });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    expect(readdirSync(join(bench.cacheDir, 'meta'))).toEqual([layer.meta.digest.slice(7)]);
    await unmount(target, options);
    // A damaged copy is made again.
    const copy = join(bench.cacheDir, 'meta', layer.meta.digest.slice(7));
    writeFileSync(copy, Buffer.alloc(layer.meta.size));
    await mountImage({ ...options, store, layers: [layer], target });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    await unmount(target, options);
    // A cache on a tmpfs too: loop devices.
    const cacheDir = join(memory, 'cache');
    await mountImage({ ...options, cacheDir, store, layers: [layer], target });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    await unmount(target, options);
    umount(memory);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('has names that the option strings of mount could not carry', async () => {
    const layer = base();
    const odd = bench.folder(`o,d:d \\ ${'long'.repeat(50)}/${'er'.repeat(60)}`);
    for (const descriptor of [layer.meta, layer.devices[0]!.blob]) {
      writeFileSync(join(odd, descriptor.digest), readFileSync(bench.blobPath(descriptor.digest)));
    }
    const store = { url: 'file:///odd', localPath: (digest: Digest) => join(odd, digest) } as BlobStore;
    const target = bench.folder('t a\\r,g:é');
    const upper = join(odd, 'upper');
    const odds = { store, runDir: join(odd, 'run'), cacheDir: join(odd, 'cache') };
    await mountImage({ ...odds, layers: [layer, top0(layer)], target, upper });
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    writeFileSync(join(target, 'x'), 'x');
    expect(readFileSync(join(upper, 'x'), 'utf8')).toBe('x');
    await unmount(target, odds);
    expect(bench.leftovers()).toEqual(NOTHING);

    function top0(like: ErofsLayer): ErofsLayer {
      const made = bench.layer((folder) => writeFileSync(join(folder, 'y'), 'y'), { device: false });
      writeFileSync(join(odd, made.meta.digest), readFileSync(bench.blobPath(made.meta.digest)));
      expect(made.meta.digest).not.toBe(like.meta.digest);
      return made;
    }
  });

  describe('refuses', () => {
    const refused = async (given: Partial<Parameters<typeof mountImage>[0]>, code: string) => {
      const target = given.target ?? bench.folder('target');
      await expect(mountImage({ ...options, ...given, target })).rejects.toMatchObject({ code });
      expect(bench.leftovers()).toEqual(NOTHING);
    };

    it('a target that is not there, or is no folder', async () => {
      const layers = [base()];
      await refused({ layers, target: join(bench.root, 'missing') }, 'MOUNT_TARGET_MISSING');
      writeFileSync(join(bench.root, 'plain'), '');
      await refused({ layers, target: join(bench.root, 'plain') }, 'MOUNT_TARGET_NOT_DIRECTORY');
    });

    it('an image without layers, and a store without files', async () => {
      await refused({ layers: [] }, 'MOUNT_NO_LAYERS');
      const store = { url: 's3://bucket', localPath: () => undefined } as Partial<BlobStore> as BlobStore;
      await refused({ layers: [base()], store }, 'MOUNT_STORE_NOT_LOCAL');
    });

    it('a missing blob', async () => {
      const layer = base();
      rmSync(bench.blobPath(layer.devices[0]!.blob.digest));
      await refused({ layers: [layer] }, 'MOUNT_BLOB_MISSING');
    });

    it('a blob with one bit flipped, data or metadata, of the right size', async () => {
      for (const pick of ['meta', 'data'] as const) {
        const layer = base();
        const { digest } = pick === 'meta' ? layer.meta : layer.devices[0]!.blob;
        const bytes = readFileSync(bench.blobPath(digest));
        bytes[bytes.length - 100]! ^= 1;
        writeFileSync(bench.blobPath(digest), bytes);
        await refused({ layers: [layer] }, 'MOUNT_DIGEST_MISMATCH');
      }
    });

    it('a blob that changes after it was proved', async () => {
      const layer = base();
      const target = bench.folder('target');
      const { digest } = layer.devices[0]!.blob;
      await new Promise((done) => setTimeout(done, 30));
      await mountImage({ ...options, layers: [layer], target });
      await unmount(target, options);
      expect(readdirSync(join(bench.cacheDir, 'proofs')).length).toBe(2);
      const bytes = readFileSync(bench.blobPath(digest));
      const { atime, mtime } = statSync(bench.blobPath(digest));
      bytes[0]! ^= 1;
      writeFileSync(bench.blobPath(digest), bytes);
      utimesSync(bench.blobPath(digest), atime, mtime);
      await refused({ layers: [layer] }, 'MOUNT_DIGEST_MISMATCH');
    });

    it('data blobs that are not those of the device slots', async () => {
      const [one, two] = [base(), top()];
      await refused({ layers: [{ meta: one.meta, devices: two.devices }] }, 'MOUNT_DEVICE_MISMATCH');
      await refused({ layers: [{ meta: one.meta, devices: [] }] }, 'MOUNT_DEVICE_MISMATCH');
      await refused(
        { layers: [{ meta: one.meta, devices: [...one.devices, ...two.devices] }] },
        'MOUNT_DEVICE_MISMATCH',
      );
    });

    it('metadata that is no EROFS, is cut short, or that the kernel does not know', async () => {
      const layer = base();
      const image = readFileSync(bench.blobPath(layer.meta.digest));
      await refused({ layers: [{ meta: bench.put(Buffer.alloc(8192)), devices: [] }] }, 'MOUNT_NOT_EROFS');
      await refused({ layers: [{ meta: bench.put(image.subarray(0, 1100)), devices: [] }] }, 'MOUNT_NOT_EROFS');
      image.writeUInt32LE((image.readUInt32LE(1024 + 80) | 0x40000000) >>> 0, 1024 + 80);
      bindDevice(image, layer.devices[0]!.blob.digest);
      await refused({ layers: [{ meta: bench.put(image), devices: layer.devices }] }, 'MOUNT_REFUSED');
    });

    it('an upper on a file system that cannot carry one, and takes back the folders it made', async () => {
      const lower = base();
      const first = bench.folder('ro');
      await mountImage({ ...options, layers: [lower], target: first });
      const upper = join(first, 'dir', 'upper');
      const failed = mountImage({ ...options, layers: [lower], target: bench.folder('target'), upper });
      await expect(failed).rejects.toMatchObject({ code: 'MOUNT_UPPER_INVALID' });
      const proc = mountImage({
        ...options,
        layers: [lower],
        target: bench.folder('target'),
        upper: join(bench.root, 'up'),
        work: '/dev/shm/dsec-mount-test-work',
      });
      await expect(proc).rejects.toMatchObject({ code: 'MOUNT_UPPER_INVALID' });
      expect(existsSync(join(bench.root, 'up'))).toBe(false);
      expect(existsSync('/dev/shm/dsec-mount-test-work')).toBe(false);
      await unmount(first, options);
      expect(bench.leftovers()).toEqual(NOTHING);
    });
  });

  it('refuses a target that is taken, also under another name of it', async () => {
    const target = bench.folder('target');
    const layers = [base()];
    await mountImage({ ...options, layers, target });
    symlinkSync(target, join(bench.root, 'alias'));
    for (const name of [target, join(bench.root, 'alias'), `${target}/../target/`]) {
      await expect(mountImage({ ...options, layers, target: name })).rejects.toMatchObject({
        code: 'MOUNT_TARGET_TAKEN',
      });
    }
    await unmount(join(bench.root, 'alias'), options);
    expect(bench.leftovers()).toEqual(NOTHING);
    await expect(unmount(target, options)).rejects.toMatchObject({ code: 'MOUNT_NOT_FOUND' });
    await expect(unmount('/proc', options)).rejects.toMatchObject({ code: 'MOUNT_NOT_FOUND' });
  });

  it('names who keeps a mount busy, and unmounts it lazily when asked', async () => {
    const target = bench.folder('target');
    await mountImage({ ...options, layers: [base(), top()], target });
    const fd = openSync(join(target, 'file'), 'r');
    const busy = unmount(target, options);
    await expect(busy).rejects.toMatchObject({ code: 'MOUNT_BUSY' });
    await expect(busy).rejects.toThrow(`${process.pid} (`);
    expect((await listMounts(options)).length).toBe(1);
    await unmount(target, { ...options, lazy: true });
    expect(bench.leftovers()).toEqual(NOTHING);
    closeSync(fd);
  });

  it('does not unmount what somebody mounted on top', async () => {
    const target = bench.folder('target');
    await mountImage({ ...options, layers: [base()], target });
    bindMount(bench.folder('foreign'), target);
    await expect(unmount(target, options)).rejects.toMatchObject({ code: 'MOUNT_BUSY' });
    umount(target);
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('forgets a mount that was unmounted by hand, and a bind copy of it is left alone', async () => {
    const target = bench.folder('target');
    const copy = bench.folder('copy');
    const { id } = await mountImage({ ...options, layers: [base(), top()], target });
    bindMount(target, copy);
    umount(target);
    expect(await reclaimMounts(options)).toMatchObject({ dropped: [id], undone: [] });
    expect(readFileSync(join(copy, 'file'), 'utf8')).toBe(BASE);
    expect(bench.leftovers().mounts).toEqual([copy]);
    umount(copy);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('keeps a mount that was moved', async () => {
    const target = bench.folder('target');
    const { id } = await mountImage({ ...options, layers: [base()], target });
    mount(target, bench.folder('elsewhere'), null, MS.MOVE);
    expect((await listMounts(options)).map((record) => record.id)).toEqual([id]);
    await unmount(id, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('drops records of an earlier boot and of namespaces that are gone, keeps those of living ones', async () => {
    const target = bench.folder('target');
    const { id } = await mountImage({ ...options, layers: [base()], target });
    const file = join(bench.runDir, 'mounts', `${id}.json`);
    const record = JSON.parse(readFileSync(file, 'utf8'));
    const put = (change: object, name: string) =>
      writeFileSync(join(bench.runDir, 'mounts', `${name}.json`), JSON.stringify({ ...record, ...change, id: name }));
    // With the same mount id: it must not be taken for the mount that has this id now.
    put({ owner: { ...record.owner, bootId: 'other' } }, 'booted');
    put({ owner: { ...record.owner, bootId: 'other' }, state: 'mounting' }, 'rebooted');
    put({ namespace: 'mnt:[1]' }, 'gone');
    writeFileSync(join(bench.runDir, 'mounts', 'damaged.json'), '{"id":"dam');
    writeFileSync(join(bench.runDir, 'mounts', '.half.tmp'), '{');
    const holder = spawn('unshare', ['-m', 'sleep', '60'], { stdio: 'ignore' });
    let theirs = '';
    for (let i = 0; i < 200 && (theirs === '' || theirs === record.namespace); i++) {
      await new Promise((done) => setTimeout(done, 10));
      theirs = execFileSync('readlink', [`/proc/${holder.pid}/ns/mnt`], { encoding: 'utf8' }).trim();
    }
    put({ namespace: theirs, target: '/elsewhere' }, 'living');
    const report = await reclaimMounts(options);
    expect([...report.dropped].sort()).toEqual(['booted', 'gone']);
    expect(report.undone).toEqual(['rebooted']);
    expect(readFileSync(join(target, 'file'), 'utf8')).toBe(BASE);
    await unmount(target, options);
    // Its layer's folder stays: removing it would unmount the layer over there.
    expect(bench.leftovers()).toMatchObject({ mounts: [], records: ['living.json'] });
    expect(bench.leftovers().layerFolders.length).toBe(1);
    const ended = new Promise((done) => holder.once('exit', done));
    holder.kill('SIGKILL');
    await ended;
    expect(await reclaimMounts(options)).toMatchObject({ dropped: ['living'] });
    expect(bench.leftovers()).toEqual(NOTHING);
  });

  it('keeps the layer attributes: xattrs of the root in a fresh upper', async () => {
    const layer = bench.layer((folder) => lsetxattr(folder, 'user.mark', Buffer.from([0, 255])));
    const upper = join(bench.root, 'upper');
    const target = bench.folder('target');
    await mountImage({ ...options, layers: [layer], target, upper });
    expect(lgetxattr(target, 'user.mark')).toEqual(Buffer.from([0, 255]));
    await unmount(target, options);
    expect(bench.leftovers()).toEqual(NOTHING);
  });
});

it.skipIf(!isRoot)('says so without root', async () => {
  process.seteuid!(65534);
  try {
    const refused = mountImage({ layers: [{ meta: { digest: digestOf('') } } as ErofsLayer], target: '/' });
    await expect(refused).rejects.toMatchObject({ code: 'MOUNT_NOT_ROOT', exit: 5 });
    await expect(unmount('/')).rejects.toMatchObject({ code: 'MOUNT_NOT_ROOT' });
    expect(await listMounts({ runDir: '/nonexistent' })).toEqual([]);
  } finally {
    process.seteuid!(0);
  }
});
