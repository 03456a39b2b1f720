/** The header of a gzip member (RFC 1952), measured and checked. */
import { crc32 } from 'node:zlib';

const FHCRC = 0x02;
const FEXTRA = 0x04;
const FNAME = 0x08;
const FCOMMENT = 0x10;
const RESERVED = 0xe0;

/**
 * The length of the header that begins at `start`; 0 when more bytes are needed to tell; or what is wrong with it.
 */
export function measureGzipHeader(b: Buffer, start: number, end: number): number | string {
  if (end > start && b[start] !== 0x1f) return 'not a gzip header';
  if (end > start + 1 && b[start + 1] !== 0x8b) return 'not a gzip header';
  if (end > start + 2 && b[start + 2] !== 8) return `unknown compression method ${b[start + 2]}`;
  if (end - start < 10) return 0;
  const flags = b[start + 3]!;
  if ((flags & RESERVED) !== 0) return 'unknown header flags';
  let at = start + 10;
  if ((flags & FEXTRA) !== 0) {
    if (end - at < 2) return 0;
    at += 2 + b.readUInt16LE(at);
  }
  for (const text of [FNAME, FCOMMENT]) {
    if ((flags & text) === 0) continue;
    if (at >= end) return 0;
    // Of the part that is there: the buffer may hold older bytes behind it.
    const nul = b.subarray(at, end).indexOf(0);
    if (nul < 0) return 0;
    at += nul + 1;
  }
  if ((flags & FHCRC) !== 0) {
    if (end - at < 2) return 0;
    if ((crc32(b.subarray(start, at)) & 0xffff) !== b.readUInt16LE(at)) return 'wrong header checksum';
    at += 2;
  }
  return at > end ? 0 : at - start;
}
