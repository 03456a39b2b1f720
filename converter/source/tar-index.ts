/**
 * Where the members of a tar file lie: a scan of its headers by positioned reads, so that an archive of gigabytes costs
 * a few kilobytes of reading. For archives of images, whose members are few and plain; layers have a reader of their own.
 * Reads ustar, PAX (path, linkpath, size) and GNU long names; checksums are verified; sparse members are refused.
 */
import { type FileHandle, open } from 'node:fs/promises';
import { fail } from '../errors.ts';
import { pathError } from './local-file.ts';
import { quote } from './quote.ts';

export interface TarMember {
  /** `empty`: folders, devices and pipes, which carry no data. `other`: unknown types, skipped with their data. */
  readonly type: 'file' | 'symlink' | 'hardlink' | 'empty' | 'other';
  /** Where its data begins in the tar file. */
  readonly offset: number;
  readonly sizeBytes: number;
  /** Of a link, as written. */
  readonly target: string;
}

const BLOCK = 512;
const MAX_MEMBERS = 200_000;
const MAX_EXTENSION_BYTES = 1024 * 1024;

/**
 * All members by name, without `./` and leading slashes; of a name that comes twice, the last.
 * @throws SOURCE_ARCHIVE that says what is wrong at which byte
 */
export async function indexTar(path: string): Promise<Map<string, TarMember>> {
  let handle: FileHandle;
  try {
    handle = await open(path, 'r');
  } catch (error) {
    throw pathError(path, error);
  }
  try {
    return await new Scan(path, handle, (await handle.stat()).size).run();
  } finally {
    await handle.close();
  }
}

/** `./a//b/` -> `a/b` */
export function memberName(text: string): string {
  return text
    .split('/')
    .filter((part) => part !== '' && part !== '.')
    .join('/');
}

class Scan {
  readonly #path: string;
  readonly #handle: FileHandle;
  readonly #size: number;
  readonly #members = new Map<string, TarMember>();
  #at = 0;
  #headers = 0;

  constructor(path: string, handle: FileHandle, size: number) {
    this.#path = path;
    this.#handle = handle;
    this.#size = size;
  }

  async run(): Promise<Map<string, TarMember>> {
    let pax = new Map<string, string>();
    let longName: string | undefined;
    let longLink: string | undefined;
    while (this.#at < this.#size) {
      const headerAt = this.#at;
      const header = await this.#take(BLOCK, 'a header');
      if (header.every((byte) => byte === 0)) break;
      if (++this.#headers > MAX_MEMBERS) throw this.#bad(headerAt, `more than ${MAX_MEMBERS} members`);
      this.#checkSum(header, headerAt);
      const type = String.fromCharCode(header[156]!);
      const size = this.#number(header, 124, 12, headerAt);

      if (type === 'x' || type === 'g' || type === 'L' || type === 'K') {
        if (size > MAX_EXTENSION_BYTES) throw this.#bad(headerAt, `an extension header of ${size} bytes`);
        const body = await this.#take(size, 'an extension header');
        this.#skipPadding(size);
        if (type === 'x') pax = this.#paxRecords(body, headerAt);
        else if (type === 'L') longName = cString(body);
        else if (type === 'K') longLink = cString(body);
        continue;
      }
      if (type === 'S' || pax.has('GNU.sparse.major') || pax.has('GNU.sparse.size')) {
        throw this.#bad(headerAt, 'a sparse member; write the archive without --sparse');
      }

      const name = memberName(pax.get('path') ?? longName ?? headerName(header));
      const target = pax.get('linkpath') ?? longLink ?? cString(header.subarray(157, 257));
      const kind = memberType(type);
      // Links and folders carry no data, whatever their size field says (some writers put the target's size there).
      const stored = kind === 'file' || kind === 'other' ? this.#size64(pax.get('size'), size, headerAt) : 0;
      if (this.#at + stored > this.#size) {
        throw this.#bad(
          headerAt,
          `${quote(name)} has ${stored} bytes, but the file ends after ${this.#size - this.#at}`,
        );
      }
      if (name !== '') this.#members.set(name, { type: kind, offset: this.#at, sizeBytes: stored, target });
      this.#at += stored;
      this.#skipPadding(stored);
      pax = new Map();
      longName = undefined;
      longLink = undefined;
    }
    if (this.#headers === 0) throw this.#bad(0, 'it has no members');
    return this.#members;
  }

  async #take(length: number, what: string): Promise<Buffer> {
    if (this.#at + length > this.#size) throw this.#bad(this.#at, `the file ends in the middle of ${what}`);
    const out = Buffer.allocUnsafe(length);
    let done = 0;
    while (done < length) {
      const { bytesRead } = await this.#handle.read(out, done, length - done, this.#at + done);
      if (bytesRead === 0) throw this.#bad(this.#at, `the file ends in the middle of ${what}`);
      done += bytesRead;
    }
    this.#at += length;
    return out;
  }

  #skipPadding(size: number): void {
    this.#at += (BLOCK - (size % BLOCK)) % BLOCK;
  }

