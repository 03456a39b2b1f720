/**
 * Stored bytes of an extent to file bytes.
 *
 * A compressed cluster is padded with zeros in front; codecs whose output could begin with a zero are not stored that way,
 * so leading zeros are padding. Whatever the bytes are, the result has the length asked for, or it is EROFS_CORRUPT.
 */
import { inflateRawSync } from 'node:zlib';
import { isDsecError, messageOf } from '#base';
import { codec, erofs } from '#converter';
import type { Extent } from './extent.ts';
import type { Inode } from './inode.ts';
import { decodeLz4 } from './lz4-block.ts';
import type { Metadata } from './metadata.ts';

export function decodeExtent(meta: Metadata, inode: Inode, extent: Extent, stored: Buffer): Buffer {
  const { encoding, length } = extent;
  switch (encoding) {
    case 'raw':
    case 'plain':
      return stored.subarray(0, length);
    case 'interlaced':
      return unrotate(meta, inode, extent, stored);
    case 'lz4':
    case 'deflate':
    case 'zstd':
      return decompress(meta, inode, extent, stored);
    default:
      throw meta.unsupported(inode.nid, `compression with ${encoding}`);
  }
}

function unrotate(meta: Metadata, inode: Inode, extent: Extent, stored: Buffer): Buffer {
  const { blockSize } = meta.sb;
  const { logical, length } = extent;
  if (stored.length > blockSize) throw meta.corrupt(inode.nid, `interlaced data of ${stored.length} bytes`);
  const skip = logical % blockSize;
  const first = stored.subarray(skip, Math.min(skip + length, stored.length));
  const rest = length - first.length;
  if (rest === 0) return first;
  if (rest > skip) throw meta.corrupt(inode.nid, `interlaced data of ${length} bytes in ${stored.length}`);
  return Buffer.concat([first, stored.subarray(0, rest)]);
}

function decompress(meta: Metadata, inode: Inode, extent: Extent, stored: Buffer): Buffer {
  const { encoding, length } = extent;
  const damaged = (problem: string, cause?: unknown) => {
    const error = meta.corrupt(
      inode.nid,
      `file byte ${extent.logical}: ${extent.storedLength} bytes at byte ${extent.offset} of ${extent.device === 0 ? 'the image' : `device ${extent.device}`} are not ${length} bytes in ${encoding}: ${problem}`,
    );
    error.cause = cause;
    return error;
  };
  let from = 0;
  const padded = encoding !== 'lz4' || (meta.sb.incompat & erofs.INCOMPAT.LZ4_0PADDING) !== 0;
  if (padded) {
    while (from < stored.length && stored[from] === 0) from++;
  }
  if (from === stored.length) throw damaged('only zeros');
  let bytes: Buffer;
  try {
    bytes = inflate(encoding, stored.subarray(from), length, extent.partial || !padded);
  } catch (error) {
    if (isDsecError(error, 'CODEC_MISSING')) throw error;
    throw damaged(messageOf(error), error);
  }
  return bytes;
}

/** Exactly `length` bytes. `open`: the cluster decodes to more, or goes on behind its end. */
function inflate(encoding: string, input: Buffer, length: number, open: boolean): Buffer {
  switch (encoding) {
    case 'lz4':
      if (!open) return codec.decompressors.lz4(input, length);
      return atLeast(length, decodeLz4(input, 0, length));
    case 'deflate':
      if (!open) return codec.decompressors.deflate(input, length);
      return atLeast(length, inflateRawSync(input, { maxOutputLength: erofs.PCLUSTER_MAX_DECODED_BYTES }));
    default:
      return atLeast(length, codec.decompressors.zstd(input, open ? zstdContentBytes(input) : length));
  }
}

function atLeast(length: number, bytes: Buffer | undefined): Buffer {
  if (bytes === undefined) throw new Error('the block ends early or points before its start');
  if (bytes.length < length) throw new Error(`they decode to ${bytes.length}`);
  return bytes.subarray(0, length);
}

/** What a zstd frame says it decodes to (RFC 8878, 3.1.1.1). */
function zstdContentBytes(frame: Buffer): number {
  const descriptor = frame.length >= 14 ? frame[4]! : -1;
  if (descriptor < 0 || frame.readUInt32LE(0) !== 0xfd2fb528) throw new Error('not a zstd frame');
  const singleSegment = (descriptor & 0x20) !== 0;
  const at = 5 + (singleSegment ? 0 : 1) + [0, 1, 2, 4][descriptor & 3]!;
  const sizes = [singleSegment ? frame[at]! : -1, frame.readUInt16LE(at) + 256, frame.readUInt32LE(at)];
  const bytes = sizes[descriptor >> 6] ?? -1;
  if (bytes < 0 || bytes > erofs.PCLUSTER_MAX_DECODED_BYTES) throw new Error('the zstd frame does not tell its size');
  return bytes;
}
