import { mkdtempSync, rmSync, truncateSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { type Digest, digestOf, hexOf } from '#base';
import {
  allBlobsOf,
  inspectImage,
  keepBlobs,
  listImages,
  openImage,
  publishImage,
  removeImage,
  resolveImage,
  sizesOf,
  tagImage,
} from '../catalog/catalog.ts';
import { collectGarbage, DEFAULT_GRACE_MS } from '../catalog/collect-garbage.ts';
import { parseConfig, readConfig } from '../catalog/config.ts';
import { chunkDigestsSize } from '../catalog/manifest.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { MemoryStore } from '../store/memory-store.ts';
import { openStore } from '../store/open-store.ts';
import { publishMadeUp, putLayer } from './made-up-image.ts';
import { collected } from './store-conformance.ts';

let store: MemoryStore;
beforeEach(() => {
  store = new MemoryStore();
});
const digests = async (from: BlobStore = store) =>
  (await collected(from.listBlobs())).map((blob) => blob.digest).sort();
const needed = (...images: Awaited<ReturnType<typeof openImage>>[]) =>
  [
    ...new Set(images.flatMap((image) => [image.manifestDigest, ...allBlobsOf(image).map((blob) => blob.digest)])),
  ].sort();

test('a further name means the same image', async () => {
  const image = await publishMadeUp(store, 'a', { layers: ['a'] });
  const other = await publishMadeUp(store, 'b', { layers: ['b'] });
  expect(await tagImage(store, 'a', 'c:1')).toEqual({
    name: 'c:1',
    digest: image.manifestDigest,
    replaced: undefined,
  });
  expect(await tagImage(store, hexOf(other.manifestDigest).slice(0, 12), 'c:1')).toMatchObject({
    digest: other.manifestDigest,
    replaced: image.manifestDigest,
  });
  expect(await openImage(store, 'c:1')).toEqual({ ...other, name: 'c:1' });
  await store.deleteBlob(image.layers[0]!.meta.digest);
  await expect(tagImage(store, 'a', 'c:2')).rejects.toMatchObject({ code: 'CATALOG_BLOB_GONE' });
  expect(await store.getRef('c:2')).toBeUndefined();
});

describe('finding an image', () => {
  test('by name, tag, digest, and the first digits of its digest', async () => {
    const image = await publishMadeUp(store, 'team/app:1', { layers: ['a'] });
    const latest = await publishMadeUp(store, 'team/app', { layers: ['b'] });
    const hex = hexOf(image.manifestDigest);
    expect(await openImage(store, 'team/app:1')).toEqual(image);
    expect(await openImage(store, 'team/app')).toEqual(latest);
    expect(latest.name).toBe('team/app:latest');
    for (const text of [image.manifestDigest, hex, hex.slice(0, 6), `sha256:${hex.slice(0, 12)}`]) {
      expect(await openImage(store, text)).toEqual({ ...image, name: image.manifestDigest });
    }
    for (const text of ['team/app:2', 'team', digestOf('nothing'), hex.slice(0, 5), '000000']) {
      await expect(openImage(store, text)).rejects.toMatchObject({
        code: 'CATALOG_NOT_FOUND',
        exit: 4,
        message: expect.stringContaining(store.url) as string,
      });
    }
    for (const text of ['', 'Team', 'a b', 'sha256:12345', '../x']) {
      await expect(openImage(store, text)).rejects.toMatchObject({ code: 'STORE_NAME' });
    }
  });

  test('an image without a name is found by its digest', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['a'] });
    await store.deleteRef('a');
    const hex = hexOf(image.manifestDigest);
    expect((await openImage(store, hex.slice(0, 10))).manifestDigest).toBe(image.manifestDigest);
    // The digits of a blob that is no manifest find nothing.
    await expect(openImage(store, hexOf(image.config.digest).slice(0, 10))).rejects.toMatchObject({
      code: 'CATALOG_NOT_FOUND',
    });
    await expect(openImage(store, image.layers[0]!.meta.digest)).rejects.toMatchObject({ code: 'CATALOG_MANIFEST' });
  });

  test('a name goes before digits, and digits that fit two images are refused', async () => {
    const image = await publishMadeUp(store, 'x', { layers: ['a'] });
    const digits = hexOf(image.manifestDigest).slice(0, 8);
    const other = await publishMadeUp(store, digits, { layers: ['b'] });
    expect((await resolveImage(store, digits)).digest).toBe(other.manifestDigest);
    expect((await resolveImage(store, `sha256:${digits}`)).digest).toBe(image.manifestDigest);
    const twin = `sha256:${digits}${'0'.repeat(56)}` as Digest;
    await store.setRef({ name: 'twin', manifest: { mediaType: 'm', digest: twin, size: 1 } });
    await expect(resolveImage(store, `sha256:${digits}`)).rejects.toMatchObject({
      code: 'CATALOG_AMBIGUOUS',
      message: expect.stringContaining(twin) as string,
    });
  });

  test('damaged bytes are never an image', async () => {
    const image = await publishMadeUp(store, 'x', { layers: ['a'] });
    const bytes = await store.readVerified(image.manifestDigest);
    store.damage(
      image.manifestDigest,
      Buffer.from(bytes.toString().replace('"kind":"base"', '"kind":"disk"')).subarray(0, bytes.length),
    );
    bytes[100]! ^= 1;
    store.damage(image.manifestDigest, bytes);
    await expect(openImage(store, 'x')).rejects.toMatchObject({ code: 'STORE_DIGEST_MISMATCH' });
  });
});

