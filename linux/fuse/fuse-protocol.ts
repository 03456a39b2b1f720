/**
 * The kernel's FUSE messages as bytes: what /dev/fuse hands out and takes back (include/uapi/linux/fuse.h, protocol 7.45).
 * What a read-only server of flat files needs; writable-protocol.ts has what a writable file needs besides. Little endian, as on
 * every machine we run on.
 *
 * A request: a header of 40 bytes, then the operation's own fields at `BODY`. A reply: a header of 16 bytes, then a body.
 * `unique` names the request in 64 bits, kept as two halves: a resent request has bit 63 set, which must be echoed.
 * Encoders write a reply's body at `REPLY_BODY` of the buffer that they get and return how many bytes it has.
 */

export const REQUEST_HEADER_BYTES = 40;
export const REPLY_HEADER_BYTES = 16;
/** Where a request's own fields begin. */
const BODY = REQUEST_HEADER_BYTES;
/** Where a reply's body begins. */
export const REPLY_BODY = REPLY_HEADER_BYTES;

export const OPCODE = {
  LOOKUP: 1,
  FORGET: 2,
  GETATTR: 3,
  OPEN: 14,
  READ: 15,
  STATFS: 17,
  RELEASE: 18,
  FLUSH: 25,
  INIT: 26,
  OPENDIR: 27,
  READDIR: 28,
  RELEASEDIR: 29,
  ACCESS: 34,
  INTERRUPT: 36,
  DESTROY: 38,
  BATCH_FORGET: 42,
} as const;

export const ERRNO = { ENOENT: 2, EIO: 5, ENOTDIR: 20, EISDIR: 21, ENOSYS: 38, EPROTO: 71 } as const;

/** Largest request that the kernel makes of 256 pages, what we ask for. */
export const MAX_READ_BYTES = 1024 * 1024;
const MAX_PAGES = MAX_READ_BYTES / 4096;
/** Nobody writes here, so requests are small; this is the least that the kernel accepts with max_write 4096, and some. */
export const REQUEST_BUFFER_BYTES = 64 * 1024;

const MAJOR = 7;
const MINOR = 45;

/** Flags of INIT. */
export const INIT_FLAG = {
  ASYNC_READ: 1 << 0,
  EXPORT_SUPPORT: 1 << 4,
  BIG_WRITES: 1 << 5,
  DO_READDIRPLUS: 1 << 13,
  READDIRPLUS_AUTO: 1 << 14,
  ASYNC_DIO: 1 << 15,
  NO_OPEN_SUPPORT: 1 << 17,
  PARALLEL_DIROPS: 1 << 18,
  POSIX_ACL: 1 << 20,
  MAX_PAGES: 1 << 22,
  CACHE_SYMLINKS: 1 << 23,
  INIT_EXT: 1 << 30,
} as const;

/** The second 32 flags, sent beside INIT_EXT. */
export const INIT_FLAG2 = { NO_EXPORT_SUPPORT: 1 << 6, HAS_RESEND: 1 << 7 } as const;

export interface RequestHeader {
  lengthBytes: number;
  opcode: number;
  uniqueLow: number;
  uniqueHigh: number;
  /** Ours are small numbers. */
  node: number;
}

export function emptyHeader(): RequestHeader {
  return { lengthBytes: 0, opcode: 0, uniqueLow: 0, uniqueHigh: 0, node: 0 };
}

/** Into an object that the caller keeps: one is read for every request. */
export function decodeHeader(request: Buffer, into: RequestHeader): void {
  into.lengthBytes = request.readUInt32LE(0);
  into.opcode = request.readUInt32LE(4);
  into.uniqueLow = request.readUInt32LE(8);
  into.uniqueHigh = request.readUInt32LE(12);
  into.node = request.readUInt32LE(16) + request.readUInt32LE(20) * 2 ** 32;
}

/** Whether the kernel sends the request again because its first server died. */
export function isResent(header: RequestHeader): boolean {
  return header.uniqueHigh >= 2 ** 31 && header.opcode !== OPCODE.INTERRUPT;
}

