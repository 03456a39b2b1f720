/** What the main thread of the raw transport and its workers say to each other. */
import type { ServedBlob } from './served-blob.ts';

export interface RawWorkerData {
  readonly fd: number;
  readonly blobs: readonly ServedBlob[];
  /** Float64Array with a row of `COUNTER`s for each thread, the main thread's first: each writes its own, any may read. */
  readonly counters: SharedArrayBuffer;
  /** This thread's row. */
  readonly row: number;
}

/** A read that has to be fetched: unique (low, high), node, offset, length. */
export type ReadMessage = readonly [number, number, number, number, number];

export const COUNTER = { reads: 0, hits: 1, failures: 2, readBytes: 3, resent: 4, largestReadBytes: 5 } as const;
export const COUNTERS = 6;
