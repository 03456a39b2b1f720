/**
 * The kernel's FUSE messages for a tree of files of every kind, beside what linux/fuse/fuse-protocol.ts has for flat ones:
 * whole attributes, directory entries with attributes, extended attributes, the place of holes.
 */
import type { ByteString } from '#base';
import { erofs } from '#converter';
import { fuse, MS } from '#linux';
import type { Inode } from '../reader/inode.ts';

const { INIT_FLAG, INIT_FLAG2, REPLY_BODY, REQUEST_HEADER_BYTES } = fuse;

export const TREE_OPCODE = { READLINK: 5, GETXATTR: 22, LISTXATTR: 23, READDIRPLUS: 44, LSEEK: 46 } as const;

export const TREE_ERRNO = { ENXIO: 6, EINVAL: 22, ERANGE: 34, ENODATA: 61, EUCLEAN: 117 } as const;

/** Since here a file that was found by its handle alone counts as invalid at the next look (fuse_dentry_revalidate: epoch). */
const HANDLES_BROKEN_MINOR = 44;

/**
 * Programs of any owner, devices too: the mount lies in a folder of root's alone. Access is checked by the kernel, by mode and
 * ACL. OverlayFS keeps a handle of the file that a copied one came from, to show the same inode number after a remount; where
 * resolving it would make the file vanish, it gets none, and the number changes.
 */
export const LAYER_TREES: fuse.FuseShape = {
  mountFlags: MS.RDONLY,
  initFlags({ minor }) {
    const broken = minor >= HANDLES_BROKEN_MINOR;
    const flags =
      INIT_FLAG.DO_READDIRPLUS | INIT_FLAG.READDIRPLUS_AUTO | INIT_FLAG.POSIX_ACL | INIT_FLAG.CACHE_SYMLINKS;
    return {
      flags: broken ? flags : flags | INIT_FLAG.EXPORT_SUPPORT,
      flags2: broken ? INIT_FLAG2.NO_EXPORT_SUPPORT : 0,
    };
  },
};

const BODY = REQUEST_HEADER_BYTES;
const ATTRIBUTES_BYTES = 88;
const ENTRY_BYTES = 40 + ATTRIBUTES_BYTES;
const DIRENT_BYTES = 24;
/** Images never change, so what is known of one stays true; also that there is no such name. */
const VALID_SECONDS = 365 * 24 * 3600;

/** An inode under its number; `undefined` inode: the root, which holds the layers. */
export interface TreeEntry {
  readonly node: number;
  readonly inode: Inode | undefined;
  /** 512-byte blocks. */
  readonly blocks: number;
}

/** Who asks. */
export function callerUid(request: Buffer): number {
  return request.readUInt32LE(24);
}

/** GETXATTR and LISTXATTR: how many bytes the caller has room for; 0 asks how many it needs. */
export function xattrRoom(request: Buffer): number {
  return request.readUInt32LE(BODY);
}

export function xattrName(request: Buffer, lengthBytes: number): ByteString {
  return request.toString('latin1', BODY + 8, Math.max(BODY + 8, lengthBytes - 1));
}

export const SEEK_DATA = 3;
export const SEEK_HOLE = 4;

export function seekOf(request: Buffer): { offset: number; whence: number } {
  return {
    offset: request.readUInt32LE(BODY + 8) + request.readUInt32LE(BODY + 12) * 2 ** 32,
    whence: request.readUInt32LE(BODY + 16),
  };
}

export function encodeSeek(into: Buffer, offset: number): number {
  writeUint64(into, offset, REPLY_BODY);
  return 8;
}

/** Reply to OPENDIR: no handle; `keep`: the kernel may keep the listing. */
export function encodeOpenDirectory(into: Buffer, keep: boolean): number {
  const FOPEN_KEEP_CACHE = 1 << 1;
  const FOPEN_CACHE_DIR = 1 << 3;
  into.fill(0, REPLY_BODY, REPLY_BODY + 16);
  if (keep) into.writeUInt32LE(FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR, REPLY_BODY + 8);
  return 16;
}

/** Reply to a call that asks how many bytes it needs room for. */
export function encodeXattrSize(into: Buffer, sizeBytes: number): number {
  into.writeUInt32LE(sizeBytes, REPLY_BODY);
  into.writeUInt32LE(0, REPLY_BODY + 4);
  return 8;
}

/** Reply to GETATTR. */
export function encodeTreeAttributes(into: Buffer, entry: TreeEntry): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + 16);
  writeUint64(into, VALID_SECONDS, REPLY_BODY);
  writeAttributes(into, REPLY_BODY + 16, entry);
  return 16 + ATTRIBUTES_BYTES;
}

