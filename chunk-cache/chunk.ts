/** Chunks: every blob is cut into pieces of 256 KiB, the last one may be short. They are fetched, verified and kept whole. */
import { createHash } from 'node:crypto';
import { createSha256, updatePair } from '#linux';

export const CHUNK_BYTES = 256 * 1024;
export const CHUNK_DIGEST_BYTES = 32;

export function chunkCount(sizeBytes: number): number {
  return Math.ceil(sizeBytes / CHUNK_BYTES);
}

/** Length of chunk `index` of a blob: CHUNK_BYTES but for the last. */
export function chunkLength(sizeBytes: number, index: number): number {
  return Math.min(CHUNK_BYTES, sizeBytes - index * CHUNK_BYTES);
}

export function chunkDigest(chunkDigests: Buffer, index: number): Buffer {
  return chunkDigests.subarray(index * CHUNK_DIGEST_BYTES, (index + 1) * CHUNK_DIGEST_BYTES);
}

export function sha256(bytes: Uint8Array): Buffer {
  return createHash('sha256').update(bytes).digest();
}

/** Of two buffers, in little more time than of one where the processor can. */
export function sha256Pair(a: Buffer, b: Buffer): [Buffer, Buffer] {
  const [ofA, ofB] = [createSha256(), createSha256()];
  updatePair(ofA, a, ofB, b);
  return [ofA.digest(), ofB.digest()];
}

/** Whether `bytes` are chunk `index`. */
export function chunkMatches(chunkDigests: Buffer, index: number, bytes: Uint8Array): boolean {
  return sha256(bytes).equals(chunkDigest(chunkDigests, index));
}
