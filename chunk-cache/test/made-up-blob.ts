/** Blobs made of a seed, with the facts that a manifest would vouch for. */
import { digestOf } from '#base';
import { CHUNK_BYTES, chunkCount, sha256 } from '../chunk.ts';
import type { BlobFacts } from '../range-source.ts';

export interface MadeUpBlob extends BlobFacts {
  readonly bytes: Buffer;
}

export function makeBlob(sizeBytes: number, seed = 1): MadeUpBlob {
  const bytes = noise(sizeBytes, seed);
  const digests = Array.from({ length: chunkCount(sizeBytes) }, (_, i) =>
    sha256(bytes.subarray(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES)),
  );
  return { bytes, sizeBytes, digest: digestOf(bytes), chunkDigests: Buffer.concat(digests) };
}

/** Different bytes everywhere, the same for the same seed. */
export function noise(sizeBytes: number, seed: number): Buffer {
  const words = new Uint32Array(Math.ceil(sizeBytes / 4));
  let state = (seed * 2654435761) >>> 0 || 1;
  for (let i = 0; i < words.length; i++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    words[i] = state >>> 0;
  }
  return Buffer.from(words.buffer).subarray(0, sizeBytes);
}

/** mulberry32: 0 <= x < 1, the same sequence for the same seed. */
export function randomFrom(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
