/** Inodes, compact and extended, as one shape. Parsed on demand, checked, never cached here. */
import { erofs } from '#converter';
import type { Metadata } from './metadata.ts';
import { readI64, readU64 } from './superblock.ts';

const { INODE_FORMAT, COMPACT_INODE, EXTENDED_INODE, MODE_TYPE, LAYOUT, CHUNK_FORMAT } = erofs;

export interface Inode {
  readonly nid: number;
  /** Byte of the metadata image where it starts. */
  readonly offset: number;
  readonly extended: boolean;
  /** One of LAYOUT. */
  readonly layout: number;
  /** Type and permission bits, as in stat. */
  readonly mode: number;
  readonly sizeBytes: number;
  readonly nlink: number;
  readonly uid: number;
  readonly gid: number;
  readonly mtimeSec: number;
  readonly mtimeNsec: number;
  /** Start block, block count, device number or chunk format, by type and layout. */
  readonly union: number;
  readonly xattrOffset: number;
  readonly xattrBytes: number;
  /** What follows the xattrs: inline tail, chunk map or cluster index, each with its own alignment. */
  readonly bodyOffset: number;
}

/** Linux refuses longer ones. */
const LINK_TARGET_MAX_BYTES = 4095;

export function readInode(meta: Metadata, nid: number): Inode {
  const { sb, bytes } = meta;
  const offset = sb.metaBlkAddr * sb.blockSize + nid * erofs.INODE_SLOT_SIZE;
  let at = meta.at(nid, offset, erofs.COMPACT_INODE_SIZE, 'inode');
  let buf = bytes.buf;
  const format = buf.readUInt16LE(at);
  if (format & ~(INODE_FORMAT.all & ~INODE_FORMAT.nlink1)) {
    throw meta.unsupported(nid, `inode format 0x${format.toString(16)}`);
  }
  const layout = (format >> INODE_FORMAT.layoutShift) & INODE_FORMAT.layoutMask;
  if (layout > LAYOUT.CHUNK_BASED) throw meta.unsupported(nid, `data layout ${layout}`);
  const extended = (format & INODE_FORMAT.extended) !== 0;
  const inodeSize = extended ? erofs.EXTENDED_INODE_SIZE : erofs.COMPACT_INODE_SIZE;
  if (extended) {
    at = meta.at(nid, offset, inodeSize, 'inode');
    buf = bytes.buf;
  }
  const xattrCount = buf.readUInt16LE(at + COMPACT_INODE.xattrCount);
  const xattrBytes = xattrCount === 0 ? 0 : erofs.XATTR_HEADER_SIZE + 4 * (xattrCount - 1);
  const xattrOffset = offset + inodeSize;
  const inode: Inode = extended
    ? {
        nid,
        offset,
        extended,
        layout,
        mode: buf.readUInt16LE(at + EXTENDED_INODE.mode),
        sizeBytes: readU64(buf, at + EXTENDED_INODE.size),
        nlink: buf.readUInt32LE(at + EXTENDED_INODE.nlink),
        uid: buf.readUInt32LE(at + EXTENDED_INODE.uid),
        gid: buf.readUInt32LE(at + EXTENDED_INODE.gid),
        mtimeSec: readI64(buf, at + EXTENDED_INODE.mtime),
        mtimeNsec: buf.readUInt32LE(at + EXTENDED_INODE.mtimeNsec),
        union: buf.readUInt32LE(at + EXTENDED_INODE.union),
        xattrOffset,
        xattrBytes,
        bodyOffset: xattrOffset + xattrBytes,
      }
    : {
        nid,
        offset,
        extended,
        layout,
        mode: buf.readUInt16LE(at + COMPACT_INODE.mode),
        sizeBytes: buf.readUInt32LE(at + COMPACT_INODE.size),
        nlink: buf.readUInt16LE(at + COMPACT_INODE.nlink),
        uid: buf.readUInt16LE(at + COMPACT_INODE.uid),
        gid: buf.readUInt16LE(at + COMPACT_INODE.gid),
        mtimeSec: sb.epoch + buf.readUInt32LE(at + COMPACT_INODE.mtime),
        mtimeNsec: sb.fixedNsec,
        union: buf.readUInt32LE(at + COMPACT_INODE.union),
        xattrOffset,
        xattrBytes,
        bodyOffset: xattrOffset + xattrBytes,
      };
  check(meta, inode);
  return inode;
}

