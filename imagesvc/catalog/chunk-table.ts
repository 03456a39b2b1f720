/** The digests of a blob's chunks, of its bytes: what its image vouches for, and what every lazy read is held against. */
import { type Digest, digestFromHex } from '#base';
import { createBlobSha256 } from '#linux';
import { CHUNK_BYTES } from './image.ts';

export interface HashedBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** 32 bytes for each `CHUNK_BYTES`. */
  readonly chunkDigests: Buffer;
}

export async function hashBlob(bytes: AsyncIterable<Buffer>): Promise<HashedBlob> {
  const hash = createBlobSha256(CHUNK_BYTES);
  let sizeBytes = 0;
  for await (const piece of bytes) {
    hash.update(piece);
    sizeBytes += piece.length;
  }
  const { hex, digests } = hash.finish();
  return { digest: digestFromHex(hex), sizeBytes, chunkDigests: Buffer.from(digests) };
}