/** Reply to LOOKUP. */
export function encodeTreeEntry(into: Buffer, entry: TreeEntry): number {
  writeEntry(into, REPLY_BODY, entry, entry.node);
  return ENTRY_BYTES;
}

/** Reply to LOOKUP of a name that is not there, to be remembered. */
export function encodeNoEntry(into: Buffer): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + ENTRY_BYTES);
  writeUint64(into, VALID_SECONDS, REPLY_BODY + 16);
  return ENTRY_BYTES;
}

export interface NamedEntry {
  readonly name: ByteString;
  readonly node: number;
  /** One of erofs.FILE_TYPE. */
  readonly fileType: number;
}

/** DT_* by FILE_TYPE. */
const DIRENT_TYPES = Object.fromEntries([
  [erofs.FILE_TYPE.REGULAR, 8],
  [erofs.FILE_TYPE.DIRECTORY, 4],
  [erofs.FILE_TYPE.CHAR, 2],
  [erofs.FILE_TYPE.BLOCK, 6],
  [erofs.FILE_TYPE.FIFO, 1],
  [erofs.FILE_TYPE.SOCKET, 12],
  [erofs.FILE_TYPE.SYMLINK, 10],
]) as Readonly<Record<number, number>>;

/**
 * One name of READDIR, or with `plus` of READDIRPLUS, at `at` of the body. `nextOffset` is what the kernel asks with for
 * what follows. `.` and `..` carry no attributes: nothing is to be made of them; nor do names without a readable inode.
 * @returns where the next one goes, or -1 when this one has no room before `limit`
 */
export function encodeName(
  into: Buffer,
  at: number,
  limit: number,
  { name, node, fileType }: NamedEntry,
  nextOffset: number,
  plus: (() => TreeEntry | undefined) | undefined,
): number {
  const head = plus === undefined ? 0 : ENTRY_BYTES;
  const length = head + DIRENT_BYTES + ((name.length + 7) & ~7);
  if (at + length > limit) return -1;
  const start = REPLY_BODY + at;
  into.fill(0, start, start + length);
  const whole = name === '.' || name === '..' ? undefined : plus?.();
  if (whole !== undefined) writeEntry(into, start, whole, node);
  const entry = start + head;
  writeUint64(into, node, entry);
  writeUint64(into, nextOffset, entry + 8);
  into.writeUInt32LE(name.length, entry + 16);
  into.writeUInt32LE(DIRENT_TYPES[fileType] ?? 0, entry + 20);
  into.write(name, entry + DIRENT_BYTES, 'latin1');
  return at + length;
}

function writeEntry(into: Buffer, at: number, entry: TreeEntry, node: number): void {
  into.fill(0, at, at + 40);
  writeUint64(into, node, at);
  writeUint64(into, VALID_SECONDS, at + 16);
  writeUint64(into, VALID_SECONDS, at + 24);
  writeAttributes(into, at + 40, entry);
}

/** As the kernel's EROFS fills them: one time for all three. */
function writeAttributes(into: Buffer, at: number, { node, inode, blocks }: TreeEntry): void {
  into.fill(0, at, at + ATTRIBUTES_BYTES);
  writeUint64(into, node, at);
  into.writeUInt32LE(4096, at + 80);
  if (inode === undefined) {
    into.writeUInt32LE(0o040500, at + 60);
    into.writeUInt32LE(2, at + 64);
    return;
  }
  writeUint64(into, inode.sizeBytes, at + 8);
  writeUint64(into, blocks, at + 16);
  for (const time of [24, 32, 40]) writeInt64(into, inode.mtimeSec, at + time);
  for (const part of [48, 52, 56]) into.writeUInt32LE(inode.mtimeNsec, at + part);
  into.writeUInt32LE(inode.mode, at + 60);
  into.writeUInt32LE(inode.nlink, at + 64);
  into.writeUInt32LE(inode.uid, at + 68);
  into.writeUInt32LE(inode.gid, at + 72);
  const { mask, CHAR, BLOCK } = erofs.MODE_TYPE;
  const type = inode.mode & mask;
  if (type === CHAR || type === BLOCK) into.writeUInt32LE(inode.union, at + 76);
}

function writeUint64(into: Buffer, value: number, at: number): void {
  into.writeUInt32LE(value % 2 ** 32, at);
  into.writeUInt32LE(Math.floor(value / 2 ** 32), at + 4);
}

/** Times before 1970 are negative. */
function writeInt64(into: Buffer, value: number, at: number): void {
  const high = Math.floor(value / 2 ** 32);
  into.writeUInt32LE(value - high * 2 ** 32, at);
  into.writeInt32LE(high, at + 4);
}