describe('publishing', () => {
  test('the same image is published once, whatever the order of names', async () => {
    const a = await publishMadeUp(store, 'a', { layers: ['1', '2'] });
    const before = await digests();
    const b = await publishMadeUp(store, 'b', { layers: ['1', '2'] });
    expect(b.manifestDigest).toBe(a.manifestDigest);
    expect(await digests()).toEqual(before);
  });

  test('an image whose blob is missing or short is not published, and keeps its old name', async () => {
    const old = await publishMadeUp(store, 'a', { layers: ['old'] });
    const layer = await putLayer(store, 'new', 300_000);
    const publish = () => publishImage(store, { name: 'a', kind: 'base', layers: [layer], config: Buffer.from('{}') });
    await store.deleteBlob(layer.devices[0]!.blob.digest);
    await expect(publish()).rejects.toMatchObject({ code: 'CATALOG_BLOB_GONE', retryable: true });
    store.damage(layer.devices[0]!.blob.digest, Buffer.alloc(299_999));
    await expect(publish()).rejects.toMatchObject({
      code: 'CATALOG_BLOB_GONE',
      message: expect.stringContaining('299999 bytes instead of 300000') as string,
    });
    expect((await openImage(store, 'a')).manifestDigest).toBe(old.manifestDigest);
  });

  test('the order is: blobs looked at, config, manifest, name', async () => {
    const log: string[] = [];
    const layer = await putLayer(store, 'x', 10);
    const watched = new Proxy(store, {
      get(target, name) {
        const value = Reflect.get(target, name, target) as unknown;
        if (typeof value !== 'function') return value;
        return (...args: unknown[]) => {
          log.push(String(name));
          return (value as (...args: unknown[]) => unknown).apply(target, args);
        };
      },
    });
    await publishImage(watched, { name: 'a', kind: 'base', layers: [layer], config: Buffer.from('{}') });
    expect(log).toEqual(['put', 'hold', 'renew', 'renew', 'renew', 'renew', 'put', 'setRef']);
  });

  test('a name or a layer that is wrong publishes nothing', async () => {
    const layer = await putLayer(store, 'x', 10);
    const before = await digests();
    await expect(
      publishImage(store, { name: 'A', kind: 'base', layers: [layer], config: Buffer.from('{}') }),
    ).rejects.toMatchObject({ code: 'STORE_NAME' });
    await expect(
      publishImage(store, { name: 'a', kind: 'base', layers: [], config: Buffer.from('{}') }),
    ).rejects.toMatchObject({ code: 'CATALOG_MANIFEST' });
    expect(await store.listRefs()).toEqual([]);
    expect((await digests()).filter((digest) => !before.includes(digest))).toEqual([digestOf('{}')]);
  });

  test('a result that is there already can be kept', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    expect(await keepBlobs(store, allBlobsOf(image))).toBe(true);
    expect(await keepBlobs(store, [{ ...image.config, size: image.config.size + 1 }])).toBe(false);
    await store.deleteBlob(image.layers[0]!.meta.digest);
    expect(await keepBlobs(store, allBlobsOf(image))).toBe(false);
  });
});

