/** What a pull verified on the way need not be hashed by the first mount; and repair lets others work while it hashes. */
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import type { Digest } from '#base';
import { openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { pullImage } from '../catalog/pull.ts';
import { pushImage } from '../catalog/push.ts';
import { setAsideDamaged } from '../catalog/set-aside.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { publishMadeUp } from './made-up-image.ts';

let root: string;
let store: BlobStore;
let image: Image;

beforeEach(async () => {
  root = mkdtempSync(join(tmpdir(), 'dsec-pulled-'));
  store = await openStore(join(root, 'from'));
  image = await publishMadeUp(store, 'app:1', { layers: ['1', '2'], dataBytes: 700_000 });
});
afterEach(() => {
  vi.unstubAllEnvs();
  vi.restoreAllMocks();
  rmSync(root, { recursive: true, force: true });
});

const blobs = () => image.layers.flatMap(({ meta, devices }) => [meta, ...devices.map(({ blob }) => blob)]);

test('a pull remembers its blobs as proved', async () => {
  await pushImage(store, 'app:1', `oci:${root}/layout:v1`);
  vi.stubEnv('DSEC_CACHE', join(root, 'cache'));
  vi.spyOn(process, 'getuid').mockReturnValue(0);
  const to = await openStore(join(root, 'to'));
  await pullImage(to, `oci:${root}/layout:v1`, 'app:1');
  const proved = readdirSync(join(root, 'cache/proofs')).map((name) => `sha256:${name.split('-')[0]}`);
  expect(proved).toEqual(expect.arrayContaining(blobs().map(({ digest }) => digest)));
  expect((await openImage(to, 'app:1')).manifestDigest).toBe(image.manifestDigest);
});

/** Does `meanwhile` whenever a blob is about to be read. */
function watched(meanwhile: (digest: Digest) => Promise<void>): BlobStore {
  return {
    localPath: (digest: Digest) => store.localPath(digest),
    hold: (mode: 'publish' | 'collect') => store.hold(mode),
    deleteBlob: (digest: Digest) => store.deleteBlob(digest),
    async *stream(digest: Digest) {
      await meanwhile(digest);
      yield* store.stream(digest);
    },
  } as Partial<BlobStore> as BlobStore;
}

test('repair hashes while others publish, and deletes what is damaged alone', async () => {
  const [good, bad] = blobs().map(({ digest }) => digest) as [Digest, Digest];
  writeFileSync(store.localPath(bad)!, 'damaged');
  let published = 0;
  const busy = watched(async () => {
    await (await store.hold('publish')).release();
    published++;
  });
  expect(await setAsideDamaged(busy, [good, bad])).toEqual([bad]);
  expect(published).toBe(2);
  expect(await store.stat(bad)).toBeUndefined();
  expect(await store.stat(good)).toBeDefined();
});

test('a blob that somebody brings again while it is hashed stays', async () => {
  const { digest } = blobs()[1]!;
  const bytes = await store.readVerified(digest);
  const path = store.localPath(digest)!;
  let looks = 0;
  const busy = watched(async () => {
    looks++;
  });
  const replacing = {
    ...busy,
    async *stream(of: Digest) {
      yield* busy.stream(of);
      // Found damaged; before anything is done about it, the right bytes are there.
      if (looks === 1) {
        rmSync(path);
        writeFileSync(path, bytes);
      }
    },
  } as BlobStore;
  writeFileSync(path, 'damaged');
  expect(await setAsideDamaged(replacing, [digest])).toEqual([]);
  expect(looks).toBe(2);
  expect((await store.readVerified(digest)).equals(bytes)).toBe(true);
});
