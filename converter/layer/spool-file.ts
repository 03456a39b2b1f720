/**
 * One growing file of a spool, written in large pieces. In the background (tars) one write at a time is on its way while
 * the parser fills the next buffer; whoever feeds the parser calls `relax` so that no more than a few buffers wait.
 * Otherwise (folders, read synchronously) each piece is written at once.
 *
 * What was handed over may be taken back (`rewind`) and read back; pieces reach the file in the order they were given.
 */
import { closeSync, ftruncateSync, openSync, readSync, write as writeCallback, writeSync } from 'node:fs';
import { promisify } from 'node:util';

const write = promisify(writeCallback);

export const SPOOL_BUFFER_BYTES = 4 << 20;
const MAX_WAITING = 3;

interface Piece {
  readonly buffer: Buffer;
  readonly length: number;
  readonly position: number;
  /** Where what it holds of the file ends: less than its length once some of it was taken back. */
  end: number;
}

export class SpoolFile {
  readonly #fd: number;
  readonly #background: boolean;
  readonly #onWritten: (bytes: number) => void;
  readonly #free: Buffer[] = [];
  readonly #waiting: Piece[] = [];
  #writing: Promise<void> | undefined;
  #failure: unknown;
  /** Bytes handed over. */
  length = 0;

  /** `onWritten`: bytes from the start of the file that are in it; not called again for what was taken back. */
  constructor(path: string, background: boolean, onWritten: (bytes: number) => void = () => {}) {
    this.#fd = openSync(path, 'w+', 0o644);
    this.#background = background;
    this.#onWritten = onWritten;
  }

  /** A buffer of SPOOL_BUFFER_BYTES to fill. */
  take(): Buffer {
    return this.#free.pop() ?? Buffer.allocUnsafeSlow(SPOOL_BUFFER_BYTES);
  }

  /** Appends the first `length` bytes of a taken buffer, which is no longer the caller's. */
  append(buffer: Buffer, length: number): void {
    if (this.#failure !== undefined) throw this.#failure;
    const piece: Piece = { buffer, length, position: this.length, end: this.length + length };
    this.length += length;
    if (!this.#background) {
      for (let done = 0; done < length; )
        done += writeSync(this.#fd, buffer, done, length - done, piece.position + done);
      this.#free.push(buffer);
      this.#onWritten(this.length);
      return;
    }
    this.#waiting.push(piece);
    this.#writing ??= this.#writeWaiting();
  }

  async #writeWaiting(): Promise<void> {
    try {
      for (let piece = this.#waiting[0]; piece !== undefined; piece = this.#waiting[0]) {
        for (let done = 0; done < piece.length; ) {
          const { bytesWritten } = await write(
            this.#fd,
            piece.buffer,
            done,
            piece.length - done,
            piece.position + done,
          );
          done += bytesWritten;
        }
        this.#waiting.shift();
        this.#free.push(piece.buffer);
        this.#onWritten(piece.end);
      }
    } catch (error) {
      this.#failure = error;
    } finally {
      this.#writing = undefined;
    }
  }

  /** Forgets what lies after `length`. */
  rewind(length: number): void {
    this.length = length;
    for (const piece of this.#waiting) piece.end = Math.min(piece.end, length);
  }

  readAt(position: number, into: Buffer): void {
    let fromFile = into.length;
    for (const piece of this.#waiting) fromFile = Math.min(fromFile, Math.max(0, piece.position - position));
    readExactly(this.#fd, into.subarray(0, fromFile), position);
    // Later pieces lie over earlier ones where something was taken back and written anew.
    for (const piece of this.#waiting) {
      const start = Math.max(position, piece.position);
      const end = Math.min(position + into.length, piece.position + piece.length);
      if (start < end) piece.buffer.copy(into, start - position, start - piece.position, end - piece.position);
    }
  }

  /** Waits until few buffers wait to be written. @throws what a write failed with */
  async relax(): Promise<void> {
    while (this.#waiting.length > MAX_WAITING && this.#writing !== undefined) await this.#writing;
    if (this.#failure !== undefined) throw this.#failure;
  }

  /** Waits for everything, and cuts off what was taken back. */
  async finish(): Promise<void> {
    await this.#writing;
    if (this.#failure !== undefined) throw this.#failure;
    ftruncateSync(this.#fd, this.length);
  }

  async close(): Promise<void> {
    await this.#writing;
    closeSync(this.#fd);
  }
}

function readExactly(fd: number, into: Buffer, position: number): void {
  for (let done = 0; done < into.length; ) {
    const n = readSync(fd, into, done, into.length - done, position + done);
    if (n === 0) throw new Error('spool file ends early');
    done += n;
  }
}
