/**
 * Digests of chunks, computed while their bytes come: for a reader who waits, hashing then costs nothing, where after the last byte it
 * would cost 0.2 ms a chunk. A source that was asked to (`hashed`, range-source.ts) makes an `ArrivalDigests` for the buffer
 * that it fills; the fetcher finds the digests by the buffer itself. Who gives on other bytes gives on another buffer, which has none
 * and is hashed as ever.
 */
import { createSha256, type Sha256 } from '#linux';
import { CHUNK_BYTES, CHUNK_DIGEST_BYTES } from './chunk.ts';

const known = new WeakMap<Buffer, Buffer>();

export class ArrivalDigests {
  readonly #bytes: Buffer;
  readonly #digests: Buffer;
  #hashed = 0;
  #hash: Sha256 | undefined;

  /** @param bytes To be filled front to back, and not written to again. It begins with a chunk. */
  constructor(bytes: Buffer) {
    this.#bytes = bytes;
    this.#digests = Buffer.alloc(Math.ceil(bytes.length / CHUNK_BYTES) * CHUNK_DIGEST_BYTES);
  }

  /** All up to `end` has come. */
  cameTo(end: number): void {
    while (this.#hashed < end) {
      const chunk = Math.floor(this.#hashed / CHUNK_BYTES);
      const chunkEnd = Math.min((chunk + 1) * CHUNK_BYTES, this.#bytes.length);
      const to = Math.min(end, chunkEnd);
      this.#hash ??= createSha256();
      this.#hash.update(this.#bytes.subarray(this.#hashed, to));
      this.#hashed = to;
      if (to < chunkEnd) return;
      this.#digests.set(this.#hash.digest(), chunk * CHUNK_DIGEST_BYTES);
      this.#hash = undefined;
    }
    if (this.#hashed === this.#bytes.length) known.set(this.#bytes, this.#digests);
  }
}

/** Of a buffer whose bytes were all hashed as they came: sha256 of each chunk, 32 bytes one after the other. */
export function arrivalDigestsOf(bytes: Buffer): Buffer | undefined {
  return known.get(bytes);
}
