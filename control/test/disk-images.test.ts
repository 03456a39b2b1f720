/** Disks as images of a store: published, read on demand, kept while something lies on them. */
import { spawnSync } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  rmSync,
  statSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeEach, describe, expect, test } from 'vitest';
import { type Digest, hexOf } from '#base';
import { openStore } from '#imagesvc';
import { openNamedDisk } from '#ublk-daemon';
import { publishPoint } from '../disk-images/publish-disk.ts';
import { storeLayerOpener } from '../disk-layers.ts';
import { runCommand } from './command-run.ts';
import { findS3, hasRegistry, RemoteStore, S3_KEYS } from './remote-stores.ts';

const MIB = 2 ** 20;
const SIZE = 8 * MIB;
const DSEC = fileURLToPath(new URL('../../bin/dsec', import.meta.url));
const S3_PROGRAM = findS3();
const REGISTRY = hasRegistry();
const VARIABLES = ['DSEC_STATE', 'DSEC_STORE', 'DSEC_CACHE', 'DSEC_RUN'] as const;

let root: string;
const at = (...names: string[]) => join(root, ...names);
const dsec = async (...argv: string[]) => JSON.parse((await runCommand(...argv, '--json')).text);
const disk = (...argv: string[]) => dsec('disk', ...argv);

beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-images-'));
  for (const name of VARIABLES) process.env[name] = at(name.slice(5).toLowerCase());
  Object.assign(process.env, S3_KEYS);
});
afterEach(() => rmSync(root, { recursive: true, force: true }));
afterAll(() => {
  for (const name of [...VARIABLES, ...Object.keys(S3_KEYS)]) delete process.env[name];
});

/** What is written to a disk, and what it must hold then. */
class Content {
  readonly bytes: Buffer;

  constructor(bytes = Buffer.alloc(SIZE)) {
    this.bytes = bytes;
  }

  async write(name: string, offset: number, bytes: Buffer): Promise<void> {
    const { disk } = await openNamedDisk(name, { openStoreLayer: storeLayerOpener() });
    await disk.write(offset, bytes);
    await disk.close();
    bytes.copy(this.bytes, offset);
  }
}

async function contentOf(name: string, openStoreLayer = storeLayerOpener()): Promise<Buffer> {
  const { disk } = await openNamedDisk(name, { openStoreLayer });
  try {
    return await disk.read(0, disk.sizeBytes);
  } finally {
    await disk.close();
  }
}

const hash = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');

/** Random, so that it does not compress; text, so that it does. */
async function makeWork(): Promise<Content> {
  await disk('create', 'work', '--size', '8M');
  const content = new Content();
  await content.write('work', 0, randomBytes(2 * MIB));
  await content.write('work', 6 * MIB, Buffer.alloc(MIB, 'some text that compresses, '));
  return content;
}

