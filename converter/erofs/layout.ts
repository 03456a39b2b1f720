/**
 * EROFS on disk: field offsets, sizes and flag values, the one source for the writer and the reader.
 *
 * All fields are little-endian. Offsets are relative to the start of their structure. An inode lies at
 * `metaBlkAddr * blockSize + 32 * nid`; a shared xattr at `xattrBlkAddr * blockSize + 4 * id`. Data addresses are block
 * numbers in the unified space: the primary's blocks first, each extra device from its slot's `uniaddr` on.
 */

/** Block size of every image that we write; others are read too. */
export const BLOCK_BYTES = 4096;

/** Superblock: 128 bytes at byte 1024, then `extSlots` times 16 more. */
export const SUPER_OFFSET = 1024;
export const SUPER_MAGIC = 0xe0f5e1e2;
export const SUPER_SIZE = 128;
export const SUPER_EXT_SLOT_SIZE = 16;

export const SB = {
  magic: 0,
  /** Raw CRC-32C of bytes 1024..blockSize-1 with this field as zero; see crc32c.ts. */
  checksum: 4,
  featureCompat: 8,
  /** u8: log2 of the block size. */
  blockBits: 12,
  extSlots: 13,
  /** u16: nid of the root; with INCOMPAT.BITS48 the high bits of the block count. */
  rootNid: 14,
  /** u64 */
  inodes: 16,
  /** u64: mtime of compact inodes, in seconds (48-bit images: what compact mtimes are added to). */
  epoch: 24,
  fixedNsec: 32,
  blocks: 36,
  metaBlkAddr: 40,
  xattrBlkAddr: 44,
  uuid: 48,
  volumeName: 64,
  featureIncompat: 80,
  /** u16: bitmap of algorithms when INCOMPAT.COMPR_CFGS is set, else the LZ4 window (0 = 65535). */
  comprAlgs: 84,
  extraDevices: 86,
  /** u16: the device table starts at this times 128. */
  devtSlotOff: 88,
  /** u8: log2(directory block size) - blockBits; always 0. */
  dirBlkBits: 90,
  xattrPrefixCount: 91,
  /** u32: the prefix table starts at this times 4 (in the packed inode when there is one). */
  xattrPrefixStart: 92,
  /** u64 */
  packedNid: 96,
  /** u8: not 0 = the xattr name filter must not be used. */
  xattrFilterReserved: 104,
  buildTime: 108,
  rootNid8: 112,
  metaboxNid: 128,
} as const;

export const COMPAT = {
  SB_CHKSUM: 0x1,
  MTIME: 0x2,
  XATTR_FILTER: 0x4,
  SHARED_EA_IN_METABOX: 0x8,
  PLAIN_XATTR_PFX: 0x10,
  ISHARE_XATTRS: 0x20,
} as const;

/** Bits 1, 3 and 5 each have two names: which one is meant depends on what else the image holds. */
export const INCOMPAT = {
  LZ4_0PADDING: 0x1,
  COMPR_CFGS: 0x2,
  BIG_PCLUSTER: 0x2,
  CHUNKED_FILE: 0x4,
  DEVICE_TABLE: 0x8,
  COMPR_HEAD2: 0x8,
  ZTAILPACKING: 0x10,
  FRAGMENTS: 0x20,
  DEDUPE: 0x20,
  XATTR_PREFIXES: 0x40,
  BITS48: 0x80,
  METABOX: 0x100,
} as const;

/** Device slot k (1-based) of the table: 128 bytes. */
export const DEVICE_SLOT_SIZE = 128;
export const DEVICE_SLOT = {
  /** 64 bytes; ours: the hex digits of the data blob's sha256. */
  tag: 0,
  tagSize: 64,
  blocks: 64,
  /** First block of the device in the unified address space. */
  uniaddr: 68,
  blocksHi: 72,
  uniaddrHi: 74,
} as const;

export const NID_SHIFT = 5;
export const INODE_SLOT_SIZE = 32;
export const COMPACT_INODE_SIZE = 32;
export const EXTENDED_INODE_SIZE = 64;

