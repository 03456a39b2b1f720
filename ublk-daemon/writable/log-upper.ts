/**
 * The log-structured writable layer, in the two files of the OverlayBD tools: data is appended to one, 16-byte entries that say which
 * sectors it is to the other; the latest entry wins (docs/overlaybd.md).
 *
 * Order is what makes it safe: data is on the disk (fdatasync) before an entry that points at it is written, entries are on the disk before
 * `flush` answers. Until then entries stay in memory, and in a file that counts for as long as the machine runs (pending-file.ts): a
 * machine that dies loses what nobody was promised, a process that dies loses nothing. The end of the index is the only place that can
 * be torn (replay.ts).
 *
 * Writing is synchronous up to 64 KiB: it goes to the page cache, and a turn through the thread pool costs more than the copy.
 */
import { fstatSync, writeSync } from 'node:fs';
import { type FileHandle, open, readFile, rename, rm } from 'node:fs/promises';
import { dirname } from 'node:path';
import { failPoint, systemCode } from '#base';
import { beginWriteback, type FileLock, syncFolder } from '#linux';
import { type ByteSource, FileSource } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { writeAll } from '../layer/byte-sink.ts';
import { encodeHeader, LSMT_BLOCK, LSMT_FLAG, type LsmtHeader, NULL_UUID, SECTOR } from '../lsmt/header.ts';
import { IndexMemory } from '../lsmt/index-memory.ts';
import { LiveIndex } from '../lsmt/live-index.ts';
import type { Pieces } from '../lsmt/pieces.ts';
import { SEGMENT_BYTES } from '../lsmt/segment.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { appendSeal } from './append-seal.ts';
import { EntryLog } from './entry-log.ts';
import { FlushQueue } from './flush-queue.ts';
import { PendingFile, pendingPath } from './pending-file.ts';
import { punchGaps } from './punch-gaps.ts';
import { replay } from './replay.ts';
import { type Compacted, UPPER, type Upper } from './upper.ts';
import { allDone, lockLayer, readHeader, writeNew } from './upper-files.ts';

export interface UpperFiles {
  readonly data: string;
  readonly index: string;
}

export interface UpperIdentity {
  readonly virtualSize: number;
  readonly uuid: string;
  readonly parentUuid?: string;
}

/** What opening found and cut. */
export interface Recovered {
  readonly entries: number;
  readonly cutIndexBytes: number;
  readonly cutDataBytes: number;
  /** Entries of them that no flush had made safe: a process died. */
  readonly unflushed: number;
}

const SYNC_BYTES = 64 * 1024;
/** Of new data, after which the kernel is asked to begin writing it out: a flush then waits for little more than this. */
const WRITEBACK_BYTES = 4 * 1024 * 1024;
/** Entries in memory before they are flushed without being asked: 4 MiB of them. */
const MAX_PENDING = 256 * 1024;
/**
 * Entries of an index file from which it is written anew, when most of them do not count any more: before it takes long to read, and long
 * before it is more than anybody reads.
 */
const WORN_ENTRIES = 8_000_000;
/** As many entries as the C++ tools read. */
const MAX_INDEX_BYTES = LSMT_BLOCK + 128_000_000 * SEGMENT_BYTES;

export class LogUpper implements Upper {
  readonly virtualSize: number;
  readonly uuid: string;
  readonly parentUuid: string;
  readonly dataPath: string;
  readonly source: ByteSource;
  readonly writesAside = true;
  readonly recovered: Recovered;
  private readonly indexPath: string;
  private readonly lock: FileLock;
  private readonly data: FileHandle;
  private indexFile: FileHandle;
  private readonly index: LiveIndex;
  private pending: EntryLog;
  private readonly pendingFile: PendingFile;
  /** Where the next bytes go. */
  private dataEnd: number;
  private indexEnd: number;
  private unsyncedData = false;
  /** Up to here the kernel was asked to begin. */
  private writebackEnd: number;
  private writeback: Promise<void> | undefined;
  private readonly queue = new FlushQueue(() => this.flushOnce());
  private readonly reads = new Set<Promise<unknown>>();
  /** Bytes that are being written and are in no index yet: start to end. */
  private readonly arriving = new Map<number, number>();
  private broken: unknown;
  private isSealed = false;
  private wornEntries = WORN_ENTRIES;

