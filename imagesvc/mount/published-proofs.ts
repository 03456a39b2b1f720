/**
 * Blobs that were just published, whose bytes their publisher has looked at on the way: remembered as proved once all is done,
 * so that the first mount on this machine need not hash them again. Best effort, so errors are dropped.
 */
import { stat } from 'node:fs/promises';
import type { Digest } from '#base';
import type { BlobStore } from '../store/blob-store.ts';
import { recordProof } from './blob-proof.ts';
import { nodeFolders } from './node-folders.ts';

export class PublishedProofs {
  readonly #store: BlobStore;
  readonly #published = new Map<Digest, string>();

  constructor(store: BlobStore) {
    this.#store = store;
  }

  /** The store's putFile, of a file whose bytes are known to be the blob's. */
  async putFile(path: string, digest: Digest, sizeBytes: number): Promise<void> {
    const made = await identityOf(path);
    await this.#store.putFile(path, digest, sizeBytes);
    if (made !== undefined) this.#published.set(digest, made);
  }

  async record(): Promise<void> {
    // Only root mounts.
    if (process.getuid?.() !== 0) return;
    const { cacheDir } = nodeFolders();
    const prove = async ([digest, made]: [Digest, string]) => {
      const local = this.#store.localPath(digest);
      // The store may have had a file of that name already, whose bytes nobody has looked at.
      if (local !== undefined && (await identityOf(local)) === made)
        await recordProof(local, digest, cacheDir).catch(() => {});
    };
    await Promise.all([...this.#published].map(prove));
  }
}

/** Which file it is, wherever it is moved to. */
async function identityOf(path: string): Promise<string | undefined> {
  return stat(path, { bigint: true }).then(
    ({ dev, ino }) => `${dev}:${ino}`,
    () => undefined,
  );
}
