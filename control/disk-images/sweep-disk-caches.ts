/**
 * `dsec gc`, for the chunk caches of disks (disk-layers.ts): what they have of blobs that the store does not have any more, and that no disk of
 * this node lies on. One that a process has open is left alone: its own eviction goes on, and the next collection finds it.
 */
import { existsSync } from 'node:fs';
import { type Digest, isDsecError } from '#base';
import { openChunkCache } from '#chunk-cache';
import type { BlobStore } from '#imagesvc';
import { diskChunkFolders } from '../disk-layers.ts';

export interface SweptDiskCaches {
  readonly chunkBlobs: number;
  readonly freedBytes: number;
}

export async function sweepDiskCaches(
  store: BlobStore,
  cacheDir: string,
  options: { readonly dryRun: boolean; readonly inUse: ReadonlySet<Digest>; readonly gone: ReadonlySet<Digest> },
): Promise<SweptDiskCaches> {
  const { dryRun, inUse, gone } = options;
  let chunkBlobs = 0;
  let freedBytes = 0;
  for (const folder of diskChunkFolders(cacheDir, store.url)) {
    if (!existsSync(folder)) continue;
    const source = { readRange: () => Promise.reject(new Error('nothing is fetched here')) };
    const cache = await openChunkCache({ folder, source }).catch((error: unknown) => {
      if (isDsecError(error, 'CACHE_BUSY')) return undefined;
      throw error;
    });
    if (cache === undefined) continue;
    try {
      for (const { digest, storedBytes } of cache.list()) {
        if (inUse.has(digest)) continue;
        if (!gone.has(digest) && (await store.stat(digest)) !== undefined) continue;
        if (!dryRun) await cache.remove(digest);
        chunkBlobs++;
        freedBytes += storedBytes;
      }
    } finally {
      await cache.close();
    }
  }
  return { chunkBlobs, freedBytes };
}
