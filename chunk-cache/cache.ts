/**
 * The chunk cache: remote bytes, read once. `openChunkCache` takes the folder (one owner at a time) and finds what earlier owners left;
 * `open` gives a blob to read. README.md tells what it promises.
 */
import { type Digest, isDigest } from '#base';
import type { FileLock } from '#linux';
import { CachedBlob } from './cached-blob.ts';
import { CHUNK_BYTES, CHUNK_DIGEST_BYTES, chunkCount, sha256 } from './chunk.ts';
import type { DiskBlob } from './disk-blob.ts';
import { DiskKeeper } from './disk-keeper.ts';
import { DiskLevel } from './disk-level.ts';
import { fail } from './errors.ts';
import { EvictionPolicy } from './eviction.ts';
import { Fetcher } from './fetcher.ts';
import { MemoryLevel } from './memory-level.ts';
import { takeOwnership } from './owner-lock.ts';
import type { BlobFacts, RangeSource } from './range-source.ts';
import { type CacheStats, Counters } from './stats.ts';
import { UseClock } from './use-clock.ts';

export interface ChunkCacheOptions {
  /** On a local disk. Made when it is missing. */
  readonly folder: string;
  readonly source: RangeSource;
  /** Chunks in memory, those on their way to the disk among them. What is on its way from the source comes on top: at most
   * 4 MiB for each of `maxInFlight`. */
  readonly memoryBytes?: number;
  /** Chunks on disk. Left out: as much as `minFreeBytes` leaves. */
  readonly capacityBytes?: number;
  /** What the cache leaves free on its file system, evicting for it when others fill it. Left out: 1 GiB, or a twentieth of a small one. */
  readonly minFreeBytes?: number;
  /** Reads of the source at a time. */
  readonly maxInFlight?: number;
  /** How long a reader waits for a read that was sent ahead of him before his chunk is fetched for him alone; a second. */
  readonly patienceMs?: number;
  /** After the disk refused to take more, the time until it is tried again. */
  readonly diskRetryMs?: number;
  /** How often the watermarks are looked at when nothing is written. */
  readonly tidyEveryMs?: number;
}

/** A blob on the local disk, opened or not. */
export interface StoredBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
  readonly storedBytes: number;
  readonly pinned: boolean;
}

const MIB = 1024 * 1024;
const GIB = 1024 * MIB;

/** @throws CACHE_BUSY, CACHE_FOLDER, CACHE_OPTION */
export async function openChunkCache(options: ChunkCacheOptions): Promise<ChunkCache> {
  const sized = {
    memoryBytes: atLeast('memoryBytes', options.memoryBytes ?? 64 * MIB, CHUNK_BYTES),
    capacityBytes: atLeast('capacityBytes', options.capacityBytes ?? Number.POSITIVE_INFINITY, 0),
    maxInFlight: atLeast('maxInFlight', options.maxInFlight ?? 16, 1),
  };
  const disk = new DiskLevel(options.folder);
  const lock = takeOwnership(options.folder, disk.lockPath);
  try {
    const minFreeBytes = options.minFreeBytes ?? Math.min(GIB, Math.floor(disk.sizeBytes() / 20));
    const room = { capacityBytes: sized.capacityBytes, minFreeBytes: atLeast('minFreeBytes', minFreeBytes, 0) };
    return new ChunkCache(options, { ...sized, room }, disk, lock);
  } catch (error) {
    lock.release();
    throw error;
  }
}

interface Sizes {
  readonly memoryBytes: number;
  readonly maxInFlight: number;
  readonly room: { readonly capacityBytes: number; readonly minFreeBytes: number };
}

