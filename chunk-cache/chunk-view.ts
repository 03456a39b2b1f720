/**
 * A blob of the cache as another thread of the same process sees it: hits that are on the local disk and verified are answered from
 * the file itself, without a word to the cache's thread. What it cannot answer, the cache can.
 *
 * The cache's thread hands over a `ChunkViewHandle` by postMessage (its shared memory is shared, not copied). Never wrong bytes:
 * a chunk's state word is loaded before and after its bytes are read, see chunk-states.ts; a data file that was replaced is
 * told by its generation and inode.
 */
import { closeSync, fstatSync, openSync, readSync } from 'node:fs';
import { CHUNK_BYTES, chunkCount } from './chunk.ts';
import { ChunkStates, VERIFIED } from './chunk-states.ts';
import { UseClock } from './use-clock.ts';

/** Can be sent to another thread. */
export interface ChunkViewHandle {
  readonly path: string;
  readonly sizeBytes: number;
  readonly states: SharedArrayBuffer;
  readonly clock: SharedArrayBuffer;
}

export class ChunkView {
  readonly sizeBytes: number;
  readonly #path: string;
  readonly #states: ChunkStates;
  readonly #clock: UseClock;
  #fd: number | undefined;
  #file = -1;

  constructor(handle: ChunkViewHandle) {
    this.sizeBytes = handle.sizeBytes;
    this.#path = handle.path;
    this.#states = ChunkStates.attach(chunkCount(handle.sizeBytes), handle.states);
    this.#clock = new UseClock(handle.clock);
  }

  /** As CachedBlob.readNow: bytes up to the blob's end, or undefined when the cache must be asked. */
  readNow(offset: number, length: number): Buffer | undefined {
    const bytes = Buffer.allocUnsafe(Math.max(0, Math.min(length, this.sizeBytes - offset)));
    return this.readNowInto(bytes, 0, offset, bytes.length) === bytes.length ? bytes : undefined;
  }

  /** Into `target` from `at` on; returns the number of bytes (less than `length` at the blob's end), or -1 when the cache must be asked. */
  readNowInto(target: Buffer, at: number, offset: number, length: number): number {
    const end = Math.min(offset + length, this.sizeBytes);
    if (end <= offset) return 0;
    const first = Math.floor(offset / CHUNK_BYTES);
    const last = Math.floor((end - 1) / CHUNK_BYTES);
    const words: number[] = [];
    for (let i = first; i <= last; i++) {
      const word = this.#states.word(i);
      if ((word & 3) !== VERIFIED) return -1;
      words.push(word);
    }
    const fd = this.#open();
    if (fd === undefined || !this.#readAll(fd, target, at, offset, end - offset)) return -1;
    for (let i = first; i <= last; i++) if (this.#states.word(i) !== words[i - first]) return -1;
    const { tick } = this.#clock;
    for (let i = first; i <= last; i++) this.#states.noteUse(i, tick);
    return end - offset;
  }

  close(): void {
    if (this.#fd !== undefined) closeSync(this.#fd);
    this.#fd = undefined;
  }

  #open(): number | undefined {
    const file = this.#states.fileGeneration;
    if (this.#fd !== undefined && this.#file === file) return this.#fd;
    this.close();
    try {
      const fd = openSync(this.#path, 'r');
      if (!this.#states.isInode(fstatSync(fd, { bigint: true }).ino)) {
        closeSync(fd);
        return undefined;
      }
      this.#fd = fd;
      this.#file = file;
      return fd;
    } catch {
      return undefined;
    }
  }

  #readAll(fd: number, target: Buffer, at: number, offset: number, length: number): boolean {
    try {
      for (let done = 0; done < length; ) {
        const bytesRead = readSync(fd, target, at + done, length - done, offset + done);
        if (bytesRead === 0) return false;
        done += bytesRead;
      }
      return true;
    } catch {
      return false;
    }
  }
}
