/**
 * Layer blobs, inflated: gzip, zstd or as they are, by name or by their first bytes. The fastest engine of this machine
 * does the work, ahead of the consumer and off its thread (see inflate-ahead.ts).
 */

import { fail } from '../errors.ts';
import { igzipEngine } from './igzip.ts';
import type { InflateContext, InflateEngine } from './inflate-engine.ts';
import { libzstdEngine } from './libzstd.ts';
import { nativeGzipEngine } from './native-gunzip.ts';
import { nodeGzipEngine, nodeZstdEngine } from './node-inflate.ts';
import { isZstdMagic } from './zstd-frames.ts';

export type Compression = 'gzip' | 'zstd' | 'plain' | 'detect';

export interface DecompressOptions {
  readonly signal?: AbortSignal;
  /** Names the layer in errors. */
  readonly label?: string;
}

/**
 * @yields chunks of some MiB where there is that much. A chunk is valid until the next one is asked for.
 * @throws LAYER_DAMAGED, LAYER_TRUNCATED, LAYER_TRAILING, CODEC_MISSING; what `source` throws; the signal's reason.
 */
export async function* decompress(
  source: AsyncIterable<Buffer>,
  compression: Compression,
  options: DecompressOptions = {},
): AsyncGenerator<Buffer> {
  const context: InflateContext = { label: options.label ?? 'layer', signal: options.signal };
  let format = compression;
  let input = source;
  if (compression === 'detect') {
    const peeked = await peek(source, 4);
    format = detectCompression(peeked.first);
    input = peeked.source;
  }
  if (format === 'gzip') yield* gzipEngine().inflate(input, context);
  else if (format === 'zstd') yield* zstdEngine().inflate(input, context);
  else {
    for await (const chunk of input) {
      context.signal?.throwIfAborted();
      if (chunk.length > 0) yield chunk;
    }
  }
}

/** By the first four bytes; anything unknown is plain. */
export function detectCompression(first: Buffer): 'gzip' | 'zstd' | 'plain' {
  if (first.length >= 2 && first[0] === 0x1f && first[1] === 0x8b) return 'gzip';
  if (first.length >= 4 && isZstdMagic(first.readUInt32LE(0))) return 'zstd';
  return 'plain';
}

/** Every engine that works on this machine, the preferred one of each format first. */
export function inflateEngines(): InflateEngine[] {
  return [nativeGzipEngine(), igzipEngine(), nodeGzipEngine(), libzstdEngine(), nodeZstdEngine()].filter(
    (engine) => engine !== undefined,
  );
}

function gzipEngine(): InflateEngine {
  return nativeGzipEngine() ?? igzipEngine() ?? nodeGzipEngine();
}

function zstdEngine(): InflateEngine {
  const engine = libzstdEngine() ?? nodeZstdEngine();
  if (engine !== undefined) return engine;
  throw fail('CODEC_MISSING', {
    codec: 'zstd',
    problem: `libzstd.so.1 cannot be loaded, and Node ${process.versions.node} has no zstd`,
    remedy: 'apt install libzstd1, or use Node 22.15 or newer',
  });
}

/** The first bytes of a source, and a source that still has them. */
async function peek(
  source: AsyncIterable<Buffer>,
  wantBytes: number,
): Promise<{ first: Buffer; source: AsyncIterable<Buffer> }> {
  const iterator = source[Symbol.asyncIterator]();
  const chunks: Buffer[] = [];
  let have = 0;
  while (have < wantBytes) {
    const step = await iterator.next();
    if (step.done) break;
    chunks.push(step.value);
    have += step.value.length;
  }
  const first = Buffer.concat(chunks.map((chunk) => chunk.subarray(0, wantBytes)));
  const whole: AsyncIterator<Buffer> = {
    next: async () => {
      const chunk = chunks.shift();
      return chunk === undefined ? iterator.next() : { done: false, value: chunk };
    },
    return: async (value) => (await iterator.return?.(value)) ?? { done: true, value },
  };
  return { first, source: { [Symbol.asyncIterator]: () => whole } };
}
