/**
 * A blob as the data server shows it, in words that can be sent to another thread or process, and the two ways to its
 * bytes: a view that answers at once or not at all (in the thread that reads the request), and a reader that fetches.
 */
import type { Digest } from '#base';
import type { ChunkViewHandle } from '#chunk-cache';
import type { ReadLogHandle } from './read-log.ts';

/** Where a thread of its own finds bytes that are there already. What it is of is the view's own business. */
export type ViewHandle = ViewOf & {
  /** Where each read is noted. */
  readonly log?: ReadLogHandle;
};

type ViewOf =
  /** The whole blob as a file. */
  | { readonly kind: 'file'; readonly path: string }
  /** Chunks of the cache, as far as they are on disk and verified. */
  | { readonly kind: 'chunks'; readonly chunks: ChunkViewHandle }
  /** Nothing is ever there at once. */
  | { readonly kind: 'none' };

export interface ServedBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** Inode number: 2 and up, in the order in which blobs were added; the same for every server of one mount. */
  readonly node: number;
  readonly view: ViewHandle;
}

/** Fetches what no view has. Must settle in bounded time: the kernel's reader waits for it. */
export interface BlobReader {
  /** Exactly the bytes. `offset + length` is within the blob. */
  read(blob: ServedBlob, offset: number, length: number): Promise<Buffer>;
}
