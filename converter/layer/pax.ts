/**
 * PAX extended headers: `length key=value\n` records that override the fields of the header they precede (`x`), or of
 * all that follow (`g`). Lengths rule, never line ends: values may hold newlines, and xattr values any byte.
 *
 * Only what an `Entry` needs is kept. The last record of a key wins; an empty value takes away what came before it,
 * except for an xattr, whose value may be empty. Times are split at the decimal point as text: no float touches them.
 */
import { type ByteString, byteString, bytesOf } from '#base';

/** Bytes of one extended header. Real ones have a few hundred; xattrs and sparse maps may bring them to some MiB. */
export const MAX_PAX_BYTES = 8 << 20;

/** Most extents of one sparse file: 16 MiB of memory, and a 4 GiB file with every other block a hole. */
export const MAX_EXTENTS = 1 << 20;

export class PaxFields {
  path: ByteString | undefined = undefined;
  link: ByteString | undefined = undefined;
  sizeBytes: number | undefined = undefined;
  uid: number | undefined = undefined;
  gid: number | undefined = undefined;
  mtimeSec: number | undefined = undefined;
  mtimeNsec = 0;
  xattrs: Map<ByteString, Buffer> | undefined = undefined;
  sparseMajor: number | undefined = undefined;
  /** Of sparse 0.x. */
  sparseSize: number | undefined = undefined;
  /** Of sparse 1.0. */
  sparseRealSize: number | undefined = undefined;
  sparseName: ByteString | undefined = undefined;
  /** Sparse 0.1: offset, length, offset, length, ... */
  sparseMap: number[] | undefined = undefined;
  /** Sparse 0.0: one record a number. Never inherited from a global header. */
  sparseOffsets: number[] | undefined = undefined;
  sparseLengths: number[] | undefined = undefined;

  /** What a member's own header starts from, when a global one was seen. */
  inherit(): PaxFields {
    const copy = new PaxFields();
    Object.assign(copy, this);
    copy.xattrs = this.xattrs && new Map(this.xattrs);
    copy.sparseOffsets = undefined;
    copy.sparseLengths = undefined;
    return copy;
  }

  /** Roughly what this holds in memory, for the bound on global headers that add up. */
  heldBytes(): number {
    let held = (this.path?.length ?? 0) + (this.link?.length ?? 0) + (this.sparseName?.length ?? 0);
    held += (this.sparseMap?.length ?? 0) * 2;
    for (const [name, value] of this.xattrs ?? []) held += name.length + value.length + 64;
    return held;
  }
}

/** Applies the records in `b[start..end)` to `into`. @returns what is wrong with them, or undefined. */
export function applyPax(b: Buffer, start: number, end: number, into: PaxFields): string | undefined {
  let at = start;
  while (at < end) {
    const recordStart = at;
    let length = 0;
    let c = b[at]!;
    while (c >= 0x30 && c <= 0x39 && length < 1e12) {
      length = length * 10 + (c - 0x30);
      if (++at >= end) return 'a record has no end';
      c = b[at]!;
    }
    const next = recordStart + length;
    if (c !== 0x20 || at === recordStart) return 'a record does not begin with its length';
    at++;
    if (next > end) return `a record of ${length} bytes runs past the end of the header`;
    if (next - at < 3 || b[next - 1] !== 0x0a) return `a record of ${length} bytes does not end with a newline`;
    let equals = at;
    while (equals < next && b[equals] !== 0x3d) {
      if (b[equals] === 0) return 'a key holds a NUL byte';
      equals++;
    }
    if (equals === at) return 'a record has no key';
    if (equals >= next - 1) return 'a record has no "="';
    const problem = applyRecord(byteString(b, at, equals), b, equals + 1, next - 1, into);
    if (problem !== undefined) return problem;
    at = next;
  }
  return undefined;
}