/** LOOKUP: the name without its NUL, as a byte string. */
export function decodeName(request: Buffer, lengthBytes: number): string {
  return request.toString('latin1', BODY, Math.max(BODY, lengthBytes - 1));
}

/** READ and READDIR. */
export function readOffset(request: Buffer): number {
  return request.readUInt32LE(BODY + 8) + request.readUInt32LE(BODY + 12) * 2 ** 32;
}

export function readLength(request: Buffer): number {
  return request.readUInt32LE(BODY + 16);
}

/** `error` is an errno or 0. */
export function encodeReplyHeader(
  into: Buffer,
  bodyBytes: number,
  error: number,
  uniqueLow: number,
  uniqueHigh: number,
): void {
  into.writeUInt32LE(REPLY_HEADER_BYTES + bodyBytes, 0);
  into.writeInt32LE(-error, 4);
  into.writeUInt32LE(uniqueLow, 8);
  into.writeUInt32LE(uniqueHigh, 12);
}

export interface KernelOffer {
  readonly major: number;
  readonly minor: number;
  readonly flags: number;
  readonly flags2: number;
}

export function decodeInit(request: Buffer, lengthBytes: number): KernelOffer {
  return {
    major: request.readUInt32LE(BODY),
    minor: request.readUInt32LE(BODY + 4),
    flags: request.readUInt32LE(BODY + 12),
    flags2: lengthBytes >= BODY + 20 ? request.readUInt32LE(BODY + 16) : 0,
  };
}

/** What was agreed on. */
export interface Agreement {
  readonly minor: number;
  /** The kernel sends unanswered requests again when told so: a server may die. */
  readonly canResend: boolean;
  readonly maxReadBytes: number;
}

const INIT_REPLY_BYTES = 64;

/** Flags of INIT. */
export interface InitFlags {
  readonly flags: number;
  readonly flags2: number;
}

/** Takes of the kernel's offer what this server uses. `more`: what this file system shows beside flat files. */
export function encodeInitReply(
  into: Buffer,
  offer: KernelOffer,
  more: InitFlags = { flags: 0, flags2: 0 },
  maxWriteBytes = 4096,
): { bodyBytes: number; agreed: Agreement } {
  const wanted =
    more.flags |
    INIT_FLAG.ASYNC_READ |
    INIT_FLAG.BIG_WRITES |
    INIT_FLAG.ASYNC_DIO |
    INIT_FLAG.NO_OPEN_SUPPORT |
    INIT_FLAG.PARALLEL_DIROPS |
    INIT_FLAG.MAX_PAGES |
    INIT_FLAG.INIT_EXT;
  const flags = (wanted & offer.flags) >>> 0;
  const flags2 = flags & INIT_FLAG.INIT_EXT ? ((INIT_FLAG2.HAS_RESEND | more.flags2) & offer.flags2) >>> 0 : 0;
  const minor = Math.min(offer.minor, MINOR);
  const at = REPLY_BODY;
  into.fill(0, at, at + INIT_REPLY_BYTES);
  into.writeUInt32LE(MAJOR, at);
  into.writeUInt32LE(minor, at + 4);
  into.writeUInt32LE(MAX_READ_BYTES, at + 8); // max_readahead
  into.writeUInt32LE(flags, at + 12);
  into.writeUInt16LE(128, at + 16); // max_background: read-ahead and direct reads in flight
  into.writeUInt16LE(96, at + 18); // congestion_threshold
  into.writeUInt32LE(maxWriteBytes, at + 20); // max_write
  into.writeUInt32LE(1, at + 24); // time_gran
  into.writeUInt16LE(MAX_PAGES, at + 28);
  into.writeUInt32LE(flags2, at + 32);
  return {
    bodyBytes: INIT_REPLY_BYTES,
    agreed: {
      minor,
      canResend: (flags2 & INIT_FLAG2.HAS_RESEND) !== 0,
      maxReadBytes: flags & INIT_FLAG.MAX_PAGES ? MAX_READ_BYTES : 128 * 1024,
    },
  };
}

