/**
 * What a cache folder's map file says of a blob's chunks, for whoever looks from outside: it takes no lock and changes nothing.
 * While an owner runs, the file is some seconds behind it.
 */
import { join } from 'node:path';
import { type Digest, hexOf } from '#base';
import { chunkCount } from './chunk.ts';
import { fetchedOf, isPresent, PRESENT, readMap, TOUCHED } from './chunk-map.ts';
import type { ChunkStates } from './chunk-states.ts';
import { COLD } from './chunk-states.ts';
import { keyOf, VERSION } from './disk-level.ts';

export interface ChunkFacts {
  /** In the cache now. */
  readonly present: boolean;
  /** A reader has read of it, now or earlier. */
  readonly touched: boolean;
  /** Who made it come first: 0 nobody, FETCHED_INTERACTIVE, FETCHED_PREFETCH. */
  readonly fetched: number;
}

/** Of a byte of a map (docs/chunk-cache.md). */
export function chunkFacts(byte: number): ChunkFacts {
  return { present: isPresent(byte), touched: (byte & TOUCHED) !== 0, fetched: fetchedOf(byte) };
}

/** The bytes that a map has for these states, one a chunk. */
export function chunkBytesOf(states: ChunkStates): Buffer {
  const bytes = Buffer.alloc(states.count);
  for (let i = 0; i < bytes.length; i++) {
    bytes[i] =
      (states.state(i) === COLD ? 0 : PRESENT) | (states.touched[i] === 1 ? TOUCHED : 0) | (states.fetched[i]! << 2);
  }
  return bytes;
}

/** A byte a chunk; undefined when the folder has nothing of the blob. `tableHash`: sha256 of its chunk digests, in hex. */
export function readStoredChunks(
  folder: string,
  blob: { readonly digest: Digest; readonly sizeBytes: number; readonly tableHash: string },
): Buffer | undefined {
  const key = keyOf(blob.digest, Buffer.from(blob.tableHash, 'hex'));
  const map = readMap(join(folder, VERSION, 'blobs', `${key}.map`));
  if (map === undefined || hexOf(map.digest) !== hexOf(blob.digest)) return undefined;
  return map.chunks.length === chunkCount(blob.sizeBytes) ? map.chunks : undefined;
}
