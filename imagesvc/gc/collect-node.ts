/**
 * `dsec gc`: garbage collection of a store as a node does it, with its own mounts as leases beside those that the store knows
 * (staging folders of living processes), and of the node's caches after it.
 */
import type { Digest } from '#base';
import { type Collected, collectGarbage, DEFAULT_GRACE_MS } from '../catalog/collect-garbage.ts';
import { type NodeFolders, nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { mountedBlobs } from './mounted-blobs.ts';
import { type SweptCaches, sweepCaches } from './sweep-caches.ts';

export interface CollectNodeOptions extends Partial<NodeFolders> {
  /** Says what would be deleted, and deletes nothing. */
  readonly dryRun?: boolean;
  /** Younger blobs are left alone: an hour by default. */
  readonly graceMs?: number;
  /** More that is needed, beside what is mounted: blobs of sandboxes that are kept. */
  readonly inUse?: ReadonlySet<Digest>;
}

export interface CollectedNode extends Collected {
  readonly caches: SweptCaches;
}

/** @throws CATALOG_GC_UNSAFE, STORE_BUSY */
export async function collectNode(store: BlobStore, options: CollectNodeOptions = {}): Promise<CollectedNode> {
  const { dryRun = false, graceMs = DEFAULT_GRACE_MS } = options;
  const { cacheDir } = nodeFolders(options);
  const inUse = new Set([...(await mountedBlobs(store, options)), ...(options.inUse ?? [])]);
  const collected = await collectGarbage(store, { dryRun, graceMs, inUse });
  const gone = new Set(collected.deleted);
  const caches = await sweepCaches(store, cacheDir, { dryRun, graceMs, inUse, gone });
  return { ...collected, caches };
}