describe('looking', () => {
  test('lists every name with sizes, also what is broken', async () => {
    const a = await publishMadeUp(store, 'b:1', { layers: ['1', '2', '1'] });
    const b = await publishMadeUp(store, 'a', { kind: 'toolkit', layers: ['3'] });
    await store.setRef({ name: 'c', manifest: { mediaType: 'm', digest: digestOf('gone'), size: 4 } });
    const chunks = chunkDigestsSize(300_000);
    expect(await listImages(store)).toEqual([
      {
        name: 'a:latest',
        digest: b.manifestDigest,
        kind: 'toolkit',
        layers: 1,
        metaBytes: 8192,
        dataBytes: 300_000,
        sizeBytes: 308_192 + chunks + b.config.size + b.manifestSize,
      },
      {
        // One layer is in it twice, and counts once.
        name: 'b:1',
        digest: a.manifestDigest,
        kind: 'base',
        layers: 3,
        metaBytes: 16_384,
        dataBytes: 600_000,
        sizeBytes: 616_384 + 2 * chunks + a.config.size + a.manifestSize,
      },
      {
        name: 'c:latest',
        digest: digestOf('gone'),
        kind: undefined,
        layers: 0,
        metaBytes: 0,
        dataBytes: 0,
        sizeBytes: 0,
        problem: expect.stringContaining('no blob') as string,
      },
    ]);
    expect(await listImages(new MemoryStore())).toEqual([]);
  });

  test('inspect says what an image has, whose its layers are, and who shares them', async () => {
    const base = await publishMadeUp(store, 'base', { layers: ['1', '2'] });
    await publishMadeUp(store, 'other', { layers: ['1'] });
    const image = await publishMadeUp(store, 'app:2', {
      kind: 'snapshot',
      layers: ['1', '2', '3'],
      ownLayers: 1,
      base,
    });
    const seen = await inspectImage(store, 'app:2');
    expect(seen).toMatchObject({
      name: 'app:2',
      digest: image.manifestDigest,
      kind: 'snapshot',
      base: base.manifestDigest,
      ownLayers: 1,
      ...sizesOf(image),
    });
    expect(seen.layers.map(({ own, sharedWith }) => [own, sharedWith])).toEqual([
      [false, ['base:latest', 'other:latest']],
      [false, ['base:latest']],
      [true, []],
    ]);
    expect(seen.layers[2]).toMatchObject({
      meta: { digest: image.layers[2]!.meta.digest, sizeBytes: 8192 },
      devices: [
        {
          digest: image.layers[2]!.devices[0]!.blob.digest,
          sizeBytes: 300_000,
          chunkDigests: image.layers[2]!.devices[0]!.chunkDigests.digest,
        },
      ],
    });
    expect(seen.config.config).toEqual({ Env: ['A=b'], Cmd: ['sh'] });
    expect(seen.manifest).toMatchObject({ schemaVersion: 2, annotations: { 'io.dsec.own-layers': '1' } });
  });
});