/** u16 at 0: bit 0 extended, bits 1-3 layout, bit 4 see below. */
export const INODE_FORMAT = {
  extended: 0x1,
  layoutShift: 1,
  layoutMask: 0x7,
  /** Compact non-directories: nlink is 1 and its field holds high address bits (48-bit images). */
  nlink1: 0x10,
  /** Directories: there is no `.` entry (48-bit images). */
  dotOmitted: 0x10,
  all: 0x1f,
} as const;

export const LAYOUT = {
  FLAT_PLAIN: 0,
  COMPRESSED_FULL: 1,
  FLAT_INLINE: 2,
  COMPRESSED_COMPACT: 3,
  CHUNK_BASED: 4,
} as const;

export const COMPACT_INODE = {
  format: 0,
  xattrCount: 2,
  mode: 4,
  nlink: 6,
  /** u32 */
  size: 8,
  /** u32: 0 in ordinary images, whose compact inodes all carry the superblock's time. */
  mtime: 12,
  /** u32: start block, compressed blocks, device number or chunk format, by layout and type. */
  union: 16,
  ino: 20,
  uid: 24,
  gid: 26,
  reserved: 28,
} as const;

export const EXTENDED_INODE = {
  format: 0,
  xattrCount: 2,
  mode: 4,
  /** u16: high bits of block count or start block in 48-bit images, else 0. */
  addressHi: 6,
  /** u64 */
  size: 8,
  union: 16,
  ino: 20,
  uid: 24,
  gid: 28,
  /** u64, two's complement seconds. */
  mtime: 32,
  mtimeNsec: 40,
  nlink: 44,
} as const;

/** What the union holds for flat files without blocks (empty, or all inline). */
export const NULL_ADDR = 0xffffffff;

export const DIRENT_SIZE = 12;
/** Each directory block: dirents, then their names; the first `nameOff` is the number of dirents times 12. */
export const DIRENT = {
  /** u64 */
  nid: 0,
  nameOff: 8,
  fileType: 10,
} as const;
export const NAME_MAX_BYTES = 255;

export const FILE_TYPE = {
  UNKNOWN: 0,
  REGULAR: 1,
  DIRECTORY: 2,
  CHAR: 3,
  BLOCK: 4,
  FIFO: 5,
  SOCKET: 6,
  SYMLINK: 7,
} as const;

/** `S_IFMT` of an inode's mode and its values. */
export const MODE_TYPE = {
  mask: 0o170000,
  FIFO: 0o010000,
  CHAR: 0o020000,
  DIRECTORY: 0o040000,
  BLOCK: 0o060000,
  REGULAR: 0o100000,
  SYMLINK: 0o120000,
  SOCKET: 0o140000,
} as const;

/** Xattr area right after the inode: 0 bytes when the count is 0, else 12 + 4 * (count - 1). */
export const XATTR_HEADER_SIZE = 12;
export const XATTR_HEADER = {
  /** u32: bit set = no name hashes to it. */
  nameFilter: 0,
  /** u8, followed at 12 by that many u32 shared ids. */
  sharedCount: 4,
} as const;

export const XATTR_ENTRY_SIZE = 4;
/** Entry: 4 bytes, name (without its prefix), value, padded to 4. */
export const XATTR_ENTRY = {
  nameLen: 0,
  nameIndex: 1,
  /** u16 */
  valueSize: 2,
} as const;

/** `nameIndex` -> prefix it stands for. The two ACL ones are whole names. */
export const XATTR_PREFIX: Readonly<Record<number, string>> = {
  1: 'user.',
  2: 'system.posix_acl_access',
  3: 'system.posix_acl_default',
  4: 'trusted.',
  5: 'lustre.',
  6: 'security.',
};
export const XATTR_INDEX = {
  USER: 1,
  POSIX_ACL_ACCESS: 2,
  POSIX_ACL_DEFAULT: 3,
  TRUSTED: 4,
  LUSTRE: 5,
  SECURITY: 6,
  /** Set when the low 7 bits name a long prefix. */
  LONG_PREFIX: 0x80,
  LONG_PREFIX_MASK: 0x7f,
} as const;
/** Name filter bit of a name: `xxh32(name without prefix, seed + nameIndex) % 32`. */
export const XATTR_FILTER_SEED = 0x25bbe08f;
export const XATTR_FILTER_BITS = 32;

