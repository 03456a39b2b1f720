/**
 * A plain model of a disk whose sectors say which operation wrote them: sector s of operation n is the words n, s, n, s, ... So what
 * is read says what happened, also when several states are allowed.
 */
import type { BlockTarget } from '../target/block-target.ts';

export const SECTOR = 512;

export class DiskModel {
  /** The operation whose bytes a sector has, 0 for zeros. */
  now: Uint32Array;

  constructor(sectors: number | Uint32Array) {
    this.now = typeof sectors === 'number' ? new Uint32Array(sectors) : Uint32Array.from(sectors);
  }

  write(start: number, sectors: number, operation: number): Buffer {
    this.now.fill(operation, start, start + sectors);
    const bytes = Buffer.alloc(sectors * SECTOR);
    for (let at = 0; at < sectors; at++) stampSector(bytes, at * SECTOR, operation, start + at);
    return bytes;
  }

  zero(start: number, sectors: number): void {
    this.now.fill(0, start, start + sectors);
  }

  expected(start: number, sectors: number): Buffer {
    const bytes = Buffer.alloc(sectors * SECTOR);
    for (let at = 0; at < sectors; at++) {
      const operation = this.now[start + at]!;
      if (operation !== 0) stampSector(bytes, at * SECTOR, operation, start + at);
    }
    return bytes;
  }

  /** The first sector that differs, or undefined. */
  async difference(disk: BlockTarget, start = 0, sectors = this.now.length): Promise<string | undefined> {
    const actual = await disk.read(start * SECTOR, sectors * SECTOR);
    if (actual.equals(this.expected(start, sectors))) return undefined;
    const found = operationsOf(actual, start);
    for (let at = 0; at < sectors; at++) {
      if (found[at] !== this.now[start + at]) {
        return `sector ${start + at}: operation ${found[at]}, expected ${this.now[start + at]}`;
      }
    }
    return 'bytes differ';
  }
}

function stampSector(bytes: Buffer, at: number, operation: number, sector: number): void {
  bytes.writeUInt32LE(operation, at);
  bytes.writeUInt32LE(sector, at + 4);
  bytes.copyWithin(at + 8, at, at + 8);
  for (let done = 16; done < SECTOR; done *= 2) bytes.copyWithin(at + done, at, at + done);
}

/** Which operation wrote each sector; -1 where the bytes are of none. */
export function operationsOf(bytes: Buffer, start: number): Int32Array {
  const found = new Int32Array(bytes.length / SECTOR);
  const expected = Buffer.alloc(SECTOR);
  for (let at = 0; at < found.length; at++) {
    const sector = bytes.subarray(at * SECTOR, (at + 1) * SECTOR);
    const operation = sector.readUInt32LE(0);
    if (operation === 0) expected.fill(0);
    else stampSector(expected, 0, operation, start + at);
    found[at] = sector.equals(expected) ? operation : -1;
  }
  return found;
}