describe('the config', () => {
  const parse = (text: string) =>
    parseConfig(Buffer.from(text), { name: 'x', config: { mediaType: '', digest: digestOf(text), size: 0 } });
  test('is read as it is, with nulls where Docker writes them', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    expect(await readConfig(store, image)).toMatchObject({ os: 'linux', config: { Cmd: ['sh'] } });
    expect(parse('{"config":null,"rootfs":null,"history":[1]}')).toEqual({ history: [1] });
    expect(parse('{"config":{"Entrypoint":null,"Cmd":["x"],"User":null,"Labels":null}}')).toEqual({
      config: { Entrypoint: null, Cmd: ['x'], Labels: null },
    });
  });
  test.each([
    '',
    '[]',
    'null',
    '{"os":1}',
    '{"config":[]}',
    '{"config":{"Env":"A=b"}}',
    '{"config":{"Env":[1]}}',
    '{"config":{"Cmd":{}}}',
    '{"config":{"User":0}}',
    '{"config":{"WorkingDir":[]}}',
    '{"config":{"Labels":{"a":1}}}',
    '{"config":{"Labels":[]}}',
    '{"rootfs":1}',
    '{"rootfs":{"type":1}}',
    '{"rootfs":{"diff_ids":[1]}}',
  ])('%s is refused', (text) => {
    expect(() => parse(text)).toThrow(expect.objectContaining({ code: 'CATALOG_CONFIG', exit: 3 }) as Error);
  });
});

describe('removing', () => {
  test('takes the blobs that nobody else needs, and no other', async () => {
    const a = await publishMadeUp(store, 'a', { layers: ['shared', 'mine'] });
    const b = await publishMadeUp(store, 'b', { layers: ['shared', 'its'] });
    const stray = await store.put(Buffer.from('not asked about'));
    const dry = await removeImage(store, 'a', { dryRun: true });
    expect(await openImage(store, 'a')).toEqual(a);
    const removed = await removeImage(store, 'a');
    expect(removed).toEqual(dry);
    expect(removed).toMatchObject({ name: 'a:latest', digest: a.manifestDigest, kept: 0 });
    const gone = needed(a).filter((digest) => !needed(b).includes(digest));
    expect(removed.deleted).toEqual(gone);
    expect(removed.freedBytes).toBe(8192 + 300_000 + 64 + a.manifestSize);
    expect(await digests()).toEqual([...needed(b), stray].sort());
    await expect(openImage(store, 'a')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    await expect(removeImage(store, 'a')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    await expect(removeImage(store, 'a', { dryRun: true })).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    await expect(removeImage(store, b.manifestDigest)).rejects.toMatchObject({ code: 'CATALOG_NOT_NAME' });
  });

  test('one of two names takes nothing', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    await publishMadeUp(store, 'b', { layers: ['1'] });
    expect(await removeImage(store, 'a')).toMatchObject({ deleted: [], freedBytes: 0, kept: 0 });
    expect(await digests()).toEqual(needed(image));
  });

  test('a base goes with the last image that stands on it', async () => {
    const base = await publishMadeUp(store, 'base', { layers: ['1'] });
    const image = await publishMadeUp(store, 'app', { kind: 'snapshot', layers: ['1', '2'], ownLayers: 1, base });
    expect(await removeImage(store, 'base')).toMatchObject({ deleted: [] });
    expect((await openImage(store, image.base!)).manifestDigest).toBe(base.manifestDigest);
    expect((await removeImage(store, 'app')).deleted).toEqual(needed(base, image));
    expect(await digests()).toEqual([]);
  });

  test('an image on a base that is not here can be kept and removed', async () => {
    const base = await publishMadeUp(store, 'base', { layers: ['1'] });
    const image = await publishMadeUp(store, 'app', { kind: 'snapshot', layers: ['1', '2'], ownLayers: 1, base });
    await store.deleteRef('base');
    await store.deleteBlob(base.manifestDigest);
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([]);
    await removeImage(store, 'app');
    expect(await digests()).toEqual([]);
    expect(image.base).toBe(base.manifestDigest);
  });

  test('a broken image can be removed; beside a broken image the name goes and the blobs stay', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    await store.setRef({ name: 'broken', manifest: { mediaType: 'm', digest: digestOf('gone'), size: 4 } });
    const removed = await removeImage(store, 'a');
    expect(removed).toMatchObject({ deleted: [], problem: expect.stringContaining('broken:latest') as string });
    expect(await digests()).toEqual(needed(image));
    expect(await removeImage(store, 'broken')).toMatchObject({ deleted: [] });
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual(needed(image));
  });
});

