/**
 * Where a reader gets bytes from.
 *
 * Metadata is local and small, and is read synchronously: walking a tree must not cost a promise an entry. Data may be
 * anywhere, and is read asynchronously.
 */
import { closeSync, fstatSync, openSync, readSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';

/** Data of one device. */
export interface ByteSource {
  readonly sizeBytes: number;
  /** Exactly `length` bytes; callers stay inside `sizeBytes`. The result may be shared: it must not be changed. */
  read(offset: number, length: number): Promise<Buffer>;
  /** The same at once, from sources that can; undefined when it would have to wait for somebody. */
  readNow?(offset: number, length: number): Buffer | undefined;
  close(): Promise<void>;
}

/** A metadata image. `buf` is what the last `locate` found: take it anew after each call. */
export interface MetaBytes {
  readonly sizeBytes: number;
  readonly buf: Buffer;
  /** Makes `length` bytes at `offset` readable in `buf`; their position there, or -1 when the image does not have them. */
  locate(offset: number, length: number): number;
  close(): void;
}

/** Up to this size a metadata image is held in memory whole. */
export const META_IN_MEMORY_BYTES = 256 * 1024 * 1024;

export class MemoryBytes implements MetaBytes {
  readonly sizeBytes: number;
  readonly buf: Buffer;

  constructor(bytes: Buffer) {
    this.buf = bytes;
    this.sizeBytes = bytes.length;
  }

  locate(offset: number, length: number): number {
    return offset >= 0 && length >= 0 && offset + length <= this.sizeBytes ? offset : -1;
  }

  close(): void {}
}

const BLOCK = 64 * 1024;
const BLOCKS_KEPT = 1024;

/** A metadata image too large for memory: a local file read in blocks, the latest 64 MiB of them kept. */
export class FileBytes implements MetaBytes {
  readonly sizeBytes: number;
  buf: Buffer = Buffer.alloc(0);
  readonly #fd: number;
  readonly #blocks = new Map<number, Buffer>();

  constructor(path: string) {
    this.#fd = openSync(path, 'r');
    this.sizeBytes = fstatSync(this.#fd).size;
  }

  locate(offset: number, length: number): number {
    if (!(offset >= 0 && length >= 0 && offset + length <= this.sizeBytes)) return -1;
    const number = Math.floor(offset / BLOCK);
    const start = number * BLOCK;
    if (offset + length > start + BLOCK) {
      this.buf = this.#load(offset, length);
      return this.buf.length === length ? 0 : -1;
    }
    let block = this.#blocks.get(number);
    if (block === undefined) {
      if (this.#blocks.size >= BLOCKS_KEPT) {
        for (const oldest of this.#blocks.keys()) {
          this.#blocks.delete(oldest);
          break;
        }
      }
      block = this.#load(start, Math.min(BLOCK, this.sizeBytes - start));
      this.#blocks.set(number, block);
    }
    this.buf = block;
    return offset - start + length <= block.length ? offset - start : -1;
  }

  /** Shorter than asked when the file has been cut since it was opened. */
  #load(offset: number, length: number): Buffer {
    const bytes = Buffer.allocUnsafe(length);
    let done = 0;
    while (done < length) {
      const got = readSync(this.#fd, bytes, done, length - done, offset + done);
      if (got === 0) break;
      done += got;
    }
    return bytes.subarray(0, done);
  }

  close(): void {
    closeSync(this.#fd);
  }
}

/** A local file as a device, not verified: for images that no manifest vouches for. */
export class FileSource implements ByteSource {
  readonly sizeBytes: number;
  readonly #file: FileHandle;

  private constructor(file: FileHandle, sizeBytes: number) {
    this.#file = file;
    this.sizeBytes = sizeBytes;
  }

  static async open(path: string): Promise<FileSource> {
    const file = await open(path, 'r');
    return new FileSource(file, (await file.stat()).size);
  }

  async read(offset: number, length: number): Promise<Buffer> {
    const bytes = Buffer.allocUnsafe(length);
    let done = 0;
    while (done < length) {
      const { bytesRead } = await this.#file.read(bytes, done, length - done, offset + done);
      if (bytesRead === 0) throw new Error(`file ended at byte ${offset + done}, expected ${offset + length}`);
      done += bytesRead;
    }
    return bytes;
  }

  async close(): Promise<void> {
    await this.#file.close();
  }
}

/** Bytes in memory as a device. */
export class MemorySource implements ByteSource {
  readonly sizeBytes: number;
  readonly #bytes: Buffer;

  constructor(bytes: Buffer) {
    this.#bytes = bytes;
    this.sizeBytes = bytes.length;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    return this.#bytes.subarray(offset, offset + length);
  }

  async close(): Promise<void> {}
}
