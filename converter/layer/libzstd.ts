/**
 * zstd through libzstd.so.1, which every Debian has (dpkg needs it): streams for layers, single buffers for clusters.
 * Preferred to node:zlib's zstd, which Node has from 22.15 only and which stops behind the first frame.
 */
import { type InflateWindow, inflateAhead, type NativeDecoder, StreamProblem } from './inflate-ahead.ts';
import type { InflateEngine } from './inflate-engine.ts';
import { addressOf, openNativeLibrary } from './native-library.ts';

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

export function libzstdEngine(): InflateEngine | undefined {
  const loaded = zstdLibrary();
  if (loaded === undefined) return undefined;
  return {
    name: 'libzstd',
    format: 'zstd',
    inflate: (source, context) => inflateAhead(new ZstdDecoder(loaded), source, context),
  };
}

function loadLibrary(): ZstdLibrary | undefined {
  if (process.arch !== 'x64' && process.arch !== 'arm64') return undefined;
  try {
    const lib = openNativeLibrary('libzstd.so.1');
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
    // One context of each for a thread's whole life: making one costs more than a cluster.
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

/** Of `ZSTD_inBuffer` and `ZSTD_outBuffer`: pointer, size, position. */
const BUFFER_BYTES = 24;
const POSITION = 16;
/** ZSTD_error_prefix_unknown: what should be a frame begins like none. */
const PREFIX_UNKNOWN = -10;

class ZstdDecoder implements NativeDecoder {
  readonly format = 'zstd';
  private readonly lib: ZstdLibrary;
  private stream: unknown;
  private readonly input = Buffer.alloc(BUFFER_BYTES);
  private readonly output = Buffer.alloc(BUFFER_BYTES);
  private frames = 0;
  private isInFrame = false;

  constructor(lib: ZstdLibrary) {
    this.lib = lib;
    this.stream = lib.newStream();
  }

  get isComplete(): boolean {
    return !this.isInFrame && this.frames > 0;
  }

  async step(window: InflateWindow, out: Buffer, at: number): Promise<number> {
    // Between frames an empty call would begin one.
    if (!this.isInFrame && window.start === window.end) return 0;
    aim(this.input, window.bytes, window.start, window.end);
    aim(this.output, out, at, out.length);
    this.isInFrame = true;
    const code = await new Promise<number>((resolve, reject) => {
      this.lib.decompressStreamAsync(this.stream, this.output, this.input, (error, result) =>
        error ? reject(error) : resolve(Number(result)),
      );
    });
    window.start += Number(this.input.readBigUInt64LE(POSITION));
    if (code < 0) {
      const isForeign = code === PREFIX_UNKNOWN && this.frames > 0;
      throw new StreamProblem(isForeign ? 'trailing' : 'damaged', this.lib.errorName(code));
    }
    if (code === 0) {
      this.isInFrame = false;
      this.frames++;
    }
    return Number(this.output.readBigUInt64LE(POSITION));
  }

  close(): void {
    if (this.stream !== undefined) this.lib.freeStream(this.stream);
    this.stream = undefined;
  }
}

function aim(descriptor: Buffer, bytes: Buffer, start: number, end: number): void {
  descriptor.writeBigUInt64LE(addressOf(bytes) + BigInt(start), 0);
  descriptor.writeBigUInt64LE(BigInt(end - start), 8);
  descriptor.writeBigUInt64LE(0n, POSITION);
}