function check(meta: Metadata, inode: Inode): void {
  const { nid, sizeBytes, mode } = inode;
  switch (mode & MODE_TYPE.mask) {
    case MODE_TYPE.SYMLINK:
      if (sizeBytes > LINK_TARGET_MAX_BYTES) throw meta.corrupt(nid, `a link target of ${sizeBytes} bytes`);
      break;
    case MODE_TYPE.REGULAR:
    case MODE_TYPE.DIRECTORY:
      break;
    case MODE_TYPE.CHAR:
    case MODE_TYPE.BLOCK:
    case MODE_TYPE.FIFO:
    case MODE_TYPE.SOCKET:
      if (sizeBytes !== 0) throw meta.corrupt(nid, `a special file of ${sizeBytes} bytes`);
      break;
    default:
      throw meta.corrupt(nid, `mode 0${mode.toString(8)} at byte ${inode.offset} has no known file type`);
  }
  if (!Number.isSafeInteger(sizeBytes)) throw meta.corrupt(nid, `size ${sizeBytes}`);
  if (inode.mtimeNsec > 999_999_999) throw meta.corrupt(nid, `modification time with ${inode.mtimeNsec} nanoseconds`);
  if (inode.layout === LAYOUT.CHUNK_BASED && inode.union & 0xffff & ~CHUNK_FORMAT.all) {
    throw meta.unsupported(nid, `chunk format 0x${(inode.union & 0xffff).toString(16)}`);
  }
}

export function typeOf(inode: Inode): number {
  return inode.mode & MODE_TYPE.mask;
}

export function isDirectory(inode: Inode): boolean {
  return (inode.mode & MODE_TYPE.mask) === MODE_TYPE.DIRECTORY;
}

export function isRegular(inode: Inode): boolean {
  return (inode.mode & MODE_TYPE.mask) === MODE_TYPE.REGULAR;
}

export function isSymlink(inode: Inode): boolean {
  return (inode.mode & MODE_TYPE.mask) === MODE_TYPE.SYMLINK;
}

/** A character device 0:0: what OverlayFS takes for "removed". */
export function isWhiteout(inode: Inode): boolean {
  return (inode.mode & MODE_TYPE.mask) === MODE_TYPE.CHAR && inode.union === 0;
}

/** The FILE_TYPE that a directory entry of this inode must have. */
export function fileTypeOf(mode: number): number {
  switch (mode & MODE_TYPE.mask) {
    case MODE_TYPE.REGULAR:
      return erofs.FILE_TYPE.REGULAR;
    case MODE_TYPE.DIRECTORY:
      return erofs.FILE_TYPE.DIRECTORY;
    case MODE_TYPE.CHAR:
      return erofs.FILE_TYPE.CHAR;
    case MODE_TYPE.BLOCK:
      return erofs.FILE_TYPE.BLOCK;
    case MODE_TYPE.FIFO:
      return erofs.FILE_TYPE.FIFO;
    case MODE_TYPE.SOCKET:
      return erofs.FILE_TYPE.SOCKET;
    case MODE_TYPE.SYMLINK:
      return erofs.FILE_TYPE.SYMLINK;
    default:
      return erofs.FILE_TYPE.UNKNOWN;
  }
}

export type Kind = 'file' | 'dir' | 'symlink' | 'char' | 'block' | 'fifo' | 'socket';

export function kindOf(mode: number): Kind {
  switch (mode & MODE_TYPE.mask) {
    case MODE_TYPE.DIRECTORY:
      return 'dir';
    case MODE_TYPE.CHAR:
      return 'char';
    case MODE_TYPE.BLOCK:
      return 'block';
    case MODE_TYPE.FIFO:
      return 'fifo';
    case MODE_TYPE.SOCKET:
      return 'socket';
    case MODE_TYPE.SYMLINK:
      return 'symlink';
    default:
      return 'file';
  }
}
