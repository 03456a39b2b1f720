/**
 * Reads and writes of any bytes for a target that knows whole blocks. A file may be written anywhere; what begins or ends inside a block reads that
 * block, changes it, and writes it back, with no other change at work meanwhile.
 */
import type { BlockTarget } from '../block-target.ts';

export class WholeBlocks {
  readonly #target: BlockTarget;
  readonly #changes = new Set<Promise<unknown>>();
  /** A change that runs alone. */
  #alone: Promise<unknown> | undefined;

  constructor(target: BlockTarget) {
    this.#target = target;
  }

  fits(offset: number, length: number): boolean {
    const { blockSize } = this.#target;
    return offset % blockSize === 0 && length % blockSize === 0;
  }

  /** Whether changes have to wait. */
  get busy(): boolean {
    return this.#alone !== undefined;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    if (this.fits(offset, length)) return this.#target.read(offset, length);
    const { start, end } = this.#around(offset, length);
    const bytes = await this.#target.read(start, end - start);
    return bytes.subarray(offset - start, offset - start + length);
  }

  async write(offset: number, data: Buffer): Promise<void> {
    if (this.fits(offset, data.length)) return this.change(() => this.#target.write(offset, data));
    const { start, end } = this.#around(offset, data.length);
    await this.#changeAlone(async () => {
      const bytes = Buffer.from(await this.#target.read(start, end - start));
      data.copy(bytes, offset - start);
      await this.#target.write(start, bytes);
    });
  }

  /** Zeros: `whole` makes them of whole blocks, the ends are written. */
  async zero(offset: number, length: number, whole: (offset: number, length: number) => Promise<void>): Promise<void> {
    if (this.fits(offset, length)) return this.change(() => whole(offset, length));
    const { blockSize } = this.#target;
    const first = Math.ceil(offset / blockSize) * blockSize;
    const last = Math.floor((offset + length) / blockSize) * blockSize;
    if (first >= last) return this.write(offset, Buffer.alloc(length));
    if (offset < first) await this.write(offset, Buffer.alloc(first - offset));
    await this.change(() => whole(first, last - first));
    if (last < offset + length) await this.write(last, Buffer.alloc(offset + length - last));
  }

  /** A change of whole blocks: any number at once. */
  async change(work: () => Promise<void>): Promise<void> {
    while (this.#alone !== undefined) await this.#alone;
    await this.#track(work());
  }

  async #changeAlone(work: () => Promise<void>): Promise<void> {
    while (this.#alone !== undefined) await this.#alone;
    const run = Promise.allSettled([...this.#changes]).then(work);
    const done = run.catch(() => {});
    this.#alone = done;
    try {
      await run;
    } finally {
      if (this.#alone === done) this.#alone = undefined;
    }
  }

  async #track(change: Promise<void>): Promise<void> {
    this.#changes.add(change);
    try {
      await change;
    } finally {
      this.#changes.delete(change);
    }
  }

  #around(offset: number, length: number): { start: number; end: number } {
    const { blockSize, sizeBytes } = this.#target;
    const end = Math.ceil((offset + length) / blockSize) * blockSize;
    return { start: offset - (offset % blockSize), end: Math.min(end, sizeBytes) };
  }
}
