/**
 * The codecs of ZFile blocks: raw LZ4 blocks and zstd frames, one buffer at a time. Reading makes exactly the size that is asked for, or
 * says what is wrong; it never writes past it.
 */
import { createRequire } from 'node:module';
import * as zlib from 'node:zlib';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import type { ZfileAlgorithm } from './header.ts';

export interface BlockCodec {
  compress(bytes: Buffer): Buffer;
  /** @throws Error whose message says what is wrong with the block */
  decompress(bytes: Buffer, outBytes: number): Buffer;
}

export function blockCodec(algorithm: ZfileAlgorithm, level = 3): BlockCodec {
  return algorithm === 'lz4' ? lz4Codec() : zstdCodec(level);
}

type Lz4 = typeof import('lz4-napi');
let lz4: Lz4 | undefined;
/** What lz4-napi puts before a block: its size, inflated. */
const LZ4_SIZE_BYTES = 4;

function lz4Codec(): BlockCodec {
  lz4 ??= createRequire(import.meta.url)('lz4-napi') as Lz4;
  const { compressSync, uncompressSync } = lz4;
  return {
    compress: (bytes) => compressSync(bytes).subarray(LZ4_SIZE_BYTES),
    decompress(bytes, outBytes) {
      const sized = Buffer.allocUnsafe(LZ4_SIZE_BYTES + bytes.length);
      sized.writeUInt32LE(outBytes, 0);
      bytes.copy(sized, LZ4_SIZE_BYTES);
      return exactly(outBytes, uncompressSync(sized));
    },
  };
}

interface Zstd {
  compress(bytes: Buffer, level: number): Buffer;
  decompress(bytes: Buffer, outBytes: number): Buffer;
}

let zstd: Zstd | undefined;

function zstdCodec(level: number): BlockCodec {
  zstd ??= libzstd() ?? nodeZstd();
  const { compress, decompress } = zstd;
  return {
    compress: (bytes) => compress(bytes, level),
    decompress: (bytes, outBytes) => exactly(outBytes, decompress(bytes, outBytes)),
  };
}

interface Koffi {
  load(path: string): { func(prototype: string): (...args: unknown[]) => unknown };
}

/** Every Debian has libzstd.so.1: dpkg needs it. */
function libzstd(): Zstd | undefined {
  if (process.arch !== 'x64' && process.arch !== 'arm64') return undefined;
  try {
    const library = (createRequire(import.meta.url)('koffi') as Koffi).load('libzstd.so.1');
    const errorName = library.func('const char *ZSTD_getErrorName(int64_t code)');
    const bound = library.func('int64_t ZSTD_compressBound(int64_t size)');
    const compress = library.func(
      'int64_t ZSTD_compressCCtx(void *ctx, void *out, int64_t outSize, void *in, int64_t inSize, int level)',
    );
    const decompress = library.func(
      'int64_t ZSTD_decompressDCtx(void *ctx, void *out, int64_t outSize, void *in, int64_t inSize)',
    );
    // One context of each for a thread's whole life: making one costs more than a block.
    const compressor = library.func('void *ZSTD_createCCtx()')();
    const decompressor = library.func('void *ZSTD_createDCtx()')();
    const checked = (code: unknown) => {
      const value = Number(code);
      if (value < 0) throw new Error(String(errorName(value)));
      return value;
    };
    return {
      compress(bytes, level) {
        const out = Buffer.allocUnsafe(Number(bound(bytes.length)));
        return out.subarray(0, checked(compress(compressor, out, out.length, bytes, bytes.length, level)));
      },
      decompress(bytes, outBytes) {
        const out = Buffer.allocUnsafe(outBytes);
        return out.subarray(0, checked(decompress(decompressor, out, outBytes, bytes, bytes.length)));
      },
    };
  } catch {
    return undefined;
  }
}

/** What Node has from 22.15 on. */
function nodeZstd(): Zstd {
  const { zstdCompressSync, zstdDecompressSync, constants } = zlib as unknown as {
    zstdCompressSync?: (bytes: Buffer, options: object) => Buffer;
    zstdDecompressSync?: (bytes: Buffer, options: object) => Buffer;
    constants: Record<string, number>;
  };
  if (zstdCompressSync === undefined || zstdDecompressSync === undefined) {
    throw fail('ZFILE_CODEC_MISSING', { version: process.versions.node });
  }
  return {
    compress: (bytes, level) =>
      zstdCompressSync(bytes, {
        params: { [constants.ZSTD_c_compressionLevel!]: level },
        pledgedSrcSize: bytes.length,
      }),
    decompress: (bytes, outBytes) => zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, outBytes) }),
  };
}

function exactly(outBytes: number, out: Buffer): Buffer {
  if (out.length === outBytes) return out;
  throw new Error(`${out.length} bytes came out, expected ${outBytes}`);
}

/** The text of what a codec threw. */
export const codecProblem = messageOf;
