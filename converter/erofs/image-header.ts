/**
 * What stands before the inodes of a metadata image: superblock, compression configuration, device slots. The checksum is
 * the caller's: it covers the whole first block.
 */
import { createHash } from 'node:crypto';
import { writeByteString } from '#base';
import type { CodecName } from '../layer/cluster-codec.ts';
import {
  ALGORITHM,
  BLOCK_BYTES,
  COMPAT,
  COMPR_CFG_BYTES,
  DEVICE_SLOT,
  DEVICE_SLOT_SIZE,
  INCOMPAT,
  SB,
  SUPER_MAGIC,
  SUPER_OFFSET,
  SUPER_SIZE,
} from './layout.ts';

export const ALGORITHM_OF: Readonly<Record<CodecName, number>> = {
  lz4: ALGORITHM.LZ4,
  deflate: ALGORITHM.DEFLATE,
  zstd: ALGORITHM.ZSTD,
};

const LZ4_MAX_DISTANCE = 65535;
/** Our clusters hold 64 KiB of a file, so none takes more blocks. */
const LZ4_MAX_CLUSTER_BLOCKS = 16;
const DEFLATE_WINDOW_BITS = 15;
/** Covers the window of any frame made of 64 KiB. */
const ZSTD_WINDOW_LOG = 17;

export interface HeaderDevice {
  readonly blocks: number;
  /** 64 characters that name the blob. */
  readonly tag: string;
}

export interface HeaderFacts {
  /** First block of each device in the unified address space. */
  readonly uniaddr: readonly number[];
  readonly primaryBlocks: number;
  /** Block from whose start shared attributes are counted; 0 when there are none. */
  readonly sharedBlock: number;
  readonly inodes: number;
  readonly rootNid: number;
  readonly epoch: { readonly sec: number; readonly nsec: number };
  readonly hasChunks: boolean;
}

export class ImageHeader {
  readonly #codec: CodecName | undefined;
  readonly #devices: readonly HeaderDevice[];
  readonly #config: Buffer;
  readonly #slotsAt: number;
  /** Where inodes may begin. */
  readonly endByte: number;

  constructor(codec: CodecName | undefined, devices: readonly HeaderDevice[]) {
    this.#codec = codec;
    this.#devices = devices;
    this.#config = codec === undefined ? Buffer.alloc(0) : compressionConfig(codec);
    const end = SUPER_OFFSET + SUPER_SIZE + this.#config.length;
    this.#slotsAt = Math.ceil(end / DEVICE_SLOT_SIZE) * DEVICE_SLOT_SIZE;
    this.endByte = devices.length === 0 ? end : this.#slotsAt + devices.length * DEVICE_SLOT_SIZE;
  }

  /** `out`: the first `endByte` bytes of the image. */
  write(out: Buffer, facts: HeaderFacts): void {
    const sb = out.subarray(SUPER_OFFSET);
    const devices = this.#devices;
    let incompat = devices.length > 0 ? INCOMPAT.DEVICE_TABLE : 0;
    if (facts.hasChunks) incompat |= INCOMPAT.CHUNKED_FILE;
    if (this.#codec !== undefined) incompat |= INCOMPAT.LZ4_0PADDING | INCOMPAT.COMPR_CFGS;
    sb.writeUInt32LE(SUPER_MAGIC, SB.magic);
    sb.writeUInt32LE(COMPAT.SB_CHKSUM | COMPAT.MTIME | COMPAT.XATTR_FILTER, SB.featureCompat);
    sb[SB.blockBits] = Math.log2(BLOCK_BYTES);
    sb.writeUInt16LE(facts.rootNid, SB.rootNid);
    sb.writeBigUInt64LE(BigInt(facts.inodes), SB.inodes);
    sb.writeBigUInt64LE(BigInt(facts.epoch.sec), SB.epoch);
    sb.writeUInt32LE(facts.epoch.nsec, SB.fixedNsec);
    sb.writeUInt32LE(facts.primaryBlocks, SB.blocks);
    sb.writeUInt32LE(facts.sharedBlock, SB.xattrBlkAddr);
    uuidOf(devices, facts.inodes).copy(sb, SB.uuid);
    sb.writeUInt32LE(incompat, SB.featureIncompat);
    if (this.#codec !== undefined) sb.writeUInt16LE(1 << ALGORITHM_OF[this.#codec], SB.comprAlgs);
    sb.writeUInt16LE(devices.length, SB.extraDevices);
    sb.writeUInt16LE(devices.length > 0 ? this.#slotsAt / DEVICE_SLOT_SIZE : 0, SB.devtSlotOff);
    this.#config.copy(sb, SUPER_SIZE);
    devices.forEach((device, i) => {
      const slot = out.subarray(this.#slotsAt + i * DEVICE_SLOT_SIZE);
      writeByteString(slot, device.tag, DEVICE_SLOT.tag);
      slot.writeUInt32LE(device.blocks, DEVICE_SLOT.blocks);
      slot.writeUInt32LE(facts.uniaddr[i]!, DEVICE_SLOT.uniaddr);
    });
  }
}

function compressionConfig(codec: CodecName): Buffer {
  const length = COMPR_CFG_BYTES[ALGORITHM_OF[codec]]!;
  const out = Buffer.alloc(2 + length);
  out.writeUInt16LE(length, 0);
  if (codec === 'lz4') {
    out.writeUInt16LE(LZ4_MAX_DISTANCE, 2);
    out.writeUInt16LE(LZ4_MAX_CLUSTER_BLOCKS, 4);
  } else if (codec === 'deflate') {
    out[2] = DEFLATE_WINDOW_BITS;
  } else {
    out[3] = ZSTD_WINDOW_LOG - 10;
  }
  return out;
}

/** A version 8 uuid (RFC 9562) of what the image is made of: the same image has the same one. */
function uuidOf(devices: readonly HeaderDevice[], inodes: number): Buffer {
  const uuid = createHash('sha256')
    .update(devices.map((device) => device.tag).join())
    .update(String(inodes))
    .digest()
    .subarray(0, 16);
  uuid[6] = (uuid[6]! & 0x0f) | 0x80;
  uuid[8] = (uuid[8]! & 0x3f) | 0x80;
  return uuid;
}
