/** IPv4 and IPv6 addresses as sixteen bytes (IPv4 as ::ffff:a.b.c.d), and ranges of them: one order, one table in the kernel for both. */
import { isIPv4, isIPv6 } from 'node:net';

export interface AddressRange {
  /** As text, in its shortest form. */
  readonly text: string;
  readonly bytes: Buffer;
  /** 0 to 128; of IPv4 from 96. */
  readonly bits: number;
}

/** Undefined when it is none. Zones ("%eth0") are none. */
export function addressBytes(text: string): Buffer | undefined {
  const bytes = Buffer.alloc(16);
  if (isIPv4(text)) {
    bytes.writeUInt16BE(0xffff, 10);
    for (const [at, part] of text.split('.').entries()) bytes[12 + at] = Number(part);
    return bytes;
  }
  if (!isIPv6(text) || text.includes('%')) return undefined;
  const hex = text.replace(/(\d+)\.(\d+)\.(\d+)\.(\d+)$/, (_, a, b, c, d) => {
    const group = (high: string, low: string) => (Number(high) * 256 + Number(low)).toString(16);
    return `${group(a, b)}:${group(c, d)}`;
  });
  const [head, tail] = hex.split('::').map((half) => (half === '' ? [] : half.split(':'))) as [string[], string[]?];
  const groups = tail === undefined ? head : [...head, ...Array(8 - head.length - tail.length).fill('0'), ...tail];
  for (const [at, group] of groups.entries()) bytes.writeUInt16BE(Number.parseInt(group, 16), at * 2);
  return bytes;
}

export function isMappedIPv4(bytes: Buffer): boolean {
  return bytes.readUInt16BE(10) === 0xffff && bytes.subarray(0, 10).every((byte) => byte === 0);
}

export function addressText(bytes: Buffer): string {
  if (isMappedIPv4(bytes)) return [...bytes.subarray(12)].join('.');
  const groups = Array.from({ length: 8 }, (_, at) => bytes.readUInt16BE(at * 2).toString(16)).join(':');
  // The longest run of zero groups is left out.
  const runs = [...groups.matchAll(/(?<![0-9a-f])0(?::0)+(?![0-9a-f])/g)].sort((a, b) => b[0].length - a[0].length);
  const [run] = runs;
  if (run === undefined) return groups;
  return `${groups.slice(0, run.index)}::${groups.slice(run.index + run[0].length)}`.replace(/:{3,}/, '::');
}

/** An address or a CIDR range; bits after the prefix have to be 0. Undefined when it is none. */
export function parseRange(text: string): AddressRange | undefined {
  const [address, length, more] = text.split('/');
  const bytes = addressBytes(address!);
  if (bytes === undefined || more !== undefined) return undefined;
  const width = isIPv4(address!) ? 32 : 128;
  if (length !== undefined && !/^\d{1,3}$/.test(length)) return undefined;
  const prefix = length === undefined ? width : Number(length);
  if (prefix > width) return undefined;
  const bits = 128 - width + prefix;
  if (!masked(bytes, bits).equals(bytes)) return undefined;
  const shown = width === 32 ? [...bytes.subarray(12)].join('.') : addressText(bytes);
  return { text: prefix === width ? shown : `${shown}/${prefix}`, bytes, bits };
}

function masked(bytes: Buffer, bits: number): Buffer {
  return Buffer.from(bytes.map((byte, at) => byte & (0xff00 >> Math.max(0, Math.min(8, bits - at * 8)))));
}

export function rangeHolds(
  range: Pick<AddressRange, 'bytes' | 'bits'>,
  other: Pick<AddressRange, 'bytes' | 'bits'>,
): boolean {
  return range.bits <= other.bits && masked(other.bytes, range.bits).equals(range.bytes);
}
