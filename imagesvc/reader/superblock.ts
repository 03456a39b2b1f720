/**
 * The superblock, the device table and the compression configuration of an EROFS image, parsed and checked once.
 *
 * Unknown incompatible features are refused: their meaning could change what any other field means.
 */
import { type ByteString, byteString } from '#base';
import { erofs, superblockChecksum } from '#converter';
import { fail } from '../errors.ts';
import type { MetaBytes } from './byte-source.ts';

const { SB, COMPAT, INCOMPAT, DEVICE_SLOT } = erofs;

export interface DeviceSlot {
  /** Text before the first NUL; ours: the hex digits of the data blob's sha256. */
  readonly tag: ByteString;
  readonly blocks: number;
  /** First block in the unified address space; 0 = addressed only by slot number. */
  readonly uniaddr: number;
}

export interface Superblock {
  readonly blockBits: number;
  readonly blockSize: number;
  readonly compat: number;
  readonly incompat: number;
  readonly checksum: number;
  readonly rootNid: number;
  readonly inodes: number;
  readonly epoch: number;
  readonly fixedNsec: number;
  readonly blocks: number;
  readonly metaBlkAddr: number;
  readonly xattrBlkAddr: number;
  readonly uuid: string;
  readonly volumeName: ByteString;
  /** Bit k set: algorithm k may be used. */
  readonly algorithms: number;
  readonly xattrPrefixCount: number;
  readonly xattrPrefixStart: number;
  readonly packedNid: number;
  readonly buildTime: number;
  readonly devices: readonly DeviceSlot[];
  /** Where superblock, compression configuration and device table end. */
  readonly endBytes: number;
}

const SUPPORTED_INCOMPAT =
  INCOMPAT.LZ4_0PADDING |
  INCOMPAT.COMPR_CFGS |
  INCOMPAT.CHUNKED_FILE |
  INCOMPAT.DEVICE_TABLE |
  INCOMPAT.ZTAILPACKING |
  INCOMPAT.FRAGMENTS |
  INCOMPAT.XATTR_PREFIXES;

/** A u64 as a number; beyond 2^53 the result is inexact, and larger than any bound it is checked against. */
export function readU64(buf: Buffer, at: number): number {
  return buf.readUInt32LE(at + 4) * 0x1_0000_0000 + buf.readUInt32LE(at);
}

export function readI64(buf: Buffer, at: number): number {
  return buf.readInt32LE(at + 4) * 0x1_0000_0000 + buf.readUInt32LE(at);
}

