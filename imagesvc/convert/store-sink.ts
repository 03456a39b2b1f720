/** Wires the converter to a store: what it makes is staged on the store's own file system and published blob by blob. */
import type { Digest } from '#base';
import type { LayerSink } from '#converter';
import { PublishedProofs } from '../mount/published-proofs.ts';
import type { BlobStore, Staging } from '../store/blob-store.ts';

export interface StoreSink extends LayerSink {
  /** Once the image is published: the first mount need not hash what the converter has just hashed. */
  recordProofs(): Promise<void>;
}

export function storeSink(store: BlobStore, staging: Staging): StoreSink {
  const proofs = new PublishedProofs(store);
  return {
    workDir: staging.path,
    put: (bytes: Buffer) => store.put(bytes),
    putFile: (path: string, digest: Digest, sizeBytes: number) => proofs.putFile(path, digest, sizeBytes),
    recordProofs: () => proofs.record(),
  };
}
