import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { homedir, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { digestOf, hexOf } from '#base';
import type { BlobStore } from '../store/blob-store.ts';
import { FolderStore } from '../store/folder-store.ts';
import { defaultStoreUrl, openStore } from '../store/open-store.ts';
import { sweepFolders } from '../store/staging.ts';
import { startWriter, writerPath } from './start-writer.ts';
import { collected, someBytes, storeConformance } from './store-conformance.ts';

const temporary = () => mkdtempSync(join(tmpdir(), 'dsec-folder-store-'));

storeConformance('folder', async () => {
  const root = temporary();
  const url = join(root, 'store');
  return {
    store: await openStore(url),
    again: () => openStore(url),
    damage: async (digest, bytes) => writeFileSync(join(url, 'blobs/sha256', hexOf(digest)), bytes),
    damageRef: async (repository, tag, text) => writeFileSync(join(url, 'refs', repository, '_tags', tag), text),
    close: async () => rmSync(root, { recursive: true, force: true }),
  };
});

let root: string;
let store: BlobStore;
beforeEach(async () => {
  root = temporary();
  store = await openStore(join(root, 'store'));
});
afterEach(() => rmSync(root, { recursive: true, force: true }));
const at = (...parts: string[]) => join(root, 'store', ...parts);
const tmpOf = (folder = at()) => readdirSync(join(folder, 'tmp'));

describe('opening', () => {
  test('a URL and a path name the same folder', async () => {
    expect((await openStore(`file://${root}/a%20b`)).url).toBe(`file://${root}/a%20b`);
    expect((await openStore(`${root}/a b`)).url).toBe(`file://${root}/a%20b`);
    expect((await openStore(`file://localhost${root}`)).localPath(digestOf(''))).toBe(
      join(root, 'blobs/sha256', hexOf(digestOf(''))),
    );
  });

  test.each(['ftp://host/x', 'http://host/x', 'file://otherhost/x', '', 'file:///a%2Fb', 'file:relative%00'])(
    '%j is refused',
    async (url) => {
      await expect(openStore(url)).rejects.toMatchObject({ code: 'STORE_SCHEME', exit: 2 });
    },
  );

  test('the default store', () => {
    expect(defaultStoreUrl({ DSEC_STORE: '/x' }, 0)).toBe('/x');
    expect(defaultStoreUrl({}, 0)).toBe('file:///var/lib/dsec/store');
    expect(defaultStoreUrl({ XDG_DATA_HOME: '/data' }, 1000)).toBe('/data/dsec/store');
    expect(defaultStoreUrl({ XDG_DATA_HOME: 'data', DSEC_STORE: '' }, 1000)).toBe(
      join(homedir(), '.local/share/dsec/store'),
    );
  });

  test('reading makes nothing', async () => {
    await store.listRefs();
    await store.getRef('a');
    await store.stat(digestOf('x'));
    await collected(store.listBlobs());
    await store.getRecord('a', 'b');
    await store.oldestStagingMs();
    await store.deleteRef('a');
    await store.deleteBlob(digestOf('x'));
    expect(existsSync(at())).toBe(false);
  });

  test('a newer version is left alone', async () => {
    await store.put(Buffer.from('x'));
    writeFileSync(at('dsec-store.json'), '{"format":"dsec-store","version":2}\n');
    const newer = { code: 'STORE_VERSION', params: { version: 2, known: 1 } };
    await expect(openStore(at())).rejects.toMatchObject(newer);
    await expect(store.put(Buffer.from('y'))).rejects.toMatchObject(newer);
    for (const bad of [
      '',
      '{',
      '[]',
      'null',
      '{"format":"x","version":1}',
      '{"format":"dsec-store"}',
      '{"format":"dsec-store","version":"1"}',
    ]) {
      writeFileSync(at('dsec-store.json'), bad);
      await expect(openStore(at())).rejects.toMatchObject({ code: 'STORE_FOREIGN' });
    }
  });

  test("a folder with other people's files does not become a store", async () => {
    writeFileSync(join(root, 'thesis.txt'), 'important');
    await expect(openStore(root)).rejects.toMatchObject({ code: 'STORE_FOREIGN' });
    await expect(new FolderStore(root).put(Buffer.from('x'))).rejects.toMatchObject({ code: 'STORE_FOREIGN' });
    expect(readdirSync(root)).toEqual(['thesis.txt']);
  });

  test('an empty folder, and the root of a fresh file system, do', async () => {
    mkdirSync(at('lost+found'), { recursive: true });
    await (await openStore(at())).put(Buffer.from('x'));
    expect(readdirSync(at()).sort()).toEqual(['blobs', 'dsec-store.json', 'lost+found', 'tmp']);
  });

  test('a file in the way is named', async () => {
    writeFileSync(join(root, 'file'), '');
    const inTheWay = { code: 'STORE_NOT_FOLDER', exit: 2 };
    await expect(openStore(join(root, 'file'))).rejects.toMatchObject(inTheWay);
    await expect(openStore(join(root, 'file/below'))).rejects.toMatchObject(inTheWay);
    await store.put(Buffer.from('x'));
    rmSync(at('tmp'), { recursive: true });
    writeFileSync(at('tmp'), '');
    await expect(store.put(Buffer.from('y'))).rejects.toMatchObject(inTheWay);
  });

  test('a store that is deleted under an open one is made again', async () => {
    await store.put(Buffer.from('x'));
    rmSync(at(), { recursive: true });
    expect(await store.listRefs()).toEqual([]);
    await store.put(Buffer.from('y'));
    expect(await (await openStore(at())).stat(digestOf('y'))).toEqual({ sizeBytes: 1 });
  });
});

describe('the layout', () => {
  test('is as docs/store.md says, whatever the umask', async () => {
    const umask = process.umask(0o777 & ~0o700);
    try {
      const deep = await openStore(at('new/er'));
      const digest = await deep.put(Buffer.from('x'));
      const staging = await deep.stage();
      writeFileSync(join(staging.path, 'f'), 'y', { mode: 0o600 });
      await deep.putFile(join(staging.path, 'f'), digestOf('y'), 1);
      await staging.remove();
      await deep.setRef({ name: 'team/app:1', manifest: { mediaType: 'm', digest, size: 1 } });
      await deep.putRecord('conversion', 'k.1', { a: 1 });
      await (await deep.hold('publish')).release();
    } finally {
      process.umask(umask);
    }
    const found: Record<string, string> = {};
    const walk = (path: string, shown: string) => {
      const stats = statSync(path);
      found[shown] = (stats.mode & 0o7777).toString(8);
      if (stats.isDirectory()) for (const name of readdirSync(path)) walk(join(path, name), `${shown}/${name}`);
    };
    walk(at(), '');
    expect(found).toEqual({
      '': '755',
      '/new': '755',
      '/new/er': '755',
      '/new/er/blobs': '755',
      '/new/er/blobs/sha256': '755',
      [`/new/er/blobs/sha256/${hexOf(digestOf('x'))}`]: '644',
      [`/new/er/blobs/sha256/${hexOf(digestOf('y'))}`]: '644',
      '/new/er/dsec-store.json': '644',
      '/new/er/lock': '644',
      '/new/er/records': '755',
      '/new/er/records/conversion': '755',
      '/new/er/records/conversion/k.1.json': '644',
      '/new/er/refs': '755',
      '/new/er/refs/team': '755',
      '/new/er/refs/team/app': '755',
      '/new/er/refs/team/app/_tags': '755',
      '/new/er/refs/team/app/_tags/1': '644',
      '/new/er/tmp': '755',
    });
    expect(readFileSync(at('new/er/dsec-store.json'), 'utf8')).toBe('{"format":"dsec-store","version":1}\n');
    expect(readFileSync(at('new/er/refs/team/app/_tags/1'), 'utf8')).toBe(
      `{"mediaType":"m","digest":"${digestOf('x')}","size":1}\n`,
    );
    expect(readFileSync(at('new/er/records/conversion/k.1.json'), 'utf8')).toBe('{"a":1}\n');
  });

  test('what is not ours in it is passed over', async () => {
    const digest = await store.put(Buffer.from('x'));
    writeFileSync(at('blobs/sha256/notes.txt'), '');
    mkdirSync(at('blobs/sha256', '0'.repeat(64)));
    await store.setRef({ name: 'a:b', manifest: { mediaType: 'm', digest, size: 1 } });
    writeFileSync(at('refs/stray'), '');
    writeFileSync(at('refs/a/_tags/.hidden'), '');
    writeFileSync(at('refs/a/_tags/torn'), '{"mediaType":');
    expect((await collected(store.listBlobs())).map((blob) => blob.digest)).toEqual([digest]);
    expect((await store.listRefs()).map((ref) => ref.name)).toEqual(['a:b']);
    await expect(store.getRef('a:torn')).rejects.toMatchObject({ code: 'STORE_REF_DAMAGED' });
    expect(await store.deleteRef('a:torn')).toBe(true);
  });

  test('a damaged record reads as none', async () => {
    await store.putRecord('conversion', 'k', 1);
    truncateSync(at('records/conversion/k.json'), 0);
    expect(await store.getRecord('conversion', 'k')).toBeUndefined();
  });

  test('deleting the last tag leaves no empty folders', async () => {
    await store.setRef({ name: 'a/b/c:1', manifest: { mediaType: 'm', digest: digestOf(''), size: 0 } });
    await store.setRef({ name: 'a:1', manifest: { mediaType: 'm', digest: digestOf(''), size: 0 } });
    await store.deleteRef('a/b/c:1');
    expect(readdirSync(at('refs/a'))).toEqual(['_tags']);
    await store.deleteRef('a:1');
    expect(readdirSync(at('refs'))).toEqual([]);
  });

  test('a blob that is there already is not written again', async () => {
    const digest = await store.put(Buffer.from('once'));
    const path = at('blobs/sha256', hexOf(digest));
    const { ino } = statSync(path);
    await store.put(Buffer.from('once'));
    const staging = await store.stage();
    writeFileSync(join(staging.path, 'f'), 'once');
    await store.putFile(join(staging.path, 'f'), digest, 4);
    await staging.remove();
    expect(statSync(path).ino).toBe(ino);
    expect(statSync(path).nlink).toBe(1);
  });

  test('what makes a blob young leaves its file as it is', async () => {
    const digest = await store.put(Buffer.from('once'));
    const path = at('blobs/sha256', hexOf(digest));
    const asItWas = () => {
      const { ino, nlink, mtimeNs, ctimeNs } = statSync(path, { bigint: true });
      return { ino, nlink, mtimeNs, ctimeNs };
    };
    const before = asItWas();
    await new Promise((resolve) => setTimeout(resolve, 30));
    const ageOf = async () => (await collected(store.listBlobs()))[0]!.modifiedMs;
    const first = await ageOf();
    await store.renew(digest);
    const second = await ageOf();
    expect(second).toBeGreaterThan(first);
    await new Promise((resolve) => setTimeout(resolve, 5));
    await store.put(Buffer.from('once'));
    const staging = await store.stage();
    writeFileSync(join(staging.path, 'f'), 'once');
    await store.putFile(join(staging.path, 'f'), digest, 4);
    await staging.remove();
    expect(await ageOf()).toBeGreaterThan(second);
    expect(asItWas()).toEqual(before);
    await store.deleteBlob(digest);
    expect(readdirSync(at('renewed/sha256'))).toEqual([]);
    expect(await store.renew(digest)).toBeUndefined();
    expect(readdirSync(at('renewed/sha256'))).toEqual([]);
  });

  test.each([true, false])('a folder in the place of a blob is damage, and is healed (empty: %s)', async (empty) => {
    const digest = digestOf('x');
    const path = at('blobs/sha256', hexOf(digest));
    const block = () => {
      mkdirSync(path, { recursive: true });
      if (!empty) writeFileSync(join(path, 'kept'), 'bytes');
    };
    await store.put(Buffer.from('other'));
    const damaged = { code: 'STORE_BLOB_NOT_FILE', exit: 3 };
    block();
    expect(await store.stat(digest)).toBeUndefined();
    expect(await store.renew(digest)).toBeUndefined();
    await expect(store.readVerified(digest)).rejects.toMatchObject(damaged);
    await expect(store.read(digest, 0, 1)).rejects.toMatchObject(damaged);
    await expect(collected(store.stream(digest))).rejects.toMatchObject(damaged);
    await store.put(Buffer.from('x'));
    expect((await store.readVerified(digest)).toString()).toBe('x');
    await store.deleteBlob(digest);
    block();
    await store.deleteBlob(digest);
    expect(existsSync(path)).toBe(false);
    const aside = readdirSync(at('blobs/sha256')).filter((name) => name.startsWith(`${hexOf(digest)}.aside-`));
    expect(aside.map((name) => readdirSync(at('blobs/sha256', name)))).toEqual(empty ? [] : [['kept'], ['kept']]);
  });

  test('a symlink is no finished file', async () => {
    const staging = await store.stage();
    writeFileSync(join(staging.path, 'f'), 'x');
    symlinkSync('f', join(staging.path, 'link'));
    await expect(store.putFile(join(staging.path, 'link'), digestOf('x'), 1)).rejects.toMatchObject({
      code: 'STORE_IO',
    });
    expect(await store.stat(digestOf('x'))).toBeUndefined();
    await staging.remove();
  });
});

describe('staging folders', () => {
  const dead = (name: string, ageMs = 0, lock = true) => {
    mkdirSync(at('tmp', name, 'deep/er'), { recursive: true });
    writeFileSync(at('tmp', name, 'deep/er/file'), 'left');
    if (lock) writeFileSync(at('tmp', name, 'lock'), '{"pid":1,"startedMs":1}');
    const then = new Date(Date.now() - ageMs);
    if (lock) utimesSync(at('tmp', name, 'lock'), then, then);
    utimesSync(at('tmp', name), then, then);
  };
  const boot = () => readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').slice(0, 8);

  test('a dead process leaves one, the next stage removes it, live ones stay', async () => {
    const live = await store.stage();
    writeFileSync(join(live.path, 'mine'), '');
    dead(`${boot()}-1-aa`);
    dead(`${boot()}-1-bb`, 0, false);
    mkdirSync(at('tmp', `${boot()}-1-cc`));
    const mine = await store.stage();
    expect(
      tmpOf()
        .map((name) => at('tmp', name))
        .sort(),
    ).toEqual([live.path, mine.path].sort());
    expect(readdirSync(live.path).sort()).toEqual(['lock', 'mine']);
    await live.remove();
    await mine.remove();
    expect(tmpOf()).toEqual([]);
  });

  test('opening the store removes it too', async () => {
    await store.put(Buffer.from('x'));
    dead(`${boot()}-1-aa`);
    await openStore(at());
    expect(tmpOf()).toEqual([]);
  });

  test("another node's is alive until its heartbeat has been silent for an hour", async () => {
    await store.put(Buffer.from('x'));
    dead('0badb007-1-aa', 59 * 60_000);
    dead('0badb007-1-bb', 61 * 60_000);
    await openStore(at());
    expect(tmpOf()).toEqual(['0badb007-1-aa']);
    expect(await store.oldestStagingMs()).toBe(1);
    expect(await sweepFolders(at('tmp'), Date.now() + 2 * 60_000)).toBe(1);
    expect(await store.oldestStagingMs()).toBeUndefined();
  });

  test('making and sweeping at once never takes a live one', async () => {
    await store.put(Buffer.from('x'));
    await Promise.all(
      Array.from({ length: 6 }, async () => {
        for (let i = 0; i < 15; i++) {
          const staging = await store.stage();
          writeFileSync(join(staging.path, 'mine'), 'x');
          await sweepFolders(at('tmp'));
          expect(readFileSync(join(staging.path, 'mine'), 'utf8')).toBe('x');
          await staging.remove();
        }
      }),
    );
    expect(tmpOf()).toEqual([]);
  });
});

test('twenty processes that write the same blobs and refs all succeed', async () => {
  const codes = await Promise.all(
    Array.from(
      { length: 20 },
      () => new Promise<number | null>((resolve) => startWriter('same', at()).on('exit', resolve)),
    ),
  );
  expect(codes).toEqual(Array.from({ length: 20 }, () => 0));
  const blobs = await collected(store.listBlobs());
  // Three blobs, and an image's metadata, data, chunk digests, config and manifest.
  expect(blobs).toHaveLength(8);
  for (const { digest } of blobs) await store.readVerified(digest);
  expect((await store.listRefs()).map((ref) => ref.name)).toEqual(['shared/name:latest']);
  expect(tmpOf()).toEqual([]);
}, 120_000);

describe.skipIf(process.getuid?.() !== 0)('a file system that refuses (as root)', () => {
  let mounted: string | undefined;
  const mount = (options: string) => {
    mounted = join(root, 'mount');
    mkdirSync(mounted, { recursive: true });
    execFileSync('mount', ['-t', 'tmpfs', '-o', options, 'dsec-test', mounted]);
    return mounted;
  };
  afterEach(() => {
    if (mounted) execFileSync('umount', [mounted]);
    mounted = undefined;
  });

  test('a full disk: said, nothing half-done, and the store goes on once there is room', async () => {
    const path = mount('size=1m');
    const small = await openStore(path);
    const kept = await small.put(someBytes(100_000, 'kept'));
    const large = someBytes(2_000_000, 'large');
    await expect(small.put(large)).rejects.toMatchObject({ code: 'STORE_FULL', http: 507 });
    expect(tmpOf(path)).toEqual([]);
    expect((await collected(small.listBlobs())).map((blob) => blob.digest)).toEqual([kept]);
    writeFileSync(join(path, 'blobs/ballast'), Buffer.alloc(0));
    const free = () =>
      Number(execFileSync('stat', ['-f', '-c', '%a * %S', path], { encoding: 'utf8' }).split(' * ')[0]) * 4096;
    writeFileSync(join(path, 'blobs/ballast'), Buffer.alloc(free()));
    const full = { code: 'STORE_FULL' };
    await expect(
      small.setRef({ name: 'a', manifest: { mediaType: 'm', digest: kept, size: 1 } }),
    ).rejects.toMatchObject(full);
    await expect(small.putRecord('a', 'b', 1)).rejects.toMatchObject(full);
    await expect(small.stage()).rejects.toMatchObject(full);
    await expect(small.put(Buffer.from('x'))).rejects.toMatchObject(full);
    expect(await small.listRefs()).toEqual([]);
    expect(tmpOf(path)).toEqual([]);
    rmSync(join(path, 'blobs/ballast'));
    await small.setRef({ name: 'a', manifest: { mediaType: 'm', digest: kept, size: 1 } });
    expect(await small.getRef('a')).toBeDefined();
  });

  test('a file from another file system is copied, and published whole', async () => {
    const path = mount('size=8m');
    const other = await openStore(path);
    const bytes = someBytes(3_000_000, 'far');
    writeFileSync(join(root, 'far'), bytes, { mode: 0o600 });
    await other.putFile(join(root, 'far'), digestOf(bytes), bytes.length);
    expect(existsSync(join(root, 'far'))).toBe(false);
    expect(digestOf(await other.readVerified(digestOf(bytes)))).toBe(digestOf(bytes));
    expect(statSync(other.localPath(digestOf(bytes))!).mode & 0o777).toBe(0o644);
    expect(tmpOf(path)).toEqual([]);
  });

  test('a read-only store reads, and says why it does not write', async () => {
    const path = mount('size=8m');
    const digest = await (await openStore(path)).put(Buffer.from('x'));
    mkdirSync(join(path, 'tmp/00000000-1-dead'));
    execFileSync('mount', ['-o', 'remount,ro', path]);
    const reading = await openStore(path);
    expect((await reading.readVerified(digest)).toString()).toBe('x');
    const refused = { code: 'STORE_READ_ONLY', exit: 5 };
    await expect(reading.put(Buffer.from('y'))).rejects.toMatchObject(refused);
    await expect(reading.stage()).rejects.toMatchObject(refused);
    await expect(reading.setRef({ name: 'a', manifest: { mediaType: 'm', digest, size: 1 } })).rejects.toMatchObject(
      refused,
    );
    await expect(reading.hold('publish')).rejects.toMatchObject(refused);
  });

  test("another user's store reads, and says who may write", async () => {
    await store.put(Buffer.from('x'));
    chmodSync(root, 0o755);
    // In a process of its own: what this one may do is not to be changed under its feet.
    const run = (mode: string) =>
      execFileSync(process.execPath, [writerPath(), mode, at()], {
        uid: 65534,
        gid: 65534,
        encoding: 'utf8',
        env: { PATH: process.env.PATH, HOME: '/tmp' },
      });
    expect(run('errors')).toBe('put STORE_ACCESS\nstage STORE_ACCESS\nsetRef STORE_ACCESS\nread x\n');
  });
});
