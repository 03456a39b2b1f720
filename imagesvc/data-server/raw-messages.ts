/** What the main thread of the raw transport and its workers say to each other. */
import type { ServedBlob } from './served-blob.ts';

export interface RawWorkerData {
  readonly fd: number;
  readonly blobs: readonly ServedBlob[];
  /** BigInt64Array of `COUNTER`s, shared by all. */
  readonly counters: SharedArrayBuffer;
}

/** A read that has to be fetched: unique (low, high), node, offset, length. */
export type ReadMessage = readonly [number, number, number, number, number];

export const COUNTER = { reads: 0, hits: 1, failures: 2, readBytes: 3, resent: 4, largestReadBytes: 5 } as const;
export const COUNTERS = 6;
