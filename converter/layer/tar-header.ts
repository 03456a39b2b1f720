/**
 * The header of a tar member, made from an `Entry`: ustar where everything fits, with a PAX extended header before it
 * for what does not (long or non-ASCII names, nanoseconds, large numbers, xattrs). Byte-exact both ways: TarReader gives
 * the same entry back. A file's data follows, padded with zero bytes to 512; an archive ends with 1024 of them.
 */
import { type ByteString, bytesOf } from '#base';
import type { Entry } from './entry.ts';
import { BLOCK_BYTES, FIELD } from './tar-fields.ts';

const TYPES: Partial<Record<Entry['kind'], string>> = {
  file: '0',
  hardlink: '1',
  symlink: '2',
  char: '3',
  block: '4',
  dir: '5',
  fifo: '6',
};

/** Values that fit in an octal field of 7 and of 11 digits. */
const OCTAL_7 = 0o7777777;
const OCTAL_11 = 0o77777777777;

/**
 * All header blocks of one member, a multiple of 512 bytes. Paths are written as they are; a directory's gets a slash at
 * its end, as every tar tool writes it.
 * @throws RangeError for kinds that tar cannot hold (sockets, whiteouts: name those `.wh.` files before).
 */
export function tarHeader(entry: Entry): Buffer {
  const type = TYPES[entry.kind];
  if (type === undefined) throw new RangeError(`a tar has no member type for a ${entry.kind}`);
  const path = entry.kind === 'dir' && !entry.path.endsWith('/') ? `${entry.path}/` : entry.path;
  const sizeBytes = entry.kind === 'file' ? entry.sizeBytes : 0;
  const isDevice = entry.kind === 'char' || entry.kind === 'block';
  const target = entry.kind === 'symlink' || entry.kind === 'hardlink' ? entry.target : '';
  const hasPlainTime = entry.mtimeNsec === 0 && entry.mtimeSec >= 0 && entry.mtimeSec <= OCTAL_11;

  const records: Buffer[] = [];
  const name = splitName(path);
  if (name === undefined) records.push(paxRecord('path', bytesOf(path)));
  if (!isPlain(target, 100)) records.push(paxRecord('linkpath', bytesOf(target)));
  if (sizeBytes > OCTAL_11) records.push(paxRecord('size', Buffer.from(String(sizeBytes))));
  if (entry.uid > OCTAL_7) records.push(paxRecord('uid', Buffer.from(String(entry.uid))));
  if (entry.gid > OCTAL_7) records.push(paxRecord('gid', Buffer.from(String(entry.gid))));
  if (!hasPlainTime) records.push(paxRecord('mtime', Buffer.from(paxTime(entry.mtimeSec, entry.mtimeNsec))));
  const xattrs = [...(entry.xattrs ?? [])].sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  for (const [xattr, value] of xattrs) records.push(paxRecord(`SCHILY.xattr.${xattr}`, value));

  const header = ustarBlock({
    name: name?.name ?? shortened(path),
    prefix: name?.prefix ?? '',
    link: isPlain(target, 100) ? target : shortened(target),
    type,
    mode: entry.mode,
    uid: entry.uid > OCTAL_7 ? 0 : entry.uid,
    gid: entry.gid > OCTAL_7 ? 0 : entry.gid,
    sizeBytes: sizeBytes > OCTAL_11 ? 0 : sizeBytes,
    mtimeSec: entry.mtimeSec >= 0 && entry.mtimeSec <= OCTAL_11 ? entry.mtimeSec : 0,
    major: isDevice ? entry.major : 0,
    minor: isDevice ? entry.minor : 0,
  });
  if (records.length === 0) return header;
  const body = Buffer.concat(records);
  const extended = ustarBlock({
    name: 'PaxHeaders/entry',
    prefix: '',
    link: '',
    type: 'x',
    mode: 0o644,
    uid: 0,
    gid: 0,
    sizeBytes: body.length,
    mtimeSec: 0,
    major: 0,
    minor: 0,
  });
  return Buffer.concat([extended, body, Buffer.alloc(-body.length & (BLOCK_BYTES - 1)), header]);
}

