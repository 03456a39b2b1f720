/**
 * The codecs of ZFile blocks: raw LZ4 blocks and zstd frames, one buffer at a time. Reading makes exactly the size that is asked for, or
 * says what is wrong; it never writes past it.
 */
import { createRequire } from 'node:module';
import { messageOf } from '#base';
import { blockZstd } from '#linux';
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

function zstdCodec(level: number): BlockCodec {
  const zstd = blockZstd();
  if (zstd === undefined) throw fail('ZFILE_CODEC_MISSING', { version: process.versions.node });
  return {
    compress: (bytes) => zstd.compress(bytes, level),
    decompress: (bytes, outBytes) => exactly(outBytes, zstd.decompress(bytes, outBytes)),
  };
}

function exactly(outBytes: number, out: Buffer): Buffer {
  if (out.length === outBytes) return out;
  throw new Error(`${out.length} bytes came out, expected ${outBytes}`);
}

/** The text of what a codec threw. */
export const codecProblem = messageOf;
