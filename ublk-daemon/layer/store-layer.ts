/**
 * A layer that is no file of this machine but a blob of a store. Where its bytes come from is not this folder's business: whoever opens a
 * disk brings an `OpenStoreLayer` (control/disk-layers.ts has the one over the chunk cache).
 *
 * In a config.v1.json it stands as OverlayBD has layers of a registry, with what we need besides under `dsec`:
 *
 *     { "digest": "sha256:…", "size": 1234, "dsec": { "store": "s3://bucket/prefix", "chunkDigests": "sha256:…" } }
 */
import { type Digest, isDigest } from '#base';
import type { ByteSource } from '../byte-source.ts';

export interface StoreLayer {
  /** URL of the store. */
  readonly store: string;
  readonly digest: Digest;
  readonly size: number;
  /** Digest of the blob that holds the digests of its chunks. */
  readonly chunkDigests: Digest;
  /** Through the chunk cache also where the store is a folder. */
  readonly lazy?: boolean;
}

/** The source is the caller's to close. It never gives out bytes other than the blob's. */
export type OpenStoreLayer = (layer: StoreLayer) => Promise<ByteSource>;

/** Where a sealed layer is: a file, or a blob of a store. */
export type LayerPlace = string | StoreLayer;

/** What `lowers` of a config.v1.json has of one. */
export function lowerOfPlace(place: LayerPlace): Record<string, unknown> {
  if (typeof place === 'string') return { file: place };
  const { digest, size, store, chunkDigests, lazy } = place;
  return { digest, size, dsec: { store, chunkDigests, ...(lazy === true ? { lazy } : {}) } };
}

/** Undefined where the entry does not say all that is needed: it was written by others. */
export function storeLayerOf(lower: Readonly<Record<string, unknown>>): StoreLayer | undefined {
  const { digest, size, dsec } = lower;
  const { store, chunkDigests, lazy } = (typeof dsec === 'object' && dsec !== null ? dsec : {}) as Partial<StoreLayer>;
  if (!isDigest(digest) || typeof size !== 'number' || typeof store !== 'string' || !isDigest(chunkDigests)) {
    return undefined;
  }
  return { store, digest, size, chunkDigests, ...(lazy === true ? { lazy } : {}) };
}

/** For messages. */
export function placeText(place: LayerPlace): string {
  return typeof place === 'string' ? place : `${place.store}: ${place.digest}`;
}
