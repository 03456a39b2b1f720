/**
 * Layers of disks out of stores: what `openDisk` and `openNamedDisk` take as `openStoreLayer`.
 *
 * A layer of a store that is a folder is read as the file it is, proved to be its blob as mounts do it. Any other (and one that its
 * disk wants `lazy`) comes through a chunk cache: a chunk is fetched when it is read, verified on arrival, kept on the local disk; what is
 * decoded of it is kept in the cache's memory, under one bound with the chunks. A store that is away is waited for, for a minute.
 *
 * A chunk cache has one owner. Disks have caches of their own, beside those of lazy mounts: `<cache>/disks/<store>/<n>`, where each process
 * that has disks open takes the first one that is free. So a second process reads as well, and finds what its likes before it fetched.
 */
import { randomUUID } from 'node:crypto';
import { mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { homedir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { type Digest, digestOf, hexOf, isDsecError } from '#base';
import {
  type CachedBlob,
  type CacheStats,
  type ChunkCache,
  chunkCount,
  type DerivedBlocks,
  openChunkCache,
  type RangeSource,
} from '#chunk-cache';
import {
  type BlobStore,
  dataServerId,
  openProven,
  openStore,
  type RetryOptions,
  type SourceMetrics,
  storeRangeSource,
  withHedge,
  withLimit,
  withMetrics,
  withRetry,
} from '#imagesvc';
import { type ByteSource, FileSource, type OpenStoreLayer, placeText, type StoreLayer, shortRead } from '#ublk-daemon';
import { fail } from './errors.ts';

/** Processes that have disks of one store open at a time. */
const MAX_OWNERS = 64;
const CHUNK_DIGEST_BYTES = 32;

export interface DiskLayerOptions {
  /** $DSEC_CACHE, else that of this user. */
  readonly cacheDir?: string;
  /** Chunks and decoded blocks in memory, for each store; 64 MiB. */
  readonly memoryBytes?: number;
  /** How long a store that is away is waited for. */
  readonly retry?: RetryOptions;
  /** Around the store's reads: faults for tests. */
  readonly inner?: (source: RangeSource) => RangeSource;
}

export interface StoreStats {
  readonly store: string;
  readonly cache: CacheStats;
  readonly reads: SourceMetrics;
}

export interface StoreLayerOpener extends OpenStoreLayer {
  /** Of the stores that are read through a cache now. */
  stats(): StoreStats[];
}

/** A cache is opened by the first layer that needs it, and closed with the last one. */
export function storeLayerOpener(options: DiskLayerOptions = {}): StoreLayerOpener {
  const caches = new LayerCaches(options);
  return Object.assign((layer: StoreLayer) => caches.open(layer), { stats: () => caches.stats() });
}

/** Root's is that of mounts. */
export function diskCacheDir(given?: string): string {
  const chosen = given || process.env.DSEC_CACHE;
  if (chosen) return resolve(chosen);
  if (process.geteuid?.() === 0) return '/var/lib/dsec/cache';
  return join(process.env.XDG_CACHE_HOME || join(homedir(), '.cache'), 'dsec');
}

/** Folders of chunk caches of a store, for as many owners as there may be. */
export function diskChunkFolders(cacheDir: string, storeUrl: string): string[] {
  const folder = join(cacheDir, 'disks', dataServerId(storeUrl));
  return Array.from({ length: MAX_OWNERS }, (_, n) => join(folder, String(n)));
}

interface SharedCache {
  readonly url: string;
  readonly opening: Promise<{ cache: ChunkCache; reads(): SourceMetrics; store(): Promise<BlobStore> }>;
  opened?: Awaited<SharedCache['opening']>;
  users: number;
  readonly blobs: Map<CachedBlob, number>;
}

class LayerCaches {
  readonly #options: DiskLayerOptions;
  readonly #cacheDir: string;
  readonly #shared = new Map<string, SharedCache>();
  /** Caches that are being closed: their folder is free after that. */
  readonly #closing = new Map<string, Promise<void>>();

  constructor(options: DiskLayerOptions) {
    this.#options = options;
    this.#cacheDir = diskCacheDir(options.cacheDir);
  }

  async open(layer: StoreLayer): Promise<ByteSource> {
    if (layer.lazy !== true && !isRemote(layer.store)) return this.#openLocal(layer);
    const shared = this.#shared.get(layer.store) ?? this.#begin(layer.store);
    shared.users++;
    try {
      const { cache, store } = await shared.opening;
      const chunkDigests = await this.#chunkDigestsOf(layer, store);
      const blob = cache.open({ digest: layer.digest, sizeBytes: layer.size, chunkDigests });
      shared.blobs.set(blob, (shared.blobs.get(blob) ?? 0) + 1);
      return new CachedSource(placeText(layer), blob, () => this.#release(shared, blob));
    } catch (error) {
      await this.#release(shared);
      throw error;
    }
  }

  stats(): StoreStats[] {
    return [...this.#shared.values()].flatMap(({ url, opened }) =>
      opened === undefined ? [] : [{ store: url, cache: opened.cache.stats(), reads: opened.reads() }],
    );
  }

  async #openLocal({ store: url, digest, size }: StoreLayer): Promise<ByteSource> {
    const path = (await openStore(url)).localPath(digest)!;
    const proven = await openProven(path, digest, size, this.#cacheDir);
    try {
      // The very file that was proved, whatever its name leads to now.
      return new FileSource(path, size, await open(proven.kernelPath, 'r'));
    } finally {
      proven.close();
    }
  }

  #begin(url: string): SharedCache {
    const opening = this.#openCache(url);
    const shared: SharedCache = { url, opening, users: 0, blobs: new Map() };
    opening.then(
      (opened) => {
        shared.opened = opened;
      },
      () => {},
    );
    this.#shared.set(url, shared);
    return shared;
  }

  async #openCache(url: string): Promise<Awaited<SharedCache['opening']>> {
    await this.#closing.get(url);
    const { memoryBytes, retry, inner = (source) => source } = this.#options;
    let opened: Promise<BlobStore> | undefined;
    // Not before it is needed: what is in the cache can be read while the store is away.
    const store = () => {
      opened ??= openStore(url).catch((error: unknown) => {
        opened = undefined;
        throw error;
      });
      return opened;
    };
    const ranges = inner({
      readRange: async (...range) => storeRangeSource(await store()).readRange(...range),
    });
    const source = withMetrics(withLimit(withRetry(withHedge(ranges), { patient: true, ...retry })));
    const reads = () => source.metrics();
    for (const folder of diskChunkFolders(this.#cacheDir, url)) {
      try {
        return { cache: await openChunkCache({ folder, source, memoryBytes }), reads, store };
      } catch (error) {
        if (!isDsecError(error, 'CACHE_BUSY')) throw error;
      }
    }
    throw fail('DISK_CACHES_TAKEN', { count: MAX_OWNERS, folder: join(this.#cacheDir, 'disks') });
  }

  async #release(shared: SharedCache, blob?: CachedBlob): Promise<void> {
    if (blob !== undefined) {
      const left = shared.blobs.get(blob)! - 1;
      if (left > 0) shared.blobs.set(blob, left);
      else {
        shared.blobs.delete(blob);
        blob.release();
      }
    }
    shared.users--;
    if (shared.users > 0) return;
    this.#shared.delete(shared.url);
    const closed = shared.opening.then(
      ({ cache }) => cache.close(),
      () => {},
    );
    this.#closing.set(shared.url, closed);
    await closed.finally(() => {
      if (this.#closing.get(shared.url) === closed) this.#closing.delete(shared.url);
    });
  }

  /** From `<cache>/meta`, so that a disk opens while its store is away. */
  async #chunkDigestsOf(layer: StoreLayer, store: () => Promise<BlobStore>): Promise<Buffer> {
    const path = join(this.#cacheDir, 'meta', hexOf(layer.chunkDigests));
    const kept = readKept(path, layer.chunkDigests);
    const digests = kept ?? (await (await store()).readVerified(layer.chunkDigests));
    const expected = chunkCount(layer.size) * CHUNK_DIGEST_BYTES;
    if (digests.length !== expected) {
      throw fail('DISK_CHUNK_DIGESTS', { layer: placeText(layer), actual: digests.length, expected });
    }
    if (kept === undefined) keep(path, digests);
    return digests;
  }
}

function isRemote(url: string): boolean {
  return /^(s3|docker):\/\//i.test(url);
}

function readKept(path: string, digest: Digest): Buffer | undefined {
  try {
    const bytes = readFileSync(path);
    return digestOf(bytes) === digest ? bytes : undefined;
  } catch {
    return undefined;
  }
}

/** Best effort: without it the store is asked again. */
function keep(path: string, bytes: Buffer): void {
  const fresh = join(dirname(path), `.${randomUUID()}`);
  try {
    mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
    writeFileSync(fresh, bytes, { mode: 0o600 });
    renameSync(fresh, path);
  } catch {
    rmSync(fresh, { force: true });
  }
}

/** A blob of a chunk cache as the source of a layer. */
class CachedSource implements ByteSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly #blob: CachedBlob;
  readonly #onClose: () => Promise<void>;
  #closing: Promise<void> | undefined;

  constructor(name: string, blob: CachedBlob, onClose: () => Promise<void>) {
    this.name = name;
    this.sizeBytes = blob.sizeBytes;
    this.#blob = blob;
    this.#onClose = onClose;
  }

  read(into: Buffer, offset: number): Promise<void> | undefined {
    return this.readNow(into, offset) ? undefined : this.#readSlowly(into, offset);
  }

  readNow(into: Buffer, offset: number): boolean {
    if (offset + into.length > this.sizeBytes) throw shortRead(this, into, offset);
    return this.#blob.readNowInto(into, 0, offset, into.length) === into.length;
  }

  blockMemory(): DerivedBlocks {
    return this.#blob.derivedBlocks();
  }

  close(): Promise<void> {
    this.#closing ??= this.#onClose();
    return this.#closing;
  }

  async #readSlowly(into: Buffer, offset: number): Promise<void> {
    const bytes = await this.#blob.read(offset, into.length);
    bytes.copy(into);
  }
}
