/**
 * A segment mapping, 16 bytes: a run of 512-byte sectors of the device and where their bytes are in the file.
 *
 *     low word   bits 0-49 first sector, 50-63 number of sectors
 *     high word  bits 0-54 first sector in the file (the header counts), 55 zeroed, 56-63 tag
 *
 * Numbers are doubles: all of them stay below 2^55, and what is above 2^53 is refused by whoever checks ranges.
 */
export const SEGMENT_BYTES = 16;
/** The longest run one entry can have. */
export const MAX_SEGMENT_SECTORS = 16383;
/** First sector of a padding entry; its length is 0. */
export const PADDING_OFFSET = 2 ** 50 - 1;

export interface Segment {
  readonly offset: number;
  readonly length: number;
  readonly moffset: number;
  readonly zeroed: boolean;
  readonly tag: number;
}

const HIGH = 2 ** 32;

export function segmentOffset(bytes: Buffer, at: number): number {
  return bytes.readUInt32LE(at) + (bytes.readUInt32LE(at + 4) & 0x3ffff) * HIGH;
}

export function segmentLength(bytes: Buffer, at: number): number {
  return bytes.readUInt32LE(at + 4) >>> 18;
}

export function segmentMoffset(bytes: Buffer, at: number): number {
  return bytes.readUInt32LE(at + 8) + (bytes.readUInt32LE(at + 12) & 0x7fffff) * HIGH;
}

export function segmentZeroed(bytes: Buffer, at: number): boolean {
  return (bytes[at + 14]! & 0x80) !== 0;
}

export function decodeSegment(bytes: Buffer, at: number): Segment {
  return {
    offset: segmentOffset(bytes, at),
    length: segmentLength(bytes, at),
    moffset: segmentMoffset(bytes, at),
    zeroed: segmentZeroed(bytes, at),
    tag: bytes[at + 15]!,
  };
}

export function encodeSegment(
  into: Buffer,
  at: number,
  offset: number,
  length: number,
  moffset: number,
  zeroed: boolean,
): void {
  into.writeUInt32LE(offset % HIGH, at);
  into.writeUInt32LE((Math.floor(offset / HIGH) | (length << 18)) >>> 0, at + 4);
  into.writeUInt32LE(moffset % HIGH, at + 8);
  into.writeUInt32LE((Math.floor(moffset / HIGH) | (zeroed ? 0x800000 : 0)) >>> 0, at + 12);
}

/** The entry that readers skip; its second word is free. */
export function encodePadding(into: Buffer, at: number): void {
  encodeSegment(into, at, PADDING_OFFSET, 0, 0, false);
}
