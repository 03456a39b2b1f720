/**
 * The one who changes the disk level: chunks that came in are written here, and chunks are given up here, one batch after the other,
 * so that no two changes of a blob's files ever overlap. Nobody waits for it: readers are answered from memory meanwhile.
 *
 * A batch: room is made, the data files are written, each is synced once, then the maps claim what is there. Where there is no
 * room (capacity, free space, or the disk says ENOSPC), the batch is let go: its chunks live in memory only and reads go on. After a
 * pause it is tried again, so that caching comes back by itself when space does.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';
import { systemCode } from '#base';
import { CHUNK_BYTES } from './chunk.ts';
import { COLD } from './chunk-states.ts';
import type { DiskBlob } from './disk-blob.ts';
import type { DiskLevel } from './disk-level.ts';
import type { EvictionPolicy } from './eviction.ts';
import type { Counters } from './stats.ts';

/** Whole chunks of one blob, one after the other, verified. */
export interface Fill {
  readonly blob: DiskBlob;
  readonly first: number;
  readonly bytes: Buffer;
  readonly chunks: readonly number[];
  /** Called once: how many of them, from the first on, are on disk now. */
  done(stored: number): void;
}

export interface Room {
  /** Bytes of chunks on disk, at most. Infinity: only free space counts. */
  readonly capacityBytes: number;
  /** What stays free on the file system. */
  readonly minFreeBytes: number;
}

/** What of a fill is written. */
interface Part {
  readonly fill: Fill;
  readonly bytes: Buffer;
  readonly chunks: readonly number[];
}

const BATCH_BYTES = 16 * 1024 * 1024;
/** Eviction syncs a map for each blob it takes from, so it takes more than it must: this part of what is there, at most. */
const EXTRA_PART = 1 / 32;
const EXTRA_BYTES = 64 * 1024 * 1024;

export class DiskKeeper {
  readonly #disk: DiskLevel;
  readonly #policy: EvictionPolicy<DiskBlob>;
  readonly #room: Room;
  readonly #retryMs: number;
  readonly #counters: Counters;
  readonly #queue: Fill[] = [];
  readonly #tasks: (() => Promise<void> | void)[] = [];
  #running: Promise<void> | undefined;
  #pausedUntilMs = 0;
  /** Of the last write, when it failed. */
  #diskError: string | undefined;
  #shortage: 'capacity' | 'free space' | undefined;

  constructor(
    disk: DiskLevel,
    policy: EvictionPolicy<DiskBlob>,
    room: Room,
    options: { readonly retryMs: number; readonly counters: Counters },
  ) {
    this.#disk = disk;
    this.#policy = policy;
    this.#room = room;
    this.#retryMs = options.retryMs;
    this.#counters = options.counters;
  }

  /** Why nothing is written at the moment; undefined when all is well. */
  get problem(): string | undefined {
    return this.#diskError ?? this.#shortage;
  }

  store(fill: Fill): void {
    this.#queue.push(fill);
    this.#start();
  }