export interface Attributes {
  readonly node: number;
  readonly sizeBytes: number;
  readonly directory: boolean;
}

const S_IFDIR = 0o040000;
const S_IFREG = 0o100000;
const ATTRIBUTES_BYTES = 88;
/** Blobs never change, so what is known of one stays true. */
const VALID_SECONDS = 365 * 24 * 3600;

function writeUint64(into: Buffer, value: number, at: number): void {
  into.writeUInt32LE(value % 2 ** 32, at);
  into.writeUInt32LE(Math.floor(value / 2 ** 32), at + 4);
}

/** The folder is root's; a jailed machine that is shown one of the files runs as another user. */
function writeAttributes(into: Buffer, at: number, { node, sizeBytes, directory }: Attributes): void {
  into.fill(0, at, at + ATTRIBUTES_BYTES);
  writeUint64(into, node, at);
  writeUint64(into, sizeBytes, at + 8);
  writeUint64(into, Math.ceil(sizeBytes / 512), at + 16);
  into.writeUInt32LE(directory ? S_IFDIR | 0o500 : S_IFREG | 0o444, at + 60);
  into.writeUInt32LE(directory ? 2 : 1, at + 64);
  into.writeUInt32LE(4096, at + 80);
}

/** Reply to GETATTR. */
export function encodeAttributes(into: Buffer, attributes: Attributes): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + 16);
  writeUint64(into, VALID_SECONDS, REPLY_BODY);
  writeAttributes(into, REPLY_BODY + 16, attributes);
  return 16 + ATTRIBUTES_BYTES;
}

/** Reply to LOOKUP. */
export function encodeEntry(into: Buffer, attributes: Attributes): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + 40);
  writeUint64(into, attributes.node, REPLY_BODY);
  writeUint64(into, VALID_SECONDS, REPLY_BODY + 16);
  writeUint64(into, VALID_SECONDS, REPLY_BODY + 24);
  writeAttributes(into, REPLY_BODY + 40, attributes);
  return 40 + ATTRIBUTES_BYTES;
}

/** Reply to OPENDIR: no handle, nothing kept of the listing. */
export function encodeOpen(into: Buffer): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + 16);
  return 16;
}

/**
 * One name of READDIR at `at` of the body. `nextOffset` is what the kernel asks with for what follows.
 * @returns where the next one goes, or -1 when this one has no room before `limit`
 */
export function encodeDirent(
  into: Buffer,
  at: number,
  limit: number,
  name: string,
  attributes: Attributes,
  nextOffset: number,
): number {
  const length = 24 + ((name.length + 7) & ~7);
  if (at + length > limit) return -1;
  const start = REPLY_BODY + at;
  into.fill(0, start, start + length);
  writeUint64(into, attributes.node, start);
  writeUint64(into, nextOffset, start + 8);
  into.writeUInt32LE(name.length, start + 16);
  into.writeUInt32LE(attributes.directory ? 4 : 8, start + 20); // DT_DIR, DT_REG
  into.write(name, start + 24, 'latin1');
  return at + length;
}

/** Reply to STATFS. */
export function encodeStatfs(into: Buffer, files: number, sizeBytes: number): number {
  into.fill(0, REPLY_BODY, REPLY_BODY + 80);
  writeUint64(into, Math.ceil(sizeBytes / 4096), REPLY_BODY);
  writeUint64(into, files, REPLY_BODY + 24);
  into.writeUInt32LE(4096, REPLY_BODY + 40); // bsize
  into.writeUInt32LE(255, REPLY_BODY + 44); // namelen
  into.writeUInt32LE(4096, REPLY_BODY + 48); // frsize
  return 80;
}

/** A message of the server's own: send again what was taken and not answered. Before the next server reads. */
export function encodeResend(): Buffer {
  const NOTIFY_RESEND = 7;
  const message = Buffer.alloc(REPLY_HEADER_BYTES);
  message.writeUInt32LE(REPLY_HEADER_BYTES, 0);
  message.writeInt32LE(NOTIFY_RESEND, 4);
  return message;
}