  #checkSum(header: Buffer, at: number): void {
    let sum = 8 * 0x20;
    let signed = sum;
    for (let i = 0; i < BLOCK; i++) {
      if (i >= 148 && i < 156) continue;
      sum += header[i]!;
      // Old writers summed signed characters.
      signed += header.readInt8(i);
    }
    const stored = this.#number(header, 148, 8, at);
    if (stored !== sum && stored !== signed) {
      throw this.#bad(at, at === 0 ? 'it does not begin with a tar header' : 'a header’s checksum is wrong');
    }
  }

  #number(header: Buffer, start: number, length: number, at: number): number {
    const field = header.subarray(start, start + length);
    if (field[0]! & 0x80) {
      let value = BigInt(field[0]! & 0x7f);
      for (const byte of field.subarray(1)) value = (value << 8n) | BigInt(byte);
      if (value > BigInt(Number.MAX_SAFE_INTEGER)) throw this.#bad(at, 'a number in a header is too large');
      return Number(value);
    }
    const text = cString(field).trim();
    if (!/^[0-7]*$/.test(text))
      throw this.#bad(at, at === 0 ? 'it does not begin with a tar header' : 'a header holds no number');
    return text === '' ? 0 : Number.parseInt(text, 8);
  }

  #size64(pax: string | undefined, size: number, at: number): number {
    if (pax === undefined) return size;
    if (!/^\d{1,16}$/.test(pax) || !Number.isSafeInteger(Number(pax)))
      throw this.#bad(at, `the size ${quote(pax)} is no number`);
    return Number(pax);
  }

  #paxRecords(body: Buffer, at: number): Map<string, string> {
    const records = new Map<string, string>();
    let pos = 0;
    while (pos < body.length) {
      const space = body.indexOf(0x20, pos);
      const digits = space < 0 ? '' : body.toString('latin1', pos, space);
      const end = pos + Number(digits);
      const equals = body.indexOf(0x3d, space);
      if (!/^\d{1,8}$/.test(digits) || end > body.length || equals < 0 || equals >= end - 1 || body[end - 1] !== 0x0a) {
        throw this.#bad(at, 'a damaged PAX header');
      }
      const value = body.toString('utf8', equals + 1, end - 1);
      const key = body.toString('utf8', space + 1, equals);
      if (value === '') records.delete(key);
      else records.set(key, value);
      pos = end;
    }
    return records;
  }

  #bad(at: number, reason: string) {
    return fail('SOURCE_ARCHIVE', { path: this.#path, reason: `${reason} (at byte ${at})` });
  }
}

function headerName(header: Buffer): string {
  const name = cString(header.subarray(0, 100));
  const posix = header.toString('latin1', 257, 263) === 'ustar\0';
  const prefix = posix ? cString(header.subarray(345, 500)) : '';
  return prefix === '' ? name : `${prefix}/${name}`;
}

function cString(bytes: Buffer): string {
  const end = bytes.indexOf(0);
  return bytes.toString('utf8', 0, end < 0 ? bytes.length : end);
}

function memberType(type: string): TarMember['type'] {
  switch (type) {
    case '0':
    case '\0':
    case '7':
      return 'file';
    case '1':
      return 'hardlink';
    case '2':
      return 'symlink';
    case '3':
    case '4':
    case '5':
    case '6':
      return 'empty';
    default:
      return 'other';
  }
}
