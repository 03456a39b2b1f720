/**
 * Where the bytes of a file lie: its extents, one asked for at a time, so that a file of a million chunks costs nothing
 * until it is read. Flat and chunk-based layouts here; compressed ones in cluster-map.ts.
 */
import { erofs } from '#converter';
import { clusterExtentAt } from './cluster-map.ts';
import type { Inode } from './inode.ts';
import type { Metadata } from './metadata.ts';

const { LAYOUT, CHUNK_FORMAT, CHUNK_INDEX } = erofs;

export type Encoding =
  /** No bytes stored: reads as zeros. */
  | 'hole'
  /** Stored as they are. */
  | 'raw'
  /** Stored as they are, in one or more whole blocks of a compressed file. */
  | 'plain'
  /** Like `plain`, rotated inside one block so that the position in the block equals that in the file. */
  | 'interlaced'
  | 'lz4'
  | 'lzma'
  | 'deflate'
  | 'zstd'
  /** In the packed inode, at `offset` of its content. */
  | 'fragment';

export interface Extent {
  /** First byte in the file. */
  readonly logical: number;
  /** Bytes of the file. */
  readonly length: number;
  readonly encoding: Encoding;
  /** 0 = the metadata image itself, k = device slot k. */
  readonly device: number;
  /** Byte on that device. */
  readonly offset: number;
  /** Bytes there. */
  readonly storedLength: number;
  /** The stored cluster decodes to more than `length` bytes; the rest belongs to others. */
  readonly partial: boolean;
}

/** The extent that holds byte `position` of the file: all of it, so `logical <= position`. */
export function extentAt(meta: Metadata, inode: Inode, position: number): Extent {
  switch (inode.layout) {
    case LAYOUT.FLAT_PLAIN:
    case LAYOUT.FLAT_INLINE:
      return flatExtentAt(meta, inode, position);
    case LAYOUT.CHUNK_BASED:
      return chunkExtentAt(meta, inode, position);
    default:
      return clusterExtentAt(meta, inode, position);
  }
}

function flatExtentAt(meta: Metadata, inode: Inode, position: number): Extent {
  const { blockSize } = meta.sb;
  const { sizeBytes, nid } = inode;
  let wholeBytes = sizeBytes;
  if (inode.layout === LAYOUT.FLAT_INLINE) {
    wholeBytes = (Math.ceil(sizeBytes / blockSize) - 1) * blockSize;
    if (position >= wholeBytes) {
      const length = sizeBytes - wholeBytes;
      if ((inode.bodyOffset % blockSize) + length > blockSize) {
        throw meta.corrupt(nid, `inline data at byte ${inode.bodyOffset}, ${length} bytes long, crosses a block`);
      }
      return raw(wholeBytes, length, 0, inode.bodyOffset);
    }
  } else if (inode.union === erofs.NULL_ADDR) {
    return hole(0, sizeBytes);
  }
  return resolve(meta, nid, raw(0, wholeBytes, 0, inode.union * blockSize));
}

function chunkExtentAt(meta: Metadata, inode: Inode, position: number): Extent {
  const { sb, bytes } = meta;
  const format = inode.union & 0xffff;
  const chunkBytes = 2 ** (sb.blockBits + (format & CHUNK_FORMAT.blockBitsMask));
  const indexed = (format & CHUNK_FORMAT.indexes) !== 0;
  const unit = indexed ? erofs.CHUNK_INDEX_SIZE : erofs.BLOCK_MAP_ENTRY_SIZE;
  const number = Math.floor(position / chunkBytes);
  const logical = number * chunkBytes;
  const length = Math.min(chunkBytes, inode.sizeBytes - logical);
  const entryAt = Math.ceil(inode.bodyOffset / unit) * unit + number * unit;
  const at = meta.at(inode.nid, entryAt, unit, `entry ${number} of the chunk map`);
  const { buf } = bytes;
  if (!indexed) {
    const block = buf.readUInt32LE(at);
    if (block === erofs.NULL_ADDR) return hole(logical, length);
    return resolve(meta, inode.nid, raw(logical, length, 0, block * sb.blockSize));
  }
  let block = buf.readUInt32LE(at + CHUNK_INDEX.startBlk);
  if (format & CHUNK_FORMAT.bits48) {
    const high = buf.readUInt16LE(at + CHUNK_INDEX.startBlkHi);
    if (block === erofs.NULL_ADDR && high === 0xffff) return hole(logical, length);
    block += high * 0x1_0000_0000;
  } else if (block === erofs.NULL_ADDR) return hole(logical, length);
  const slots = sb.devices.length;
  const device = buf.readUInt16LE(at + CHUNK_INDEX.deviceId) & slotMask(slots);
  if (device > slots) {
    throw meta.corrupt(inode.nid, `chunk ${number}, entry at byte ${entryAt}: device ${device} of ${slots}`);
  }
  const extent = raw(logical, length, device, block * sb.blockSize);
  return device === 0 ? resolve(meta, inode.nid, extent) : inside(meta, inode.nid, extent);
}

