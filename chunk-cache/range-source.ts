/**
 * Where the cache gets bytes that it does not have. imagesvc's stores implement it; retries, hedging, limits and fault
 * injection are decorators around it, so nothing of that is in here.
 *
 * - `readRange` gives exactly `lengthBytes` bytes from `offset`, or an error. The cache asks for ranges inside the blob only,
 *   `lengthBytes` > 0, whole chunks but for the blob's last, at most 4 MiB.
 * - The bytes need not be right: the cache checks each chunk against its digest, and asks again a bounded number of times.
 * - The buffer is the cache's from then on: the source must not write to it any more.
 * - An aborted signal means that nobody waits any more: the promise should be rejected soon, with whatever.
 * - `hashed`: the bytes are hashed next. A source that sees them come may do that meanwhile (arrival-digests.ts).
 * - `priority` is a hint for limits below: a reader waits for 'interactive', nobody for 'prefetch'.
 * - An error reaches every reader that waits for the range, as it is. `DsecError.retryable` says whether to try again.
 */
import type { Digest, StopSignal } from '#base';

export type FetchPriority = 'interactive' | 'prefetch';

export interface RangeOptions {
  readonly signal?: StopSignal;
  readonly priority: FetchPriority;
  readonly hashed?: boolean;
}

export interface RangeSource {
  readRange(blob: Digest, offset: number, lengthBytes: number, options: RangeOptions): Promise<Buffer>;
}

/** What must be known of a blob before a byte of it can be believed. */
export interface BlobFacts {
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** sha256 of each 256 KiB of the blob, 32 bytes each, one after the other; vouched for by the image's manifest. */
  readonly chunkDigests: Buffer;
}
