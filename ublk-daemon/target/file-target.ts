/**
 * A plain or sparse file as a disk (`raw`). The page cache is the disk's cache: what it holds is read at once, by whoever
 * serves the disk; the rest by a thread of the pool. Writes go to the page cache, `flush` to the disk.
 *
 * The file is locked while it is open: one writer, or any number of readers.
 */
import { close, constants, fdatasync, fstatSync, open, read as readFd, write as writeFd, writeSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { promisify } from 'node:util';
import { systemCode } from '#base';
import { lockDescriptor, punchHole, ReadyReads, readAhead, seekData, seekHole, zeroRange } from '#linux';
import { fail } from '../errors.ts';
import type { BlockTarget } from './block-target.ts';
import type { AsFile, Extent, Extents, Immediate, Prefetch } from './capabilities.ts';
import { checkRange } from './range.ts';
import { TargetError } from './target-error.ts';

const syncFile = promisify(fdatasync);

/** What fallocate is asked for at once: it blocks this thread. */
const DEALLOCATE_STEP_BYTES = 64 * 2 ** 20;
const ZEROS_BYTES = 2 ** 20;
/** More runs than this are told in the next answer. */
const MAX_EXTENTS = 256;

export interface FileTargetOptions {
  readonly readOnly?: boolean;
  /** 512 by default. */
  readonly blockSize?: 512 | 4096;
}

/**
 * @throws TARGET_FILE_KIND, TARGET_FILE_SIZE, TARGET_BUSY, or what `open` fails with
 */
export async function openFileTarget(path: string, options: FileTargetOptions = {}): Promise<FileTarget> {
  const { readOnly = false, blockSize = 512 } = options;
  const fd = await promisify(open)(path, (readOnly ? constants.O_RDONLY : constants.O_RDWR) | constants.O_NONBLOCK);
  try {
    const stat = fstatSync(fd);
    if (!stat.isFile()) throw fail('TARGET_FILE_KIND', { path, problem: 'not a regular file' });
    if (stat.size === 0 || stat.size % blockSize !== 0) {
      throw fail('TARGET_FILE_SIZE', { path, sizeBytes: stat.size, blockSize });
    }
    if (!lockDescriptor(fd, readOnly ? 'shared' : 'exclusive')) throw fail('TARGET_BUSY', { path });
    return new FileTarget(path, fd, stat.size, blockSize, readOnly);
  } catch (error) {
    await promisify(close)(fd);
    throw error;
  }
}

export class FileTarget implements BlockTarget, Immediate, Extents, Prefetch, AsFile {
  readonly sizeBytes: number;
  readonly blockSize: 512 | 4096;
  readonly readOnly: boolean;
  readonly #path: string;
  readonly #fd: number;
  /** `ask`: the file system tells what is in memory; `all` of it is; `none` is known to be. */
  readonly #ready: ReadyReads;
  /**
   * A run known to be data: tmpfs walks page by page to where it ends. Discards forget it; what becomes a hole without one is
   * told as data, which is no error.
   */
  #dataRun = { start: 0, end: 0 };
  #busy = 0;
  #idle: (() => void) | undefined;
  #closed: Promise<void> | undefined;
  #flushing: Promise<void> | undefined;
  #nextFlush: Promise<void> | undefined;

  constructor(path: string, fd: number, sizeBytes: number, blockSize: 512 | 4096, readOnly: boolean) {
    this.#path = path;
    this.#fd = fd;
    this.#ready = new ReadyReads(fd);
    this.sizeBytes = sizeBytes;
    this.blockSize = blockSize;
    this.readOnly = readOnly;
  }

  get fileDescriptor(): number {
    return this.#fd;
  }

  readNow(into: Buffer, at: number, offset: number, length: number): boolean {
    this.#check(offset, length);
    return this.#ready.read(into, at, length, offset) === length;
  }

  writeNow(offset: number, data: Buffer): boolean {
    this.#checkWrite(offset, data.length);
    for (let done = 0; done < data.length; ) done += writeSync(this.#fd, data, done, data.length - done, offset + done);
    return true;
  }

  read(offset: number, length: number): Promise<Buffer> {
    return this.#run(async () => {
      this.#check(offset, length);
      const bytes = Buffer.allocUnsafeSlow(length);
      for (let done = 0; done < length; ) {
        const count = await readSome(this.#fd, bytes, done, length - done, offset + done);
        if (count === 0) {
          throw new TargetError('TARGET_FILE_SHORT', {
            path: this.#path,
            offset: offset + done,
            sizeBytes: this.sizeBytes,
          });
        }
        done += count;
      }
      return bytes;
    });
  }

  write(offset: number, data: Buffer, options: { fua?: boolean } = {}): Promise<void> {
    return this.#run(async () => {
      this.#checkWrite(offset, data.length);
      await this.#write(offset, data);
      if (options.fua) await this.#flush();
    });
  }

  flush(): Promise<void> {
    return this.#run(async () => {
      if (!this.readOnly) await this.#flush();
    });
  }

  discard(offset: number, length: number): Promise<void> {
    return this.#run(async () => {
      this.#checkWrite(offset, length);
      await this.#zero(offset, length, true);
    });
  }

  writeZeroes(offset: number, length: number, options: { mayUnmap?: boolean; fua?: boolean } = {}): Promise<void> {
    return this.#run(async () => {
      this.#checkWrite(offset, length);
      await this.#zero(offset, length, options.mayUnmap ?? true);
      if (options.fua) await this.#flush();
    });
  }

  extents(offset: number, length: number): Promise<readonly Extent[]> {
    return this.#run(async () => {
      this.#check(offset, length);
      return this.#extents(offset, offset + length);
    });
  }

  prefetch(offset: number, length: number): Promise<void> {
    return this.#run(async () => {
      this.#check(offset, length);
      readAhead(this.#fd, offset, length);
    });
  }

  close(): Promise<void> {
    this.#closed ??= this.#end();
    return this.#closed;
  }

  async #end(): Promise<void> {
    if (this.#busy > 0) {
      await new Promise<void>((idle) => {
        this.#idle = idle;
      });
    }
    try {
      if (!this.readOnly) await syncFile(this.#fd);
    } finally {
      await promisify(close)(this.#fd);
    }
  }

  async #run<T>(work: () => Promise<T>): Promise<T> {
    if (this.#closed !== undefined) throw new TargetError('TARGET_CLOSED');
    this.#busy++;
    try {
      return await work();
    } finally {
      this.#busy--;
      if (this.#busy === 0) this.#idle?.();
    }
  }

  #check(offset: number, length: number): void {
    if (this.#closed !== undefined) throw new TargetError('TARGET_CLOSED');
    checkRange(this, offset, length);
  }

  #checkWrite(offset: number, length: number): void {
    if (this.readOnly) throw new TargetError('TARGET_READ_ONLY');
    this.#check(offset, length);
  }

  async #write(offset: number, data: Buffer): Promise<void> {
    for (let done = 0; done < data.length; ) {
      done += await writeSome(this.#fd, data, done, data.length - done, offset + done);
    }
  }

  /** Those who come while one runs share the one after it: theirs covers what was written since. */
  async #flush(): Promise<void> {
    if (this.#flushing === undefined) {
      this.#flushing = syncFile(this.#fd).finally(() => {
        this.#flushing = undefined;
      });
      return this.#flushing;
    }
    this.#nextFlush ??= this.#flushing
      .catch(() => {})
      .then(() => {
        this.#nextFlush = undefined;
        return this.#flush();
      });
    return this.#nextFlush;
  }

  async #zero(offset: number, length: number, unmap: boolean): Promise<void> {
    const end = offset + length;
    this.#dataRun = { start: 0, end: 0 };
    for (let at = offset; at < end; ) {
      const step = Math.min(end - at, DEALLOCATE_STEP_BYTES);
      if (!this.#deallocate(at, step, unmap)) await this.#writeZeros(at, step);
      // Found again meanwhile, it may be half of the truth.
      this.#dataRun = { start: 0, end: 0 };
      at += step;
      if (at < end) await nextTurn();
    }
  }

  /** False where the file system cannot. */
  #deallocate(offset: number, length: number, unmap: boolean): boolean {
    for (const work of unmap ? [punchHole, zeroRange] : [zeroRange]) {
      try {
        work(this.#fd, offset, length);
        return true;
      } catch (error) {
        if (!['EOPNOTSUPP', 'ENOSYS', 'ENOTSUP'].includes(systemCode(error) ?? '')) throw error;
      }
    }
    return false;
  }

  async #writeZeros(offset: number, length: number): Promise<void> {
    const zeros = Buffer.alloc(Math.min(length, ZEROS_BYTES));
    for (let done = 0; done < length; done += zeros.length) {
      await this.#write(offset + done, zeros.subarray(0, Math.min(zeros.length, length - done)));
    }
  }

  #extents(start: number, end: number): Extent[] {
    if (start >= this.#dataRun.start && end <= this.#dataRun.end) {
      return [{ length: end - start, hole: false, zero: false }];
    }
    const found: Extent[] = [];
    for (let at = start; at < end && found.length < MAX_EXTENTS; ) {
      const data = Math.min(seekData(this.#fd, at) ?? end, end);
      // A file system may tell of parts of a block: the block is data then.
      const dataStart = data - (data % this.blockSize);
      if (dataStart > at) found.push({ length: dataStart - at, hole: true, zero: true });
      at = Math.max(at, dataStart);
      if (at >= end) break;
      const hole = Math.min(seekHole(this.#fd, at) ?? this.sizeBytes, this.sizeBytes);
      this.#dataRun = { start: at, end: hole - (hole % this.blockSize) };
      const dataEnd = Math.min(end, Math.max(at + this.blockSize, Math.ceil(hole / this.blockSize) * this.blockSize));
      found.push({ length: dataEnd - at, hole: false, zero: false });
      at = dataEnd;
    }
    return found;
  }
}

function readSome(fd: number, into: Buffer, at: number, length: number, offset: number): Promise<number> {
  return new Promise((done, failed) => {
    readFd(fd, into, at, length, offset, (error, count) => (error === null ? done(count) : failed(error)));
  });
}

function writeSome(fd: number, data: Buffer, at: number, length: number, offset: number): Promise<number> {
  return new Promise((done, failed) => {
    writeFd(fd, data, at, length, offset, (error, count) => (error === null ? done(count) : failed(error)));
  });
}
