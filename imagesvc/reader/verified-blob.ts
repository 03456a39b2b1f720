/**
 * A data blob of a store, read in 256 KiB chunks that are checked against the digests the manifest vouches for. A byte
 * that does not match is never returned: STORE_CHUNK_MISMATCH.
 *
 * The latest chunks stay in memory, shared by all blobs of a tree; neighbouring missing chunks become one read; who asks for a
 * chunk that is on its way waits for it.
 */
import { createHash } from 'node:crypto';
import { type FileHandle, open } from 'node:fs/promises';
import type { Digest } from '#base';
import { CHUNK_BYTES, type LayerDevice } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import type { ByteSource } from './byte-source.ts';

const DIGEST_BYTES = 32;
/** Chunks fetched by one read. */
const RUN_CHUNKS = 8;

/** Chunks of all blobs of one tree, the least recently used given up first. */
export class ChunkCache {
  readonly #chunks = new Map<string, Buffer>();
  readonly #limit: number;

  constructor(limitBytes = 32 * 1024 * 1024) {
    this.#limit = Math.max(1, Math.floor(limitBytes / CHUNK_BYTES));
  }

  get(key: string): Buffer | undefined {
    const chunk = this.#chunks.get(key);
    if (chunk !== undefined) {
      this.#chunks.delete(key);
      this.#chunks.set(key, chunk);
    }
    return chunk;
  }

  put(key: string, chunk: Buffer): void {
    this.#chunks.set(key, chunk);
    if (this.#chunks.size <= this.#limit) return;
    for (const oldest of this.#chunks.keys()) {
      this.#chunks.delete(oldest);
      break;
    }
  }
}

export class VerifiedBlob implements ByteSource {
  readonly digest: Digest;
  readonly sizeBytes: number;
  /** 32 bytes a chunk. */
  readonly #digests: Buffer;
  readonly #store: BlobStore;
  readonly #cache: ChunkCache;
  readonly #inFlight = new Map<number, Promise<Buffer>>();
  #file: Promise<FileHandle | undefined> | undefined;

  private constructor(store: BlobStore, device: LayerDevice, digests: Buffer, cache: ChunkCache) {
    this.#store = store;
    this.digest = device.blob.digest;
    this.sizeBytes = device.blob.size;
    this.#digests = digests;
    this.#cache = cache;
  }

  /** @throws STORE_CHUNK_TABLE, and what the store throws */
  static async open(store: BlobStore, device: LayerDevice, cache: ChunkCache): Promise<VerifiedBlob> {
    const digests = await store.readVerified(device.chunkDigests.digest);
    const expected = chunkCount(device.blob.size) * DIGEST_BYTES;
    if (digests.length !== expected) {
      throw fail('STORE_CHUNK_TABLE', {
        blob: device.blob.digest,
        table: device.chunkDigests.digest,
        actual: digests.length,
        expected,
      });
    }
    return new VerifiedBlob(store, device, digests, cache);
  }

  /** Digest of chunk `index`, raw. */
  chunkDigest(index: number): Buffer {
    return this.#digests.subarray(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES);
  }

  async read(offset: number, length: number): Promise<Buffer> {
    if (length === 0) return Buffer.alloc(0);
    const first = Math.floor(offset / CHUNK_BYTES);
    const last = Math.floor((offset + length - 1) / CHUNK_BYTES);
    if (first === last) {
      const chunk = this.#cache.get(this.#key(first)) ?? (await this.#fetch(first, first));
      const start = offset - first * CHUNK_BYTES;
      return chunk.subarray(start, start + length);
    }
    const out = Buffer.allocUnsafe(length);
    for (let index = first; index <= last; index++) {
      const chunk = this.#cache.get(this.#key(index)) ?? (await this.#fetch(index, last));
      const start = index * CHUNK_BYTES - offset;
      if (start >= 0) chunk.copy(out, start, 0, Math.min(chunk.length, length - start));
      else chunk.copy(out, 0, -start);
    }
    return out;
  }

  #key(index: number): string {
    return `${this.digest}${index}`;
  }

  /** Chunk `first`, fetched together with those after it that are missing too, up to `last`. */
  #fetch(first: number, last: number): Promise<Buffer> {
    const waiting = this.#inFlight.get(first);
    if (waiting !== undefined) return waiting;
    let count = 1;
    while (
      count < RUN_CHUNKS &&
      first + count <= last &&
      !this.#inFlight.has(first + count) &&
      this.#cache.get(this.#key(first + count)) === undefined
    ) {
      count++;
    }
    const run = this.#fetchRun(first, count);
    for (let k = 0; k < count; k++) {
      const one = run.then((chunks) => chunks[k]!);
      // Whoever waits for it sees the failure; nobody may.
      one.catch(() => {}).finally(() => this.#inFlight.delete(first + k));
      this.#inFlight.set(first + k, one);
    }
    return this.#inFlight.get(first)!;
  }

  async #fetchRun(first: number, count: number): Promise<Buffer[]> {
    const start = first * CHUNK_BYTES;
    const end = Math.min(start + count * CHUNK_BYTES, this.sizeBytes);
    const bytes = await this.#readStore(start, end - start);
    const chunks: Buffer[] = [];
    for (let k = 0; k < count; k++) {
      const chunk = bytes.subarray(k * CHUNK_BYTES, (k + 1) * CHUNK_BYTES);
      checkChunk(this.digest, first + k, chunk, this.chunkDigest(first + k));
      chunks.push(chunk);
    }
    for (let k = 0; k < count; k++) this.#cache.put(this.#key(first + k), chunks[k]!);
    return chunks;
  }

  async #readStore(offset: number, length: number): Promise<Buffer> {
    this.#file ??= this.#openLocal();
    const file = await this.#file;
    if (file === undefined) return this.#store.read(this.digest, offset, length);
    const bytes = Buffer.allocUnsafe(length);
    let done = 0;
    while (done < length) {
      const { bytesRead } = await file.read(bytes, done, length - done, offset + done);
      // Shorter than it should be: the store says so in its own words.
      if (bytesRead === 0) return this.#store.read(this.digest, offset, length);
      done += bytesRead;
    }
    return bytes;
  }

  async #openLocal(): Promise<FileHandle | undefined> {
    const path = this.#store.localPath(this.digest);
    if (path === undefined) return undefined;
    return open(path, 'r').catch(() => undefined);
  }

  async close(): Promise<void> {
    const file = await this.#file;
    this.#file = undefined;
    await file?.close();
  }
}

export function chunkCount(sizeBytes: number): number {
  return Math.ceil(sizeBytes / CHUNK_BYTES);
}

/** @throws STORE_CHUNK_MISMATCH */
export function checkChunk(blob: Digest, index: number, chunk: Buffer, expected: Buffer): void {
  const actual = createHash('sha256').update(chunk).digest();
  if (actual.equals(expected)) return;
  throw fail('STORE_CHUNK_MISMATCH', {
    blob,
    chunk: index,
    start: index * CHUNK_BYTES,
    end: index * CHUNK_BYTES + chunk.length,
    actual: actual.toString('hex'),
    expected: expected.toString('hex'),
  });
}
