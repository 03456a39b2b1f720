import { CHUNK_BYTES } from '../chunk.ts';
import { type MadeUpBlob, makeBlob } from './made-up-blob.ts';

export const KILL_CAPACITY_BYTES = 24 * CHUNK_BYTES;

/** The same in parent and child: three blobs, together twice the capacity. */
export function killBlobs(): MadeUpBlob[] {
  return [30, 12, 5].map((chunks, k) => makeBlob(chunks * CHUNK_BYTES - 1000 * k, k + 1));
}
