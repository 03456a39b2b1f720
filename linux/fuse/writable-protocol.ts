/**
 * The kernel's FUSE messages for one file that is read and written, beside what fuse-protocol.ts has: it is the root of its file system,
 * and is mounted on a file. Its size is fixed, as that of a block device.
 */
import { REPLY_BODY, REQUEST_HEADER_BYTES } from './fuse-protocol.ts';

export const WRITABLE_OPCODE = { SETATTR: 4, WRITE: 16, FSYNC: 20, FALLOCATE: 43, LSEEK: 46 } as const;

/** The node of a file system's root. */
export const ROOT_NODE = 1;

const BODY = REQUEST_HEADER_BYTES;
/** Where a WRITE's bytes begin: behind its own fields. */
export const WRITE_DATA = BODY + 40;

export const FALLOCATE_MODE = { KEEP_SIZE: 1, PUNCH_HOLE: 2, ZERO_RANGE: 16 } as const;

/** FALLOCATE: its offset is where READ and WRITE have it. */
export function fallocateLength(request: Buffer): number {
  return request.readUInt32LE(BODY + 16) + request.readUInt32LE(BODY + 20) * 2 ** 32;
}

export function fallocateMode(request: Buffer): number {
  return request.readUInt32LE(BODY + 24);
}

/** LSEEK: SEEK_DATA or SEEK_HOLE, the others the kernel answers by itself. */
export const WHENCE = { DATA: 3, HOLE: 4 } as const;

export function seekWhence(request: Buffer): number {
  return request.readUInt32LE(BODY + 16);
}

export function encodePosition(into: Buffer, offset: number): number {
  writeUint64(into, offset, REPLY_BODY);
  return 8;
}

export interface AttributeChange {
  /** The size that the file shall have; undefined: not asked for. */
  readonly sizeBytes: number | undefined;
  /** Mode or owner. */
  readonly access: boolean;
  /** By ftruncate: the caller has the file open, and means what it says. */
  readonly byHandle: boolean;
}

export function decodeSetattr(request: Buffer): AttributeChange {
  const MODE_OR_OWNER = 7;
  const SIZE = 1 << 3;
  const HANDLE = 1 << 6;
  const valid = request.readUInt32LE(BODY);
  const sizeBytes = request.readUInt32LE(BODY + 16) + request.readUInt32LE(BODY + 20) * 2 ** 32;
  return {
    sizeBytes: valid & SIZE ? sizeBytes : undefined,
    access: (valid & MODE_OR_OWNER) !== 0,
    byHandle: (valid & HANDLE) !== 0,
  };
}

/** Reply to WRITE. */
export function encodeWritten(into: Buffer, lengthBytes: number): number {
  into.writeUInt32LE(lengthBytes, REPLY_BODY);
  into.writeUInt32LE(0, REPLY_BODY + 4);
  return 8;
}

export interface FileAttributes {
  readonly sizeBytes: number;
  /** 512-byte blocks. */
  readonly blocks: number;
  readonly readOnly: boolean;
  /** Not for its owner alone. */
  readonly shared?: boolean;
  readonly timeSec: number;
}

const S_IFREG = 0o100000;
const ATTRIBUTES_BYTES = 88;
/** Nobody changes them but through this file. */
const VALID_SECONDS = 365 * 24 * 3600;

/** Reply to GETATTR and SETATTR. */
export function encodeFileAttributes(into: Buffer, attributes: FileAttributes): number {
  const { sizeBytes, blocks, readOnly, shared = false, timeSec } = attributes;
  const at = REPLY_BODY + 16;
  into.fill(0, REPLY_BODY, at + ATTRIBUTES_BYTES);
  writeUint64(into, VALID_SECONDS, REPLY_BODY);
  writeUint64(into, ROOT_NODE, at);
  writeUint64(into, sizeBytes, at + 8);
  writeUint64(into, blocks, at + 16);
  for (const time of [24, 32, 40]) writeUint64(into, timeSec, at + time);
  const owner = readOnly ? 0o400 : 0o600;
  into.writeUInt32LE(S_IFREG | owner | (shared ? (owner >> 3) | (owner >> 6) : 0), at + 60);
  into.writeUInt32LE(1, at + 64); // nlink
  into.writeUInt32LE(4096, at + 80); // blksize
  return 16 + ATTRIBUTES_BYTES;
}

function writeUint64(into: Buffer, value: number, at: number): void {
  into.writeUInt32LE(value % 2 ** 32, at);
  into.writeUInt32LE(Math.floor(value / 2 ** 32), at + 4);
}
