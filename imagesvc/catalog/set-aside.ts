/**
 * `dsec verify --repair`: takes damaged blobs out of the store, so that whoever brings them again brings them: a blob of the
 * right size is taken for whole, and would stay. Names stay, and what they lead to is missing until then.
 *
 * What is mounted goes on with the file that it has open.
 */
import { createHash } from 'node:crypto';
import { type Digest, hexOf, isDsecError } from '#base';
import type { BlobStore } from '../store/blob-store.ts';
import { resolveImage } from './catalog.ts';

/** Each is looked at once more: somebody may have brought it meanwhile. The ones that were deleted. */
export async function setAsideDamaged(store: BlobStore, suspects: Iterable<Digest>): Promise<Digest[]> {
  const gone: Digest[] = [];
  // Whoever publishes has looked at its blobs: none of them may vanish before its name is set.
  const hold = await store.hold('collect');
  try {
    for (const digest of suspects) {
      if (!(await isDamaged(store, digest))) continue;
      await store.deleteBlob(digest);
      gone.push(digest);
    }
  } finally {
    await hold.release();
  }
  return gone;
}

/** The manifest of an image, when it is damaged itself: then nothing else is known of the image. */
export async function damagedManifest(store: BlobStore, nameOrDigest: string): Promise<Digest | undefined> {
  const { digest } = await resolveImage(store, nameOrDigest);
  return (await isDamaged(store, digest)) ? digest : undefined;
}

async function isDamaged(store: BlobStore, digest: Digest): Promise<boolean> {
  const hash = createHash('sha256');
  try {
    for await (const piece of store.stream(digest)) hash.update(piece);
  } catch (error) {
    if (isDsecError(error, 'STORE_BLOB_MISSING')) return false;
    if (isDsecError(error, 'STORE_BLOB_NOT_FILE')) return true;
    throw error;
  }
  return hash.digest('hex') !== hexOf(digest);
}