  /** The files must not be there. Both are on the disk when this is done. */
  static async create(files: UpperFiles, identity: UpperIdentity): Promise<LogUpper> {
    const { virtualSize, uuid, parentUuid = NULL_UUID } = identity;
    if (!Number.isSafeInteger(virtualSize) || virtualSize < 0 || virtualSize % SECTOR !== 0) {
      throw fail('LSMT_OPTION', { what: `size ${virtualSize}`, problem: `no multiple of ${SECTOR}` });
    }
    const facts = { virtualSize, uuid, parentUuid };
    try {
      await allDone([
        writeNew(files.data, encodeHeader({ ...facts, flags: LSMT_FLAG.header | LSMT_FLAG.data })),
        writeNew(files.index, encodeHeader({ ...facts, flags: LSMT_FLAG.header, indexOffset: LSMT_BLOCK })),
      ]);
      await syncFolder(dirname(files.data));
      if (dirname(files.index) !== dirname(files.data)) await syncFolder(dirname(files.index));
    } catch (error) {
      if (systemCode(error) !== 'EEXIST') {
        await rm(files.data, { force: true });
        await rm(files.index, { force: true });
      }
      throw error;
    }
    return LogUpper.open(files);
  }

  /** Takes the layer for this process alone, and cuts what is torn. */
  static async open(files: UpperFiles): Promise<LogUpper> {
    const lock = lockLayer(files.data);
    let data: FileHandle | undefined;
    let indexFile: FileHandle | undefined;
    try {
      data = await open(files.data, 'r+');
      indexFile = await open(files.index, 'r+');
      const header = await readHeader(data, files.data);
      if ((header.flags & LSMT_FLAG.data) === 0 || (header.flags & (LSMT_FLAG.sealed | LSMT_FLAG.sparse)) !== 0) {
        throw fail('DISK_NOT_WRITABLE', {
          file: files.data,
          problem: `flags ${header.flags} are not those of a writable layer`,
        });
      }
      const indexHeader = await readHeader(indexFile, files.index);
      if ((indexHeader.flags & LSMT_FLAG.data) !== 0) {
        throw fail('DISK_NOT_WRITABLE', { file: files.index, problem: 'this is no index file' });
      }
      if (indexHeader.uuid !== header.uuid) {
        throw fail('DISK_NOT_WRITABLE', {
          file: files.index,
          problem: `it is the index of ${indexHeader.uuid}, not of ${header.uuid}`,
        });
      }
      const indexBytes = fstatSync(indexFile.fd).size;
      if (indexBytes > MAX_INDEX_BYTES) {
        throw fail('DISK_NOT_WRITABLE', {
          file: files.index,
          problem: `an index of ${indexBytes} bytes, at most ${MAX_INDEX_BYTES} are read`,
        });
      }
      new IndexMemory().take(Math.floor(indexBytes / SEGMENT_BYTES), files.index);
      const bytes = (await readFile(files.index)).subarray(LSMT_BLOCK);
      const index = new LiveIndex();
      const dataBytes = fstatSync(data.fd).size;
      const facts = { deviceSectors: header.virtualSize / SECTOR, fileSectors: Math.floor(dataBytes / SECTOR) };
      const flushed = replay(bytes, index, { file: files.index, ...facts });
      const { goodBytes } = flushed;
      const pendingFile = new PendingFile(pendingPath(files.index), header.uuid);
      const pending = new EntryLog();
      const late = replay(pendingFile.found, index, { file: pendingPath(files.index), ...facts }, pending);
      pendingFile.cut(pending.count);
      const dataSectors = Math.max(flushed.dataSectors, late.dataSectors);
      const recovered = {
        entries: flushed.entries + late.entries,
        cutIndexBytes: bytes.length - goodBytes,
        cutDataBytes: Math.max(0, dataBytes - dataSectors * SECTOR),
        unflushed: late.entries,
      };
      // Data first: the index never points at more than there is.
      if (recovered.cutIndexBytes > 0) {
        await indexFile.truncate(LSMT_BLOCK + goodBytes);
        await indexFile.sync();
      }
      if (recovered.cutDataBytes > 0) {
        await data.truncate(dataSectors * SECTOR);
        await data.sync();
      }
      return new LogUpper(
        files,
        header,
        { lock, data, indexFile, index, recovered, pending, pendingFile },
        dataSectors * SECTOR,
        LSMT_BLOCK + goodBytes,
      );
    } catch (error) {
      await indexFile?.close();
      await data?.close();
      lock.release();
      throw error;
    }
  }

  private constructor(
    files: UpperFiles,
    header: LsmtHeader,
    parts: {
      lock: FileLock;
      data: FileHandle;
      indexFile: FileHandle;
      index: LiveIndex;
      recovered: Recovered;
      pending: EntryLog;
      pendingFile: PendingFile;
    },
    dataEnd: number,
    indexEnd: number,
  ) {
    this.dataPath = files.data;
    this.indexPath = files.index;
    this.virtualSize = header.virtualSize;
    this.uuid = header.uuid;
    this.parentUuid = header.parentUuid;
    this.lock = parts.lock;
    this.data = parts.data;
    this.indexFile = parts.indexFile;
    this.index = parts.index;
    this.recovered = parts.recovered;
    this.pending = parts.pending;
    this.pendingFile = parts.pendingFile;
    this.unsyncedData = parts.pending.count > 0;
    this.dataEnd = dataEnd;
    this.writebackEnd = dataEnd;
    this.indexEnd = indexEnd;
    this.source = new FileSource(files.data, Number.MAX_SAFE_INTEGER, parts.data, false);
  }

