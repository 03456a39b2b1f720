/** Wires the converter to a store: what it makes is staged on the store's own file system and published blob by blob. */
import type { Digest } from '#base';
import type { LayerSink } from '#converter';
import { recordProof } from '../mount/blob-proof.ts';
import { nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore, Staging } from '../store/blob-store.ts';

export interface StoreSink extends LayerSink {
  /** Waits for what goes on beside publishing. */
  settled(): Promise<void>;
}

export function storeSink(store: BlobStore, staging: Staging): StoreSink {
  const proofs: Promise<void>[] = [];
  return {
    workDir: staging.path,
    put: (bytes: Buffer) => store.put(bytes),
    async putFile(path: string, digest: Digest, sizeBytes: number) {
      await store.putFile(path, digest, sizeBytes);
      const local = store.localPath(digest);
      // The converter has just hashed these bytes: who can mount need not do it again. Best effort, so errors are dropped.
      if (local !== undefined && process.getuid?.() === 0) {
        proofs.push(recordProof(local, digest, nodeFolders().cacheDir).catch(() => {}));
      }
    },
    async settled() {
      await Promise.all(proofs);
    },
  };
}
