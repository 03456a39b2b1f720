/** Wires the converter to a store: what it makes is staged on the store's own file system and published blob by blob. */
import type { Digest } from '#base';
import type { LayerSink } from '#converter';
import { recordProof } from '../mount/blob-proof.ts';
import { nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore, Staging } from '../store/blob-store.ts';

export interface StoreSink extends LayerSink {
  /**
   * Once the image is published: remembers the blobs as proved, so that the first mount on this machine need not hash what
   * the converter has just hashed. Best effort, so errors are dropped.
   */
  recordProofs(): Promise<void>;
}

export function storeSink(store: BlobStore, staging: Staging): StoreSink {
  const published = new Set<Digest>();
  return {
    workDir: staging.path,
    put: (bytes: Buffer) => store.put(bytes),
    async putFile(path: string, digest: Digest, sizeBytes: number) {
      await store.putFile(path, digest, sizeBytes);
      published.add(digest);
    },
    async recordProofs() {
      if (process.getuid?.() !== 0) return;
      const { cacheDir } = nodeFolders();
      const prove = async (digest: Digest) => {
        const local = store.localPath(digest);
        if (local !== undefined) await recordProof(local, digest, cacheDir).catch(() => {});
      };
      await Promise.all([...published].map(prove));
    },
  };
}