  get usage(): { liveBytes: number; usedBytes: number } {
    return { liveBytes: this.index.dataSectors * SECTOR, usedBytes: this.dataEnd - LSMT_BLOCK };
  }

  lookup(start: number, end: number, into: Pieces): void {
    this.index.lookup(start, end, into, UPPER);
  }

  writesNow(length: number): boolean {
    return length <= SYNC_BYTES;
  }

  write(start: number, bytes: Buffer): Promise<void> | undefined {
    this.checkWritable();
    const position = this.dataEnd;
    this.dataEnd += bytes.length;
    if (bytes.length > SYNC_BYTES) return this.writeSlowly(start, bytes, position);
    try {
      for (let done = 0; done < bytes.length; ) {
        done += writeSync(this.data.fd, bytes, done, bytes.length - done, position + done);
      }
      this.wrote(start, bytes.length, position);
    } catch (error) {
      this.giveBack(position, bytes.length);
      throw error;
    }
    return undefined;
  }

  zero(start: number, end: number): undefined {
    this.checkWritable();
    this.pendingFile.add(start, end, this.dataEnd / SECTOR, true);
    this.index.write(start, end, undefined);
    this.pending.add(start, end, this.dataEnd / SECTOR, true);
    this.flushWhenFull();
    return undefined;
  }

  flush(): Promise<void> {
    return this.queue.flush();
  }

  track(read: Promise<unknown>): void {
    this.reads.add(read);
    const done = () => this.reads.delete(read);
    read.then(done, done);
  }

  freeze(number: number): SegmentIndex {
    return this.index.freeze(number, this.dataEnd / SECTOR);
  }

  /**
   * The index file anew, with the entries that count alone; then what nothing refers to is given back to the file system. In between it
   * waits for reads, one of which may be a whole export: flushes do not wait with it.
   */
  async compact(): Promise<Compacted> {
    await this.flush();
    const renewed = await this.queue.alone(async () => {
      this.checkWritable();
      // A snapshot came first: the layer stays as it is.
      if (this.isSealed) return undefined;
      const before = this.indexEntries;
      const end = this.dataEnd;
      const taken = [...this.arriving];
      const { live, entries } = await this.renewIndex();
      failPoint('disk-compact-index');
      return { before, entries, live, taken, end };
    });
    if (renewed === undefined) return { indexEntriesBefore: 0, indexEntriesAfter: 0, reclaimedBytes: 0 };
    const { before, entries, live, taken, end } = renewed;
    // Reads that began before the entries were collected may still want what they saw then.
    await Promise.allSettled([...this.reads]);
    const reclaimedBytes = await this.queue.alone(async () =>
      // What was written since lies beyond `end`, or where a write was arriving.
      this.isSealed ? 0 : punchGaps(this.data.fd, live, taken, end),
    );
    return { indexEntriesBefore: before, indexEntriesAfter: entries, reclaimedBytes };
  }

  /** Without a flush: what the index file lacks, the sealed index has, and one fsync makes both data and index safe. */
  async seal(): Promise<void> {
    this.checkWritable();
    await this.queue.alone(async () => {
      const { virtualSize, uuid, parentUuid, dataEnd } = this;
      const live = this.index.freeze(0, dataEnd / SECTOR);
      try {
        await appendSeal(this.data, dataEnd, live, { virtualSize, uuid, parentUuid });
      } catch (error) {
        await this.unseal().catch(() => {});
        throw error;
      }
      this.isSealed = true;
      failPoint('disk-sealed');
    });
  }

  async unseal(): Promise<void> {
    this.isSealed = false;
    await this.data.truncate(this.dataEnd);
  }

  async close(): Promise<void> {
    await this.queue.alone(async () => {
      await this.writeback;
      await this.indexFile.close();
      await this.data.close();
      if (this.pending.count === 0 || this.isSealed) this.pendingFile.remove();
      else this.pendingFile.close();
    });
    this.lock.release();
  }

  private checkWritable(): void {
    if (this.broken !== undefined) throw fail('DISK_BROKEN', { file: this.dataPath }, this.broken);
  }

  private async writeSlowly(start: number, bytes: Buffer, position: number): Promise<void> {
    this.arriving.set(position, position + bytes.length);
    try {
      await writeAll(this.data, bytes, position);
      this.wrote(start, bytes.length, position);
    } catch (error) {
      this.giveBack(position, bytes.length);
      throw error;
    } finally {
      this.arriving.delete(position);
    }
  }