function applyRecord(key: string, b: Buffer, start: number, end: number, into: PaxFields): string | undefined {
  switch (key) {
    case 'path':
    case 'linkpath':
    case 'GNU.sparse.name': {
      const text = start === end ? undefined : byteString(b, start, end);
      if (text?.includes('\0')) return `${key} holds a NUL byte`;
      if (key === 'path') into.path = text;
      else if (key === 'linkpath') into.link = text;
      else into.sparseName = text;
      return undefined;
    }
    case 'mtime':
      return applyTime(b, start, end, into);
    case 'size':
      into.sizeBytes = decimal(b, start, end);
      return checked(key, into.sizeBytes);
    case 'uid':
      into.uid = signedDecimal(b, start, end);
      return checked(key, into.uid);
    case 'gid':
      into.gid = signedDecimal(b, start, end);
      return checked(key, into.gid);
    case 'GNU.sparse.major':
      into.sparseMajor = decimal(b, start, end);
      return checked(key, into.sparseMajor);
    case 'GNU.sparse.size':
      into.sparseSize = decimal(b, start, end);
      return checked(key, into.sparseSize);
    case 'GNU.sparse.realsize':
      into.sparseRealSize = decimal(b, start, end);
      return checked(key, into.sparseRealSize);
    case 'GNU.sparse.offset': {
      const value = decimal(b, start, end);
      if (value === undefined) return undefined;
      into.sparseOffsets ??= [];
      into.sparseOffsets.push(value);
      return checked(key, value);
    }
    case 'GNU.sparse.numbytes': {
      const value = decimal(b, start, end);
      if (value === undefined) return undefined;
      into.sparseLengths ??= [];
      into.sparseLengths.push(value);
      return checked(key, value);
    }
    case 'GNU.sparse.map':
      return applyMap(b, start, end, into);
    default:
      if (key.startsWith('SCHILY.xattr.')) {
        into.xattrs ??= new Map();
        // A copy: the pushed buffer is not ours to keep.
        into.xattrs.set(key.slice(13), Buffer.from(b.subarray(start, end)));
      } else if (key.startsWith('LIBARCHIVE.xattr.')) {
        // Written beside SCHILY.xattr by some and instead of it by others; base64, the name percent-encoded.
        const name = percentDecoded(key.slice(17));
        into.xattrs ??= new Map();
        if (!into.xattrs.has(name)) into.xattrs.set(name, Buffer.from(byteString(b, start, end), 'base64'));
      }
      return undefined;
  }
}

function checked(key: string, value: number | undefined): string | undefined {
  return Number.isNaN(value) ? `${key} is not a whole number that can be held` : undefined;
}

/** Digits only; undefined when empty, NaN when it is anything else or too large. */
function decimal(b: Buffer, start: number, end: number): number | undefined {
  if (start === end) return undefined;
  let value = 0;
  for (let at = start; at < end; at++) {
    const digit = b[at]! - 0x30;
    if (digit < 0 || digit > 9) return Number.NaN;
    value = value * 10 + digit;
    if (value > Number.MAX_SAFE_INTEGER) return Number.NaN;
  }
  return value;
}

function signedDecimal(b: Buffer, start: number, end: number): number | undefined {
  if (start === end || b[start] !== 0x2d) return decimal(b, start, end);
  const value = decimal(b, start + 1, end);
  return value === undefined ? Number.NaN : -value;
}

/** `[-]seconds[.fraction]`, floored to the nanosecond towards zero, kept as floored seconds and nanoseconds. */
function applyTime(b: Buffer, start: number, end: number, into: PaxFields): string | undefined {
  if (start === end) {
    into.mtimeSec = undefined;
    into.mtimeNsec = 0;
    return undefined;
  }
  const negative = b[start] === 0x2d;
  const first = negative ? start + 1 : start;
  let point = first;
  while (point < end && b[point] !== 0x2e) point++;
  const seconds = point === first ? 0 : decimal(b, first, point)!;
  let nanoseconds = 0;
  let place = 100_000_000;
  for (let at = point + 1; at < end; at++) {
    const digit = b[at]! - 0x30;
    if (digit < 0 || digit > 9) return 'mtime is not a decimal number';
    nanoseconds += digit * place;
    place = place === 1 ? 0 : Math.trunc(place / 10);
  }
  const digits = end - first - (point < end ? 1 : 0);
  if (Number.isNaN(seconds) || digits === 0) return 'mtime is not a decimal number that can be held';
  into.mtimeSec = negative ? -seconds - (nanoseconds > 0 ? 1 : 0) : seconds;
  into.mtimeNsec = negative && nanoseconds > 0 ? 1_000_000_000 - nanoseconds : nanoseconds;
  if (into.mtimeSec === 0) into.mtimeSec = 0; // -0 is no time
  return undefined;
}

function applyMap(b: Buffer, start: number, end: number, into: PaxFields): string | undefined {
  into.sparseMap = undefined;
  if (start === end) return undefined;
  const map: number[] = [];
  let from = start;
  for (let at = start; at <= end; at++) {
    if (at < end && b[at] !== 0x2c) continue;
    const value = decimal(b, from, at) ?? Number.NaN;
    if (Number.isNaN(value)) return 'GNU.sparse.map is not a list of numbers';
    if (map.push(value) > 2 * MAX_EXTENTS) return `GNU.sparse.map has more than ${MAX_EXTENTS} extents`;
    from = at + 1;
  }
  into.sparseMap = map;
  return undefined;
}

function percentDecoded(name: string): ByteString {
  if (!name.includes('%')) return name;
  const bytes = bytesOf(name);
  let length = 0;
  for (let at = 0; at < bytes.length; at++) {
    const hex = bytes[at] === 0x25 ? byteString(bytes, at + 1, at + 3) : '';
    if (/^[0-9a-fA-F]{2}$/.test(hex)) {
      bytes[length++] = Number.parseInt(hex, 16);
      at += 2;
    } else bytes[length++] = bytes[at]!;
  }
  return byteString(bytes, 0, length);
}
