/**
 * Index entries that are not on the disk yet, in the order in which they took effect.
 *
 * A batch is written with a seal behind it: a padding entry, which every reader skips, whose free word has the raw CRC-32C of the
 * batch's entries and their number. So an index that was damaged can be told from one whose end was never written.
 */
import { crc32cRaw } from '#base';
import { encodePadding, encodeSegment, MAX_SEGMENT_SECTORS, SEGMENT_BYTES } from '../lsmt/segment.ts';

export class EntryLog {
  count = 0;
  private bytes = Buffer.allocUnsafe(256 * SEGMENT_BYTES);

  /** @param moffset of the first sector's bytes, or for zeros the end of the data so far */
  add(start: number, end: number, moffset: number, zeroed: boolean): void {
    for (let from = start, place = moffset; from < end; ) {
      const sectors = Math.min(MAX_SEGMENT_SECTORS, end - from);
      // Room for the seal too.
      if ((this.count + 2) * SEGMENT_BYTES > this.bytes.length) {
        const larger = Buffer.allocUnsafe(this.bytes.length * 2);
        this.bytes.copy(larger, 0, 0, this.count * SEGMENT_BYTES);
        this.bytes = larger;
      }
      encodeSegment(this.bytes, this.count++ * SEGMENT_BYTES, from, sectors, place, zeroed);
      from += sectors;
      if (!zeroed) place += sectors;
    }
  }

  /** The entries alone. */
  plain(): Buffer {
    return this.bytes.subarray(0, this.count * SEGMENT_BYTES);
  }

  /** The entries and their seal. */
  sealed(): Buffer {
    const end = this.count * SEGMENT_BYTES;
    writeSeal(this.bytes, end, crc32cRaw(0, this.bytes, 0, end), this.count);
    return this.bytes.subarray(0, end + SEGMENT_BYTES);
  }

  /** Puts the entries of an earlier log before those of this one. */
  prepend(earlier: EntryLog): void {
    const count = earlier.count + this.count;
    const bytes = Buffer.allocUnsafe(Math.max(256, count * 2) * SEGMENT_BYTES);
    earlier.bytes.copy(bytes, 0, 0, earlier.count * SEGMENT_BYTES);
    this.bytes.copy(bytes, earlier.count * SEGMENT_BYTES, 0, this.count * SEGMENT_BYTES);
    this.bytes = bytes;
    this.count = count;
  }
}

function writeSeal(into: Buffer, at: number, crc: number, count: number): void {
  encodePadding(into, at);
  into.writeUInt32LE(crc, at + 8);
  into.writeUInt32LE(count, at + 12);
}

/** Of the padding entry at `at`: 'none' is mere padding, 'wrong' a seal of other entries than those before it. */
export function checkSeal(bytes: Buffer, at: number, batchStart: number): 'none' | 'right' | 'wrong' {
  const crc = bytes.readUInt32LE(at + 8);
  const count = bytes.readUInt32LE(at + 12);
  if (crc === 0 && count === 0) return 'none';
  const start = at - count * SEGMENT_BYTES;
  // More entries may stand before the batch: those that a tool without seals has added.
  return start >= batchStart && crc32cRaw(0, bytes, start, at) === crc ? 'right' : 'wrong';
}
