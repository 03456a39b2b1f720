/** A set of images into another store: each blob once, verified, whole images only, and again where it was interrupted. */
import { chmodSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import type { ProgressEvent } from '#base';
import { allBlobsOf, openImage, removeImage } from '../catalog/catalog.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { MemoryStore } from '../store/memory-store.ts';
import { openStore } from '../store/open-store.ts';
import { syncImages } from '../sync/sync-images.ts';
import { SYNCED_RECORDS, wasSynced } from '../sync/synced-images.ts';
import { publishMadeUp } from './made-up-image.ts';

let root: string;
let from: BlobStore;
let to: BlobStore;

beforeEach(async () => {
  root = mkdtempSync(join(tmpdir(), 'dsec-sync-'));
  from = await openStore(`file://${root}/from`);
  to = await openStore(`file://${root}/to`);
  // The shared layer is too large for memory.
  await publishMadeUp(from, 'a:1', { layers: ['shared', 'a'], dataBytes: 5_000_000 });
  await publishMadeUp(from, 'b:1', { layers: ['shared', 'b'], dataBytes: 5_000_000 });
  await publishMadeUp(from, 'other:1', { layers: ['other'] });
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

async function expectWhole(store: BlobStore, name: string): Promise<void> {
  const image = await openImage(store, name);
  expect(image.manifestDigest).toBe((await openImage(from, name)).manifestDigest);
  for (const { digest } of allBlobsOf(image)) await store.readVerified(digest);
}

it('copies what several images share once, and counts it', async () => {
  const events: ProgressEvent[] = [];
  const synced = await syncImages(from, to, ['a:1', 'b:1', 'a:1'], { progress: (event) => events.push(event) });
  expect(synced.images.map(({ name }) => name)).toEqual(['a:1', 'b:1']);
  // Three layers of three blobs, the config that both have, two manifests.
  expect(synced).toMatchObject({ blobs: 12, copiedBlobs: 12 });
  expect(synced.copiedBytes).toBe(synced.bytes);
  expect(synced.unsharedBytes - synced.bytes).toBeGreaterThan(5_000_000);
  for (const name of ['a:1', 'b:1']) await expectWhole(to, name);
  expect((await to.listRefs()).map(({ name }) => name)).toEqual(['a:1', 'b:1']);
  expect(events.filter(({ phase }) => phase === 'done').length).toBe(12);
  const again = await syncImages(from, to, ['b:1', 'a:1']);
  expect(again).toMatchObject({ blobs: 12, copiedBlobs: 0, copiedBytes: 0, bytes: synced.bytes });
  expect(readdirSync(join(root, 'to/tmp'))).toEqual([]);
});

it('copies nothing when one name is not there', async () => {
  await expect(syncImages(from, to, ['a:1', 'none:1'])).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
  expect(await to.listRefs()).toEqual([]);
});

it('goes on with what is missing after it was interrupted', async () => {
  const stop = new AbortController();
  const progress = ({ task, phase }: ProgressEvent) => {
    if (task === 'image a:1' && phase === 'done') stop.abort();
  };
  await expect(syncImages(from, to, ['a:1', 'b:1'], { progress, signal: stop.signal })).rejects.toThrow();
  await expectWhole(to, 'a:1');
  expect(await to.getRef('b:1')).toBeUndefined();
  const rest = await syncImages(from, to, ['a:1', 'b:1']);
  expect(rest.copiedBlobs).toBe(4);
  await expectWhole(to, 'b:1');
});

it('publishes nothing of a damaged image', async () => {
  const { layers } = await openImage(from, 'b:1');
  const path = from.localPath(layers[1]!.devices[0]!.blob.digest)!;
  const bytes = readFileSync(path);
  bytes[1_000_000]! ^= 1;
  chmodSync(path, 0o600);
  writeFileSync(path, bytes);
  await expect(syncImages(from, to, ['a:1', 'b:1'])).rejects.toMatchObject({ code: 'STORE_DIGEST_MISMATCH' });
  await expectWhole(to, 'a:1');
  expect(await to.getRef('b:1')).toBeUndefined();
  expect(await to.stat(layers[1]!.devices[0]!.blob.digest)).toBeUndefined();
});

it('goes between any two stores', async () => {
  const memory = new MemoryStore();
  await syncImages(from, memory, ['a:1', 'other:1']);
  await expectWhole(memory, 'a:1');
  await syncImages(memory, to, ['other:1']);
  await expectWhole(to, 'other:1');
});

it('remembers where whole images are, until they are gone here', async () => {
  const a = await openImage(from, 'a:1');
  const b = await openImage(from, 'b:1');
  const stop = new AbortController();
  const progress = ({ task, phase }: ProgressEvent) => {
    if (task === 'image a:1' && phase === 'done') stop.abort();
  };
  await expect(syncImages(from, to, ['a:1', 'b:1'], { progress, signal: stop.signal })).rejects.toThrow();
  expect(await wasSynced(from, to.url, a.manifestDigest)).toBe(true);
  expect(await wasSynced(from, to.url, b.manifestDigest)).toBe(false);
  expect(await wasSynced(from, 'file:///elsewhere', a.manifestDigest)).toBe(false);
  await Promise.all([syncImages(from, to, ['b:1']), syncImages(from, to, ['other:1'])]);
  expect(await from.listRecords(SYNCED_RECORDS)).toHaveLength(3);
  const [key = ''] = await from.listRecords(SYNCED_RECORDS);
  expect(await from.getRecord(SYNCED_RECORDS, key)).toMatchObject({ to: to.url, blobs: expect.any(Array) });
  await removeImage(from, 'a:1', { graceMs: 0 });
  expect(await wasSynced(from, to.url, a.manifestDigest)).toBe(false);
  expect(await wasSynced(from, to.url, b.manifestDigest)).toBe(true);
});

it('brings what it can where it came from cannot remember it', async () => {
  const closed = Object.assign(from, {
    putRecord: async () => {
      throw new Error('it is read only');
    },
  });
  const { notes } = await syncImages(closed, to, ['other:1']);
  expect(notes).toEqual([expect.stringContaining('does not remember that other:1 is in')]);
  await expectWhole(to, 'other:1');
});