test('only what is new is published, and disks of it hold the same', async () => {
  const content = await makeWork();
  const first = await disk('snapshot', 'work', 'p1', '--name', 'team/work:1');
  expect(first).toMatchObject({ snapshot: 'p1', image: { name: 'team/work:1', layers: 1, newLayers: 1 } });
  const atFirst = new Content(Buffer.from(content.bytes));
  await content.write('work', MIB, Buffer.alloc(64 * 1024, 7));
  const second = await disk('snapshot', 'work', '--name', 'team/work:2');
  expect(second.image).toMatchObject({ layers: 2, newLayers: 1 });
  expect(second.image.newBytes).toBeLessThan(MIB);
  // The same point again: it is there, nothing is sealed and nothing sent.
  const again = await disk('snapshot', 'work', 'p1', '--name', 'team/work:again');
  expect(again.image).toMatchObject({ digest: first.image.digest, newLayers: 0, newBytes: 0 });
  expect((await disk('ls'))[0].snapshots.length).toBe(2);

  expect(await disk('create', 'one', '--from', 'team/work:1')).toMatchObject({ sizeBytes: SIZE, layers: 2 });
  await disk('create', 'two', '--from', 'team/work:2', '--size', '16M');
  expect(hash(await contentOf('one'))).toBe(hash(atFirst.bytes));
  const two = await contentOf('two');
  expect(two.length).toBe(2 * SIZE);
  expect(hash(two)).toBe(hash(Buffer.concat([content.bytes, Buffer.alloc(SIZE)])));

  // An increment of the image that the disk was made of.
  await atFirst.write('one', 5 * MIB, randomBytes(4096));
  const packed = await disk('pack-diff', 'one', '--name', 'team/work:3', '--compress', 'lz4', '--block-size', '16');
  expect(packed.image).toMatchObject({ layers: 2, newLayers: 1 });
  const inspected = await dsec('inspect', 'team/work:3');
  expect(inspected).toMatchObject({ kind: 'disk', base: first.image.digest, ownLayers: 1, disk: { sizeBytes: SIZE } });
  expect(inspected.disk.layers.map(({ own }: { own: boolean }) => own)).toEqual([false, true]);
  await disk('create', 'three', '--from', 'team/work:3');
  expect(hash(await contentOf('three'))).toBe(hash(atFirst.bytes));
  // Further on from there: a fork of a fork, uncompressed.
  await disk('snapshot', 'three', 'fork');
  await disk('restore', 'three', 'fork', 'four');
  expect(hash(await contentOf('four'))).toBe(hash(atFirst.bytes));
  expect((await disk('snapshot', 'four', '--name', 'four:1', '--compress', 'none')).image.layers).toBe(4);

  expect(await dsec('verify', 'team/work:3')).toMatchObject({ ok: true, layers: 2 });
  const rows = await dsec('images');
  expect(rows.map(({ name, kind, layers }: Record<string, unknown>) => [name, kind, layers])).toContainEqual([
    'team/work:2',
    'disk',
    2,
  ]);
  for (const command of [
    ['mount', 'team/work:1', at('mnt')],
    ['ls', 'team/work:1'],
    ['cat', 'team/work:1', '/x'],
  ]) {
    await expect(runCommand(...command)).rejects.toMatchObject({ code: 'CATALOG_IS_DISK' });
  }
  mkdirSync(at('files'));
  writeFileSync(at('files', 'a'), 'a');
  await dsec('convert', `dir:${at('files')}`, '--name', 'files:1');
  await expect(disk('create', 'x', '--from', 'files:1')).rejects.toMatchObject({ code: 'CATALOG_NOT_DISK' });
  await expect(disk('create', 'x', '--from', 'nothing:1')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
  await expect(disk('create', 'x', '--from', 'team/work:1', '--ext4')).rejects.toMatchObject({ code: 'CLI_USAGE' });
  await expect(disk('create', 'x', '--from', at('files', 'a'))).rejects.toMatchObject({ code: 'CLI_USAGE' });
  await expect(disk('snapshot', 'work')).rejects.toMatchObject({ code: 'CLI_USAGE' });
}, 120_000);

test('published from the sealed layer while the disk is written to, as of the snapshot', async () => {
  await makeWork();
  const { disk: opened, snapshot, lowers } = await openNamedDisk('work');
  const before = await opened.read(0, SIZE);
  await snapshot('p1');
  let isDone = false;
  const writer = (async () => {
    for (let at = 0; !isDone; at++) {
      await opened.write(((at * 40_960) % SIZE) & ~4095, Buffer.alloc(4096, at));
      await opened.flush();
    }
  })();
  const store = await openStore(process.env.DSEC_STORE!);
  const zfile = { algorithm: 'zstd', blockSize: 16_384 } as const;
  const seal = async () => lowers.length + 1;
  await publishPoint(store, 'work', seal, { name: 'work:1', zfile, openStoreLayer: storeLayerOpener() });
  isDone = true;
  await writer;
  await opened.close();
  await disk('create', 'fork', '--from', 'work:1');
  expect(hash(await contentOf('fork'))).toBe(hash(before));
  expect(hash(await contentOf('work'))).not.toBe(hash(before));
}, 120_000);

test('resize and merge, from the command line', async () => {
  const content = await makeWork();
  await disk('snapshot', 'work', 'p1', '--name', 'work:1');
  await disk('create', 'fork', '--from', 'work:1');
  expect(await disk('resize', 'fork', '--size', '16M')).toEqual({ disk: 'fork', sizeBytes: 2 * SIZE, told: true });
  await expect(disk('resize', 'fork', '--size', '8M')).rejects.toMatchObject({ code: 'DISK_SIZE' });
  await disk('resize', 'fork', '--size', '8M', '--shrink');
  expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));
  expect(await disk('merge', 'fork')).toEqual({ disk: 'fork', layersBefore: 4, layersAfter: 2 });
  expect(await disk('merge', 'fork', '--whole')).toMatchObject({ layersAfter: 1 });
  // It depends on nothing any more.
  await dsec('rm', 'work:1');
  expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));

  const layers = [at('one.lsmt'), at('two.tar')];
  await disk('pack-diff', 'work', '--whole', '-o', layers[0]!);
  await disk('snapshot', 'work', 'p2');
  await content.write('work', 4096, randomBytes(4096));
  await disk('pack-diff', 'fork', '--whole', '--tar', '--compress', 'zstd', '-o', layers[1]!);
  const merged = await disk('merge', layers[1]!, '-o', at('merged.lsmt'));
  expect(merged).toMatchObject({ path: at('merged.lsmt'), layers: 1 });
  expect(await disk('verify', at('merged.lsmt'))).toMatchObject([{ ok: true, kind: 'sealed' }]);
  await expect(disk('merge', layers[1]!, '-o', at('merged.lsmt'))).rejects.toMatchObject({ code: 'CLI_OUTPUT_EXISTS' });
  await expect(disk('merge', 'work', 'fork')).rejects.toMatchObject({ code: 'CLI_USAGE' });
  await expect(disk('merge', 'work', '--tar')).rejects.toMatchObject({ code: 'CLI_USAGE' });
  await expect(disk('merge', 'nobody')).rejects.toMatchObject({ code: 'DISK_NOT_FOUND' });
  await expect(disk('merge', at('none'), '-o', at('x'))).rejects.toMatchObject({ code: 'CLI_INPUT_MISSING' });
}, 120_000);

