/**
 * A disk on the layers of an image. It holds references, no copies: its configuration names blobs of the store, and garbage collection on
 * this node keeps those (blobs-in-use.ts), whatever becomes of the image's name.
 */
import { isDsecError } from '#base';
import { type BlobStore, type DiskParts, keepBlobs, openDiskImage, type Staging } from '#imagesvc';
import { createNamedDisk, type OpenStoreLayer, type StoreLayer, type UpperMode } from '#ublk-daemon';
import { fail } from '../errors.ts';

const NO_WRITER = ['STORE_NO_WRITES', 'STORE_ACCESS', 'STORE_READ_ONLY', 'STORE_REMOTE_ACCESS'];

export interface DiskFromImage {
  readonly sizeBytes?: number;
  readonly mode?: UpperMode;
  /** Through the chunk cache also where the store is a folder: for one on a file server. */
  readonly lazy?: boolean;
  readonly openStoreLayer: OpenStoreLayer;
}

/** @throws CATALOG_NOT_DISK, CATALOG_NOT_FOUND, DISK_EXISTS, DISK_IMAGE_GONE */
export async function createDiskFromImage(
  disk: string,
  store: BlobStore,
  imageName: string,
  { sizeBytes, mode, lazy = false, openStoreLayer }: DiskFromImage,
): Promise<void> {
  const image = await openDiskImage(store, imageName);
  const { url } = store;
  const lowers = layersOf(store, image.disk, lazy);
  const staging = await stageIfWritable(store);
  try {
    // Young from here on: a collection that began before the disk was there leaves them alone.
    const blobs = image.disk.layers.flatMap(({ blob, chunkDigests }) => [blob, chunkDigests]);
    if (staging !== undefined && !(await keepBlobs(store, blobs))) {
      throw fail('DISK_IMAGE_GONE', { name: image.name, store: url });
    }
    await createNamedDisk(disk, {
      sizeBytes,
      mode,
      openStoreLayer,
      origin: { kind: 'layers', lowers, image: { name: image.name, digest: image.manifestDigest, store: url } },
    });
  } finally {
    await staging?.remove();
  }
}

/** Bottom first. */
export function layersOf(store: BlobStore, { layers }: DiskParts, lazy = false): StoreLayer[] {
  return layers.map(({ blob, chunkDigests }) => ({
    store: store.url,
    digest: blob.digest,
    size: blob.size,
    chunkDigests: chunkDigests.digest,
    ...(lazy ? { lazy } : {}),
  }));
}

/** One that can only be read is not collected from here either. */
async function stageIfWritable(store: BlobStore): Promise<Staging | undefined> {
  try {
    return await store.stage();
  } catch (error) {
    if (isDsecError(error) && NO_WRITER.includes(error.code)) return undefined;
    throw error;
  }
}
