/**
 * The fixed fields of a 512-byte tar header: numbers, strings, checksum. Everything reads in place from the buffer that
 * holds the block, at an offset, and allocates nothing but the strings that are returned.
 *
 * Numbers come back as NaN when they are malformed and as +-Infinity when no integer of JavaScript holds them exactly,
 * so that the caller, who knows the member and the field, makes the error.
 */
import { type ByteString, byteString } from '#base';

export const BLOCK_BYTES = 512;

/** Offsets and lengths of the fields that are read. */
export const FIELD = {
  name: 0,
  mode: 100,
  uid: 108,
  gid: 116,
  size: 124,
  mtime: 136,
  checksum: 148,
  type: 156,
  link: 157,
  magic: 257,
  major: 329,
  minor: 337,
  prefix: 345,
  sparseMap: 386,
  sparseMore: 482,
  sparseSize: 483,
} as const;

/**
 * Octal with leading spaces or NULs, ended by spaces, a NUL or the field; or GNU base-256, two's complement, when the
 * top bit of the first byte is set. An empty field is 0.
 */
export function readNumber(b: Buffer, offset: number, length: number): number {
  const end = offset + length;
  let at = offset;
  let c = b[at]!;
  if (c > 0x7f) return readBase256(b, offset, end);
  while (c === 0x20 || c === 0) {
    if (++at === end) return 0;
    c = b[at]!;
  }
  let value = 0;
  while (c >= 0x30 && c < 0x38) {
    value = value * 8 + (c - 0x30);
    if (++at === end) return value;
    c = b[at]!;
  }
  while (c === 0x20) {
    if (++at === end) return value;
    c = b[at]!;
  }
  return c === 0 ? value : Number.NaN;
}

function readBase256(b: Buffer, offset: number, end: number): number {
  const negative = (b[offset]! & 0x40) !== 0;
  // The flag bit is not part of the number: it is replaced by a copy of the sign.
  let value = BigInt(negative ? (b[offset]! | 0x80) - 256 : b[offset]! & 0x7f);
  for (let at = offset + 1; at < end; at++) value = value * 256n + BigInt(b[at]!);
  const number = Number(value);
  if (Number.isSafeInteger(number)) return number;
  return negative ? Number.NEGATIVE_INFINITY : Number.POSITIVE_INFINITY;
}

/** Up to the first NUL, or the whole field. */
export function readText(b: Buffer, offset: number, length: number): ByteString {
  if (b[offset] === 0) return '';
  const end = offset + length;
  let at = offset + 1;
  while (at < end && b[at] !== 0) at++;
  return byteString(b, offset, at);
}

/** The sum of all 512 bytes. 0 means that all of them are 0. */
export function sumBytes(b: Buffer, offset: number): number {
  let sum = 0;
  for (let at = offset, end = offset + BLOCK_BYTES; at < end; at += 8) {
    sum += b[at]! + b[at + 1]! + b[at + 2]! + b[at + 3]! + b[at + 4]! + b[at + 5]! + b[at + 6]! + b[at + 7]!;
  }
  return sum;
}

/**
 * The same, of the block that starts at word `first`. Two 16-bit lanes are added at a time; 128 words of two bytes
 * each are at most 65280 in a lane, so no lane carries into the other.
 */
export function sumWords(words: Int32Array, first: number): number {
  let lanes = 0;
  for (let at = first, end = first + BLOCK_BYTES / 4; at < end; at += 4) {
    const p = words[at]!;
    const q = words[at + 1]!;
    const r = words[at + 2]!;
    const s = words[at + 3]!;
    lanes =
      (lanes +
        (p & 0xff00ff) +
        ((p >>> 8) & 0xff00ff) +
        (q & 0xff00ff) +
        ((q >>> 8) & 0xff00ff) +
        (r & 0xff00ff) +
        ((r >>> 8) & 0xff00ff) +
        (s & 0xff00ff) +
        ((s >>> 8) & 0xff00ff)) |
      0;
  }
  return (lanes & 0xffff) + (lanes >>> 16);
}

/** What the checksum field must hold, given the sum of all bytes: the field itself counts as eight spaces. */
export function checksumFrom(sum: number, b: Buffer, offset: number): number {
  let field = 0;
  for (let at = offset + FIELD.checksum, end = at + 8; at < end; at++) field += b[at]!;
  return sum - field + 8 * 0x20;
}

/** The sum that some old writers made: bytes taken as signed. */
export function signedChecksum(b: Buffer, offset: number): number {
  let sum = 8 * 0x20;
  for (let at = 0; at < BLOCK_BYTES; at++) {
    if (at < FIELD.checksum || at >= FIELD.checksum + 8) sum += (b[offset + at]! << 24) >> 24;
  }
  return sum;
}

/** `ustar\0`: POSIX, with a prefix field. */
export function isUstar(b: Buffer, offset: number): boolean {
  const at = offset + FIELD.magic;
  return (
    b[at] === 0x75 &&
    b[at + 1] === 0x73 &&
    b[at + 2] === 0x74 &&
    b[at + 3] === 0x61 &&
    b[at + 4] === 0x72 &&
    b[at + 5] === 0
  );
}

/** `ustar  \0`: GNU, with times and a sparse map where POSIX has the prefix. */
export function isGnu(b: Buffer, offset: number): boolean {
  return byteString(b, offset + FIELD.magic, offset + FIELD.magic + 8) === 'ustar  \0';
}

/** Name and, in POSIX headers, prefix, joined. */
export function readName(b: Buffer, offset: number): ByteString {
  const name = readText(b, offset + FIELD.name, 100);
  if (b[offset + FIELD.prefix] === 0 || !isUstar(b, offset)) return name;
  // star keeps times behind a shorter prefix and says so in the last four bytes.
  const isStar = b[offset + 508] === 0x74 && byteString(b, offset + 508, offset + 512) === 'tar\0';
  return `${readText(b, offset + FIELD.prefix, isStar ? 131 : 155)}/${name}`;
}
