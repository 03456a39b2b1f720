/**
 * The codecs of EROFS clusters, one buffer at a time: raw LZ4 blocks, raw deflate, zstd frames. Reading takes the size
 * that the metadata promises and accepts nothing else: data that inflates to more, to less or not at all is an error,
 * and no more than that size is ever written.
 */

import { createRequire } from 'node:module';
import * as zlib from 'node:zlib';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import { zstdLibrary } from '../layer/libzstd.ts';

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
  zstd(bytes, level) {
    const library = zstdLibrary();
    if (library === undefined) return nodeZstd().compress(bytes, level);
    const out = Buffer.allocUnsafe(library.compressBound(bytes.length));
    const made = library.compress(out, out.length, bytes, bytes.length, level);
    if (made < 0) throw fail('CODEC_DATA', { codec: 'zstd', problem: library.errorName(made) });
    return out.subarray(0, made);
  },
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
  zstd(bytes, outBytes) {
    const library = zstdLibrary();
    if (library === undefined) return exactly('zstd', outBytes, () => nodeZstd().decompress(bytes, outBytes));
    const out = Buffer.allocUnsafe(outBytes);
    const made = library.decompress(out, outBytes, bytes, bytes.length);
    if (made < 0) throw fail('CODEC_DATA', { codec: 'zstd', problem: library.errorName(made) });
    return exactly('zstd', outBytes, () => out.subarray(0, made));
  },
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

interface NodeZstd {
  compress(bytes: Buffer, level: number): Buffer;
  decompress(bytes: Buffer, outBytes: number): Buffer;
}

/** What Node has from 22.15 on. */
function nodeZstd(): NodeZstd {
  const node = zlib as unknown as {
    zstdCompressSync?: (bytes: Buffer, options: object) => Buffer;
    zstdDecompressSync?: (bytes: Buffer, options: object) => Buffer;
    constants: Record<string, number>;
  };
  const { zstdCompressSync, zstdDecompressSync } = node;
  if (zstdCompressSync === undefined || zstdDecompressSync === undefined) {
    throw fail('CODEC_MISSING', {
      codec: 'zstd',
      problem: `libzstd.so.1 cannot be loaded, and Node ${process.versions.node} has no zstd`,
      remedy: 'apt install libzstd1, or use Node 22.15 or newer',
    });
  }
  return {
    compress: (bytes, level) =>
      zstdCompressSync(bytes, {
        params: { [node.constants.ZSTD_c_compressionLevel!]: level },
        pledgedSrcSize: bytes.length,
      }),
    decompress: (bytes, outBytes) => zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, outBytes) }),
  };
}
