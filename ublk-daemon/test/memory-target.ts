/** A disk in memory that tests can look into: what reached it in which order, calls held open, calls made to fail. */
import type { BlockTarget } from '../target/block-target.ts';
import type { Extent, Extents, Immediate } from '../target/capabilities.ts';
import { checkRange } from '../target/range.ts';
import { TargetError } from '../target/target-error.ts';

export interface Call {
  readonly name: 'read' | 'write' | 'flush' | 'discard' | 'writeZeroes' | 'close';
  readonly offset: number;
  readonly length: number;
  readonly fua?: boolean;
  readonly mayUnmap?: boolean;
}

export class MemoryTarget implements BlockTarget {
  readonly blockSize: 512 | 4096;
  readonly readOnly: boolean;
  readonly bytes: Buffer;
  readonly calls: Call[] = [];
  /** Before each call takes effect; may wait, may throw. */
  before: (call: Call) => Promise<void> | void = () => {};

  constructor(sizeBytes: number, options: { readonly blockSize?: 512 | 4096; readonly readOnly?: boolean } = {}) {
    this.bytes = Buffer.alloc(sizeBytes);
    this.blockSize = options.blockSize ?? 512;
    this.readOnly = options.readOnly ?? false;
  }

  get sizeBytes(): number {
    return this.bytes.length;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    checkRange(this, offset, length);
    await this.#called({ name: 'read', offset, length });
    return Buffer.from(this.bytes.subarray(offset, offset + length));
  }

  async write(offset: number, data: Buffer, options: { fua?: boolean } = {}): Promise<void> {
    this.#checkWrite(offset, data.length);
    await this.#called({ name: 'write', offset, length: data.length, fua: options.fua ?? false });
    data.copy(this.bytes, offset);
  }

  async flush(): Promise<void> {
    await this.#called({ name: 'flush', offset: 0, length: 0 });
  }

  async discard(offset: number, length: number): Promise<void> {
    this.#checkWrite(offset, length);
    await this.#called({ name: 'discard', offset, length });
    this.bytes.fill(0, offset, offset + length);
  }

  async writeZeroes(
    offset: number,
    length: number,
    options: { mayUnmap?: boolean; fua?: boolean } = {},
  ): Promise<void> {
    this.#checkWrite(offset, length);
    const { fua = false, mayUnmap = true } = options;
    await this.#called({ name: 'writeZeroes', offset, length, fua, mayUnmap });
    this.bytes.fill(0, offset, offset + length);
  }

  async close(): Promise<void> {
    await this.#called({ name: 'close', offset: 0, length: 0 });
  }

  #checkWrite(offset: number, length: number): void {
    if (this.readOnly) throw new TargetError('TARGET_READ_ONLY');
    checkRange(this, offset, length);
  }

  async #called(call: Call): Promise<void> {
    this.calls.push(call);
    await this.before(call);
  }
}

/** The same, answering at once where nothing holds it, and telling where zeros are. */
export class ImmediateMemoryTarget extends MemoryTarget implements Immediate, Extents {
  readNow(into: Buffer, at: number, offset: number, length: number): boolean {
    checkRange(this, offset, length);
    const held = this.before({ name: 'read', offset, length });
    if (held instanceof Promise) {
      held.catch(() => {});
      return false;
    }
    this.calls.push({ name: 'read', offset, length });
    this.bytes.copy(into, at, offset, offset + length);
    return true;
  }

  writeNow(offset: number, data: Buffer): boolean {
    if (this.readOnly) throw new TargetError('TARGET_READ_ONLY');
    checkRange(this, offset, data.length);
    const held = this.before({ name: 'write', offset, length: data.length, fua: false });
    if (held instanceof Promise) {
      held.catch(() => {});
      return false;
    }
    this.calls.push({ name: 'write', offset, length: data.length, fua: false });
    data.copy(this.bytes, offset);
    return true;
  }

  async extents(offset: number, length: number): Promise<readonly Extent[]> {
    checkRange(this, offset, length);
    const found: Extent[] = [];
    for (let at = offset; at < offset + length; at += this.blockSize) {
      const zero = this.bytes.subarray(at, at + this.blockSize).every((byte) => byte === 0);
      const last = found.at(-1);
      if (last !== undefined && last.zero === zero) {
        found[found.length - 1] = { ...last, length: last.length + this.blockSize };
      } else found.push({ length: this.blockSize, hole: zero, zero });
    }
    return found;
  }
}
