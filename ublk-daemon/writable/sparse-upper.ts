/**
 * The sparse writable layer: one file, in which sector n of the device lies at byte 4096 + 512 n; what the file system has as a hole was never
 * written. There is no index: opening asks for data and holes. Writes go to their place, as on a raw disk, and take no more room when
 * repeated; a machine that dies in the middle leaves what a raw disk would.
 *
 * A file system has whole pages or nothing, so a page that is written in part is filled up with what lies below; zeros over something
 * below are written as zeros, since a hole would let it show.
 */
import { fstatSync, statfsSync } from 'node:fs';
import { constants, type FileHandle, open } from 'node:fs/promises';
import { dirname } from 'node:path';
import { failPoint } from '#base';
import { dataRuns, type FileLock, punchHole, syncFolder } from '#linux';
import { type ByteSource, FileSource } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { writeAll } from '../layer/byte-sink.ts';
import { encodeHeader, LSMT_BLOCK, LSMT_FLAG, type LsmtHeader, NULL_UUID, SECTOR } from '../lsmt/header.ts';
import { LiveIndex } from '../lsmt/live-index.ts';
import { HOLE, Pieces } from '../lsmt/pieces.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { appendSeal } from './append-seal.ts';
import { FlushQueue } from './flush-queue.ts';
import type { UpperIdentity } from './log-upper.ts';
import { type Below, type Compacted, UPPER, type Upper } from './upper.ts';
import { lockLayer, readHeader } from './upper-files.ts';

const PAGE_SECTORS = LSMT_BLOCK / SECTOR;
const FIRST_SECTOR = LSMT_BLOCK / SECTOR;
const ZEROS = Buffer.alloc(256 * 1024);

/** Undefined when the file is a writable layer of the other kind. */
export async function openSparseUpper(path: string): Promise<SparseUpper | undefined> {
  // A pipe of that name must not wait for its other end.
  const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
  let header: LsmtHeader;
  try {
    header = await readHeader(file, path);
  } finally {
    await file.close();
  }
  return (header.flags & LSMT_FLAG.sparse) === 0 ? undefined : SparseUpper.open(path);
}

export class SparseUpper implements Upper {
  readonly virtualSize: number;
  readonly uuid: string;
  readonly parentUuid: string;
  readonly dataPath: string;
  readonly source: ByteSource;
  readonly writesAside = false;
  private readonly lock: FileLock;
  private readonly data: FileHandle;
  private readonly index: LiveIndex;
  private readonly pieces = new Pieces();
  private readonly queue = new FlushQueue(() => this.flushOnce());
  /** Pages that are being filled up, one writer at a time. */
  private turn: Promise<void> = Promise.resolve();
  /** A process that died may have answered writes that nobody has flushed. */
  private unsynced = true;
  private broken: unknown;

  static async create(
    path: string,
    { virtualSize, uuid, parentUuid = NULL_UUID }: UpperIdentity,
  ): Promise<SparseUpper> {
    const { bsize } = statfsSync(dirname(path));
    if (bsize > LSMT_BLOCK) {
      throw fail('DISK_SPARSE_UNSUPPORTED', { file: path, problem: `its file system has blocks of ${bsize} bytes` });
    }
    const file = await open(path, 'wx', 0o600);
    try {
      const flags = LSMT_FLAG.header | LSMT_FLAG.data | LSMT_FLAG.sparse;
      await writeAll(file, encodeHeader({ virtualSize, uuid, parentUuid, flags }), 0);
      await file.truncate(LSMT_BLOCK + virtualSize);
      await file.sync();
    } finally {
      await file.close();
    }
    await syncFolder(dirname(path));
    return SparseUpper.open(path);
  }

  static async open(path: string): Promise<SparseUpper> {
    const lock = lockLayer(path);
    let data: FileHandle | undefined;
    try {
      data = await open(path, 'r+');
      const header = await readHeader(data, path);
      const { size } = fstatSync(data.fd);
      if (size < LSMT_BLOCK + header.virtualSize) {
        throw fail('DISK_NOT_WRITABLE', { file: path, problem: `${size} bytes for a device of ${header.virtualSize}` });
      }
      // A process died while it sealed the layer: what it had appended is no data.
      if (size > LSMT_BLOCK + header.virtualSize) await data.truncate(LSMT_BLOCK + header.virtualSize);
      const index = new LiveIndex();
      for (const { offset, length } of dataRuns(data.fd, LSMT_BLOCK + header.virtualSize)) {
        const start = Math.max(0, Math.floor(offset / LSMT_BLOCK) * PAGE_SECTORS - FIRST_SECTOR);
        const end = Math.min(
          header.virtualSize / SECTOR,
          Math.ceil((offset + length) / LSMT_BLOCK) * PAGE_SECTORS - FIRST_SECTOR,
        );
        if (end > start) index.write(start, end, start + FIRST_SECTOR);
      }
      return new SparseUpper(path, header, lock, data, index);
    } catch (error) {
      await data?.close();
      lock.release();
      throw error;
    }
  }

  private constructor(path: string, header: LsmtHeader, lock: FileLock, data: FileHandle, index: LiveIndex) {
    this.dataPath = path;
    this.virtualSize = header.virtualSize;
    this.uuid = header.uuid;
    this.parentUuid = header.parentUuid;
    this.lock = lock;
    this.data = data;
    this.index = index;
    this.source = new FileSource(path, Number.MAX_SAFE_INTEGER, data, false);
  }

