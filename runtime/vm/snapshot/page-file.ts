/** Pages of memory, as they come, into a sparse file. At once: what is written is in the page cache, and a turn for each would cost more. */
import { closeSync, ftruncateSync, openSync, writeSync } from 'node:fs';
import type { PageTaker } from './ram-stream.ts';

export class PageFile implements PageTaker {
  private readonly fd: number;

  constructor(path: string, sizeBytes: number) {
    this.fd = openSync(path, 'wx', 0o600);
    ftruncateSync(this.fd, sizeBytes);
  }

  page(offset: number, bytes: Buffer): void {
    for (let done = 0; done < bytes.length; )
      done += writeSync(this.fd, bytes, done, bytes.length - done, offset + done);
  }

  close(): void {
    closeSync(this.fd);
  }
}
