/** What the supervisor and the process that serves say to each other, over the channel that spawn made. */
import type { Digest } from '#base';
import type { ByteRange } from '#chunk-cache';
import type { RegisteredLayer } from '../layer-server/layer-facts.ts';
import type { RegisteredBlob } from './blob-registry.ts';
import type { TransportStats } from './transport.ts';

/** Argument of the serving process. It finds the device's descriptor as number 3 when `transport` is raw. */
export interface ServerConfig {
  readonly storeUrl: string;
  readonly transport: 'raw' | 'native';
  readonly mountPoint: string;
  /** Of the blob registry, or the layer registry. */
  readonly blobs: string;
  /** Of the chunk cache. */
  readonly chunks: string;
  readonly runDir: string;
  readonly cacheDir: string;
  readonly id: string;
  readonly threads?: number;
  readonly memoryBytes?: number;
  readonly capacityBytes?: number;
  /** Every read is noted, for `recorded`. */
  readonly record?: boolean;
  /** Of the supervisor. */
  readonly idleMs: number;
  /** How long to serve without a supervisor before a new one is started. */
  readonly orphanMs: number;
}

export type ToServer =
  | { readonly id: number; readonly op: 'add'; readonly blob: RegisteredBlob }
  | { readonly id: number; readonly op: 'add-layer'; readonly layer: RegisteredLayer }
  | { readonly id: number; readonly op: 'cached' }
  | { readonly id: number; readonly op: 'forget'; readonly digests: readonly Digest[] }
  | { readonly id: number; readonly op: 'stats' }
  /** Fetches ranges ahead; answered when it has begun, and told of (`prefetched`) when it is over. */
  | { readonly id: number; readonly op: 'prefetch'; readonly digest: Digest; readonly ranges: readonly ByteRange[] }
  /** Answered with a `ChunkReport`. */
  | { readonly id: number; readonly op: 'chunks'; readonly digest: Digest }
  /** Answered with `RecordedReads`. */
  | { readonly id: number; readonly op: 'recorded' };

export type FromServer =
  | { readonly event: 'ready' }
  /** The prefetch of that id is over, whatever came of it. */
  | { readonly event: 'prefetched'; readonly id: number }
  | { readonly event: 'reply'; readonly id: number; readonly value: unknown }
  | { readonly event: 'failed'; readonly id: number; readonly message: string };

/** Answer to `add`. */
export interface AddedBlob {
  readonly digest: Digest;
  /** The whole blob as a file of the cache, once it is there: read that. It is kept while a mount names it. */
  readonly localPath?: string;
}

export interface ServerStats {
  readonly pid: number;
  readonly transport: TransportStats;
  readonly cache: unknown;
  /** Prefetches that are not done. */
  readonly prefetching?: number;
}

/** What the cache has of a blob: base64 of a byte a chunk (docs/chunk-cache.md); left out when the server does not show it. */
export interface ChunkReport {
  readonly chunks?: string;
}