  /** Runs `work` alone, between batches. */
  async alone<T>(work: () => Promise<T> | T): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      this.#tasks.push(async () => {
        try {
          resolve(await work());
        } catch (error) {
          reject(error);
        }
      });
      this.#start();
    });
  }

  /** Evicts what the watermarks demand, though nothing is to be written. */
  async tidy(): Promise<void> {
    await this.alone(async () => {
      await this.#makeRoom(0);
    });
  }

  /** Resolves when all that was given before has been written or let go. */
  async flush(): Promise<void> {
    while (this.#running !== undefined) await this.#running;
  }

  /** Removes the blob's files; one that nobody has open is forgotten as well. Only inside `alone`. */
  removeBlob(blob: DiskBlob): void {
    this.#policy.forget(blob);
    if (blob.inUse) blob.remove();
    else this.#disk.remove(blob);
  }

  #start(): void {
    this.#running ??= this.#run().finally(() => {
      this.#running = undefined;
      if (this.#queue.length > 0 || this.#tasks.length > 0) this.#start();
    });
  }

  async #run(): Promise<void> {
    // What comes in during this turn of the event loop belongs to the first batch; and whoever waits for it has his answer first.
    await nextTurn();
    while (this.#queue.length > 0 || this.#tasks.length > 0) {
      for (const task of this.#tasks.splice(0)) await task();
      const batch = this.#takeBatch();
      if (batch.length > 0) await this.#storeBatch(batch);
    }
  }

  #takeBatch(): Fill[] {
    // A batch must not push out most of what is there at once.
    const limit = Math.min(BATCH_BYTES, this.#room.capacityBytes / 8);
    let bytes = 0;
    let count = 0;
    while (count < this.#queue.length && (count === 0 || bytes + this.#queue[count]!.bytes.length <= limit)) {
      bytes += this.#queue[count++]!.bytes.length;
    }
    return this.#queue.splice(0, count);
  }

  async #storeBatch(batch: readonly Fill[]): Promise<void> {
    const bytes = batch.reduce((sum, fill) => sum + fill.bytes.length, 0);
    let allowed = 0;
    try {
      if (performance.now() >= this.#pausedUntilMs) allowed = await this.#makeRoom(bytes);
    } catch (error) {
      this.#pause(error);
    }
    const byBlob = new Map<DiskBlob, Part[]>();
    for (const fill of batch) {
      const chunks = fill.blob.isGone ? 0 : wholeChunks(fill, allowed);
      const part = { fill, bytes: fill.bytes.subarray(0, chunks * CHUNK_BYTES), chunks: fill.chunks.slice(0, chunks) };
      allowed -= part.bytes.length;
      this.#counters.bypassedBytes += fill.bytes.length - part.bytes.length;
      const parts = byBlob.get(fill.blob);
      if (chunks === 0) fill.done(0);
      else if (parts === undefined) byBlob.set(fill.blob, [part]);
      else parts.push(part);
    }
    await Promise.all([...byBlob].map(([blob, parts]) => this.#storeIn(blob, parts)));
  }

  async #storeIn(blob: DiskBlob, parts: readonly Part[]): Promise<void> {
    const chunks = parts.flatMap((part) => part.chunks);
    try {
      await blob.withdraw();
      let file: number | undefined;
      for (const { fill, bytes } of parts) {
        const into = await blob.write(fill.first, bytes);
        if (file !== undefined && into !== file) throw new Error(`${blob.dataPath} was replaced while it was written`);
        file = into;
      }
      await blob.commit(chunks);
    } catch (error) {
      await giveBack(blob, chunks);
      this.#pause(error);
      for (const { fill, bytes } of parts) {
        this.#counters.bypassedBytes += bytes.length;
        fill.done(0);
      }
      return;
    }
    this.#diskError = undefined;
    for (const index of chunks) this.#policy.add(blob, index);
    for (const part of parts) {
      this.#counters.storedBytes += part.bytes.length;
      part.fill.done(part.chunks.length);
    }
  }

  #pause(error: unknown): void {
    this.#diskError = systemCode(error) ?? String(error);
    this.#counters.diskErrors++;
    this.#pausedUntilMs = performance.now() + this.#retryMs;
  }

  /** How many of `bytes` more may be written. Evicts when not all may. */
  async #makeRoom(bytes: number): Promise<number> {
    const { capacityBytes } = this.#room;
    const wanted = Math.min(bytes, capacityBytes);
    if (this.#missing(wanted) > 0) {
      const extra = Math.min(EXTRA_BYTES, this.#disk.total.bytes * EXTRA_PART);
      await this.#evict(this.#missing(wanted) + extra);
    }
    const missing = Math.max(0, this.#missing(bytes));
    if (missing === 0) this.#shortage = undefined;
    else this.#shortage = this.#disk.total.bytes + bytes > capacityBytes ? 'capacity' : 'free space';
    return Math.max(0, bytes - missing);
  }

  #missing(bytes: number): number {
    return Math.max(
      this.#disk.total.bytes + bytes - this.#room.capacityBytes,
      this.#room.minFreeBytes + bytes - this.#disk.freeBytes(),
    );
  }

  async #evict(bytes: number): Promise<void> {
    const leaving = new Map<DiskBlob, number[]>();
    for (let got = 0; got < bytes; ) {
      const victim = this.#policy.victim();
      if (victim === undefined) break;
      got += victim.blob.lengthOf(victim.index);
      const indexes = leaving.get(victim.blob);
      if (indexes === undefined) leaving.set(victim.blob, [victim.index]);
      else indexes.push(victim.index);
    }
    for (const [blob, indexes] of leaving) {
      // Pinned since it was chosen: its file may be in the kernel's hands by now, and must get no holes.
      if (blob.pinned) {
        for (const index of indexes) this.#policy.add(blob, index);
        continue;
      }
      this.#counters.evictedChunks += indexes.length;
      try {
        await blob.release(indexes);
      } catch {
        // The map cannot be written (a full copy-on-write disk): removing it takes the claims back just as well. If it was
        // the hole that failed, the space comes back with the file.
        this.removeBlob(blob);
        continue;
      }
      if (blob.storedBytes === 0 && !blob.inUse && !blob.pinned) this.removeBlob(blob);
    }
  }
}

/** How many chunks of the fill fit in `bytes`. */
function wholeChunks(fill: Fill, bytes: number): number {
  return bytes >= fill.bytes.length ? fill.chunks.length : Math.max(0, Math.floor(bytes / CHUNK_BYTES));
}

/** Half of a batch may be on the disk, and half of its claims. */
async function giveBack(blob: DiskBlob, chunks: readonly number[]): Promise<void> {
  try {
    await blob.withdraw();
    if (blob.exists && !blob.pinned) blob.punch(chunks.filter((index) => blob.states.state(index) === COLD));
  } catch {
    // The disk that just failed fails again; opening the cache gives it back.
  }
}