test('garbage collection keeps what a disk lies on, until the disk is gone', async () => {
  const content = await makeWork();
  await disk('snapshot', 'work', 'p1', '--name', 'work:1');
  await disk('create', 'fork', '--from', 'work:1');
  const [removed] = await dsec('rm', 'work:1');
  expect(removed.keptFor).toEqual(['disk fork lies on layers of it']);
  await dsec('gc', '--grace', '0s');
  expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));
  // It can be published again: its base has gone, the layers are there.
  expect((await disk('snapshot', 'fork', '--name', 'fork:1')).image).toMatchObject({ layers: 2, newLayers: 1 });
  expect(await dsec('verify', 'fork:1')).toMatchObject({ ok: true });
  await dsec('rm', 'fork:1');
  await disk('rm', 'fork');
  await dsec('gc', '--grace', '0s');
  const store = await openStore(process.env.DSEC_STORE!);
  const left: unknown[] = [];
  for await (const blob of store.listBlobs()) left.push(blob);
  expect(left).toEqual([]);
}, 120_000);

test('a blob of the store that was changed is refused, not read', async () => {
  await makeWork();
  await disk('snapshot', 'work', 'p1', '--name', 'work:1');
  await disk('create', 'fork', '--from', 'work:1', '--lazy');
  const { disk: found } = await dsec('inspect', 'work:1');
  const store = await openStore(process.env.DSEC_STORE!);
  const path = store.localPath(found.layers[0].digest as Digest)!;
  flip(path, 300 * 1024);
  await expect(disk('create', 'direct', '--from', 'work:1')).rejects.toMatchObject({ code: 'MOUNT_DIGEST_MISMATCH' });
  const quick = storeLayerOpener({ retry: { budgetMs: 1000, maxDelayMs: 50 } });
  await expect(contentOf('fork', quick)).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH' });
  expect(await dsec('verify', 'work:1')).toMatchObject({ ok: false });
}, 120_000);

