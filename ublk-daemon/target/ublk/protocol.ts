/**
 * Numbers and layouts of ublk, as the kernel's include/uapi/linux/ublk_cmd.h has them. Everything is little-endian.
 */

/** `_IOWR('u', number, 32)`: control commands; `_IOR` for some, whatever they do. */
const control = (number: number) => 0xc0207500 | number;
const question = (number: number) => 0x80207500 | number;
/** `_IOWR('u', number, 16)`: commands of a queue. */
const queue = (number: number) => 0xc0107500 | number;

export const CONTROL = {
  ADD_DEV: control(0x04),
  DEL_DEV: control(0x05),
  START_DEV: control(0x06),
  STOP_DEV: control(0x07),
  SET_PARAMS: control(0x08),
  START_USER_RECOVERY: control(0x10),
  END_USER_RECOVERY: control(0x11),
  /** The one question that takes a path for every kind of device: see control.ts. */
  GET_DEV_INFO2: question(0x12),
  GET_FEATURES: question(0x13),
  DEL_DEV_ASYNC: question(0x14),
  UPDATE_SIZE: control(0x15),
} as const;

export const IO = { FETCH: queue(0x20), COMMIT_AND_FETCH: queue(0x21) } as const;

export const OPERATION = { READ: 0, WRITE: 1, FLUSH: 2, DISCARD: 3, WRITE_ZEROES: 5 } as const;
/** In the same word as the operation. */
export const OPERATION_FLAG = { FUA: 1 << 13, NO_UNMAP: 1 << 15 } as const;

export const STATE = { DEAD: 0, LIVE: 1, QUIESCED: 2, FAIL_IO: 3 } as const;

export const DEV_INFO_BYTES = 64;
export const PARAMS_BYTES = 64;
/** One request as the kernel describes it. */
export const IO_DESC_BYTES = 24;
export const MAX_DEPTH = 4096;

export interface DeviceInfo {
  readonly id: number;
  readonly state: number;
  readonly queues: number;
  readonly depth: number;
  readonly maxIoBytes: number;
  /** Of the process that serves it. */
  readonly pid: number;
  readonly flags: number;
  /** Who made it; beside root nobody else may open an unprivileged one. */
  readonly ownerUid: number;
  readonly ownerGid: number;
  /** 32 bits by which its server knows its own devices; undefined: it is of another program. */
  readonly mark?: number;
}

/** What is asked for; the kernel fills in the rest. */
export type NewDevice = Omit<DeviceInfo, 'state' | 'ownerUid' | 'ownerGid'>;

/** "DSec": the upper half of the word that the driver keeps for servers. The lower half is the mark. */
const OURS = 0x44536563;

export function encodeDevInfo(into: Buffer, info: NewDevice): void {
  into.fill(0, 0, DEV_INFO_BYTES);
  into.writeUInt16LE(info.queues, 0);
  into.writeUInt16LE(info.depth, 2);
  into.writeUInt32LE(info.maxIoBytes, 8);
  into.writeInt32LE(info.id, 12);
  into.writeInt32LE(info.pid, 16);
  into.writeBigUInt64LE(BigInt(info.flags), 24);
  if (info.mark === undefined) return;
  into.writeUInt32LE(info.mark, 32);
  into.writeUInt32LE(OURS, 36);
}

export function decodeDevInfo(from: Buffer): DeviceInfo {
  return {
    queues: from.readUInt16LE(0),
    depth: from.readUInt16LE(2),
    state: from.readUInt16LE(4),
    maxIoBytes: from.readUInt32LE(8),
    id: from.readInt32LE(12),
    pid: from.readInt32LE(16),
    flags: Number(from.readBigUInt64LE(24) & 0xffffffffn),
    ownerUid: from.readUInt32LE(40),
    ownerGid: from.readUInt32LE(44),
    mark: from.readUInt32LE(36) === OURS ? from.readUInt32LE(32) : undefined,
  };
}

const PARAM_BASIC = 1;
const PARAM_DISCARD = 2;
const ATTRIBUTE = { READ_ONLY: 1, VOLATILE_CACHE: 4, FUA: 8 } as const;

export function encodeParams(
  into: Buffer,
  disk: {
    readonly sizeBytes: number;
    readonly blockSize: number;
    readonly readOnly: boolean;
    readonly maxIoBytes: number;
  },
): void {
  into.fill(0, 0, PARAMS_BYTES);
  into.writeUInt32LE(PARAMS_BYTES, 0);
  into.writeUInt32LE(PARAM_BASIC | PARAM_DISCARD, 4);
  into.writeUInt32LE(ATTRIBUTE.VOLATILE_CACHE | ATTRIBUTE.FUA | (disk.readOnly ? ATTRIBUTE.READ_ONLY : 0), 8);
  const shift = Math.log2(disk.blockSize);
  // Logical and physical block, best and smallest I/O.
  into.set([shift, 12, 12, shift], 12);
  into.writeUInt32LE(disk.maxIoBytes / 512, 16);
  into.writeBigUInt64LE(BigInt(disk.sizeBytes / 512), 24);
  into.writeUInt32LE(Math.max(4096, disk.blockSize), 44);
  into.writeUInt32LE(MAX_DISCARD_SECTORS, 48);
  into.writeUInt32LE(MAX_DISCARD_SECTORS, 52);
  into.writeUInt16LE(1, 56);
}

/** 512 MiB: what one request may discard. */
const MAX_DISCARD_SECTORS = 2 ** 20;