describe('collecting garbage', () => {
  test('leaves what is young, and says how much', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    await store.put(Buffer.from('stray'));
    expect(await collectGarbage(store)).toEqual({ deleted: [], freedBytes: 0, kept: 1, traces: 0 });
    expect(await collectGarbage(store, { graceMs: 0, dryRun: true })).toEqual({
      deleted: [digestOf('stray')],
      freedBytes: 5,
      kept: 0,
      traces: 0,
    });
    expect(await collectGarbage(store, { graceMs: 0 })).toEqual({
      deleted: [digestOf('stray')],
      freedBytes: 5,
      kept: 0,
      traces: 0,
    });
    expect(await digests()).toEqual(needed(image));
  });

  test('a manifest that cannot be read stops it', async () => {
    const image = await publishMadeUp(store, 'a', { layers: ['1'] });
    await store.put(Buffer.from('stray'));
    const unsafe = { code: 'CATALOG_GC_UNSAFE', message: expect.stringContaining('a:latest') as string };
    for (const bytes of [Buffer.from('{'), Buffer.alloc(5 * 2 ** 20), Buffer.alloc(0)]) {
      store.damage(image.manifestDigest, bytes);
      await expect(collectGarbage(store, { graceMs: 0 })).rejects.toMatchObject(unsafe);
    }
    await store.deleteBlob(image.manifestDigest);
    await expect(collectGarbage(store, { graceMs: 0 })).rejects.toMatchObject(unsafe);
    expect(await store.stat(digestOf('stray'))).toBeDefined();
  });

  test('understands manifests of others: an index, a subject, layers of any type', async () => {
    const put = async (value: object) => store.put(Buffer.from(JSON.stringify(value)));
    const layer = await store.put(Buffer.from('layer'));
    const inner = await put({
      config: { digest: await store.put(Buffer.from('cfg')) },
      layers: [{ digest: layer }, null, { digest: 'odd' }],
    });
    const signed = await put({ layers: [{ digest: await store.put(Buffer.from('signed')) }] });
    const index = await put({
      manifests: [{ digest: inner }, { digest: digestOf('another platform, not here') }],
      subject: { digest: signed },
    });
    await store.setRef({ name: 'multi', manifest: { mediaType: 'm', digest: index, size: 1 } });
    const stray = await store.put(Buffer.from('stray'));
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([stray]);
    const odd = await put({ manifests: [{ digest: layer }] });
    await store.setRef({ name: 'odd', manifest: { mediaType: 'm', digest: odd, size: 1 } });
    await expect(collectGarbage(store, { graceMs: 0 })).rejects.toMatchObject({ code: 'CATALOG_GC_UNSAFE' });
  });

  test('a manifest that another names as a mere blob keeps what it needs, and a circle of manifests ends', async () => {
    const image = await publishMadeUp(store, 'z', { layers: ['1'] });
    const other = await store.put(
      Buffer.from(
        JSON.stringify({ layers: [{ digest: image.manifestDigest }], manifests: [{ digest: image.manifestDigest }] }),
      ),
    );
    await store.setRef({ name: 'a', manifest: { mediaType: 'm', digest: other, size: 1 } });
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([]);
    await store.setRef({
      name: 'a',
      manifest: {
        mediaType: 'm',
        digest: await store.put(Buffer.from(JSON.stringify({ layers: [{ digest: image.manifestDigest }] }))),
        size: 1,
      },
    });
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([other]);
    expect(await store.stat(image.layers[0]!.meta.digest)).toBeDefined();
  });
});