test('an image that is no stack of layers is found by verify', async () => {
  await makeWork();
  await disk('snapshot', 'work', 'p1', '--name', 'work:1');
  const store = await openStore(process.env.DSEC_STORE!);
  const { publishDiskImage, hashBlob } = await import('#imagesvc');
  const bytes = randomBytes(10_000);
  const { chunkDigests } = await hashBlob(
    (async function* () {
      yield bytes;
    })(),
  );
  const blob = { mediaType: '', digest: await store.put(bytes), size: bytes.length };
  const table = { mediaType: '', digest: await store.put(chunkDigests), size: chunkDigests.length };
  await publishDiskImage(store, {
    name: 'junk:1',
    config: Buffer.from('{"architecture":"unknown","os":"unknown"}'),
    layers: [{ blob, chunkDigests: table }],
  });
  expect(await dsec('verify', 'junk:1')).toMatchObject({ ok: false, problemCount: 1 });
  await expect(disk('create', 'x', '--from', 'junk:1')).rejects.toMatchObject({ code: 'DISK_NOT_A_LAYER' });
  expect(await disk('ls')).toHaveLength(1);
}, 120_000);

test('what OverlayBD’s converter pushed is pulled, and made a disk of', async () => {
  const content = await makeWork();
  await disk('snapshot', 'work', 'p1', '--name', 'work:1', '--compress', 'lz4');
  await dsec('push', 'work:1', `oci:${at('layout')}:theirs`);
  // As they have it: no digests of chunks, none of our annotations.
  const blobs = at('layout', 'blobs', 'sha256');
  const index = JSON.parse(readFileSync(at('layout', 'index.json'), 'utf8'));
  const manifest = JSON.parse(readFileSync(join(blobs, hexOf(index.manifests[0].digest)), 'utf8'));
  manifest.layers = manifest.layers.filter(({ mediaType }: { mediaType: string }) => mediaType.endsWith('.tar'));
  delete manifest.annotations;
  const bytes = Buffer.from(JSON.stringify(manifest));
  const digest = `sha256:${hash(bytes)}`;
  writeFileSync(join(blobs, hexOf(digest as Digest)), bytes);
  index.manifests[0] = { ...index.manifests[0], digest, size: bytes.length };
  writeFileSync(at('layout', 'index.json'), JSON.stringify(index));

  process.env.DSEC_STORE = at('other-store');
  await dsec('pull', `oci:${at('layout')}:theirs`, '--name', 'theirs:1');
  expect(await dsec('verify', 'theirs:1')).toMatchObject({ ok: true, layers: 1 });
  expect((await dsec('inspect', 'theirs:1')).disk.layers[0].digest).toBe(manifest.layers[0].digest);
  await disk('create', 'theirs', '--from', 'theirs:1');
  expect(hash(await contentOf('theirs'))).toBe(hash(content.bytes));
  flip(join(blobs, hexOf(manifest.layers[0].digest)), 5000);
  process.env.DSEC_STORE = at('third-store');
  await expect(dsec('pull', `oci:${at('layout')}:theirs`, '--name', 'theirs:1')).rejects.toMatchObject({
    code: 'CATALOG_PULL_MISMATCH',
  });
}, 120_000);

test.each(['disk-sealed', 'disk-config-replaced', 'disk-layer-put', 'disk-layers-published'])(
  'killed at %s, publishing leaves the store as it was, and goes on the next time',
  async (where) => {
    const content = await makeWork();
    await disk('snapshot', 'work', 'p0', '--name', 'work:0');
    await content.write('work', 0, randomBytes(8192));
    const env = { ...process.env, DSEC_FAILPOINT: where };
    const killed = spawnSync(DSEC, ['disk', 'snapshot', 'work', 'p1', '--name', 'work:1'], { env, encoding: 'utf8' });
    expect(killed.status, killed.stderr).not.toBe(0);
    expect((await dsec('images')).map(({ name }: { name: string }) => name)).toEqual(['work:0']);
    expect(await dsec('verify', 'work:0')).toMatchObject({ ok: true });
    expect((await disk('snapshot', 'work', 'p1', '--name', 'work:1')).image.layers).toBe(2);
    expect(await dsec('verify', 'work:1')).toMatchObject({ ok: true });
    await disk('create', 'fork', '--from', 'work:1');
    expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));
    await dsec('gc', '--grace', '0s');
    expect(readdirSync(at('store', 'tmp'))).toEqual([]);
    expect(hash(await contentOf('work'))).toBe(hash(content.bytes));
  },
  120_000,
);

