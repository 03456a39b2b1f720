export { type ChunkCache, type ChunkCacheOptions, openChunkCache, type StoredBlob } from './cache.ts';
export type { ByteRange, CachedBlob } from './cached-blob.ts';
export { CHUNK_BYTES, CHUNK_DIGEST_BYTES, chunkCount, chunkLength } from './chunk.ts';
export { FETCHED_INTERACTIVE, FETCHED_PREFETCH } from './chunk-states.ts';
export { ChunkView, type ChunkViewHandle } from './chunk-view.ts';
export { chunkCacheErrors } from './errors.ts';
export type { BlobFacts, FetchPriority, RangeSource } from './range-source.ts';
export type { CacheStats } from './stats.ts';
