/** zstd layers through libzstd: frames in a stream, decoded on another thread. */
import { addressOf, type ZstdLibrary, zstdLibrary } from '#linux';
import { type InflateWindow, inflateAhead, type NativeDecoder, StreamProblem } from './inflate-ahead.ts';
import type { InflateEngine } from './inflate-engine.ts';

export function libzstdEngine(): InflateEngine | undefined {
  const loaded = zstdLibrary();
  if (loaded === undefined) return undefined;
  return {
    name: 'libzstd',
    format: 'zstd',
    inflate: (source, context) => inflateAhead(new ZstdDecoder(loaded), source, context),
  };
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
  descriptor.writeBigUInt64LE(BigInt(addressOf(bytes) + start), 0);
  descriptor.writeBigUInt64LE(BigInt(end - start), 8);
  descriptor.writeBigUInt64LE(0n, POSITION);
}
