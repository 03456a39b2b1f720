/** Tar bytes for tests, written apart from layer/tar-header.ts, and what a TarReader makes of them as comparable values. */
import { createHash } from 'node:crypto';
import type { Entry, EntryHandler } from '../layer/entry.ts';
import { TarReader } from '../layer/tar-reader.ts';

export interface HeaderFields {
  name?: string;
  type?: string;
  size?: number;
  mode?: number;
  uid?: number;
  gid?: number;
  mtime?: number;
  link?: string;
  major?: number;
  minor?: number;
  prefix?: string;
  magic?: string;
  /** Offset and bytes, laid over everything before the checksum is made. */
  patch?: readonly (readonly [number, string | Buffer])[];
  /** Added to the checksum. */
  wrong?: number;
  signedSum?: boolean;
}

export const GNU_MAGIC = 'ustar  \0';
export const END = Buffer.alloc(1024);

export function header(f: HeaderFields = {}): Buffer {
  const b = Buffer.alloc(512);
  const put = (at: number, text: string) => b.write(text, at, 'latin1');
  const octal = (value: number, digits: number) => value.toString(8).padStart(digits, '0');
  const magic = f.magic ?? 'ustar\x0000';
  put(0, f.name ?? 'name');
  put(100, octal(f.mode ?? 0o644, 7));
  put(108, octal(f.uid ?? 0, 7));
  put(116, octal(f.gid ?? 0, 7));
  put(124, octal(f.size ?? 0, 11));
  put(136, octal(f.mtime ?? 1_600_000_000, 11));
  put(156, f.type ?? '0');
  put(157, f.link ?? '');
  put(257, magic);
  if (f.major !== undefined) put(329, octal(f.major, 7));
  if (f.minor !== undefined) put(337, octal(f.minor, 7));
  if (f.prefix !== undefined) put(345, f.prefix);
  for (const [at, bytes] of f.patch ?? [])
    (typeof bytes === 'string' ? Buffer.from(bytes, 'latin1') : bytes).copy(b, at);
  b.fill(0x20, 148, 156);
  let sum = f.wrong ?? 0;
  for (const byte of b) sum += f.signedSum ? (byte << 24) >> 24 : byte;
  put(148, `${sum.toString(8).padStart(6, '0')}\0 `);
  return b;
}

export function padded(data: Buffer): Buffer {
  return Buffer.concat([data, Buffer.alloc(-data.length & 511)]);
}

export function file(name: string, data: Buffer | string = '', f: HeaderFields = {}): Buffer {
  const bytes = typeof data === 'string' ? Buffer.from(data, 'latin1') : data;
  return Buffer.concat([header({ name, size: bytes.length, ...f }), padded(bytes)]);
}

export function record(key: string, value: string | Buffer): Buffer {
  const rest = Buffer.concat([
    Buffer.from(` ${key}=`, 'latin1'),
    Buffer.from(value as string, 'latin1'),
    Buffer.from('\n'),
  ]);
  let length = rest.length;
  while (String(length).length + rest.length !== length) length = String(length).length + rest.length;
  return Buffer.concat([Buffer.from(String(length)), rest]);
}

export function pax(records: readonly (readonly [string, string | Buffer])[], type = 'x'): Buffer {
  return file('PaxHeaders/x', Buffer.concat(records.map(([key, value]) => record(key, value))), { type });
}

export function long(text: string, type: 'L' | 'K'): Buffer {
  return file('././@LongLink', `${text}\0`, { type, magic: GNU_MAGIC });
}

/** Bytes that do not compress, the same for the same seed. */
export function noise(sizeBytes: number, seed = 0): Buffer {
  const parts: Buffer[] = [];
  for (let i = 0; i * 64 < sizeBytes; i++) parts.push(createHash('sha512').update(`${seed}/${i}`).digest());
  return Buffer.concat(parts).subarray(0, sizeBytes);
}

/** A member as a test compares it: holes filled in, `extents` as they came, adjoining data calls as one. */
export interface Seen extends Omit<Entry, 'xattrs'> {
  xattrs: Record<string, string>;
  data: Buffer | undefined;
  extents: string;
}

export class Recorder implements EntryHandler {
  readonly seen: Seen[] = [];
  private parts: Buffer[] = [];
  private extents: [string, number][] = [];
  private open: Entry | undefined;
  private readonly keepsData: boolean;

  constructor(keepsData = true) {
    this.keepsData = keepsData;
  }

  entry(entry: Entry): void {
    if (this.open !== undefined) throw new Error('an entry before the end of the file before it');
    const xattrs: Record<string, string> = {};
    for (const [name, value] of entry.xattrs ?? []) xattrs[name] = value.toString('hex');
    this.seen.push({ ...entry, xattrs, data: undefined, extents: '' });
    if (entry.kind === 'file') this.open = entry;
    else if (entry.sizeBytes !== 0) throw new Error('a size on something that is no file');
  }

  data(bytes: Buffer): void {
    if (bytes.length === 0) throw new Error('an empty data call');
    this.add('d', bytes.length);
    if (this.keepsData) this.parts.push(Buffer.from(bytes));
  }

  hole(sizeBytes: number): void {
    if (!(sizeBytes > 0)) throw new Error('an empty hole');
    this.add('h', sizeBytes);
    if (this.keepsData && sizeBytes < 1 << 24) this.parts.push(Buffer.alloc(sizeBytes));
  }

  fileEnd(): void {
    if (this.open === undefined) throw new Error('a fileEnd without a file');
    const total = this.extents.reduce((sum, [, size]) => sum + size, 0);
    if (total !== this.open.sizeBytes) throw new Error(`${total} bytes of ${this.open.sizeBytes}`);
    const seen = this.seen.at(-1)!;
    seen.data = Buffer.concat(this.parts);
    seen.extents = this.extents.map(([kind, size]) => `${kind}${size}`).join(' ');
    this.open = undefined;
    this.parts = [];
    this.extents = [];
  }

  private add(kind: string, size: number): void {
    if (this.open === undefined) throw new Error('data without a file');
    const last = this.extents.at(-1);
    if (last?.[0] === kind && kind === 'd') last[1] += size;
    else this.extents.push([kind, size]);
  }
}

/** Reads a whole archive in chunks of `chunkBytes`. */
export function readAll(tar: Buffer, chunkBytes = tar.length, keepsData = true): Seen[] {
  const recorder = new Recorder(keepsData);
  const reader = new TarReader(recorder, { label: 'layer' });
  for (let at = 0; at < tar.length; at += chunkBytes) {
    // Copies, spoiled afterwards: nothing may be kept.
    const chunk = Buffer.from(tar.subarray(at, at + chunkBytes));
    reader.push(chunk);
    chunk.fill(0xee);
  }
  reader.end();
  return recorder.seen;
}

/** Members as text, data as digests: quick to compare where there is much of it. */
export function fingerprint(seen: readonly Seen[]): string[] {
  return seen.map((member) => {
    const data = member.data && createHash('sha256').update(member.data).digest('hex');
    return JSON.stringify({ ...member, data });
  });
}