export function readSuperblock(meta: MetaBytes, image: string): Superblock {
  const corrupt = (problem: string) => fail('EROFS_CORRUPT', { image, where: 'superblock', problem });
  const unsupported = (feature: string) => fail('EROFS_UNSUPPORTED', { image, where: 'superblock', feature });

  const at = meta.locate(erofs.SUPER_OFFSET, erofs.SUPER_SIZE);
  if (at < 0) throw corrupt(`the image has ${meta.sizeBytes} bytes, too few for a superblock`);
  const sb = Buffer.from(meta.buf.subarray(at, at + erofs.SUPER_SIZE));
  const magic = sb.readUInt32LE(SB.magic);
  if (magic !== erofs.SUPER_MAGIC) {
    throw corrupt(`magic 0x${magic.toString(16)} at byte ${erofs.SUPER_OFFSET}: this is not an EROFS image`);
  }
  const incompat = sb.readUInt32LE(SB.featureIncompat);
  const unknown = (incompat & ~SUPPORTED_INCOMPAT) >>> 0;
  if (unknown !== 0) throw unsupported(`incompatible feature 0x${unknown.toString(16)}${featureName(unknown)}`);
  const blockBits = sb.readUInt8(SB.blockBits);
  if (blockBits < 9 || blockBits > 16) throw corrupt(`block size 2^${blockBits}`);
  const blockSize = 1 << blockBits;

  const compat = sb.readUInt32LE(SB.featureCompat);
  const checksum = sb.readUInt32LE(SB.checksum);
  if (compat & COMPAT.SB_CHKSUM) {
    const length = blockSize > erofs.SUPER_OFFSET ? blockSize : erofs.SUPER_OFFSET + blockSize;
    const start = meta.locate(0, length);
    if (start < 0) throw corrupt(`the image ends inside its first block`);
    const actual = superblockChecksum(meta.buf.subarray(start, start + length), blockSize);
    if (actual !== checksum) {
      throw corrupt(`checksum is 0x${actual.toString(16)}, the superblock says 0x${checksum.toString(16)}`);
    }
  }
  if (sb.readUInt8(SB.dirBlkBits) !== 0) throw unsupported('a directory block size of its own');
  const blocks = sb.readUInt32LE(SB.blocks);
  const haveBlocks = Math.ceil(meta.sizeBytes / blockSize);
  if (blocks > haveBlocks) throw corrupt(`${blocks} blocks of ${blockSize} bytes, but the image has ${haveBlocks}`);

  let end = erofs.SUPER_OFFSET + erofs.SUPER_SIZE + sb.readUInt8(SB.extSlots) * erofs.SUPER_EXT_SLOT_SIZE;
  let algorithms = 1 << erofs.ALGORITHM.LZ4;
  if (incompat & INCOMPAT.COMPR_CFGS) {
    algorithms = sb.readUInt16LE(SB.comprAlgs);
    if (algorithms & ~0xf) throw unsupported(`compression algorithm set 0x${algorithms.toString(16)}`);
    for (let k = 0; k < 4; k++) {
      if (!(algorithms & (1 << k))) continue;
      end = (end + 3) & ~3;
      const cfg = meta.locate(end, 2);
      if (cfg < 0) throw corrupt(`compression configuration ${k} at byte ${end} lies outside the image`);
      const length = meta.buf.readUInt16LE(cfg);
      if (length < (erofs.COMPR_CFG_BYTES[k] ?? 0)) throw corrupt(`compression configuration ${k} has ${length} bytes`);
      end += 2 + length;
    }
  }

  const devices: DeviceSlot[] = [];
  const deviceCount = incompat & INCOMPAT.DEVICE_TABLE ? sb.readUInt16LE(SB.extraDevices) : 0;
  const tableAt = sb.readUInt16LE(SB.devtSlotOff) * erofs.DEVICE_SLOT_SIZE;
  for (let k = 0; k < deviceCount; k++) {
    const slot = meta.locate(tableAt + k * erofs.DEVICE_SLOT_SIZE, erofs.DEVICE_SLOT_SIZE);
    if (slot < 0) throw corrupt(`device slot ${k + 1} of ${deviceCount} lies outside the image`);
    const { buf } = meta;
    const tag = byteString(buf, slot + DEVICE_SLOT.tag, slot + DEVICE_SLOT.tag + DEVICE_SLOT.tagSize);
    devices.push({
      tag: untilNul(tag),
      blocks: buf.readUInt32LE(slot + DEVICE_SLOT.blocks),
      uniaddr: buf.readUInt32LE(slot + DEVICE_SLOT.uniaddr),
    });
  }
  if (deviceCount > 0) end = Math.max(end, tableAt + deviceCount * erofs.DEVICE_SLOT_SIZE);

  const fixedNsec = sb.readUInt32LE(SB.fixedNsec);
  if (fixedNsec > 999_999_999) throw corrupt(`${fixedNsec} nanoseconds`);
  return {
    blockBits,
    blockSize,
    compat,
    incompat,
    checksum,
    rootNid: sb.readUInt16LE(SB.rootNid),
    inodes: readU64(sb, SB.inodes),
    epoch: readI64(sb, SB.epoch),
    fixedNsec,
    blocks,
    metaBlkAddr: sb.readUInt32LE(SB.metaBlkAddr),
    xattrBlkAddr: sb.readUInt32LE(SB.xattrBlkAddr),
    uuid: sb.toString('hex', SB.uuid, SB.uuid + 16).replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-'),
    volumeName: untilNul(byteString(sb, SB.volumeName, SB.volumeName + 16)),
    algorithms,
    xattrPrefixCount: incompat & INCOMPAT.XATTR_PREFIXES ? sb.readUInt8(SB.xattrPrefixCount) : 0,
    xattrPrefixStart: sb.readUInt32LE(SB.xattrPrefixStart),
    packedNid: incompat & INCOMPAT.FRAGMENTS ? readU64(sb, SB.packedNid) : 0,
    buildTime: sb.readUInt32LE(SB.buildTime),
    devices,
    endBytes: end,
  };
}

function untilNul(text: ByteString): ByteString {
  const nul = text.indexOf('\0');
  return nul < 0 ? text : text.slice(0, nul);
}

function featureName(bits: number): string {
  if (bits & INCOMPAT.METABOX) return ' (metadata box)';
  if (bits & INCOMPAT.BITS48) return ' (48-bit addresses)';
  return '';
}
