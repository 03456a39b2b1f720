/**
 * Sparse members: a map of extents, stored back to back, and the holes between them. Four dialects bring the map (old
 * GNU headers, PAX 0.0, 0.1 and 1.0); all end here as one list, checked as a whole before the member is announced, and
 * then played as `data` and `hole` calls while the stored bytes stream by.
 */
import type { EntryHandler } from './entry.ts';
import { MAX_EXTENTS } from './pax.ts';
import { readNumber } from './tar-fields.ts';

/** Extents in stored order, as [offset, length, offset, length, ...]; no empty ones after `checkMap`. */
export type SparseMap = number[];

/**
 * Checks order, overlap and bounds, and drops empty extents.
 * @param sizeBytes of the whole file
 * @param storedBytes that the member has for extents
 * @returns what is wrong, or undefined
 */
export function checkMap(map: SparseMap, sizeBytes: number, storedBytes: number): string | undefined {
  if (map.length % 2 !== 0) return 'the sparse map has an offset without a length';
  let last = 0;
  let stored = 0;
  let kept = 0;
  for (let at = 0; at < map.length; at += 2) {
    const offset = map[at]!;
    const length = map[at + 1]!;
    if (offset < last) return `sparse extent ${at / 2} at ${offset} overlaps or precedes the one before it`;
    if (!(offset + length <= sizeBytes)) return `sparse extent ${at / 2} ends past the file's ${sizeBytes} bytes`;
    last = offset + length;
    stored += length;
    if (length === 0) continue;
    map[kept++] = offset;
    map[kept++] = length;
  }
  map.length = kept;
  if (stored > storedBytes) return `the sparse map names ${stored} bytes, the member has ${storedBytes}`;
  return undefined;
}

/**
 * Appends the extents of an old GNU sparse block: `count` pairs of 12-byte numbers from `offset` on, ended early by a
 * pair whose first byte is 0.
 */
export function appendGnuExtents(b: Buffer, offset: number, count: number, map: SparseMap): string | undefined {
  for (let i = 0, at = offset; i < count && b[at] !== 0; i++, at += 24) {
    const start = readNumber(b, at, 12);
    const length = readNumber(b, at + 12, 12);
    if (!(start >= 0 && length >= 0 && start + length <= Number.MAX_SAFE_INTEGER)) {
      return 'a number of the sparse map is malformed';
    }
    if (map.push(start, length) > 2 * MAX_EXTENTS) return `the sparse map has more than ${MAX_EXTENTS} extents`;
  }
  return undefined;
}

/** Reads the map that stands in front of the data in PAX sparse 1.0: decimal lines, the first one the extent count. */
export class SparseLines {
  readonly map: SparseMap = [];
  /** Bytes of the map so far. */
  usedBytes = 0;
  isComplete = false;
  problem: string | undefined = undefined;
  private value = 0;
  private digits = 0;
  private wanted = -1;

  /** @returns how far it read. Stops after the last line and at the first problem. */
  push(b: Buffer, start: number, end: number): number {
    let at = start;
    while (at < end && !this.isComplete && this.problem === undefined) {
      const c = b[at++]!;
      if (c >= 0x30 && c <= 0x39 && this.digits < 20) {
        this.value = this.value * 10 + (c - 0x30);
        this.digits++;
      } else if (c === 0x0a && this.digits > 0 && this.value <= Number.MAX_SAFE_INTEGER) this.line(this.value);
      else this.problem = 'the sparse map in front of the data is not lines of numbers';
    }
    this.usedBytes += at - start;
    return at;
  }

  private line(value: number): void {
    this.value = 0;
    this.digits = 0;
    if (this.wanted >= 0) this.map.push(value);
    else if (value > MAX_EXTENTS) this.problem = `the sparse map has ${value} extents, more than ${MAX_EXTENTS}`;
    else this.wanted = 2 * value;
    if (this.map.length === this.wanted) this.isComplete = true;
  }
}

/** Turns the stored bytes of one member into `data` and `hole` calls. */
export class SparsePlayer {
  private next = 0;
  private position = 0;
  /** Bytes of the current extent that are still to come; 0 when all extents are done. */
  leftBytes = 0;
  private readonly map: SparseMap;
  private readonly sizeBytes: number;
  private readonly handler: EntryHandler;

  constructor(map: SparseMap, sizeBytes: number, handler: EntryHandler) {
    this.map = map;
    this.sizeBytes = sizeBytes;
    this.handler = handler;
    this.advance();
  }

  /** `bytes` must not be longer than `leftBytes`. */
  data(bytes: Buffer): void {
    this.handler.data(bytes);
    this.position += bytes.length;
    this.leftBytes -= bytes.length;
    if (this.leftBytes === 0) this.advance();
  }

  private advance(): void {
    const isLast = this.next >= this.map.length;
    const offset = isLast ? this.sizeBytes : this.map[this.next]!;
    if (offset > this.position) this.handler.hole(offset - this.position);
    this.position = offset;
    if (!isLast) this.leftBytes = this.map[this.next + 1]!;
    this.next += 2;
  }
}
