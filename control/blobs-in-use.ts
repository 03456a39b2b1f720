/**
 * Blobs that this node needs whatever names say: of what is mounted, and of the images that kept containers ran on, without
 * which what they changed could not be packed; and layers that the disks of this node lie on.
 */
import { type Digest, isDsecError } from '#base';
import { type BlobStore, mountedBlobs, reachable } from '#imagesvc';
import { listSandboxes } from '#runtime';
import { layersInStores } from '#ublk-daemon';

export async function blobsInUse(store: BlobStore): Promise<Set<Digest>> {
  const needed = await mountedBlobs(store);
  for (const { base, workspace, toolkits } of listSandboxes()) {
    for (const image of [base, workspace, ...toolkits]) {
      if (image === undefined || needed.has(image.digest)) continue;
      for (const digest of await blobsOf(store, image.digest)) needed.add(digest);
    }
  }
  // Whatever store they are of: too much is kept rather than too little.
  for (const { layers } of await layersInStores()) {
    for (const { digest, chunkDigests } of layers) needed.add(digest).add(chunkDigests);
  }
  return needed;
}

async function blobsOf(store: BlobStore, manifest: Digest): Promise<Iterable<Digest>> {
  try {
    return await reachable(store, manifest);
  } catch (error) {
    // Of another store.
    if (isDsecError(error, 'STORE_BLOB_MISSING')) return [];
    throw error;
  }
}
