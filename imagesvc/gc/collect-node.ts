/**
 * `dsec gc`: garbage collection of a store as a node does it, with its own mounts as leases beside those that the store knows
 * (staging folders of living processes), and of the node's caches after it.
 */
import type { Digest } from '#base';
import { type Collected, collectGarbage, DEFAULT_GRACE_MS } from '../catalog/collect-garbage.ts';
import { type NodeFolders, nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { mountedBlobs } from './mounted-blobs.ts';
import { type SweptFiles, sweepCaches } from './sweep-caches.ts';
import { type SweptChunks, sweepChunks } from './sweep-chunks.ts';

/** What of the node's caches went. */
export type SweptCaches = SweptFiles & SweptChunks;

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
  const inUse = new Set([...(await mountedBlobs(store, options)), ...(options.inUse ?? [])]);
  const collected = await collectGarbage(store, { dryRun, graceMs, inUse });
  const caches = await sweepNode(store, { ...options, dryRun, graceMs, inUse }, new Set(collected.deleted));
  return { ...collected, caches };
}

/** The node's caches alone: what they have of blobs that the store does not have. For stores that cannot be written, too. */
export async function collectCaches(store: BlobStore, options: CollectNodeOptions = {}): Promise<SweptCaches> {
  const { dryRun = false, graceMs = DEFAULT_GRACE_MS } = options;
  const inUse = new Set([...(await mountedBlobs(store, options)), ...(options.inUse ?? [])]);
  return sweepNode(store, { ...options, dryRun, graceMs, inUse }, new Set());
}

async function sweepNode(
  store: BlobStore,
  options: CollectNodeOptions & { dryRun: boolean; graceMs: number; inUse: ReadonlySet<Digest> },
  gone: ReadonlySet<Digest>,
): Promise<SweptCaches> {
  const folders = nodeFolders(options);
  const { dryRun, graceMs, inUse } = options;
  const files = await sweepCaches(store, folders.cacheDir, { dryRun, graceMs, inUse, gone });
  const { chunkBlobs, freedBytes, busy } = await sweepChunks(store, folders, { dryRun, inUse, gone });
  return { ...files, chunkBlobs, freedBytes: files.freedBytes + freedBytes, busy };
}
