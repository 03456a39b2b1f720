/** Extended attributes: those after the inode, those shared by id, and names with long prefixes. */
import { type ByteString, byteString } from '#base';
import { erofs } from '#converter';
import type { Inode } from './inode.ts';
import type { Metadata } from './metadata.ts';

const { XATTR_HEADER, XATTR_ENTRY, XATTR_INDEX } = erofs;

/** Full names by the low 7 bits of a long index. */
export type LongPrefixes = readonly ByteString[];

/** One stored entry: where it lies, for reports; `next` is where the following one begins. */
export interface StoredXattr {
  readonly name: ByteString;
  readonly offset: number;
  readonly shared: boolean;
  readonly valueOffset: number;
  readonly valueBytes: number;
  readonly next: number;
}

export function storedXattrs(meta: Metadata, inode: Inode, prefixes: LongPrefixes): StoredXattr[] {
  const out: StoredXattr[] = [];
  if (inode.xattrBytes === 0) return out;
  const { nid } = inode;
  const start = inode.xattrOffset;
  const end = start + inode.xattrBytes;
  const header = meta.at(nid, start, inode.xattrBytes, 'xattrs');
  const sharedCount = meta.bytes.buf.readUInt8(header + XATTR_HEADER.sharedCount);
  const inlineAt = start + erofs.XATTR_HEADER_SIZE + 4 * sharedCount;
  if (inlineAt > end) throw meta.corrupt(nid, `${sharedCount} shared xattrs in ${inode.xattrBytes} bytes`);
  for (let k = 0; k < sharedCount; k++) {
    const at = meta.at(nid, start + erofs.XATTR_HEADER_SIZE + 4 * k, 4, 'shared xattr id');
    const id = meta.bytes.buf.readUInt32LE(at);
    const offset = meta.sb.xattrBlkAddr * meta.sb.blockSize + 4 * id;
    out.push(entryAt(meta, inode, prefixes, offset, meta.bytes.sizeBytes, true));
  }
  for (let at = inlineAt; at < end; ) {
    const entry = entryAt(meta, inode, prefixes, at, end, false);
    out.push(entry);
    at = entry.next;
  }
  return out;
}

function entryAt(
  meta: Metadata,
  inode: Inode,
  prefixes: LongPrefixes,
  offset: number,
  limit: number,
  shared: boolean,
): StoredXattr {
  const { nid } = inode;
  if (offset + erofs.XATTR_ENTRY_SIZE > limit) throw meta.corrupt(nid, `xattr at byte ${offset} passes byte ${limit}`);
  let at = meta.at(nid, offset, erofs.XATTR_ENTRY_SIZE, 'xattr');
  const nameLen = meta.bytes.buf.readUInt8(at + XATTR_ENTRY.nameLen);
  const nameIndex = meta.bytes.buf.readUInt8(at + XATTR_ENTRY.nameIndex);
  const valueBytes = meta.bytes.buf.readUInt16LE(at + XATTR_ENTRY.valueSize);
  const length = erofs.XATTR_ENTRY_SIZE + nameLen + valueBytes;
  if (offset + length > limit)
    throw meta.corrupt(nid, `xattr at byte ${offset}, ${length} bytes long, passes byte ${limit}`);
  const prefix =
    nameIndex & XATTR_INDEX.LONG_PREFIX
      ? prefixes[nameIndex & XATTR_INDEX.LONG_PREFIX_MASK]
      : erofs.XATTR_PREFIX[nameIndex];
  if (prefix === undefined) throw meta.corrupt(nid, `xattr at byte ${offset} has the unknown name index ${nameIndex}`);
  at = meta.at(nid, offset, length, 'xattr');
  const nameStart = at + erofs.XATTR_ENTRY_SIZE;
  const name = prefix + byteString(meta.bytes.buf, nameStart, nameStart + nameLen);
  if (name.includes('\0')) throw meta.corrupt(nid, `xattr at byte ${offset} has a NUL in its name`);
  return {
    name,
    offset,
    shared,
    valueOffset: offset + erofs.XATTR_ENTRY_SIZE + nameLen,
    valueBytes,
    next: offset + Math.ceil(length / 4) * 4,
  };
}

/** All of an inode's, in stored order. Values are copies. */
export function readXattrs(meta: Metadata, inode: Inode, prefixes: LongPrefixes): Map<ByteString, Buffer> {
  const out = new Map<ByteString, Buffer>();
  for (const entry of storedXattrs(meta, inode, prefixes)) {
    if (out.has(entry.name)) throw meta.corrupt(inode.nid, `xattr at byte ${entry.offset}: its name occurs twice`);
    const at = meta.at(inode.nid, entry.valueOffset, entry.valueBytes, 'xattr value');
    out.set(entry.name, Buffer.from(meta.bytes.buf.subarray(at, at + entry.valueBytes)));
  }
  return out;
}

export function findXattr(meta: Metadata, inode: Inode, prefixes: LongPrefixes, name: ByteString): Buffer | undefined {
  if (inode.xattrBytes === 0) return undefined;
  for (const entry of storedXattrs(meta, inode, prefixes)) {
    if (entry.name !== name) continue;
    const at = meta.at(inode.nid, entry.valueOffset, entry.valueBytes, 'xattr value');
    return Buffer.from(meta.bytes.buf.subarray(at, at + entry.valueBytes));
  }
  return undefined;
}

/**
 * The table of long prefixes. `read` gives bytes of the file that holds it: the packed inode, or the image itself.
 * @throws EROFS_CORRUPT
 */
export function readLongPrefixes(
  meta: Metadata,
  read: (offset: number, length: number) => Buffer,
  nid: number,
): ByteString[] {
  const out: ByteString[] = [];
  let at = meta.sb.xattrPrefixStart * 4;
  for (let k = 0; k < meta.sb.xattrPrefixCount; k++) {
    at = Math.ceil(at / 4) * 4;
    const length = read(at, 2).readUInt16LE(0);
    if (length < 1 || length > 1 + erofs.NAME_MAX_BYTES) {
      throw meta.corrupt(nid, `long xattr prefix ${k} at byte ${at} has ${length} bytes`);
    }
    const record = read(at + 2, length);
    const base = erofs.XATTR_PREFIX[record.readUInt8(0)];
    if (base === undefined)
      throw meta.corrupt(nid, `long xattr prefix ${k} has the unknown base ${record.readUInt8(0)}`);
    out.push(base + byteString(record, 1));
    at += 2 + length;
  }
  return out;
}
