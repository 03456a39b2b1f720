/** A part of a file as a source: the next block is always on its way, and goes to memory that was given back. */
import { open } from 'node:fs/promises';
import { fail } from '../errors.ts';
import type { RecyclingSource } from './prefetch.ts';

const READ_BYTES = 2 << 20;

/** @throws LAYER_SIZE when the file is shorter. */
export class FileRange implements RecyclingSource {
  readonly #path: string;
  readonly #offset: number;
  readonly #sizeBytes: number;
  readonly #free: Buffer[] = [];

  constructor(path: string, offset: number, sizeBytes: number) {
    this.#path = path;
    this.#offset = offset;
    this.#sizeBytes = sizeBytes;
  }

  recycle(chunk: Buffer): void {
    if (chunk.length === READ_BYTES) this.#free.push(chunk);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Buffer> {
    const file = await open(this.#path, 'r');
    try {
      let position = 0;
      const readNext = () => {
        const from = position;
        const length = Math.min(READ_BYTES, this.#sizeBytes - from);
        if (length === 0) return undefined;
        position += length;
        const block = this.#free.pop() ?? Buffer.allocUnsafeSlow(READ_BYTES);
        const reading = file.read(block, 0, length, this.#offset + from);
        return reading.then(({ bytesRead }) => ({ block, from, bytesRead }));
      };
      let pending = readNext();
      while (pending !== undefined) {
        const { block, from, bytesRead } = await pending;
        if (bytesRead === 0) throw fail('LAYER_SIZE', { layer: this.#path, expected: this.#sizeBytes, actual: from });
        // After a short one, what was to come is read from where it ended.
        position = Math.min(position, from + bytesRead);
        pending = readNext();
        // It may fail while the consumer is busy, or has stopped.
        pending?.catch(() => {});
        yield block.subarray(0, bytesRead);
      }
    } finally {
      await file.close();
    }
  }
}