/** The kernel looks at no more bits of a device id than the number of slots needs. */
function slotMask(slots: number): number {
  let mask = 0;
  while (mask < slots) mask = mask * 2 + 1;
  return mask;
}

/** Turns a unified address (device 0) into a device and an offset there, and checks that the bytes exist. */
export function resolve(meta: Metadata, nid: number, extent: Extent): Extent {
  const { blockSize, devices } = meta.sb;
  for (let k = 0; k < devices.length; k++) {
    const slot = devices[k]!;
    if (slot.uniaddr === 0) continue;
    const start = slot.uniaddr * blockSize;
    if (extent.offset >= start && extent.offset < start + slot.blocks * blockSize) {
      return inside(meta, nid, { ...extent, device: k + 1, offset: extent.offset - start });
    }
  }
  return inside(meta, nid, extent);
}

function inside(meta: Metadata, nid: number, extent: Extent): Extent {
  const { device, offset, storedLength, logical } = extent;
  const slot = device === 0 ? undefined : meta.sb.devices[device - 1]!;
  // Old tools leave the block count of a slot 0: the device's own size then is the only bound.
  if (slot?.blocks === 0) return extent;
  const sizeBytes = slot === undefined ? meta.bytes.sizeBytes : slot.blocks * meta.sb.blockSize;
  if (offset + storedLength > sizeBytes) {
    const where = device === 0 ? 'the image' : `device ${device}`;
    throw meta.corrupt(
      nid,
      `data of file byte ${logical} lies at byte ${offset} of ${where}, ${storedLength} bytes long, which has ${sizeBytes} bytes`,
    );
  }
  return extent;
}

function raw(logical: number, length: number, device: number, offset: number): Extent {
  return { logical, length, encoding: 'raw', device, offset, storedLength: length, partial: false };
}

export function hole(logical: number, length: number): Extent {
  return { logical, length, encoding: 'hole', device: 0, offset: 0, storedLength: 0, partial: false };
}

/**
 * Extents of bytes `from` to `to` in order, neighbours joined where they are stored one after the other; the first and the
 * last one are not cut to the range.
 */
export function* extentsOf(meta: Metadata, inode: Inode, from = 0, to = inode.sizeBytes): Generator<Extent> {
  const end = Math.min(to, inode.sizeBytes);
  let position = from;
  let pending: Extent | undefined;
  while (position < end) {
    const next = extentAt(meta, inode, position);
    if (!(next.length > 0) || next.logical > position || next.logical + next.length <= position) {
      throw meta.corrupt(inode.nid, `the extent of file byte ${position} does not hold it`);
    }
    position = next.logical + next.length;
    if (pending !== undefined && joins(pending, next)) {
      pending = {
        ...pending,
        length: pending.length + next.length,
        storedLength: pending.storedLength + next.storedLength,
      };
    } else {
      if (pending !== undefined) yield pending;
      pending = next;
    }
  }
  if (pending !== undefined) yield pending;
}

function joins(a: Extent, b: Extent): boolean {
  if (a.logical + a.length !== b.logical || a.encoding !== b.encoding) return false;
  if (a.encoding === 'hole') return true;
  return a.encoding === 'raw' && a.device === b.device && a.offset + a.storedLength === b.offset;
}
