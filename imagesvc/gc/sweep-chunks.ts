/**
 * The chunk cache of a store (`<cache>/chunks/<id>`): blobs of it that the store does not have any more, and that no mount of
 * this node reads, go. A cache has one owner: the data server of the store is asked, where one runs; else the cache is opened
 * here for a moment. What readers use, and what is in the store, is for the cache's own eviction.
 *
 * Caches of other stores are left alone: what those have is unknown here.
 */
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, isDsecError } from '#base';
import { openChunkCache, type StoredBlob } from '#chunk-cache';
import { lock } from '#linux';
import { chunksFolder, dataServerId } from '../data-server/data-folders.ts';
import { findDataServer } from '../data-server/data-server.ts';
import type { NodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';

export interface SweptChunks {
  /** Blobs of the chunk cache. */
  readonly chunkBlobs: number;
  readonly freedBytes: number;
  /** The chunk cache is owned by a process that does not answer: it was left alone. */
  readonly busy: boolean;
}

const LOCK_TIMEOUT_MS = 60_000;

interface Owned {
  list(): Promise<StoredBlob[]>;
  /** Those that went. */
  remove(digests: readonly Digest[]): Promise<readonly Digest[]>;
  close(): Promise<void>;
}

export async function sweepChunks(
  store: BlobStore,
  folders: NodeFolders,
  options: { dryRun: boolean; inUse: ReadonlySet<Digest>; gone: ReadonlySet<Digest> },
): Promise<SweptChunks> {
  const folder = chunksFolder(folders.cacheDir, dataServerId(store.url));
  // Only root's data servers make one.
  if (process.geteuid?.() !== 0 || !existsSync(folder)) return { chunkBlobs: 0, freedBytes: 0, busy: false };
  let owned: Owned;
  try {
    owned = (await servedCache(store, folders)) ?? (await openedCache(folder, folders.runDir));
  } catch (error) {
    if (isDsecError(error, 'CACHE_BUSY') || isDsecError(error, 'DATA_CONTROL')) {
      return { chunkBlobs: 0, freedBytes: 0, busy: true };
    }
    throw error;
  }
  try {
    const { dryRun, inUse, gone } = options;
    const unneeded = new Map<Digest, number>();
    for (const { digest, storedBytes, pinned } of await owned.list()) {
      if (pinned || inUse.has(digest)) continue;
      if (!gone.has(digest) && (await store.stat(digest)) !== undefined) continue;
      unneeded.set(digest, (unneeded.get(digest) ?? 0) + storedBytes);
    }
    const went = dryRun ? [...unneeded.keys()] : await owned.remove([...unneeded.keys()]);
    return {
      chunkBlobs: went.length,
      freedBytes: went.reduce((total, digest) => total + unneeded.get(digest)!, 0),
      busy: false,
    };
  } finally {
    await owned.close();
  }
}

async function servedCache(store: BlobStore, folders: NodeFolders): Promise<Owned | undefined> {
  const server = await findDataServer(store.url, folders);
  if (server === undefined) return undefined;
  return {
    list: () => server.cached(),
    remove: (digests) => server.forget(digests),
    async close() {},
  };
}

async function openedCache(folder: string, runDir: string): Promise<Owned> {
  // Nobody starts a server meanwhile: it would find its cache taken.
  mkdirSync(runDir, { recursive: true, mode: 0o755 });
  const held = await lock(join(runDir, 'data', 'lock'), { timeoutMs: LOCK_TIMEOUT_MS });
  const source = { readRange: () => Promise.reject(new Error('nothing is fetched here')) };
  const cache = await openChunkCache({ folder, source }).catch((error: unknown) => {
    held.release();
    throw error;
  });
  return {
    list: async () => cache.list(),
    async remove(digests) {
      for (const digest of digests) await cache.remove(digest);
      return digests;
    },
    async close() {
      await cache.close();
      held.release();
    },
  };
}