/** u16 in the union of a chunk-based inode. */
export const CHUNK_FORMAT = {
  /** log2(chunk size) - blockBits */
  blockBitsMask: 0x1f,
  /** 8-byte indexes; else 4-byte block numbers. */
  indexes: 0x20,
  bits48: 0x40,
  all: 0x7f,
} as const;
export const CHUNK_INDEX_SIZE = 8;
export const BLOCK_MAP_ENTRY_SIZE = 4;
/** The map starts at the end of the xattrs, aligned to its entry size. A hole is all ones in the address. */
export const CHUNK_INDEX = {
  startBlkHi: 0,
  /** u16: 0 = a unified address, k = slot k. */
  deviceId: 2,
  startBlk: 4,
} as const;

export const ALGORITHM = { LZ4: 0, LZMA: 1, DEFLATE: 2, ZSTD: 3 } as const;

/** Map header, 8 bytes, at the end of the xattrs aligned to 8. */
export const MAP_HEADER_SIZE = 8;
export const MAP_HEADER = {
  /** u32: offset in the packed inode, with MAP_ADVISE.FRAGMENT. */
  fragmentOff: 0,
  /** u16: encoded size of the inline tail cluster. */
  idataSize: 2,
  advise: 4,
  /** u8: low nibble HEAD1, high nibble HEAD2. */
  algorithm: 6,
  /** u8: bits 0-3 log2(logical cluster) - blockBits; bit 7: the whole file lies in the packed inode. */
  clusterBits: 7,
} as const;
export const MAP_ADVISE = {
  /** Compact index: some packs hold 16 units of 2 bytes. */
  COMPACTED_2B: 0x1,
  /** Full index: extent records instead (48-bit images). */
  EXTENTS: 0x1,
  BIG_PCLUSTER_1: 0x2,
  BIG_PCLUSTER_2: 0x4,
  INLINE_PCLUSTER: 0x8,
  INTERLACED: 0x10,
  FRAGMENT: 0x20,
} as const;
export const FRAGMENT_INODE = 0x80;

/** Full index: starts 8 bytes after the map header's end; one entry of 8 bytes per logical cluster. */
export const FULL_INDEX_GAP = 8;
export const LCLUSTER_INDEX_SIZE = 8;
export const LCLUSTER_INDEX = {
  /** u16: low 2 bits the type, bit 15 partial reference. */
  advise: 0,
  /** u16: where in this logical cluster the extent starts. */
  clusterOfs: 2,
  /** u32: of a head or plain cluster. */
  blkAddr: 4,
  /** u16 of a non-head: clusters back to its head, or, on the first one, CBLK_COUNT | blocks of the physical cluster. */
  delta0: 4,
  /** u16: clusters on to the next head. */
  delta1: 6,
} as const;
export const LCLUSTER_TYPE = { PLAIN: 0, HEAD1: 1, NONHEAD: 2, HEAD2: 3, mask: 3, partialRef: 0x8000 } as const;
export const CBLK_COUNT = 0x800;

export const PCLUSTER_MAX_BYTES = 1 << 20;
export const PCLUSTER_MAX_DECODED_BYTES = 12 << 20;

/** Configuration records follow the superblock, lowest algorithm first: u16 length, then that many bytes. */
export const COMPR_CFG_BYTES: Readonly<Record<number, number>> = { 0: 14, 1: 14, 2: 6, 3: 6 };

/** Kernel's cut of a Linux `dev_t` as 32 bits (new_encode_dev). */
export function encodeDevice(major: number, minor: number): number {
  return ((minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xfff00) << 12)) >>> 0;
}

export function decodeDevice(rdev: number): { major: number; minor: number } {
  return { major: (rdev >>> 8) & 0xfff, minor: (rdev & 0xff) | ((rdev >>> 12) & 0xfff00) };
}
