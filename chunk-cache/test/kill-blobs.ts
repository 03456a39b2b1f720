import { digestOf } from '#base';
import { CHUNK_BYTES, chunkCount, sha256 } from '../chunk.ts';
import type { BlobFacts } from '../range-source.ts';

export const KILL_CAPACITY_BYTES = 24 * CHUNK_BYTES;

/** The same in parent and child: three blobs, together twice the capacity. */
export function killBlobs(): (BlobFacts & { bytes: Buffer })[] {
  return [30, 12, 5].map((chunks, k) => {
    const bytes = Buffer.alloc(chunks * CHUNK_BYTES - 1000 * k);
    for (let i = 0; i < bytes.length; i += 8) bytes.writeDoubleLE((i + 1) * (k + 1.5), Math.min(i, bytes.length - 8));
    const digests = Array.from({ length: chunkCount(bytes.length) }, (_, i) =>
      sha256(bytes.subarray(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES)),
    );
    return { bytes, sizeBytes: bytes.length, digest: digestOf(bytes), chunkDigests: Buffer.concat(digests) };
  });
}
