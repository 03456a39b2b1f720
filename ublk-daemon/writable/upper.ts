/**
 * The writable layer of a disk, as the stack above it sees it. Sectors are of 512 bytes; ranges have been checked by the caller.
 *
 * - A write that has been answered is seen by every lookup after it.
 * - `flush` answers when everything answered before it is on the disk. A layer that could not be flushed refuses writes and flushes from
 *   then on (its pages may be lost without the kernel saying so again), reads go on, and opening it again brings the last flush.
 * - A full disk fails a write with ENOSPC and changes nothing; later writes may succeed.
 * - `seal` and `compact` are called one at a time; while `seal` runs nothing is written.
 */
import type { ByteSource } from '../byte-source.ts';
import type { Pieces } from '../lsmt/pieces.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';

/** The layer number that lookups of an upper give. */
export const UPPER = 255;

/** What lies under an upper. */
export interface Below {
  /** Fills `into` with the bytes from sector `start` on. */
  read(into: Buffer, start: number): Promise<void>;
  /** Whether there are bytes in the range. */
  hasData(start: number, end: number): boolean;
}

export interface Compacted {
  readonly indexEntriesBefore: number;
  readonly indexEntriesAfter: number;
  /** Bytes of overwritten data that were given back to the file system. */
  readonly reclaimedBytes: number;
}

export interface Upper {
  readonly virtualSize: number;
  readonly uuid: string;
  readonly parentUuid: string;
  readonly dataPath: string;
  readonly source: ByteSource;
  /** Bytes that hold something, and bytes the layer takes, overwritten ones included. */
  readonly usage: { readonly liveBytes: number; readonly usedBytes: number };
  /** What is written goes elsewhere than what was there: a frozen index stays good. */
  readonly writesAside: boolean;
  lookup(start: number, end: number, into: Pieces): void;
  /** Whether `write` of so many bytes and `zero` answer at once, without a promise. */
  writesNow(length: number): boolean;
  write(start: number, bytes: Buffer, below: Below): Promise<void> | undefined;
  /** Makes zeros of the range, which hide what lies below. */
  zero(start: number, end: number, below: Below): Promise<void> | undefined;
  flush(): Promise<void>;
  /** Reads that `compact` must wait for before it gives bytes back. */
  track(read: Promise<unknown>): void;
  compact(): Promise<Compacted>;
  /** As it is now, as layer `number` of a stack. */
  freeze(number: number): SegmentIndex;
  /** Makes a sealed layer of the data file. */
  seal(): Promise<void>;
  /** Takes `seal` back. */
  unseal(): Promise<void>;
  /** Does not flush. */
  close(): Promise<void>;
}
