/**
 * What `dsec sync` has brought where: a record `synced/<sha256 of the other store's URL>.<manifest hex>` in the store that it came from, with the
 * digests of all blobs of the image. One for each image, written when all of it is there, so that commands that run at the same time
 * take nothing from each other, and whoever asks about an image reads one small record.
 *
 * It is a memory, not a promise: the other store may have lost the image since. Whoever relies on it needs another way then.
 */
import { type Digest, digestOf, hexOf } from '#base';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';

export const SYNCED_RECORDS = 'synced';

function keyOf(toUrl: string, manifest: Digest): string {
  return `${hexOf(digestOf(toUrl))}.${hexOf(manifest)}`;
}

/** @throws STORE_NO_WRITES and what else the store throws */
export async function recordSynced(
  from: BlobStore,
  toUrl: string,
  { name, manifestDigest }: { readonly name: string; readonly manifestDigest: Digest },
  blobs: readonly Pick<Descriptor, 'digest'>[],
): Promise<void> {
  const value = { to: toUrl, name, blobs: blobs.map(({ digest }) => digest) };
  await from.putRecord(SYNCED_RECORDS, keyOf(toUrl, manifestDigest), value);
}

/** Whether all blobs of the image of that manifest were brought to the store at `toUrl`. */
export async function wasSynced(from: BlobStore, toUrl: string, manifest: Digest): Promise<boolean> {
  const record = await from.getRecord(SYNCED_RECORDS, keyOf(toUrl, manifest));
  // Nobody else's that happens to have the key.
  return typeof record === 'object' && record !== null && (record as { to?: unknown }).to === toUrl;
}

/** Of images that are no longer here. */
export async function forgetSynced(from: BlobStore, gone: ReadonlySet<Digest>): Promise<void> {
  if (gone.size === 0) return;
  const hexes = new Set([...gone].map(hexOf));
  for (const key of await from.listRecords(SYNCED_RECORDS)) {
    if (hexes.has(key.slice(key.indexOf('.') + 1))) await from.deleteRecord(SYNCED_RECORDS, key);
  }
}
