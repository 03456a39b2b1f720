/**
 * A target with a count of all that is asked of it, and two switches: read-only, and `hold`. What the target offers besides (answers at
 * once, holes, prefetch, being a file) it offers too. A way out that goes to the file by itself is not counted here.
 */
import type { BlockTarget } from '../target/block-target.ts';
import {
  type AsFile,
  type Extents,
  extentsOf,
  fileOf,
  type Immediate,
  immediateOf,
  type Prefetch,
  prefetchOf,
} from '../target/capabilities.ts';
import { TargetError } from '../target/target-error.ts';

export const OPERATIONS = ['read', 'write', 'flush', 'discard', 'writeZeroes'] as const;
export type Operation = (typeof OPERATIONS)[number];

export interface OperationCount {
  count: number;
  /** Asked for, by those that succeeded. */
  bytes: number;
  errors: number;
  /** Of all, failed ones included. */
  seconds: number;
}

export type OperationCounts = Readonly<Record<Operation, OperationCount>>;

export class CountedTarget implements BlockTarget {
  readonly readOnly: boolean;
  readonly blockSize: 512 | 4096;
  readonly counts: OperationCounts;
  /** What went wrong last, for people. */
  lastError: string | undefined;
  readonly readNow?: Immediate['readNow'];
  readonly writeNow?: Immediate['writeNow'];
  readonly extents?: Extents['extents'];
  readonly prefetch?: Prefetch['prefetch'];
  readonly fileDescriptor?: AsFile['fileDescriptor'];
  readonly #target: BlockTarget;
  #held = false;

  constructor(target: BlockTarget, readOnly: boolean) {
    this.#target = target;
    this.readOnly = readOnly || target.readOnly;
    this.blockSize = target.blockSize;
    const none = () => ({ count: 0, bytes: 0, errors: 0, seconds: 0 });
    this.counts = { read: none(), write: none(), flush: none(), discard: none(), writeZeroes: none() };
    const immediate = immediateOf(target);
    if (immediate !== undefined) {
      this.readNow = (into, at, offset, length) =>
        !this.#held && this.#now('read', length, () => immediate.readNow(into, at, offset, length));
      this.writeNow = (offset, data) => {
        if (this.#held) return false;
        this.#checkWrite();
        return this.#now('write', data.length, () => immediate.writeNow(offset, data));
      };
    }
    const extents = extentsOf(target);
    if (extents !== undefined) this.extents = (offset, length) => extents.extents(offset, length);
    const prefetch = prefetchOf(target);
    if (prefetch !== undefined) this.prefetch = (offset, length) => prefetch.prefetch(offset, length);
    const file = fileOf(target);
    if (file !== undefined) this.fileDescriptor = file;
  }

  get sizeBytes(): number {
    return this.#target.sizeBytes;
  }

  /**
   * From now on nothing is answered any more, as if this process had died: what is asked waits for ever. For a daemon that leaves its
   * devices to the next one, which gets all of it again.
   */
  hold(): void {
    this.#held = true;
  }

  read(offset: number, length: number): Promise<Buffer> {
    return this.#run('read', length, () => this.#target.read(offset, length));
  }

  write(offset: number, data: Buffer, options?: { fua?: boolean }): Promise<void> {
    return this.#run('write', data.length, () => this.#target.write(offset, data, options));
  }

  flush(): Promise<void> {
    return this.#run('flush', 0, () => this.#target.flush());
  }

  discard(offset: number, length: number): Promise<void> {
    return this.#run('discard', length, () => this.#target.discard(offset, length));
  }

  writeZeroes(offset: number, length: number, options?: { mayUnmap?: boolean; fua?: boolean }): Promise<void> {
    return this.#run('writeZeroes', length, () => this.#target.writeZeroes(offset, length, options));
  }

  close(): Promise<void> {
    return this.#target.close();
  }

  #checkWrite(): void {
    if (this.readOnly) throw new TargetError('TARGET_READ_ONLY');
  }

  #now(operation: Operation, length: number, work: () => boolean): boolean {
    const began = performance.now();
    try {
      const answered = work();
      // Else it is asked for again, and counted then.
      if (answered) this.#count(operation, length, began);
      return answered;
    } catch (error) {
      this.#fail(operation, error, began);
      throw error;
    }
  }

  async #run<T>(operation: Operation, length: number, work: () => Promise<T>): Promise<T> {
    if (this.#held) return new Promise<never>(() => {});
    const began = performance.now();
    try {
      if (operation !== 'read' && operation !== 'flush') this.#checkWrite();
      const answer = await work();
      this.#count(operation, length, began);
      return answer;
    } catch (error) {
      this.#fail(operation, error, began);
      throw error;
    }
  }

  #count(operation: Operation, length: number, began: number): void {
    const counted = this.counts[operation];
    counted.count++;
    counted.bytes += length;
    counted.seconds += (performance.now() - began) / 1000;
  }

  #fail(operation: Operation, error: unknown, began: number): void {
    const counted = this.counts[operation];
    counted.count++;
    counted.errors++;
    counted.seconds += (performance.now() - began) / 1000;
    this.lastError = error instanceof Error ? error.message : String(error);
  }
}
