/** What the cache counts. Counters only grow, from 0 when the cache was opened. */

export class Counters {
  /** Chunks asked for by readers, by where they were. Hits that other threads answer (chunk-view.ts) are not among them. */
  memoryHits = 0;
  diskHits = 0;
  misses = 0;
  /** Calls of the source and bytes that it gave, by priority. */
  interactiveReads = 0;
  interactiveBytes = 0;
  prefetchReads = 0;
  prefetchBytes = 0;
  failedReads = 0;
  abortedReads = 0;
  /** Chunks that came with wrong bytes. */
  mismatches = 0;
  /** Chunks that were claimed to be on disk and were not, or were other bytes. */
  badOnDisk = 0;
  storedBytes = 0;
  /** Bytes that were not stored since there was no room, or the disk failed. */
  bypassedBytes = 0;
  evictedChunks = 0;
  diskErrors = 0;
}

export interface CacheStats extends Readonly<Counters> {
  readonly blobs: number;
  readonly diskBytes: number;
  /** Undefined: bounded by free space only. */
  readonly capacityBytes: number | undefined;
  readonly minFreeBytes: number;
  readonly memoryBytes: number;
  readonly memoryLimitBytes: number;
  readonly inFlight: number;
  readonly queued: number;
  /** Why nothing is written to disk at the moment (ENOSPC, 'capacity', ...); undefined when all is well. */
  readonly diskProblem: string | undefined;
}
