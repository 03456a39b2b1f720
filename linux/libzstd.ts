/**
 * zstd through libzstd.so.1, which every Debian has (dpkg needs it): streams, and blocks that fit into a Buffer.
 * Preferred to node:zlib's zstd, which Node has from 22.15 only and which stops behind the first frame.
 */
import * as zlib from 'node:zlib';
import { openSystemLibrary } from './system-library.ts';

/** Negative results are errors: size_t read as a signed number. */
export interface ZstdLibrary {
  errorName(code: number): string;
  newStream(): unknown;
  freeStream(stream: unknown): void;
  decompressStreamAsync(
    stream: unknown,
    out: Buffer,
    input: Buffer,
    done: (error: unknown, code: number) => void,
  ): void;
  compressBound(sizeBytes: number): number;
  compress(out: Buffer, outBytes: number, input: Buffer, inputBytes: number, level: number): number;
  decompress(out: Buffer, outBytes: number, input: Buffer, inputBytes: number): number;
}

let library: ZstdLibrary | undefined | null = null;

export function zstdLibrary(): ZstdLibrary | undefined {
  if (library === null) library = loadLibrary();
  return library;
}

function loadLibrary(): ZstdLibrary | undefined {
  if (process.arch !== 'x64' && process.arch !== 'arm64') return undefined;
  try {
    const lib = openSystemLibrary('libzstd.so.1');
    const errorName = lib.bind('const char *ZSTD_getErrorName(int64_t code)');
    const newStream = lib.bind('void *ZSTD_createDStream()');
    const freeStream = lib.bind('int64_t ZSTD_freeDStream(void *stream)');
    const decompressStream = lib.bind('int64_t ZSTD_decompressStream(void *stream, void *out, void *in)');
    const bound = lib.bind('int64_t ZSTD_compressBound(int64_t size)');
    const newCompressor = lib.bind('void *ZSTD_createCCtx()');
    const newDecompressor = lib.bind('void *ZSTD_createDCtx()');
    const compress = lib.bind(
      'int64_t ZSTD_compressCCtx(void *ctx, void *out, int64_t outSize, void *in, int64_t inSize, int level)',
    );
    const decompress = lib.bind(
      'int64_t ZSTD_decompressDCtx(void *ctx, void *out, int64_t outSize, void *in, int64_t inSize)',
    );
    // One context of each for a thread's whole life: making one costs more than a block.
    let compressor: unknown;
    let decompressor: unknown;
    return {
      errorName: (code) => errorName(code) as string,
      newStream: () => newStream(),
      freeStream: (stream) => {
        freeStream(stream);
      },
      decompressStreamAsync: (stream, out, input, done) => decompressStream.async(stream, out, input, done),
      compressBound: (sizeBytes) => Number(bound(sizeBytes)),
      compress: (out, outBytes, input, inputBytes, level) => {
        compressor ??= newCompressor();
        return Number(compress(compressor, out, outBytes, input, inputBytes, level));
      },
      decompress: (out, outBytes, input, inputBytes) => {
        decompressor ??= newDecompressor();
        return Number(decompress(decompressor, out, outBytes, input, inputBytes));
      },
    };
  } catch {
    return undefined;
  }
}

export interface BlockZstd {
  /** One frame. */
  compress(bytes: Buffer, level: number): Buffer;
  /** Never more than `outBytes`. @throws Error whose message says what is wrong with the frame */
  decompress(bytes: Buffer, outBytes: number): Buffer;
}

let block: BlockZstd | undefined | null = null;

/** Of libzstd, else of Node; undefined where neither is. */
export function blockZstd(): BlockZstd | undefined {
  if (block === null) {
    const found = zstdLibrary();
    block = found === undefined ? nodeZstd() : blocksOf(found);
  }
  return block;
}

function blocksOf(lib: ZstdLibrary): BlockZstd {
  const made = (out: Buffer, code: number) => {
    if (code < 0) throw new Error(lib.errorName(code));
    return out.subarray(0, code);
  };
  return {
    compress(bytes, level) {
      const out = Buffer.allocUnsafe(lib.compressBound(bytes.length));
      return made(out, lib.compress(out, out.length, bytes, bytes.length, level));
    },
    decompress(bytes, outBytes) {
      const out = Buffer.allocUnsafe(outBytes);
      return made(out, lib.decompress(out, outBytes, bytes, bytes.length));
    },
  };
}

/** What Node has from 22.15 on. */
function nodeZstd(): BlockZstd | undefined {
  const { zstdCompressSync, zstdDecompressSync, constants } = zlib as unknown as {
    zstdCompressSync?: (bytes: Buffer, options: object) => Buffer;
    zstdDecompressSync?: (bytes: Buffer, options: object) => Buffer;
    constants: Record<string, number>;
  };
  if (zstdCompressSync === undefined || zstdDecompressSync === undefined) return undefined;
  return {
    compress: (bytes, level) =>
      zstdCompressSync(bytes, {
        params: { [constants.ZSTD_c_compressionLevel!]: level },
        pledgedSrcSize: bytes.length,
      }),
    decompress: (bytes, outBytes) => zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, outBytes) }),
  };
}
