/**
 * `dsec verify --repair`: takes damaged blobs out of the store, so that whoever brings them again brings them: a blob of the
 * right size is taken for whole, and would stay. Names stay, and what they lead to is missing until then.
 *
 * What is mounted goes on with the file that it has open.
 */
import { createHash } from 'node:crypto';
import { stat } from 'node:fs/promises';
import { type Digest, hexOf, isDsecError } from '#base';
import type { BlobStore } from '../store/blob-store.ts';
import { resolveImage } from './catalog.ts';

/**
 * Each is looked at once more: somebody may have brought it meanwhile. The ones that were deleted.
 *
 * They are hashed while others may publish, since that takes as long as the blobs are large; whoever publishes has looked at
 * its blobs, so none may vanish before its name is set, and the store is held for the deletion. A blob that was replaced
 * between the two is looked at again.
 */
export async function setAsideDamaged(store: BlobStore, suspects: Iterable<Digest>): Promise<Digest[]> {
  const gone: Digest[] = [];
  for (const digest of suspects) {
    for (let looks = 0; looks < MAX_LOOKS; looks++) {
      const before = await placeOf(store, digest);
      if (!(await isDamaged(store, digest))) break;
      if (await deleteUnchanged(store, digest, before)) {
        gone.push(digest);
        break;
      }
    }
  }
  return gone;
}

/** How often a blob that somebody replaces all the time is hashed. */
const MAX_LOOKS = 5;

async function deleteUnchanged(store: BlobStore, digest: Digest, before: string | undefined): Promise<boolean> {
  const hold = await store.hold('collect');
  try {
    const unchanged = before === undefined ? await isDamaged(store, digest) : (await placeOf(store, digest)) === before;
    if (!unchanged) return false;
    await store.deleteBlob(digest);
    return true;
  } finally {
    await hold.release();
  }
}

/** Changes when the blob is replaced; undefined where blobs are no files, and only their bytes tell. */
async function placeOf(store: BlobStore, digest: Digest): Promise<string | undefined> {
  const path = store.localPath(digest);
  if (path === undefined) return undefined;
  return stat(path, { bigint: true }).then(
    ({ dev, ino, size, mtimeNs }) => `${dev}:${ino}:${size}:${mtimeNs}`,
    () => 'gone',
  );
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
