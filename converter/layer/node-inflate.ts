/**
 * gzip through node:zlib: everywhere, and the yardstick for the other engine. zstd through node:zlib where Node has it
 * (22.15), for machines without libzstd.
 *
 * The stream inflates on Node's thread pool, and goes on by itself until a few MiB are waiting; large chunks make one
 * round of it long enough to overlap with the consumer.
 */
import type { Transform } from 'node:stream';
import * as zlib from 'node:zlib';
import { fail } from '../errors.ts';
import type { InflateContext, InflateEngine } from './inflate-engine.ts';
import { Prefetch } from './prefetch.ts';
import { ZstdFrames } from './zstd-frames.ts';

const CHUNK_BYTES = 1 << 20;
const WAITING_BYTES = 2 << 20;
const PREFETCH_BYTES = 2 << 20;
const FEED_BYTES = 1 << 20;

type Decoder = Transform & { readonly bytesWritten: number };

const OPTIONS = { chunkSize: CHUNK_BYTES, readableHighWaterMark: WAITING_BYTES, writableHighWaterMark: 2 * FEED_BYTES };

export function nodeGzipEngine(): InflateEngine {
  return {
    name: 'node:zlib gzip',
    format: 'gzip',
    inflate: (source, context) => inflateWithNode(() => zlib.createGunzip(OPTIONS), 'gzip', source, context),
  };
}

export function nodeZstdEngine(): InflateEngine | undefined {
  const create = (zlib as unknown as { createZstdDecompress?: (options: object) => Decoder }).createZstdDecompress;
  if (create === undefined) return undefined;
  return {
    name: 'node:zlib zstd',
    format: 'zstd',
    inflate: (source, context) => inflateWithNode(() => create(OPTIONS), 'zstd', source, context),
  };
}

async function* inflateWithNode(
  create: () => Decoder,
  format: 'gzip' | 'zstd',
  source: AsyncIterable<Buffer>,
  context: InflateContext,
): AsyncGenerator<Buffer> {
  const input = new Prefetch(source, PREFETCH_BYTES, context.signal);
  const frames = format === 'zstd' ? new ZstdFrames() : undefined;
  let offset = 0;
  let decoder: Decoder | undefined;
  let rest: Buffer = Buffer.alloc(0);
  const take = async (): Promise<Buffer> => {
    while (input.availableBytes === 0 && !input.isEnded) await input.more();
    const part = input.take(FEED_BYTES);
    frames?.push(part);
    return part;
  };
  try {
    do {
      const current = create();
      decoder = current;
      // What went in last: what the decoder leaves of it follows the end of the stream, or begins another frame.
      let last = rest;
      let fed = 0;
      let isOver = false;
      let failure: { error: unknown } | undefined;
      let written: (() => void) | undefined;
      // A decoder that has found its end calls no writer back: the end itself ends the wait.
      current.once('end', () => written?.());
      current.once('close', () => written?.());
      const feed = async () => {
        for (let part = rest; !isOver; part = await take()) {
          if (part.length === 0 && input.isEnded) break;
          if (part.length === 0) continue;
          last = part;
          fed += part.length;
          await new Promise<void>((resolve) => {
            written = resolve;
            current.write(part, () => resolve());
          });
        }
        if (!isOver) current.end();
      };
      const feeding = feed().catch((error: unknown) => {
        failure = { error };
        current.destroy(error as Error);
      });
      try {
        for await (const chunk of current as AsyncIterable<Buffer>) {
          context.signal?.throwIfAborted();
          offset += chunk.length;
          yield chunk;
        }
      } catch (error) {
        throw failure === undefined ? named(error, format, context.label, offset) : failure.error;
      } finally {
        isOver = true;
      }
      await feeding;
      const left = fed - current.bytesWritten;
      rest = left > 0 ? last.subarray(last.length - left) : Buffer.alloc(0);
      if (rest.length === 0) rest = await take();
    } while (format === 'zstd' && rest.length > 0);
    if (frames !== undefined && !frames.isComplete) {
      throw fail('LAYER_TRUNCATED', { layer: context.label, format, offset });
    }
    for (; rest.length > 0; rest = await take()) {
      if (rest.some((byte) => byte !== 0)) throw fail('LAYER_TRAILING', { layer: context.label, format });
    }
  } finally {
    input.stop();
    decoder?.destroy();
  }
}

function named(error: unknown, format: string, layer: string, offset: number): unknown {
  const code = (error as { code?: unknown } | null)?.code;
  if (typeof code !== 'string' || !/^(Z_|ZSTD_|ERR_ZLIB|ERR_ZSTD)/.test(code)) return error;
  if (code === 'Z_BUF_ERROR') return fail('LAYER_TRUNCATED', { layer, format, offset }, error);
  return fail('LAYER_DAMAGED', { layer, format, offset, problem: (error as Error).message }, error);
}
