/**
 * gzip through node:zlib: everywhere, and the yardstick for the other engine. zstd through node:zlib where Node has it
 * (22.15), for machines without libzstd; a decoder a frame, because its decoder is not sure of more than one.
 *
 * The stream inflates on Node's thread pool, and goes on by itself until a few MiB are waiting; large chunks make one
 * round of it long enough to overlap with the consumer.
 */
import type { Transform } from 'node:stream';
import * as zlib from 'node:zlib';
import { fail } from '../errors.ts';
import type { InflateContext, InflateEngine } from './inflate-engine.ts';
import { Prefetch } from './prefetch.ts';
import { isSkippableMagic, isZstdMagic, ZstdFrame } from './zstd-frames.ts';

const CHUNK_BYTES = 1 << 20;
const WAITING_BYTES = 2 << 20;
const PREFETCH_BYTES = 2 << 20;
const FEED_BYTES = 1 << 20;

type Decoder = Transform & { readonly bytesWritten: number };

const OPTIONS = { chunkSize: CHUNK_BYTES, readableHighWaterMark: WAITING_BYTES, writableHighWaterMark: 2 * FEED_BYTES };

export function nodeGzipEngine(): InflateEngine {
  return { name: 'node:zlib gzip', format: 'gzip', inflate: inflateGzip };
}

export function nodeZstdEngine(): InflateEngine | undefined {
  const create = (zlib as unknown as { createZstdDecompress?: (options: object) => Decoder }).createZstdDecompress;
  if (create === undefined) return undefined;
  return {
    name: 'node:zlib zstd',
    format: 'zstd',
    inflate: (source, context) => inflateZstd(() => create(OPTIONS), source, context),
  };
}

async function* inflateGzip(source: AsyncIterable<Buffer>, context: InflateContext): AsyncGenerator<Buffer> {
  const input = new Prefetch(source, PREFETCH_BYTES, context.signal);
  const run = new DecoderRun('gzip', context);
  try {
    const decoder = zlib.createGunzip(OPTIONS);
    let fed = 0;
    let last: Buffer = Buffer.alloc(0);
    yield* run.chunks(decoder, async () => {
      const part = await takeSome(input);
      if (part === undefined) return undefined;
      fed += part.length;
      last = part;
      return part;
    });
    // The decoder stops at a zero byte behind a member, and reports any other that begins none.
    const left = fed - decoder.bytesWritten;
    let rest: Buffer | undefined = last.subarray(last.length - left);
    for (; rest !== undefined; rest = await takeSome(input)) {
      if (rest.some((byte) => byte !== 0)) throw fail('LAYER_TRAILING', { layer: context.label, format: 'gzip' });
    }
  } finally {
    input.stop();
  }
}

async function* inflateZstd(
  create: () => Decoder,
  source: AsyncIterable<Buffer>,
  context: InflateContext,
): AsyncGenerator<Buffer> {
  const input = new Prefetch(source, PREFETCH_BYTES, context.signal);
  const run = new DecoderRun('zstd', context);
  const truncated = () => fail('LAYER_TRUNCATED', { layer: context.label, format: 'zstd', offset: run.offset });
  let frames = 0;
  let bytes: Buffer = Buffer.alloc(0);
  try {
    for (;;) {
      while (bytes.length < 4) {
        const part = await takeSome(input);
        if (part === undefined) break;
        bytes = Buffer.concat([bytes, part]);
      }
      if (bytes.length === 0 && frames > 0) return;
      if (bytes.length < 4) throw truncated();
      const magic = bytes.readUInt32LE(0);
      if (!isZstdMagic(magic)) {
        if (frames > 0) throw fail('LAYER_TRAILING', { layer: context.label, format: 'zstd' });
        throw run.damaged('not a zstd frame');
      }
      const frame = new ZstdFrame();
      const next = async (): Promise<Buffer | undefined> => {
        if (frame.isComplete) return undefined;
        if (bytes.length === 0) {
          const part = await takeSome(input);
          if (part === undefined) throw truncated();
          bytes = part;
        }
        const length = frame.push(bytes);
        const part = bytes.subarray(0, length);
        bytes = bytes.subarray(length);
        return part;
      };
      if (isSkippableMagic(magic)) while ((await next()) !== undefined);
      else yield* run.chunks(create(), next);
      frames++;
    }
  } finally {
    input.stop();
  }
}

/** Waits for something. @returns undefined at the end. */
async function takeSome(input: Prefetch): Promise<Buffer | undefined> {
  while (input.availableBytes === 0) {
    if (input.isEnded) return undefined;
    await input.more();
  }
  return input.take(FEED_BYTES);
}

/** Runs decoders over one layer and names what goes wrong in them. */
class DecoderRun {
  private readonly format: string;
  private readonly context: InflateContext;
  /** Bytes that came out. */
  offset = 0;

  constructor(format: string, context: InflateContext) {
    this.format = format;
    this.context = context;
  }

  /** Feeds a decoder from `next`, until that or the decoder ends, and yields what comes out. */
  async *chunks(decoder: Decoder, next: () => Promise<Buffer | undefined>): AsyncGenerator<Buffer> {
    let isOver = false;
    let failure: { readonly error: unknown } | undefined;
    let written: (() => void) | undefined;
    // An error may also come when nobody iterates any more: it must not end the process.
    decoder.on('error', () => {});
    // A decoder that has found its end calls no writer back: the end itself ends the wait.
    decoder.once('end', () => written?.());
    decoder.once('close', () => written?.());
    const feed = async () => {
      while (!isOver) {
        const part = await next();
        if (part === undefined) break;
        await new Promise<void>((resolve) => {
          written = resolve;
          decoder.write(part, () => resolve());
        });
      }
      if (!isOver) decoder.end();
    };
    decoder.once('end', () => {
      isOver = true;
    });
    const feeding = feed().catch((error: unknown) => {
      failure = { error };
      decoder.destroy(error as Error);
    });
    try {
      for await (const chunk of decoder as AsyncIterable<Buffer>) {
        this.context.signal?.throwIfAborted();
        this.offset += chunk.length;
        yield chunk;
      }
    } catch (error) {
      throw failure === undefined ? this.named(error) : failure.error;
    } finally {
      isOver = true;
      decoder.destroy();
    }
    // It may be waiting for input that the decoder no longer wants; what it takes then is looked at by the caller.
    await feeding;
    if (failure !== undefined) throw failure.error;
  }

  damaged(problem: string, cause?: unknown): Error {
    const { format, offset } = this;
    return fail('LAYER_DAMAGED', { layer: this.context.label, format, offset, problem }, cause);
  }

  private named(error: unknown): unknown {
    const code = (error as { code?: unknown } | null)?.code;
    if (typeof code !== 'string' || !/^(Z_|ZSTD_|ERR_ZLIB|ERR_ZSTD)/.test(code)) return error;
    if (code !== 'Z_BUF_ERROR') return this.damaged((error as Error).message, error);
    return fail('LAYER_TRUNCATED', { layer: this.context.label, format: this.format, offset: this.offset }, error);
  }
}
