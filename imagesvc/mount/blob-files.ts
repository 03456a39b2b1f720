/**
 * Where the files behind a mount come from. A folder store has them already; a data server answers with a path whose
 * bytes it fetches when the kernel asks.
 */

import type { ErofsLayer, LayerDevice } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import type { LazyLayer } from './mount-record.ts';

export interface BlobFiles {
  /**
   * An absolute path, readable by the kernel, whose bytes are the blob's; it must stay for as long as the mount does.
   * @param device Of a data blob; none for a metadata image.
   * @throws MOUNT_STORE_NOT_LOCAL, MOUNT_BLOB_MISSING
   */
  fileFor(blob: Descriptor, device?: LayerDevice): Promise<string>;
  /**
   * Whether whoever serves the file verifies every byte that it gives out. Then the file is not hashed as a whole before
   * the mount: that would fetch all of it.
   */
  verifiedOnRead?(blob: Descriptor): boolean;
  /** What the mount's record says of a layer whose files a data server answers for, asked once they are found. */
  lazyLayer?(layer: ErofsLayer): Promise<LazyLayer | undefined>;
  /** When what is fetched beside the mount is in other hands: a process that only mounts waits for it before it ends. */
  handedOver?(): Promise<void>;
}

/** The blobs of a store that is a folder, as they lie there. */
export function storeBlobFiles(store: BlobStore): BlobFiles {
  return {
    async fileFor(blob) {
      const path = store.localPath(blob.digest);
      if (path === undefined) throw fail('MOUNT_STORE_NOT_LOCAL', { store: store.url });
      return path;
    },
  };
}
