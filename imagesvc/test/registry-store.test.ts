/** Images that were pushed to a registry, read from there. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { digestOf } from '#base';
import { allBlobsOf, inspectImage, listImages, openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { pushImage } from '../catalog/push.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { storeRangeSource } from '../store/store-range-source.ts';
import type { Trace } from '../trace/trace.ts';
import { keepTrace, mergedTrace } from '../trace/trace-store.ts';
import { LoopbackRegistry } from './loopback-registry.ts';
import { publishMadeUp } from './made-up-image.ts';
import { collected } from './store-conformance.ts';

const withRegistry = spawnSync('sh', ['-c', 'command -v docker-registry']).status === 0;
if (!withRegistry) console.log('registry-store: no docker-registry here, skipped (apt install docker-registry)');

describe('addresses of registries', () => {
  test.each([
    ['docker://', /write docker/],
    ['docker://host/a:tag', /leave the tag out/],
    [`docker://host/a@sha256:${'0'.repeat(64)}`, /leave the tag out/],
    ['docker://host/a?creds=user:secret', /log in/],
    ['docker://host/a?other=1', /no option "other"/],
  ])('%s is refused', async (url, why) => {
    await expect(openStore(url)).rejects.toMatchObject({
      code: 'STORE_URL',
      message: expect.stringMatching(why) as string,
    });
    await expect(openStore(url)).rejects.not.toMatchObject({ message: expect.stringContaining('secret') as string });
  });
});

describe.skipIf(!withRegistry)('a registry as a store', () => {
  let root: string;
  let registry: LoopbackRegistry;
  let folder: BlobStore;
  let store: BlobStore;
  let image: Image;
  beforeAll(async () => {
    root = mkdtempSync(join(tmpdir(), 'dsec-registry-store-'));
    registry = await LoopbackRegistry.start(root);
    folder = await openStore(join(root, 'folder'));
    image = await publishMadeUp(folder, 'app:1', { kind: 'toolkit', layers: ['1', '2'], dataBytes: 700_000 });
    await pushImage(folder, 'app:1', `docker://${registry.host}/team/app:1`);
    await publishMadeUp(folder, 'app:2', { kind: 'toolkit', layers: ['1', '3'], dataBytes: 700_000 });
    await pushImage(folder, 'app:2', `docker://${registry.host}/team/app:2`);
    store = await openStore(`docker://${registry.host}/team/app`);
  });
  afterAll(async () => {
    await registry?.stop();
    if (root !== undefined) rmSync(root, { recursive: true, force: true });
  });

  test('its tags are the images, by the whole name or its last part', async () => {
    expect((await listImages(store)).map(({ name, problem }) => [name, problem])).toEqual([
      ['team/app:1', undefined],
      ['team/app:2', undefined],
    ]);
    for (const name of ['team/app:1', 'app:1', image.manifestDigest, image.manifestDigest.slice(7, 19)]) {
      const found = await openImage(store, name);
      expect({ ...found, name: '' }).toEqual({ ...image, name: '' });
    }
    for (const name of ['other/app:1', 'team/app:3', 'app']) {
      await expect(openImage(store, name)).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    }
    expect((await inspectImage(store, 'app:2')).layers).toHaveLength(2);
    expect(await (await openStore(`docker://${registry.host}/nobody/pushed`)).listRefs()).toEqual([]);
  });

  test('every blob comes back, whole and by range', async () => {
    for (const { digest, size } of allBlobsOf(image)) {
      const fresh = await openStore(`docker://${registry.host}/team/app`);
      const bytes = await folder.readVerified(digest);
      const [offset, length] = [Math.floor(size / 3), Math.ceil(size / 4)];
      expect(await fresh.read(digest, offset, length)).toEqual(bytes.subarray(offset, offset + length));
      expect(await fresh.stat(digest)).toEqual({ sizeBytes: size });
      expect(await fresh.read(digest, size, 0)).toEqual(Buffer.alloc(0));
      await expect(fresh.read(digest, size - 1, 2)).rejects.toMatchObject({ code: 'STORE_SHORT_READ' });
      await expect(fresh.read(digest, -1, 2)).rejects.toMatchObject({ code: 'STORE_SHORT_READ' });
      expect(digestOf(await fresh.readVerified(digest))).toBe(digest);
      expect(digestOf(Buffer.concat(await collected(fresh.stream(digest))))).toBe(digest);
      expect(await storeRangeSource(fresh).readRange(digest, 0, 1, { priority: 'interactive' })).toEqual(
        bytes.subarray(0, 1),
      );
    }
    const listed = (await collected(store.listBlobs())).map(({ digest }) => digest);
    expect(listed).toEqual(
      expect.arrayContaining([image.manifestDigest, ...allBlobsOf(image).map(({ digest }) => digest)]),
    );
  });

  test('traces that were pushed with an image are its traces here', async () => {
    const { digest, size } = image.layers[0]!.devices[0]!.blob;
    const trace: Trace = {
      image: image.manifestDigest,
      command: ['start'],
      blobs: [{ digest, sizeBytes: size }],
      chunks: [{ blob: 0, chunk: 1, ms: 0 }],
      files: [],
    };
    await keepTrace(folder, image, 'serve', trace);
    await pushImage(folder, 'app:1', `docker://${registry.host}/team/app:1`);
    const fresh = await openStore(`docker://${registry.host}/team/app`);
    expect(await mergedTrace(fresh, await openImage(fresh, 'app:1'))).toEqual(trace);
    expect(await mergedTrace(fresh, await openImage(fresh, 'app:2'))).toBeUndefined();
    // The list that the registry does not keep is no image.
    expect((await listImages(fresh)).map(({ name }) => name)).toEqual(['team/app:1', 'team/app:2']);
  });

  test('what is missing is said to be', async () => {
    const missing = { code: 'STORE_BLOB_MISSING', retryable: false };
    expect(await store.stat(digestOf('x'))).toBeUndefined();
    await expect(store.read(digestOf('x'), 0, 1)).rejects.toMatchObject(missing);
    await expect(store.readVerified(digestOf('x'))).rejects.toMatchObject(missing);
    await expect(collected(store.stream(digestOf('x')))).rejects.toMatchObject(missing);
  });

  test('nothing can be written', async () => {
    const refused = { code: 'STORE_NO_WRITES', exit: 5 };
    await expect(store.put(Buffer.from('x'))).rejects.toMatchObject(refused);
    await expect(store.stage()).rejects.toMatchObject(refused);
    await expect(store.hold('publish')).rejects.toMatchObject(refused);
    await expect(store.setRef({ name: 'a', manifest: image.config })).rejects.toMatchObject(refused);
    await expect(store.deleteRef('app:1')).rejects.toMatchObject(refused);
    expect(await store.oldestStagingMs()).toBeUndefined();
    expect(await store.getRecord('a', 'b')).toBeUndefined();
  });
});
