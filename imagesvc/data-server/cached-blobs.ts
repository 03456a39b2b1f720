/**
 * The chunk cache as the data server uses it: blobs by their digest, views for the threads, reads for what is missing, and
 * which blobs must stay whole because a mount reads their cache file directly.
 *
 * Who reads a file directly is told by the mount records of the node, as everything about mounts is: a blob stays pinned
 * from when its path was given out until no record names it. The kernel keeps an EROFS whose mount was detached lazily
 * without any record; while there is one, nothing is unpinned.
 */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, messageOf } from '#base';
import {
  type ByteRange,
  type CachedBlob,
  type ChunkCache,
  openChunkCache,
  type RangeSource,
  type StoredBlob,
} from '#chunk-cache';
import { readMountInfo } from '#linux';
import { readRecords } from '../mount/mount-record.ts';
import type { BlobReader, ServedBlob, ViewHandle } from './served-blob.ts';

export interface CachedBlobsOptions {
  readonly folder: string;
  readonly source: RangeSource;
  readonly runDir: string;
  readonly memoryBytes?: number;
  readonly capacityBytes?: number;
  /** Told of every read that failed. */
  onFailure?(blob: Digest, reason: string): void;
}

/** A path that was given out is mounted, and recorded, within this time. */
const GRACE_MS = 5 * 60_000;

export class CachedBlobs implements BlobReader {
  readonly #cache: ChunkCache;
  readonly #options: CachedBlobsOptions;
  readonly #blobs = new Map<Digest, CachedBlob>();
  /** Digest -> when its path was last given out. */
  readonly #pinned = new Map<Digest, number>();
  #prefetching = 0;

  private constructor(cache: ChunkCache, options: CachedBlobsOptions) {
    this.#cache = cache;
    this.#options = options;
  }

  /** @throws CACHE_BUSY, CACHE_FOLDER */
  static async open(options: CachedBlobsOptions): Promise<CachedBlobs> {
    const { folder, source, memoryBytes, capacityBytes } = options;
    const blobs = new CachedBlobs(await openChunkCache({ folder, source, memoryBytes, capacityBytes }), options);
    // Pins of earlier servers: those that no mount names any more are taken back in a while.
    for (const digest of blobs.#cache.pinned()) blobs.#pinned.set(digest, performance.now());
    for (const digest of blobs.#named()) blobs.#pin(digest, 0);
    return blobs;
  }

  /** The view of the blob for threads. @throws CACHE_FACTS */
  add(digest: Digest, sizeBytes: number, chunkDigests: Buffer): ViewHandle {
    let blob = this.#blobs.get(digest);
    if (blob === undefined) {
      blob = this.#cache.open({ digest, sizeBytes, chunkDigests });
      this.#blobs.set(digest, blob);
    }
    return { kind: 'chunks', chunks: blob.view() };
  }

  /** The whole blob as a file, where it is whole; it stays so until no mount names it. */
  localPath(digest: Digest): string | undefined {
    const blob = this.#blobs.get(digest);
    if (blob === undefined || !blob.isComplete) return undefined;
    this.#pin(digest, performance.now());
    // Looked at after pinning: what was evicted just before must not be given out.
    return blob.isComplete ? blob.localPath : undefined;
  }

  async read(blob: ServedBlob, offset: number, length: number): Promise<Buffer> {
    try {
      return await this.#blobs.get(blob.digest)!.read(offset, length);
    } catch (error) {
      this.#options.onFailure?.(blob.digest, messageOf(error));
      throw error;
    }
  }

  /** Begins to fetch ranges, in this order, behind what readers ask for. `over` is called in any case. */
  prefetch(digest: Digest, ranges: readonly ByteRange[], over: () => void): void {
    const blob = this.#blobs.get(digest);
    if (blob === undefined) throw new Error(`no blob ${digest}`);
    this.#prefetching++;
    blob
      .prefetch(ranges)
      .catch((error: unknown) => this.#options.onFailure?.(digest, `fetched ahead: ${messageOf(error)}`))
      .finally(() => {
        this.#prefetching--;
        over();
      });
  }

  /** Calls of `prefetch` that are not done. */
  get prefetching(): number {
    return this.#prefetching;
  }

  /** A byte a chunk, as the cache's map has them; undefined for a blob that is not shown. */
  chunks(digest: Digest): Buffer | undefined {
    return this.#blobs.get(digest)?.chunkBytes();
  }

  stats(): unknown {
    return this.#cache.stats();
  }

  /** What is on disk, of blobs of this and earlier servers. */
  stored(): StoredBlob[] {
    return this.#cache.list();
  }

  /** Takes blobs off the disk that no mount names; those that went. Who reads one of them all the same has it fetched again. */
  async forget(digests: readonly Digest[]): Promise<Digest[]> {
    const named = this.#named();
    const gone: Digest[] = [];
    for (const digest of digests) {
      if (named.has(digest) || this.#pinned.has(digest)) continue;
      await this.#cache.remove(digest);
      gone.push(digest);
    }
    return gone;
  }

  /** To be called now and then. */
  unpinUnused(): void {
    const named = this.#named();
    for (const [digest, at] of this.#pinned) {
      if (named.has(digest)) this.#pinned.set(digest, Math.max(at, performance.now() - GRACE_MS));
      else if (performance.now() - at > GRACE_MS && !hiddenErofs()) {
        this.#cache.unpin(digest);
        this.#pinned.delete(digest);
      }
    }
  }

  async close(): Promise<void> {
    await this.#cache.close();
  }

  #pin(digest: Digest, at: number): void {
    if (!this.#pinned.has(digest)) this.#cache.pin(digest);
    this.#pinned.set(digest, Math.max(at, this.#pinned.get(digest) ?? 0));
  }

  #named(): Set<Digest> {
    try {
      const { records } = readRecords(join(this.#options.runDir, 'mounts'));
      return new Set(records.flatMap((record) => record.lazy?.flatMap(({ blobs }) => blobs) ?? []));
    } catch {
      return new Set();
    }
  }
}

/** Whether the kernel holds an EROFS that no mount of this namespace shows: detached lazily, or of another namespace. */
function hiddenErofs(): boolean {
  let held: number;
  try {
    held = readdirSync('/sys/fs/erofs').filter((name) => name !== 'features').length;
  } catch {
    return true;
  }
  const shown = new Set(
    readMountInfo()
      .filter(({ type }) => type === 'erofs')
      .map(({ device }) => device),
  );
  return held > shown.size;
}
