/** Where the bytes of a layer that is made go, in order. */
import type { FileHandle } from 'node:fs/promises';

export interface ByteSink {
  /** Bytes so far. */
  readonly written: number;
  /** The buffer is the sink's until the promise is kept, no longer. */
  append(bytes: Buffer): Promise<void>;
}

/** A part of a file from `start` on. */
export class FileSink implements ByteSink {
  written = 0;
  private readonly file: FileHandle;
  private readonly start: number;

  constructor(file: FileHandle, start = 0) {
    this.file = file;
    this.start = start;
  }

  async append(bytes: Buffer): Promise<void> {
    await writeAll(this.file, bytes, this.start + this.written);
    this.written += bytes.length;
  }
}

export async function writeAll(file: FileHandle, bytes: Buffer, position: number): Promise<void> {
  for (let done = 0; done < bytes.length; ) {
    const { bytesWritten } = await file.write(bytes, done, bytes.length - done, position + done);
    done += bytesWritten;
  }
}
