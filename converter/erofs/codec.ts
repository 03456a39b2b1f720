/**
 * The codecs of EROFS clusters, one buffer at a time: raw LZ4 blocks, raw deflate, zstd frames. Reading takes the size
 * that the metadata promises and accepts nothing else: data that inflates to more, to less or not at all is an error,
 * and no more than that size is ever written.
 */

import { createRequire } from 'node:module';
import * as zlib from 'node:zlib';
import { messageOf } from '#base';
import { type BlockZstd, blockZstd } from '#linux';
import { fail } from '../errors.ts';

type Lz4 = typeof import('lz4-napi');
let loadedLz4: Lz4 | undefined;
/** Loaded by the first block: a native addon that most commands do not need. */
function lz4(): Lz4 {
  loadedLz4 ??= createRequire(import.meta.url)('lz4-napi') as Lz4;
  return loadedLz4;
}

/** What lz4-napi puts before a block: its size, inflated. */
const LZ4_SIZE_BYTES = 4;

export interface Compressors {
  /** A raw block; may be larger than its input. */
  lz4(bytes: Buffer): Buffer;
  /** A raw stream. @param level 1..9 */
  deflate(bytes: Buffer, level: number): Buffer;
  /** One frame with its content size in it, without a checksum. @param level 1..22 */
  zstd(bytes: Buffer, level: number): Buffer;
}

export interface Decompressors {
  lz4(bytes: Buffer, outBytes: number): Buffer;
  deflate(bytes: Buffer, outBytes: number): Buffer;
  zstd(bytes: Buffer, outBytes: number): Buffer;
}

export const compressors: Compressors = {
  lz4: (bytes) => lz4().compressSync(bytes).subarray(LZ4_SIZE_BYTES),
  deflate: (bytes, level) => zlib.deflateRawSync(bytes, { level, chunkSize: Math.max(64, bytes.length + 64) }),
  zstd: (bytes, level) => zstd().compress(bytes, level),
};

export const decompressors: Decompressors = {
  lz4(bytes, outBytes) {
    const sized = Buffer.allocUnsafe(LZ4_SIZE_BYTES + bytes.length);
    sized.writeUInt32LE(outBytes, 0);
    bytes.copy(sized, LZ4_SIZE_BYTES);
    return exactly('lz4', outBytes, () => lz4().uncompressSync(sized));
  },
  deflate: (bytes, outBytes) =>
    exactly('deflate', outBytes, () =>
      zlib.inflateRawSync(bytes, { maxOutputLength: Math.max(1, outBytes), chunkSize: Math.max(64, outBytes) }),
    ),
  zstd: (bytes, outBytes) => exactly('zstd', outBytes, () => zstd().decompress(bytes, outBytes)),
};

function exactly(codec: string, outBytes: number, inflate: () => Buffer): Buffer {
  let out: Buffer;
  try {
    out = inflate();
  } catch (error) {
    throw fail('CODEC_DATA', { codec, problem: messageOf(error) }, error);
  }
  if (out.length === outBytes) return out;
  throw fail('CODEC_DATA', { codec, problem: `${out.length} bytes came out, expected ${outBytes}` });
}

function zstd(): BlockZstd {
  const found = blockZstd();
  if (found !== undefined) return found;
  throw fail('CODEC_MISSING', {
    codec: 'zstd',
    problem: `libzstd.so.1 cannot be loaded, and Node ${process.versions.node} has no zstd`,
    remedy: 'apt install libzstd1, or use Node 22.15 or newer',
  });
}
