/** How many bytes of a store's blobs a sandbox made the kernel read, read-ahead included. */
import type { BlobStore, Image } from '#imagesvc';
import { cachedBytes, dropCached } from '#linux';

export interface StoreReads {
  /** Undefined where the kernel cannot tell, and for stores that are not folders. */
  readonly readBytes: number | undefined;
  readonly ofBytes: number;
}

function blobPaths(store: BlobStore, images: readonly Image[]): Map<string, number> {
  const paths = new Map<string, number>();
  for (const { meta, devices } of images.flatMap((image) => image.layers)) {
    for (const { digest, size } of [meta, ...devices.map((device) => device.blob)]) {
      const path = store.localPath(digest);
      if (path !== undefined) paths.set(path, size);
    }
  }
  return paths;
}

/** From here on reads count: nothing of the images is in memory, as on a machine that has just got them. */
export function forgetReads(store: BlobStore, images: readonly Image[]): void {
  for (const path of blobPaths(store, images).keys()) dropCached(path);
}

export function countReads(store: BlobStore, images: readonly Image[]): StoreReads {
  let readBytes: number | undefined = 0;
  let ofBytes = 0;
  for (const [path, sizeBytes] of blobPaths(store, images)) {
    const cached = cachedBytes(path);
    // The last page of a file counts whole.
    readBytes = readBytes === undefined || cached === undefined ? undefined : readBytes + Math.min(cached, sizeBytes);
    ofBytes += sizeBytes;
  }
  return { readBytes, ofBytes };
}