/** Zero bytes that follow `sizeBytes` of file data. */
export function tarPadding(sizeBytes: number): number {
  const over = sizeBytes % BLOCK_BYTES;
  return over === 0 ? 0 : BLOCK_BYTES - over;
}

/** `length key=value\n`, where the length counts its own digits. */
function paxRecord(key: ByteString, value: Buffer): Buffer {
  const rest = key.length + value.length + 3;
  let length = rest + String(rest).length;
  if (rest + String(length).length > length) length = rest + String(length).length;
  return Buffer.concat([Buffer.from(`${length} `), bytesOf(key), Buffer.from('='), value, Buffer.from('\n')]);
}

/** Exact: a time before 1970 counts back from its second's end. */
function paxTime(seconds: number, nanoseconds: number): string {
  const isNegative = seconds < 0;
  const whole = isNegative && nanoseconds > 0 ? seconds + 1 : seconds;
  const part = isNegative && nanoseconds > 0 ? 1_000_000_000 - nanoseconds : nanoseconds;
  const fraction = part === 0 ? '' : `.${String(part).padStart(9, '0').replace(/0+$/, '')}`;
  return `${isNegative ? '-' : ''}${Math.abs(whole)}${fraction}`;
}

/** ASCII without NUL that fits a field: every reader agrees what it means. */
function isPlain(text: ByteString, maxBytes: number): boolean {
  return text.length <= maxBytes && !/[^\x01-\x7f]/.test(text);
}

/** Into name (100) and prefix (155), at a slash; undefined when it does not fit. */
function splitName(path: ByteString): { name: ByteString; prefix: ByteString } | undefined {
  if (path.length === 0 || !isPlain(path, 256)) return undefined;
  if (path.length <= 100) return { name: path, prefix: '' };
  // The first slash that leaves at most 100 bytes behind it, and something.
  const slash = path.indexOf('/', path.length - 101);
  if (slash <= 0 || slash > 155 || slash === path.length - 1) return undefined;
  return { name: path.slice(slash + 1), prefix: path.slice(0, slash) };
}

/** What stands in the header when a record says the truth: for readers that know no PAX. */
function shortened(text: ByteString): ByteString {
  return text.slice(0, 100).replace(/[^\x01-\x7f]/g, '_');
}

interface Ustar {
  readonly name: ByteString;
  readonly prefix: ByteString;
  readonly link: ByteString;
  readonly type: string;
  readonly mode: number;
  readonly uid: number;
  readonly gid: number;
  readonly sizeBytes: number;
  readonly mtimeSec: number;
  readonly major: number;
  readonly minor: number;
}

function ustarBlock(f: Ustar): Buffer {
  const b = Buffer.alloc(BLOCK_BYTES);
  b.write(f.name, FIELD.name, 100, 'latin1');
  b.write(octal(f.mode, 7), FIELD.mode, 'latin1');
  b.write(octal(f.uid, 7), FIELD.uid, 'latin1');
  b.write(octal(f.gid, 7), FIELD.gid, 'latin1');
  b.write(octal(f.sizeBytes, 11), FIELD.size, 'latin1');
  b.write(octal(f.mtimeSec, 11), FIELD.mtime, 'latin1');
  b.write(f.type, FIELD.type, 'latin1');
  b.write(f.link, FIELD.link, 100, 'latin1');
  b.write('ustar\x0000', FIELD.magic, 'latin1');
  writeDevice(b, f.major, FIELD.major);
  writeDevice(b, f.minor, FIELD.minor);
  b.write(f.prefix, FIELD.prefix, 155, 'latin1');
  b.fill(0x20, FIELD.checksum, FIELD.checksum + 8);
  let sum = 0;
  for (const byte of b) sum += byte;
  b.write(`${sum.toString(8).padStart(6, '0')}\0 `, FIELD.checksum, 'latin1');
  return b;
}

/** PAX has no record for these: what octal cannot hold goes as GNU base-256. */
function writeDevice(b: Buffer, value: number, at: number): void {
  if (value <= OCTAL_7) b.write(octal(value, 7), at, 'latin1');
  else {
    b[at] = 0x80;
    b.writeUIntBE(value, at + 2, 6);
  }
}

function octal(value: number, digits: number): string {
  return `${value.toString(8).padStart(digits, '0')}\0`;
}
