/** What `dsec verify` does not see of a disk's blobs, which are right by their digests: whether they are layers, and lie on each other. */
import { type Digest, isDsecError, messageOf } from '#base';
import type { BlobStore, Image, VerifyProblem } from '#imagesvc';
import { openStack } from '#ublk-daemon';
import { storeLayerOpener } from '../disk-layers.ts';
import { layersOf } from './disk-from-image.ts';

export async function verifyDiskLayers(store: BlobStore, image: Image): Promise<VerifyProblem[]> {
  if (image.disk === undefined) return [];
  const { layers, sizeBytes } = image.disk;
  const blob: Digest = layers.at(-1)!.blob.digest;
  try {
    const stack = await openStack(layersOf(store, image.disk), undefined, storeLayerOpener());
    await stack.close();
    if (sizeBytes === undefined || sizeBytes === stack.virtualSize) return [];
    return [{ blob, problem: `the disk has ${stack.virtualSize} bytes, its manifest says ${sizeBytes}` }];
  } catch (error) {
    if (!isDsecError(error) || error.retryable) throw error;
    return [{ blob, problem: messageOf(error) }];
  }
}
