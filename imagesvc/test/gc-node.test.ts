/** Garbage collection as a node does it: mounts are leases, caches without a blob go. */
import { existsSync, mkdirSync, mkdtempSync, rmSync, statSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Digest, digestOf, hexOf } from '#base';
import { processIdentity } from '#linux';
import { allBlobsOf, removeImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { collectNode } from '../gc/collect-node.ts';
import { mountedBlobs } from '../gc/mounted-blobs.ts';
import { type MountRecord, newMountId, writeRecord } from '../mount/mount-record.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { someBytes } from './store-conformance.ts';

let root: string;
let store: BlobStore;
let image: Image;
const folders = () => ({ runDir: join(root, 'run'), cacheDir: join(root, 'cache') });

beforeEach(async () => {
  root = mkdtempSync(join(tmpdir(), 'dsec-gc-'));
  store = await openStore(`file://${root}/store`);
  mkdirSync(join(root, 'tree'));
  writeFileSync(join(root, 'tree/file'), someBytes(300_000, 'gc'));
  ({ image } = await convertToStore(store, `dir:${root}/tree`, 'web:1'));
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

function recordMount(more: Partial<MountRecord>): void {
  const folder = join(root, 'run/mounts');
  mkdirSync(folder, { recursive: true });
  writeRecord(folder, {
    id: newMountId(),
    target: '/mnt',
    layers: image.layers.map(({ meta }) => meta.digest),
    owner: processIdentity()!,
    namespace: 'mnt:[1]',
    createdAt: new Date().toISOString(),
    state: 'mounted',
    ...more,
  });
}

describe('blobs of what is mounted', () => {
  it('stay when the name goes, all of them, where the record knows the image', async () => {
    recordMount({ image: { name: 'web:1', manifest: image.manifestDigest } });
    await store.deleteRef('web:1');
    expect(await collectNode(store, { ...folders(), graceMs: 0 })).toMatchObject({ deleted: [] });
    for (const { digest } of allBlobsOf(image)) expect(await store.stat(digest)).toBeDefined();
  });

  it('stay when only the layers are known: metadata and the data that it names', async () => {
    recordMount({});
    await store.deleteRef('web:1');
    const { deleted } = await collectNode(store, { ...folders(), graceMs: 0 });
    const [{ meta, devices }] = image.layers as [Image['layers'][number]];
    expect(deleted).toContain(image.manifestDigest);
    expect(await store.stat(meta.digest)).toBeDefined();
    expect(await store.stat(devices[0]!.blob.digest)).toBeDefined();
  });

  it('stay when the image is removed', async () => {
    recordMount({ image: { name: 'web:1', manifest: image.manifestDigest } });
    const removed = await removeImage(store, 'web:1', { inUse: await mountedBlobs(store, folders()) });
    expect(removed).toMatchObject({ deleted: [] });
    expect(removed.kept).toBeGreaterThan(3);
  });

  it('go when the mount has gone; mounts of other stores do not matter', async () => {
    recordMount({ image: { name: 'x:1', manifest: digestOf('elsewhere') }, layers: [digestOf('elsewhere, too')] });
    await store.deleteRef('web:1');
    const dry = await collectNode(store, { ...folders(), graceMs: 0, dryRun: true });
    expect(dry.deleted).toContain(image.manifestDigest);
    const real = await collectNode(store, { ...folders(), graceMs: 0 });
    expect(real.deleted).toEqual(dry.deleted);
    for (const { digest } of allBlobsOf(image)) expect(await store.stat(digest)).toBeUndefined();
  });

  it('stay beside more that is named, and beside a staging folder', async () => {
    const staging = await store.stage();
    const mine = await store.put(Buffer.from('being made'));
    await staging.remove();
    const inUse = new Set<Digest>([mine]);
    expect((await collectNode(store, { ...folders(), graceMs: 0, inUse })).deleted).toEqual([]);
    expect((await collectNode(store, { ...folders(), graceMs: 3600_000 })).deleted).toEqual([]);
    const other = await store.stage();
    const young = await store.put(Buffer.from('of a living process'));
    expect((await collectNode(store, { ...folders(), graceMs: 0 })).deleted).not.toContain(young);
    await other.remove();
    expect((await collectNode(store, { ...folders(), graceMs: 0 })).deleted).toContain(young);
  });
});

describe('caches', () => {
  it('without a blob go; of blobs that are there or mounted, and young ones, stay', async () => {
    const { cacheDir } = folders();
    mkdirSync(join(cacheDir, 'proofs'), { recursive: true });
    mkdirSync(join(cacheDir, 'meta'));
    const device = statSync(join(root, 'store'), { bigint: true }).dev;
    const there = image.layers[0]!.meta.digest;
    const [gone, mounted] = [digestOf('gone'), digestOf('mounted')];
    recordMount({ layers: [mounted] });
    const place = (path: string, ageMs: number) => {
      const full = join(cacheDir, path);
      writeFileSync(full, 'x'.repeat(10));
      const at = new Date(Date.now() - ageMs);
      utimesSync(full, at, at);
      return full;
    };
    const day = 86_400_000;
    const stays = [
      place(`proofs/${hexOf(there)}-${device}-5`, day),
      place(`proofs/${hexOf(gone)}-${device + 1n}-5`, day),
      place(`proofs/${hexOf(gone)}-${device}-6`, 0),
      place('proofs/no-proof', day),
      place(`meta/${hexOf(there)}`, day),
      place(`meta/${hexOf(mounted)}`, day),
      place(`meta/.${hexOf(gone)}.tmp`, day),
    ];
    const goes = [place(`proofs/${hexOf(gone)}-${device}-5`, day), place(`meta/${hexOf(gone)}`, day)];
    const dry = await collectNode(store, { ...folders(), dryRun: true });
    expect(dry.caches).toEqual({ proofs: 1, metaCopies: 1, chunkBlobs: 0, freedBytes: 20, busy: false });
    expect(goes.every((path) => existsSync(path))).toBe(true);
    expect((await collectNode(store, folders())).caches).toEqual(dry.caches);
    expect(goes.some((path) => existsSync(path))).toBe(false);
    expect(stays.every((path) => existsSync(path))).toBe(true);
  });
});
