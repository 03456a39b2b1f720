/** Inline tails, read from the spools in blocks: they lie there in the order of the layer, which is nearly that of the tree. */
import { closeSync, openSync, readSync } from 'node:fs';
import type { TailReader } from '../erofs/writer.ts';
import type { FileData } from './spool-format.ts';

export class SpoolTails implements TailReader {
  static readonly #BLOCK_BYTES = 1 << 16;
  static readonly #MAX_BLOCKS = 256;
  readonly #paths: readonly string[];
  readonly #fds = new Map<string, number>();
  readonly #blocks = new Map<string, Buffer>();

  /** `paths[i]`: of layer i. */
  constructor(paths: readonly string[]) {
    this.#paths = paths;
  }

  read(data: FileData, into: Buffer): void {
    const path = this.#paths[data.layer]!;
    for (let done = 0; done < into.length; ) {
      const position = data.tailOffset + done;
      const block = this.#block(path, Math.floor(position / SpoolTails.#BLOCK_BYTES));
      const from = position % SpoolTails.#BLOCK_BYTES;
      const n = block.copy(into, done, from, Math.min(block.length, from + into.length - done));
      if (n === 0) throw new Error(`${path} ends early`);
      done += n;
    }
  }

  #lastPath = '';
  #lastNumber = -1;
  #lastBlock: Buffer = Buffer.alloc(0);

  #block(path: string, number: number): Buffer {
    if (number !== this.#lastNumber || path !== this.#lastPath) {
      this.#lastBlock = this.#found(path, number);
      this.#lastNumber = number;
      this.#lastPath = path;
    }
    return this.#lastBlock;
  }

  #found(path: string, number: number): Buffer {
    const key = `${path}:${number}`;
    const known = this.#blocks.get(key);
    if (known !== undefined) return known;
    let fd = this.#fds.get(path);
    if (fd === undefined) {
      fd = openSync(path, 'r');
      this.#fds.set(path, fd);
    }
    const bytes = Buffer.allocUnsafe(SpoolTails.#BLOCK_BYTES);
    const n = readSync(fd, bytes, 0, bytes.length, number * bytes.length);
    if (this.#blocks.size >= SpoolTails.#MAX_BLOCKS) this.#blocks.delete(this.#blocks.keys().next().value!);
    const block = bytes.subarray(0, n);
    this.#blocks.set(key, block);
    return block;
  }

  close(): void {
    for (const fd of this.#fds.values()) closeSync(fd);
  }
}
