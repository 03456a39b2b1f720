/** The codecs of `--compress`: 64 KiB clusters in and out. EROFS right-aligns a cluster in its blocks behind zero bytes. */
import { compressors, decompressors } from '../erofs/codec.ts';

export type CodecName = 'lz4' | 'deflate' | 'zstd';

export const CODEC_NAMES: readonly CodecName[] = ['lz4', 'deflate', 'zstd'];

export interface Codec {
  readonly name: CodecName;
  /** Bytes as EROFS stores them, before padding. */
  compress(bytes: Buffer): Buffer;
  /** `padded` may begin with zero bytes, as stored. */
  decompress(padded: Buffer, sizeBytes: number): Buffer;
}

/** Levels where each codec's curve of size against time bends on root file systems (bench/micro has the sweep). */
const DEFLATE_LEVEL = 6;
const ZSTD_LEVEL = 3;

export function codecFor(name: CodecName): Codec {
  const compress = {
    lz4: (bytes: Buffer) => compressors.lz4(bytes),
    deflate: (bytes: Buffer) => compressors.deflate(bytes, DEFLATE_LEVEL),
    zstd: (bytes: Buffer) => compressors.zstd(bytes, ZSTD_LEVEL),
  }[name];
  return {
    name,
    compress,
    decompress(padded, sizeBytes) {
      let start = 0;
      while (start < padded.length && padded[start] === 0) start++;
      return decompressors[name](padded.subarray(start), sizeBytes);
    },
  };
}