  private wrote(start: number, length: number, position: number): void {
    const end = start + length / SECTOR;
    this.pendingFile.add(start, end, position / SECTOR, false);
    this.index.write(start, end, position / SECTOR);
    this.pending.add(start, end, position / SECTOR, false);
    this.unsyncedData = true;
    this.beginWriteback();
    this.flushWhenFull();
  }

  /** Space of a failed write, where nothing came after it. */
  private giveBack(position: number, length: number): void {
    if (this.dataEnd === position + length) this.dataEnd = position;
  }

  private beginWriteback(): void {
    const { writebackEnd, dataEnd } = this;
    if (dataEnd - writebackEnd < WRITEBACK_BYTES || this.writeback !== undefined) return;
    this.writebackEnd = dataEnd;
    const done = () => {
      this.writeback = undefined;
    };
    this.writeback = beginWriteback(this.data.fd, writebackEnd, dataEnd - writebackEnd).then(done, done);
  }

  private flushWhenFull(): void {
    // One that fails is tried again by the next; whoever asks for a flush is told.
    if (this.pending.count > MAX_PENDING && !this.queue.isBusy) this.flush().catch(() => {});
  }

  private async flushOnce(): Promise<void> {
    this.checkWritable();
    if (this.pending.count === 0 || this.isSealed) return;
    if (this.isWorn && (await this.renewed())) return;
    const batch = this.pending;
    this.pending = new EntryLog();
    await this.syncData();
    failPoint('disk-flush-data');
    const bytes = batch.sealed();
    try {
      await writeAll(this.indexFile, bytes, this.indexEnd);
    } catch (error) {
      // A full disk, most likely: the entries wait for the next flush, which writes to the same place.
      this.pending.prepend(batch);
      throw error;
    }
    failPoint('disk-flush-index');
    await this.orBroken(this.indexFile.datasync());
    this.indexEnd += bytes.length;
    this.pendingFile.keepOnly(this.pending);
  }

  private async syncData(): Promise<void> {
    if (!this.unsyncedData) return;
    this.unsyncedData = false;
    await this.orBroken(this.data.datasync());
  }

  /** After a failed fsync the kernel may have dropped the pages, and the next one would say that all is well. */
  private async orBroken(work: Promise<void>): Promise<void> {
    try {
      await work;
    } catch (error) {
      this.broken = error;
      this.pendingFile.remove();
      throw fail('DISK_BROKEN', { file: this.dataPath }, error);
    }
  }

  private get indexEntries(): number {
    return (this.indexEnd - LSMT_BLOCK) / SEGMENT_BYTES;
  }

  private get isWorn(): boolean {
    return this.indexEntries > Math.max(this.wornEntries, 4 * this.index.count);
  }

  /** False where there is no room for a new index: the old one goes on, and it is not tried again at once. */
  private async renewed(): Promise<boolean> {
    try {
      await this.renewIndex();
      return true;
    } catch (error) {
      if (this.broken !== undefined) throw error;
      this.wornEntries = 2 * this.indexEntries;
      return false;
    }
  }

  /** The index file anew, with the entries that count alone; what was pending is among them. */
  private async renewIndex(): Promise<{ live: SegmentIndex; entries: number }> {
    const batch = this.pending;
    this.pending = new EntryLog();
    const live = this.index.freeze(0, this.dataEnd / SECTOR);
    const entries = new EntryLog();
    for (let at = 0; at < live.count; at++) {
      entries.add(live.start(at), live.end(at), live.moffset(at), live.isZeroed(at));
    }
    try {
      await this.syncData();
      await this.replaceIndex(entries);
    } catch (error) {
      this.pending.prepend(batch);
      throw error;
    }
    this.pendingFile.keepOnly(this.pending);
    return { live, entries: entries.count };
  }

  private async replaceIndex(entries: EntryLog): Promise<void> {
    const path = `${this.indexPath}.new`;
    await rm(path, { force: true });
    const { virtualSize, uuid, parentUuid } = this;
    const header = encodeHeader({ virtualSize, uuid, parentUuid, flags: LSMT_FLAG.header, indexOffset: LSMT_BLOCK });
    const file = await open(path, 'wx+', 0o600);
    try {
      const bytes = entries.count === 0 ? Buffer.alloc(0) : entries.sealed();
      await writeAll(file, header, 0);
      await writeAll(file, bytes, LSMT_BLOCK);
      await file.sync();
      failPoint('disk-compact-written');
      await rename(path, this.indexPath);
      // From here on the new file is the index, whatever comes.
      const old = this.indexFile;
      this.indexFile = file;
      this.indexEnd = LSMT_BLOCK + bytes.length;
      await old.close();
    } catch (error) {
      if (this.indexFile !== file) await file.close();
      await rm(path, { force: true });
      throw error;
    }
    await this.orBroken(syncFolder(dirname(this.indexPath)));
  }
}