  get usage(): { liveBytes: number; usedBytes: number } {
    const liveBytes = this.index.dataSectors * SECTOR;
    return { liveBytes, usedBytes: liveBytes };
  }

  lookup(start: number, end: number, into: Pieces): void {
    this.index.lookup(start, end, into, UPPER);
  }

  writesNow(): boolean {
    return false;
  }

  write(start: number, bytes: Buffer, below: Below): Promise<void> {
    return this.inTurn(() => this.writeNow(start, bytes, below));
  }

  /** Whole pages are given back where nothing below would show; the rest is written as zeros. */
  zero(start: number, end: number, below: Below): Promise<void> {
    return this.inTurn(async () => {
      const firstPage = Math.ceil(start / PAGE_SECTORS) * PAGE_SECTORS;
      const lastPage = end - (end % PAGE_SECTORS);
      if (firstPage >= lastPage || below.hasData(firstPage, lastPage)) return this.writeZeros(start, end, below);
      if (start < firstPage) await this.writeZeros(start, firstPage, below);
      punchHole(this.data.fd, LSMT_BLOCK + firstPage * SECTOR, (lastPage - firstPage) * SECTOR);
      this.index.cut(firstPage, lastPage);
      this.unsynced = true;
      if (lastPage < end) await this.writeZeros(lastPage, end, below);
    });
  }

  flush(): Promise<void> {
    return this.queue.flush();
  }

  track(): void {}

  /** What is overwritten is overwritten in place: there is nothing to gain. */
  async compact(): Promise<Compacted> {
    await this.flush();
    return { indexEntriesBefore: 0, indexEntriesAfter: 0, reclaimedBytes: 0 };
  }

  freeze(number: number): SegmentIndex {
    return this.index.freeze(number, FIRST_SECTOR);
  }

  async seal(): Promise<void> {
    await this.flush();
    await this.queue.alone(async () => {
      const { virtualSize, uuid, parentUuid } = this;
      const identity = { virtualSize, uuid, parentUuid, flags: LSMT_FLAG.sparse };
      try {
        await appendSeal(this.data, LSMT_BLOCK + virtualSize, this.index.freeze(0, FIRST_SECTOR), identity);
      } catch (error) {
        await this.unseal().catch(() => {});
        throw error;
      }
      failPoint('disk-sealed');
    });
  }

  async unseal(): Promise<void> {
    await this.data.truncate(LSMT_BLOCK + this.virtualSize);
  }

  async close(): Promise<void> {
    await this.turn;
    await this.queue.alone(() => this.data.close());
    this.lock.release();
  }

  /** Filling up a page reads and writes it: two at once would lose one's sectors. */
  private inTurn(work: () => Promise<void>): Promise<void> {
    if (this.broken !== undefined) throw fail('DISK_BROKEN', { file: this.dataPath }, this.broken);
    const done = this.turn.then(work);
    this.turn = done.catch(() => {});
    return done;
  }

  private async writeZeros(start: number, end: number, below: Below): Promise<void> {
    for (let at = start; at < end; at += ZEROS.length / SECTOR) {
      const sectors = Math.min(ZEROS.length / SECTOR, end - at);
      await this.writeNow(at, ZEROS.subarray(0, sectors * SECTOR), below);
    }
  }

  private async writeNow(start: number, bytes: Buffer, below: Below): Promise<void> {
    const end = start + bytes.length / SECTOR;
    const deviceEnd = this.virtualSize / SECTOR;
    const first = start - (start % PAGE_SECTORS);
    const last = Math.min(deviceEnd, Math.ceil(end / PAGE_SECTORS) * PAGE_SECTORS);
    // Only a page at either edge can be written in part.
    const before = first < start && this.isMissing(first) ? await this.fromBelow(first, start, below) : undefined;
    const lastPage = end - (end % PAGE_SECTORS);
    const after = end < last && this.isMissing(lastPage) ? await this.fromBelow(end, last, below) : undefined;
    const parts = [before, bytes, after].filter((part) => part !== undefined);
    const from = before === undefined ? start : first;
    const whole = parts.length === 1 ? bytes : Buffer.concat(parts);
    this.unsynced = true;
    await writeAll(this.data, whole, LSMT_BLOCK + from * SECTOR);
    const until = from + whole.length / SECTOR;
    this.index.write(from, until, from + FIRST_SECTOR);
  }

  private async fromBelow(start: number, end: number, below: Below): Promise<Buffer> {
    const bytes = Buffer.alloc((end - start) * SECTOR);
    await below.read(bytes, start);
    return bytes;
  }

  private isMissing(sector: number): boolean {
    this.pieces.clear();
    this.index.lookup(sector, sector + 1, this.pieces, UPPER);
    return this.pieces.layers[0] === HOLE;
  }

  private async flushOnce(): Promise<void> {
    if (this.broken !== undefined) throw fail('DISK_BROKEN', { file: this.dataPath }, this.broken);
    if (!this.unsynced) return;
    this.unsynced = false;
    try {
      await this.data.datasync();
    } catch (error) {
      this.broken = error;
      throw fail('DISK_BROKEN', { file: this.dataPath }, error);
    }
  }
}
