/** Wires the converter to a store: what it makes is staged on the store's own file system and published blob by blob. */
import { stat } from 'node:fs/promises';
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
  const published = new Map<Digest, string>();
  return {
    workDir: staging.path,
    put: (bytes: Buffer) => store.put(bytes),
    async putFile(path: string, digest: Digest, sizeBytes: number) {
      const made = await identityOf(path);
      await store.putFile(path, digest, sizeBytes);
      if (made !== undefined) published.set(digest, made);
    },
    async recordProofs() {
      if (process.getuid?.() !== 0) return;
      const { cacheDir } = nodeFolders();
      const prove = async ([digest, made]: [Digest, string]) => {
        const local = store.localPath(digest);
        // The store may have had a file of that name already, whose bytes nobody has looked at.
        if (local !== undefined && (await identityOf(local)) === made)
          await recordProof(local, digest, cacheDir).catch(() => {});
      };
      await Promise.all([...published].map(prove));
    },
  };
}

/** Which file it is, wherever it is moved to. */
async function identityOf(path: string): Promise<string | undefined> {
  return stat(path, { bigint: true }).then(
    ({ dev, ino }) => `${dev}:${ino}`,
    () => undefined,
  );
}