describe('beside work that goes on (a folder)', () => {
  let root: string;
  let folder: BlobStore;
  beforeEach(async () => {
    root = mkdtempSync(join(tmpdir(), 'dsec-catalog-'));
    folder = await openStore(join(root, 'store'));
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));
  const age = (digest: Digest, ms: number) => {
    const then = new Date(Date.now() - ms);
    utimesSync(folder.localPath(digest)!, then, then);
  };

  test('blobs are collected once they are an hour old', async () => {
    const [young, old] = [await folder.put(Buffer.from('young')), await folder.put(Buffer.from('old'))];
    age(young, DEFAULT_GRACE_MS - 60_000);
    age(old, DEFAULT_GRACE_MS + 60_000);
    expect(await collectGarbage(folder)).toMatchObject({ deleted: [old], kept: 1 });
  });

  test('what a living process has put or found since it began is left alone', async () => {
    const found = await folder.put(Buffer.from('found'));
    const unused = await folder.put(Buffer.from('unused'));
    for (const digest of [found, unused]) age(digest, 86_400_000);
    const staging = await folder.stage();
    const made = await folder.put(Buffer.from('made'));
    expect(await keepBlobs(folder, [{ mediaType: '', digest: found, size: 5 }])).toBe(true);
    expect(await collectGarbage(folder, { graceMs: 0 })).toMatchObject({ deleted: [unused], kept: 2 });
    await staging.remove();
    expect((await collectGarbage(folder, { graceMs: 0 })).deleted).toEqual([found, made].sort());
  });

  test('a removal while the same image is published again leaves it whole', async () => {
    for (let round = 0; round < 8; round++) {
      await publishMadeUp(folder, 'a', { layers: ['1'], dataBytes: 5000 });
      const [removed] = await Promise.all([
        removeImage(folder, 'a'),
        publishMadeUp(folder, 'b', { layers: ['1'], dataBytes: 5000 }),
      ]);
      expect(removed.problem).toBeUndefined();
      for (const blob of allBlobsOf(await openImage(folder, 'b'))) await folder.readVerified(blob.digest);
      await removeImage(folder, 'b');
    }
    expect(await digests(folder)).toEqual([]);
  });

  test('a damaged ref is removed like any other', async () => {
    await publishMadeUp(folder, 'a', { layers: ['1'], dataBytes: 10 });
    writeFileSync(join(root, 'store/refs/a/_tags/latest'), '{');
    const other = await publishMadeUp(folder, 'b', { layers: ['2'], dataBytes: 10 });
    const stray = await folder.put(Buffer.from('stray'));
    const before = await digests(folder);
    const problem = expect.stringContaining('the ref of a:latest is damaged') as string;
    expect(await listImages(folder)).toMatchObject([
      { name: 'a:latest', digest: undefined, kind: undefined, problem },
      { name: 'b:latest', digest: other.manifestDigest },
    ]);
    // What it needs is unknown: nothing may go, neither at once nor with another image.
    const unsafe = { code: 'CATALOG_GC_UNSAFE', message: problem };
    await expect(collectGarbage(folder, { graceMs: 0 })).rejects.toMatchObject(unsafe);
    expect(await removeImage(folder, 'b')).toMatchObject({ deleted: [], problem });
    expect(await digests(folder)).toEqual(before);
    expect(await removeImage(folder, 'a', { dryRun: true })).toMatchObject({ digest: undefined, deleted: [] });
    expect(stray).toBe(digestOf('stray'));
    expect(await removeImage(folder, 'a')).toMatchObject({
      digest: undefined,
      problem: expect.stringContaining('damaged') as string,
    });
    await expect(removeImage(folder, 'a')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
  });

  test('publishing again heals a blob that was cut short', async () => {
    const image = await publishMadeUp(folder, 'a', { layers: ['1'] });
    truncateSync(folder.localPath(image.layers[0]!.devices[0]!.blob.digest)!, 1000);
    await publishMadeUp(folder, 'a', { layers: ['1'] });
    for (const blob of allBlobsOf(image)) await folder.readVerified(blob.digest);
  });
});
