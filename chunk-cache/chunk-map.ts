/**
 * The map file of a blob: which of its chunks are in the data file. It never claims a chunk whose bytes are not safely there:
 *
 * - fill: the bytes are written, the data file is synced (fdatasync, one for a batch), and only then is the claim written;
 * - evict: the claim is taken back and the map synced, and only then is the hole punched.
 *
 * So whenever the process is killed, each claimed chunk is whole. That rests on the disk keeping its word about syncs; nobody has to
 * believe it: after a restart a claim says only where to look. Each chunk's bytes are checked against its digest once before they
 * are trusted, so a disk that lied, a power failure, or a damaged map cost a fetch, and never give wrong bytes.
 *
 * A header of 4096 bytes, then one byte a chunk, so that a claim is one byte that is there or not, whatever the sector
 * or the moment: no record can be half written. docs/chunk-cache.md has the format. Little-endian.
 */
import { readFileSync, renameSync, writeFileSync, writeSync } from 'node:fs';
import { crc32 } from 'node:zlib';
import { type Digest, digestFromHex, failPoint, hexOf, systemCode } from '#base';
import { CHUNK_BYTES, chunkCount } from './chunk.ts';
import { type ChunkStates, COLD } from './chunk-states.ts';

const MAGIC = 'DSECMAP1';
export const MAP_HEADER_BYTES = 4096;
const CHECKED_BYTES = 88;
const PAGE_BYTES = 4096;

/** Bits of a chunk's byte. */
export const PRESENT = 1;
export const TOUCHED = 2;
const FETCHED_SHIFT = 2;
const FETCHED_BITS = 3;
const KNOWN_BITS = 0b1111;

/** What a map is the map of. */
export interface MapSubject {
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** sha256 of the blob's chunk digests: the same blob with other chunk digests is another subject. */
  readonly tableHash: Buffer;
}

/** A map as it was found. `chunks`: a byte a chunk. */
export interface FoundMap extends MapSubject {
  readonly chunks: Buffer;
}

/** The map in the file; undefined when there is none, or none that is whole. */
export function readMap(path: string): FoundMap | undefined {
  let bytes: Buffer;
  try {
    bytes = readFileSync(path);
  } catch (error) {
    if (systemCode(error) === 'ENOENT' || systemCode(error) === 'EIO') return undefined;
    throw error;
  }
  return parseMap(bytes);
}

export function parseMap(bytes: Buffer): FoundMap | undefined {
  if (bytes.length < MAP_HEADER_BYTES || bytes.toString('latin1', 0, 8) !== MAGIC) return undefined;
  if (bytes.readUInt32LE(CHECKED_BYTES) !== crc32(bytes.subarray(0, CHECKED_BYTES))) return undefined;
  const sizeBytes = Number(bytes.readBigUInt64LE(16));
  if (bytes.readUInt32LE(8) !== MAP_HEADER_BYTES || bytes.readUInt32LE(12) !== CHUNK_BYTES) return undefined;
  if (!Number.isSafeInteger(sizeBytes) || bytes.length !== MAP_HEADER_BYTES + chunkCount(sizeBytes)) return undefined;
  return {
    digest: digestFromHex(bytes.toString('hex', 24, 56)),
    sizeBytes,
    tableHash: Buffer.from(bytes.subarray(56, 88)),
    chunks: Buffer.from(bytes.subarray(MAP_HEADER_BYTES)),
  };
}

/** Header and chunk bytes as they are in the file. */
export function formatMap(subject: MapSubject, chunks: Buffer): Buffer {
  const bytes = Buffer.alloc(MAP_HEADER_BYTES + chunks.length);
  bytes.write(MAGIC, 0, 'latin1');
  bytes.writeUInt32LE(MAP_HEADER_BYTES, 8);
  bytes.writeUInt32LE(CHUNK_BYTES, 12);
  bytes.writeBigUInt64LE(BigInt(subject.sizeBytes), 16);
  bytes.write(hexOf(subject.digest), 24, 'hex');
  subject.tableHash.copy(bytes, 56);
  bytes.writeUInt32LE(crc32(bytes.subarray(0, CHECKED_BYTES)), CHECKED_BYTES);
  chunks.copy(bytes, MAP_HEADER_BYTES);
  return bytes;
}

export function fetchedOf(chunkByte: number): number {
  return (chunkByte >> FETCHED_SHIFT) & FETCHED_BITS;
}

/** A byte with bits that nobody knows claims nothing. */
export function isPresent(chunkByte: number): boolean {
  return (chunkByte & PRESENT) !== 0 && (chunkByte & ~KNOWN_BITS) === 0;
}

/** A whole new map file with nothing in it, under its name at once. */
export function createMap(path: string, subject: MapSubject, chunks: Buffer): void {
  const made = `${path}.new`;
  writeFileSync(made, formatMap(subject, chunks));
  renameSync(made, path);
}

/** Brings the file up to date with the states, writing only the pages that differ; `saved` is what is in the file. */
export function updateMap(fd: number, states: ChunkStates, saved: Buffer): void {
  for (let page = 0; page < saved.length; page += PAGE_BYTES) {
    const end = Math.min(page + PAGE_BYTES, saved.length);
    const first = firstChange(states, saved, page, end);
    if (first === end) continue;
    const bytes = Buffer.allocUnsafe(end - first);
    for (let i = first; i < end; i++) bytes[i - first] = byteOf(states, i);
    let done = 0;
    while (done < bytes.length)
      done += writeSync(fd, bytes, done, bytes.length - done, MAP_HEADER_BYTES + first + done);
    bytes.copy(saved, first);
    failPoint('cache-map-page-written');
  }
}

/** Whether `updateMap` would have nothing to write. */
export function mapIsCurrent(states: ChunkStates, saved: Buffer): boolean {
  return firstChange(states, saved, 0, saved.length) === saved.length;
}

function firstChange(states: ChunkStates, saved: Buffer, start: number, end: number): number {
  let i = start;
  while (i < end && saved[i] === byteOf(states, i)) i++;
  return i;
}

function byteOf(states: ChunkStates, i: number): number {
  return (
    (states.state(i) === COLD ? 0 : PRESENT) |
    (states.touched[i] === 1 ? TOUCHED : 0) |
    ((states.fetched[i]! & FETCHED_BITS) << FETCHED_SHIFT)
  );
}
