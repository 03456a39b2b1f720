export { CHUNK_BYTES, CHUNK_DIGEST_BYTES, chunkCount, chunkLength } from './chunk.ts';
export { chunkCacheErrors } from './errors.ts';
export type { BlobFacts, FetchPriority, RangeSource } from './range-source.ts';
