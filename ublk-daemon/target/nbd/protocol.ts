/**
 * Numbers and layouts of the NBD protocol (fixed newstyle), as its own document names them. Everything on the wire is
 * big-endian. https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
 */

export const MAGIC = 0x4e42444d41474943n;
export const OPTION_MAGIC = 0x49484156454f5054n;
export const OPTION_REPLY_MAGIC = 0x0003e889045565a9n;
export const REQUEST_MAGIC = 0x25609513;
export const SIMPLE_REPLY_MAGIC = 0x67446698;
export const CHUNK_MAGIC = 0x668e33ef;

export const GREETING_BYTES = 18;
export const OPTION_HEADER_BYTES = 16;
export const REQUEST_BYTES = 28;
export const SIMPLE_REPLY_BYTES = 16;
export const CHUNK_HEADER_BYTES = 20;

/** Server's and client's handshake flags have the same bits. */
export const HANDSHAKE = { FIXED_NEWSTYLE: 1, NO_ZEROES: 2 } as const;

export const OPTION = {
  EXPORT_NAME: 1,
  ABORT: 2,
  LIST: 3,
  INFO: 6,
  GO: 7,
  STRUCTURED_REPLY: 8,
  LIST_META_CONTEXT: 9,
  SET_META_CONTEXT: 10,
} as const;

export const OPTION_REPLY = {
  ACK: 1,
  SERVER: 2,
  INFO: 3,
  META_CONTEXT: 4,
  ERR_UNSUP: 0x80000001,
  ERR_POLICY: 0x80000002,
  ERR_INVALID: 0x80000003,
  ERR_UNKNOWN: 0x80000006,
  ERR_SHUTDOWN: 0x80000007,
  ERR_TOO_BIG: 0x80000009,
} as const;

export const INFO = { EXPORT: 0, NAME: 1, DESCRIPTION: 2, BLOCK_SIZE: 3 } as const;

/** Transmission flags: what an export can do. */
export const TRANSMISSION = {
  HAS_FLAGS: 1 << 0,
  READ_ONLY: 1 << 1,
  SEND_FLUSH: 1 << 2,
  SEND_FUA: 1 << 3,
  SEND_TRIM: 1 << 5,
  SEND_WRITE_ZEROES: 1 << 6,
  SEND_DF: 1 << 7,
  CAN_MULTI_CONN: 1 << 8,
  SEND_CACHE: 1 << 10,
} as const;

export const COMMAND = {
  READ: 0,
  WRITE: 1,
  DISC: 2,
  FLUSH: 3,
  TRIM: 4,
  CACHE: 5,
  WRITE_ZEROES: 6,
  BLOCK_STATUS: 7,
} as const;

export const COMMAND_FLAG = { FUA: 1, NO_HOLE: 2, DF: 4, REQ_ONE: 8 } as const;

export const CHUNK = { NONE: 0, OFFSET_DATA: 1, OFFSET_HOLE: 2, BLOCK_STATUS: 5, ERROR: 0x8001 } as const;
export const CHUNK_DONE = 1;

export const STATE = { HOLE: 1, ZERO: 2 } as const;
export const ALLOCATION_CONTEXT = 'base:allocation';
export const ALLOCATION_CONTEXT_ID = 1;

/** Linux's numbers, which the protocol took; anything else is sent as EINVAL. */
export const ERROR = {
  EPERM: 1,
  EIO: 5,
  ENOMEM: 12,
  EINVAL: 22,
  ENOSPC: 28,
  EOVERFLOW: 75,
  ENOTSUP: 95,
  ESHUTDOWN: 108,
} as const;

/** Names and descriptions on the wire. */
export const MAX_STRING_BYTES = 4096;

/** What one request may carry: told to clients that ask, refused from those that do not. */
export const MAX_PAYLOAD_BYTES = 32 * 2 ** 20;

/** The protocol's error for an errno: what it does not know is an I/O error. */
export function wireError(errno: number): number {
  // EROFS, EDQUOT and EFBIG have no number of their own.
  if (errno === 30) return ERROR.EPERM;
  if (errno === 122 || errno === 27) return ERROR.ENOSPC;
  return (Object.values(ERROR) as number[]).includes(errno) ? errno : ERROR.EIO;
}
