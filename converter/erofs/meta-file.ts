/**
 * The metadata image on its way to disk: written in order but for a window, hashed as it goes. Everything before
 * `settle(position)` is final.
 */
import { createHash, type Hash } from 'node:crypto';
import { closeSync, openSync, writeSync } from 'node:fs';

export class MetaFile {
  readonly #fd: number;
  readonly #hash: Hash = createHash('sha256');
  readonly #onFirst: (head: Buffer) => void;
  #window: Buffer;
  #view: DataView;
  #base = 0;
  #first = true;

  /** `onFirst` sees the first window once its bytes are final, before it is hashed: for the superblock's checksum. */
  constructor(path: string, windowBytes: number, onFirst: (head: Buffer) => void) {
    this.#fd = openSync(path, 'w', 0o644);
    this.#window = Buffer.alloc(windowBytes);
    this.#view = viewOf(this.#window);
    this.#onFirst = onFirst;
  }

  /** Room for `length` bytes at `position`, zero unless written before. */
  at(position: number, length: number): Buffer {
    const offset = this.room(position, length);
    return this.#window.subarray(offset, offset + length);
  }

  /** The same as an offset in `view`, which may be another one than before. */
  room(position: number, length: number): number {
    const offset = position - this.#base;
    if (offset < 0) throw new Error('metadata written behind its window');
    if (offset + length > this.#window.length) {
      const larger = Buffer.alloc(2 ** Math.ceil(Math.log2(offset + length)));
      this.#window.copy(larger);
      this.#window = larger;
      this.#view = viewOf(larger);
    }
    return offset;
  }

  /** Of the window: for who writes many small numbers, each of which would cost a buffer else. */
  get view(): DataView {
    return this.#view;
  }

  /** Nothing before `position` changes any more. */
  settle(position: number, slackBytes = 1 << 20): void {
    const length = position - this.#base;
    if (length < slackBytes) return;
    this.#write(length);
  }

  #write(length: number): void {
    const bytes = this.#window.subarray(0, length);
    if (this.#first) this.#onFirst(bytes);
    this.#first = false;
    this.#hash.update(bytes);
    for (let done = 0; done < length; ) done += writeSync(this.#fd, bytes, done, length - done);
    this.#window.copyWithin(0, length);
    this.#window.fill(0, this.#window.length - length);
    this.#base += length;
  }

  /** Writes the rest up to `endByte`. Returns the hex sha256 of the whole. */
  finish(endByte: number): string {
    this.at(endByte, 0);
    if (endByte > this.#base) this.#write(endByte - this.#base);
    return this.#hash.digest('hex');
  }

  close(): void {
    closeSync(this.#fd);
  }
}

function viewOf({ buffer, byteOffset, byteLength }: Buffer): DataView {
  return new DataView(buffer, byteOffset, byteLength);
}
