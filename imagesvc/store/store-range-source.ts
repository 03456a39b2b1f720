/**
 * A store as the source of a chunk cache. `storeRangeSource` is one try a read; `remoteRangeSource` is what a reader of a remote
 * store wants around it: counted, bounded, tried again, hedged. In that order: waiting for a place is no part of a try, or a long
 * queue would look like a silent server; and a read that waits to be tried again keeps its place, so that a server in
 * trouble has fewer requests at once.
 */
import type { RangeSource } from '#chunk-cache';
import type { BlobStore } from './blob-store.ts';
import type { RetryOptions } from './decorators/retry-call.ts';
import { type HedgeOptions, withHedge } from './decorators/with-hedge.ts';
import { type LimitOptions, withLimit } from './decorators/with-limit.ts';
import { type MeteredSource, withMetrics } from './decorators/with-metrics.ts';
import { withRetry } from './decorators/with-retry.ts';
import { RegistryStore } from './registry-store.ts';
import { S3Store } from './s3-store.ts';

/** Single tries, which end with their signal where the store is remote. */
export function storeRangeSource(store: BlobStore): RangeSource {
  if (store instanceof S3Store || store instanceof RegistryStore) return store.ranges;
  return {
    async readRange(blob, offset, lengthBytes, { signal }) {
      signal?.throwIfAborted();
      return store.read(blob, offset, lengthBytes);
    },
  };
}

export interface RemoteSourceOptions {
  readonly retry?: RetryOptions;
  readonly hedge?: HedgeOptions;
  readonly limit?: LimitOptions;
  /** Goes innermost: faults for tests. */
  readonly inner?: (source: RangeSource) => RangeSource;
}

export function remoteRangeSource(store: BlobStore, options: RemoteSourceOptions = {}): MeteredSource {
  const { retry, hedge, limit, inner = (source) => source } = options;
  return withMetrics(withLimit(withRetry(withHedge(inner(storeRangeSource(store)), hedge), retry), limit));
}