export class ChunkCache {
  readonly folder: string;
  readonly #sizes: Sizes;
  readonly #lock: FileLock;
  readonly #disk: DiskLevel;
  readonly #keeper: DiskKeeper;
  readonly #memory: MemoryLevel;
  readonly #fetcher: Fetcher;
  readonly #clock = new UseClock();
  readonly #counters = new Counters();
  readonly #open = new Map<DiskBlob, CachedBlob>();
  readonly #pinCounts = new Map<Digest, number>();
  readonly #timer: NodeJS.Timeout;
  #roomWaiters: (() => void)[] = [];
  #nextId = 0;
  #closedWith: Error | undefined;
  #closing: Promise<void> | undefined;

  /** Use `openChunkCache`. */
  constructor(options: ChunkCacheOptions, sizes: Sizes, disk: DiskLevel, lock: FileLock) {
    this.folder = options.folder;
    this.#sizes = sizes;
    this.#disk = disk;
    this.#lock = lock;
    this.#memory = new MemoryLevel(sizes.memoryBytes);
    const policy = new EvictionPolicy<DiskBlob>((slot) => disk.blobAt(slot));
    this.#keeper = new DiskKeeper(disk, policy, sizes.room, {
      retryMs: options.diskRetryMs ?? 1000,
      counters: this.#counters,
    });
    this.#fetcher = new Fetcher({
      source: options.source,
      maxInFlight: sizes.maxInFlight,
      patienceMs: options.patienceMs ?? 1000,
      counters: this.#counters,
      hasRoom: () => this.#hasRoom(),
    });
    for (const blob of disk.load()) {
      for (let index = 0; index < blob.states.count; index++)
        if (blob.states.state(index) !== 0) policy.add(blob, index);
    }
    this.#timer = setInterval(() => void this.tidy().catch(() => {}), options.tidyEveryMs ?? 10_000);
    this.#timer.unref();
  }

  /**
   * The blob to read; the same object as long as it is not released. Nothing is fetched or read yet.
   * @throws CACHE_CLOSED, CACHE_FACTS
   */
  open(facts: BlobFacts): CachedBlob {
    if (this.#closedWith !== undefined) throw this.#closedWith;
    const problem = problemWith(facts);
    if (problem !== undefined) throw fail('CACHE_FACTS', { blob: facts.digest, problem });
    const tableHash = sha256(facts.chunkDigests);
    const disk = this.#disk.blobFor({ digest: facts.digest, sizeBytes: facts.sizeBytes, tableHash });
    const known = this.#open.get(disk);
    if (known !== undefined) return known;
    const blob = new CachedBlob(facts, disk, this.#nextId++, {
      memory: this.#memory,
      keeper: this.#keeper,
      fetcher: this.#fetcher,
      clock: this.#clock,
      counters: this.#counters,
      diskBytes: () => this.#disk.total.bytes,
      roomCame: () => this.#roomCame(),
      closedWith: () => this.#closedWith,
      released: () => this.#open.delete(disk),
      newId: () => this.#nextId++,
    });
    this.#open.set(disk, blob);
    return blob;
  }

  /**
   * Keeps the blob's chunks from eviction until as many `unpin`s. It is written down before this returns and outlives the process: a
   * kernel mount that uses the cache file does so too. The next owner finds it in `pinned()`.
   */
  pin(digest: Digest): void {
    if (this.#closedWith !== undefined) throw this.#closedWith;
    this.#disk.setPinned(digest, true);
    this.#pinCounts.set(digest, (this.#pinCounts.get(digest) ?? 0) + 1);
  }

  /** Takes back one `pin`, or one that an earlier owner left. */
  unpin(digest: Digest): void {
    if (this.#closedWith !== undefined) return;
    const left = (this.#pinCounts.get(digest) ?? 0) - 1;
    if (left > 0) {
      this.#pinCounts.set(digest, left);
      return;
    }
    this.#pinCounts.delete(digest);
    this.#disk.setPinned(digest, false);
  }

  /** Those of earlier owners among them. */
  pinned(): Digest[] {
    return this.#disk.pinned();
  }

  /** What is on the local disk. */
  list(): StoredBlob[] {
    return [...this.#disk.blobs()]
      .filter((blob) => blob.exists)
      .map(({ subject, storedBytes, pinned }) => ({
        digest: subject.digest,
        sizeBytes: subject.sizeBytes,
        storedBytes,
        pinned,
      }));
  }

  /** Takes the blob off the local disk. One that is open stays usable: its chunks are fetched again. @throws CACHE_CLOSED, CACHE_PINNED */
  async remove(digest: Digest): Promise<void> {
    if (this.#closedWith !== undefined) throw this.#closedWith;
    await this.#keeper.alone(() => {
      if (this.#disk.isPinned(digest)) throw fail('CACHE_PINNED', { blob: digest });
      for (const blob of [...this.#disk.blobs()]) {
        if (blob.subject.digest !== digest || !blob.exists) continue;
        this.#open.get(blob)?.forgetMemory();
        this.#keeper.removeBlob(blob);
      }
    });
  }

  /** Holds the watermarks and writes down what was read; happens by itself every few seconds. */
  async tidy(): Promise<void> {
    if (this.#closedWith !== undefined) return;
    this.#clock.advance();
    await this.#keeper.tidy();
    await this.#saveMaps();
  }

  /** Resolves when what has come is on the disk, or has been let go. */
  async flush(): Promise<void> {
    await this.#keeper.flush();
  }

  stats(): CacheStats {
    const { capacityBytes, minFreeBytes } = this.#sizes.room;
    return {
      ...this.#counters,
      blobs: this.list().length,
      diskBytes: this.#disk.total.bytes,
      capacityBytes: Number.isFinite(capacityBytes) ? capacityBytes : undefined,
      minFreeBytes,
      memoryBytes: this.#memory.usedBytes,
      memoryLimitBytes: this.#memory.limitBytes,
      inFlight: this.#fetcher.inFlight,
      queued: this.#fetcher.queued,
      diskProblem: this.#keeper.problem,
    };
  }

  /** Reads under way fail with CACHE_CLOSED; what has come is written. Then the folder is free. Safe to call twice. */
  close(): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  async #close(): Promise<void> {
    clearInterval(this.#timer);
    this.#closedWith = fail('CACHE_CLOSED', { folder: this.folder });
    this.#fetcher.close(this.#closedWith);
    this.#roomCame();
    try {
      await this.#keeper.flush();
      await this.#saveMaps();
    } finally {
      this.#disk.close();
      this.#memory.clear();
      this.#lock.release();
    }
  }

  async #saveMaps(): Promise<void> {
    await this.#keeper.alone(() => {
      for (const disk of this.#open.keys()) {
        try {
          disk.saveMap();
        } catch {
          // Statistics only.
        }
      }
    });
  }

  /** Half of the memory is for chunks on their way to the disk; one read may always go past that, or nothing would ever move. */
  async #hasRoom(): Promise<void> {
    while (this.#memory.reservedBytes > this.#memory.limitBytes / 2 && this.#closedWith === undefined) {
      await new Promise<void>((resolve) => this.#roomWaiters.push(resolve));
    }
  }

  #roomCame(): void {
    const waiters = this.#roomWaiters;
    this.#roomWaiters = [];
    for (const resolve of waiters) resolve();
  }
}

function problemWith({ digest, sizeBytes, chunkDigests }: BlobFacts): string | undefined {
  if (!isDigest(digest)) return 'this is no sha256 digest';
  if (!Number.isSafeInteger(sizeBytes) || sizeBytes < 0) return `a size of ${sizeBytes} bytes`;
  const expected = chunkCount(sizeBytes) * CHUNK_DIGEST_BYTES;
  if (chunkDigests.length === expected) return undefined;
  return `its chunk digests have ${chunkDigests.length} bytes, ${expected} are needed for its ${sizeBytes} bytes`;
}

function atLeast(name: string, value: number, least: number): number {
  if (value >= least) return value;
  throw fail('CACHE_OPTION', { name, value, problem: `it must be ${least} or more` });
}