describe.skipIf(S3_PROGRAM === undefined)('in S3', () => {
  test('layers are read on demand, kept, waited for, and never believed', async () => {
    const s3 = await RemoteStore.s3(S3_PROGRAM!, at('s3'), 'disks');
    try {
      const url = `s3://disks/images?endpoint=${encodeURIComponent(`http://${s3.host}`)}`;
      const content = await makeWork();
      await disk('snapshot', 'work', 'p1', '--name', 'work:1', '--store', url);
      expect(await dsec('verify', 'work:1', '--store', url)).toMatchObject({ ok: true });
      await disk('create', 'fork', '--from', 'work:1', '--store', url);

      const retry = { budgetMs: 1500, maxDelayMs: 100 };
      const opener = storeLayerOpener({ retry });
      const { disk: opened } = await openNamedDisk('fork', { openStoreLayer: opener });
      const part = await opened.read(6 * MIB, 4096);
      expect(part.equals(content.bytes.subarray(6 * MIB, 6 * MIB + 4096))).toBe(true);
      // Header, index, and what was read; not all of the 2 MiB of random bytes before.
      const [stats] = opener.stats();
      expect(stats!.reads.interactive.bytes + stats!.reads.prefetch.bytes).toBeLessThan(1.5 * MIB);
      expect(stats!.cache.memoryBytes).toBeLessThanOrEqual(stats!.cache.memoryLimitBytes);

      // A second process reads beside it.
      const script = `import { openNamedDisk } from '${join(import.meta.dirname, '../../ublk-daemon/index.ts')}';
        import { storeLayerOpener } from '${join(import.meta.dirname, '../disk-layers.ts')}';
        const { disk: first } = await openNamedDisk('second', { openStoreLayer: storeLayerOpener() });
        const { disk } = await openNamedDisk('second2', { openStoreLayer: storeLayerOpener() });
        process.stdout.write(await disk.read(${6 * MIB}, 4096));
        await first.close(); await disk.close(); process.exit(0);`;
      await disk('create', 'second', '--from', 'work:1', '--store', url);
      await disk('create', 'second2', '--from', 'work:1', '--store', url);
      const tsx = ['--import', 'tsx', '--input-type=module', '-e', script];
      const other = spawnSync(process.execPath, tsx, { env: process.env, maxBuffer: MIB });
      expect(String(other.stderr)).toBe('');
      expect(other.stdout.equals(part)).toBe(true);
      const [storeFolder] = readdirSync(at('cache', 'disks'));
      expect(readdirSync(at('cache', 'disks', storeFolder!)).sort()).toEqual(['0', '1', '2']);

      // Away: what was read is there, the rest is an error after a while, and there when the store is back.
      await s3.stop();
      expect((await opened.read(6 * MIB, 4096)).equals(part)).toBe(true);
      await expect(opened.read(MIB, 4096)).rejects.toMatchObject({ retryable: true });
      await s3.start();
      expect((await opened.read(MIB, 4096)).equals(content.bytes.subarray(MIB, MIB + 4096))).toBe(true);
      await opened.close();

      // Opened while it is away: of what the cache has.
      await s3.stop();
      const { disk: offline } = await openNamedDisk('fork', { openStoreLayer: storeLayerOpener({ retry }) });
      expect((await offline.read(MIB, 4096)).equals(content.bytes.subarray(MIB, MIB + 4096))).toBe(true);
      await offline.close();
      await s3.start();

      // Damaged in the cache: fetched again.
      const cacheFiles = filesBelow(at('cache', 'disks', storeFolder!, '0')).filter(
        (path) => statSync(path).size > MIB,
      );
      expect(cacheFiles).toHaveLength(1);
      flip(cacheFiles[0]!, 1000);
      expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));

      // Collection from here keeps what disks of this node lie on, and their caches; without disks both go.
      await dsec('rm', 'work:1', '--store', url);
      await dsec('gc', '--grace', '0s', '--store', url);
      expect(hash(await contentOf('second'))).toBe(hash(content.bytes));
      await disk('rm', 'fork', 'second', 'second2');
      const collected = await dsec('gc', '--grace', '0s', '--store', url);
      expect(collected.deleted.length).toBeGreaterThan(0);
      expect(collected.caches.chunkBlobs).toBeGreaterThan(0);
    } finally {
      await s3.stop();
    }
  }, 240_000);

  test('wrong bytes under the right digest never reach a reader', async () => {
    const s3 = await RemoteStore.s3(S3_PROGRAM!, at('s3'), 'disks');
    try {
      const url = `s3://disks/images?endpoint=${encodeURIComponent(`http://${s3.host}`)}`;
      const content = await makeWork();
      await disk('snapshot', 'work', 'p1', '--name', 'work:1', '--store', url);
      await disk('create', 'fork', '--from', 'work:1', '--store', url);
      const blob = filesBelow(s3.folder).find((path) => statSync(path).size > MIB)!;
      flip(blob, MIB + 5);
      rmSync(at('cache'), { recursive: true, force: true });
      const { disk: opened } = await openNamedDisk('fork', { openStoreLayer: storeLayerOpener() });
      try {
        let refused = 0;
        for (let offset = 0; offset < SIZE; offset += 256 * 1024) {
          const bytes = await opened.read(offset, 256 * 1024).catch((error) => {
            expect(error.code).toBe('CACHE_CHUNK_MISMATCH');
            refused++;
          });
          if (bytes) expect(bytes.equals(content.bytes.subarray(offset, offset + 256 * 1024))).toBe(true);
        }
        expect(refused).toBeGreaterThan(0);
        expect(refused).toBeLessThan(4);
      } finally {
        await opened.close();
      }
    } finally {
      await s3.stop();
    }
  }, 240_000);
});

