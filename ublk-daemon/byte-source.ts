/**
 * Where the bytes of a layer come from: a file, a part of one, blocks that are decompressed, a blob in the chunk cache.
 *
 * `read` fills `into` whole from `offset`, or fails. It answers at once (undefined) where the bytes are at hand, so that a hit costs
 * no turn of the event loop, and with a promise otherwise. `readNow` does the first half: false where it would have to wait, and
 * nothing is begun then.
 */
import { constants, type FileHandle, open } from 'node:fs/promises';
import { ReadyReads } from '#linux';
import { fail } from './errors.ts';

export interface ByteSource {
  readonly name: string;
  readonly sizeBytes: number;
  read(into: Buffer, offset: number): Promise<void> | undefined;
  readNow(into: Buffer, offset: number): boolean;
  /** Room for what is decoded of this source's bytes, under the bound of whoever keeps the bytes themselves in memory. */
  blockMemory?(): BlockMemory;
  close(): Promise<void>;
}

/** Decoded blocks by their number. What was put may be gone at any time. */
export interface BlockMemory {
  get(block: number): Buffer | undefined;
  put(block: number, bytes: Buffer): void;
}

/** For a source that is asked for more than it has. */
export function shortRead({ name }: Pick<ByteSource, 'name'>, into: Buffer, offset: number): Error {
  return fail('DISK_SHORT_READ', { file: name, offset, length: into.length });
}

export async function readBytes(source: ByteSource, offset: number, length: number): Promise<Buffer> {
  const bytes = Buffer.allocUnsafe(length);
  await source.read(bytes, offset);
  return bytes;
}

/** A local file. What the page cache has is copied at once; for the rest a thread of the pool waits. */
export class FileSource implements ByteSource {
  readonly name: string;
  readonly sizeBytes: number;
  private readonly file: FileHandle;
  private readonly ready: ReadyReads;
  /** What `close` does besides: the owner of the descriptor may be somebody else. */
  private readonly owned: boolean;

  constructor(name: string, sizeBytes: number, file: FileHandle, owned = true) {
    this.name = name;
    this.sizeBytes = sizeBytes;
    this.file = file;
    this.ready = new ReadyReads(file.fd);
    this.owned = owned;
  }

  static async open(path: string): Promise<FileSource> {
    // A pipe of that name must not wait for its other end.
    const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      const facts = await file.stat();
      if (!facts.isFile()) throw fail('DISK_NOT_A_FILE', { path });
      return new FileSource(path, facts.size, file);
    } catch (error) {
      await file.close();
      throw error;
    }
  }

  read(into: Buffer, offset: number): Promise<void> | undefined {
    const done = this.ready.read(into, 0, into.length, offset);
    return done === into.length ? undefined : this.readSlowly(into, offset, done);
  }

  readNow(into: Buffer, offset: number): boolean {
    return this.ready.read(into, 0, into.length, offset) === into.length;
  }

  private async readSlowly(into: Buffer, offset: number, begun: number): Promise<void> {
    for (let done = begun; done < into.length; ) {
      const { bytesRead } = await this.file.read(into, done, into.length - done, offset + done);
      if (bytesRead === 0) throw shortRead(this, into, offset);
      done += bytesRead;
    }
  }

  async close(): Promise<void> {
    if (this.owned) await this.file.close();
  }
}

/** Bytes in memory: what tests make, and small parts of layers. */
export class MemorySource implements ByteSource {
  readonly name: string;
  readonly bytes: Buffer;

  constructor(name: string, bytes: Buffer) {
    this.name = name;
    this.bytes = bytes;
  }

  get sizeBytes(): number {
    return this.bytes.length;
  }

  read(into: Buffer, offset: number): undefined {
    if (offset + into.length > this.bytes.length) {
      throw shortRead(this, into, offset);
    }
    this.bytes.copy(into, 0, offset, offset + into.length);
    return undefined;
  }

  readNow(into: Buffer, offset: number): boolean {
    this.read(into, offset);
    return true;
  }

  async close(): Promise<void> {}
}

/** A part of another source, which it closes with itself. */
export class PartSource implements ByteSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly blockMemory?: () => BlockMemory;
  private readonly whole: ByteSource;
  private readonly start: number;

  constructor(whole: ByteSource, start: number, sizeBytes: number) {
    this.name = whole.name;
    this.whole = whole;
    this.start = start;
    this.sizeBytes = sizeBytes;
    if (whole.blockMemory !== undefined) this.blockMemory = () => whole.blockMemory!();
  }

  read(into: Buffer, offset: number): Promise<void> | undefined {
    this.checkRange(into, offset);
    return this.whole.read(into, this.start + offset);
  }

  readNow(into: Buffer, offset: number): boolean {
    this.checkRange(into, offset);
    return this.whole.readNow(into, this.start + offset);
  }

  private checkRange(into: Buffer, offset: number): void {
    if (offset + into.length <= this.sizeBytes) return;
    throw shortRead(this, into, offset);
  }

  close(): Promise<void> {
    return this.whole.close();
  }
}