describe.skipIf(!REGISTRY)('in a registry', () => {
  test('pushed, read from there on demand, pulled', async () => {
    const registry = await RemoteStore.registry(at('registry'));
    try {
      const content = await makeWork();
      await disk('snapshot', 'work', 'p1', '--name', 'work:1');
      expect(await dsec('push', 'work:1', `docker://${registry.host}/team/work:1`)).toMatchObject({ skippedBlobs: 0 });
      await content.write('work', 0, randomBytes(4096));
      await disk('snapshot', 'work', 'p2', '--name', 'work:2');
      const pushed = await dsec('push', 'work:2', `docker://${registry.host}/team/work:2`);
      // The layer below and its chunk digests are there.
      expect(pushed.skippedBlobs).toBe(2);
      const url = `docker://${registry.host}/team/work`;
      await disk('create', 'fork', '--from', 'work:2', '--store', url);
      expect(hash(await contentOf('fork'))).toBe(hash(content.bytes));
      await content.write('fork', MIB, randomBytes(4096));
      await expect(disk('snapshot', 'fork', '--name', 'fork:1', '--store', url)).rejects.toMatchObject({
        code: 'STORE_NO_WRITES',
      });
      // Into a store that lacks the layers below: they come along.
      process.env.DSEC_STORE = at('other-store');
      expect((await disk('snapshot', 'fork', 'p3', '--name', 'fork:1')).image).toMatchObject({
        layers: 3,
        newLayers: 3,
      });
      await disk('create', 'last', '--from', 'fork:1');
      expect(hash(await contentOf('last'))).toBe(hash(content.bytes));
      process.env.DSEC_STORE = at('third-store');
      await dsec('pull', `docker://${registry.host}/team/work:2`, '--name', 'work:2');
      expect(await dsec('verify', 'work:2')).toMatchObject({ ok: true, layers: 2 });
      writeFileSync(at('names'), 'work:2\n');
      await dsec('sync', '--to', at('fourth-store'), '--images', at('names'));
      expect(await dsec('verify', 'work:2', '--store', at('fourth-store'))).toMatchObject({ ok: true });
    } finally {
      await registry.stop();
    }
  }, 240_000);
});

/** Changes a byte in place. */
function flip(path: string, offset: number): void {
  const fd = openSync(path, 'r+');
  const byte = Buffer.alloc(1);
  readSync(fd, byte, 0, 1, offset);
  byte[0]! ^= 0xff;
  writeSync(fd, byte, 0, 1, offset);
}

function filesBelow(folder: string): string[] {
  if (!existsSync(folder)) return [];
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
}
