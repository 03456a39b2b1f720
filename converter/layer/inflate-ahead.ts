/**
 * Drives a native decoder one block ahead of its consumer: the next block is already being inflated on another thread
 * when a block is handed out, so a consumer that blocks the JavaScript thread costs nothing but its own time.
 *
 * Compressed bytes are gathered in a window of our own before each step. One step then fills one block without coming
 * back for input, and the memory that the other thread reads is touched by nobody else.
 */
import { setImmediate as turn } from 'node:timers/promises';
import { fail } from '../errors.ts';
import type { InflateContext } from './inflate-engine.ts';
import { Prefetch } from './prefetch.ts';

/**
 * Of one block. Two exist: one with the consumer, one being filled. Whoever is done first waits for the other: in a large block
 * what is quick to inflate or to consume and what is slow even out.
 */
const BLOCK_BYTES = 4 << 20;
/** A block that does not compress at all fits, with what is left of the one before. */
const WINDOW_BYTES = 2 * BLOCK_BYTES;
const PREFETCH_BYTES = 4 << 20;
/**
 * Below this a step waits for more input, unless there is none: a step that runs out of input in the middle of a block
 * cannot go on while the consumer holds the JavaScript thread.
 */
const LEAST_STEP_BYTES = 2 << 20;

/** Compressed bytes at hand: `bytes[start..end)`. */
export interface InflateWindow {
  readonly bytes: Buffer;
  start: number;
  end: number;
}

export interface NativeDecoder {
  readonly format: 'gzip' | 'zstd';
  /**
   * Inflates from the window into `out[at..]` on another thread; moves `window.start` past what it used.
   * @returns the bytes it made. 0 with nothing used means that it needs more input, or that the stream may end here.
   * @throws `StreamProblem`
   */
  step(window: InflateWindow, out: Buffer, at: number): Promise<number>;
  /** Whether the stream may end where the decoder is. */
  readonly isComplete: boolean;
  /** Frees what it holds. Never called while a step is under way. */
  close(): void;
}

/** What a decoder finds wrong; the driver adds the layer and the position. */
export class StreamProblem extends Error {
  readonly kind: 'damaged' | 'trailing';

  constructor(kind: 'damaged' | 'trailing', message: string) {
    super(message);
    this.name = 'StreamProblem';
    this.kind = kind;
  }
}

export async function* inflateAhead(
  decoder: NativeDecoder,
  source: AsyncIterable<Buffer>,
  context: InflateContext,
): AsyncGenerator<Buffer> {
  const input = new Prefetch(source, PREFETCH_BYTES, context.signal);
  const window: InflateWindow = { bytes: Buffer.allocUnsafeSlow(WINDOW_BYTES), start: 0, end: 0 };
  let offset = 0;
  let isStopped = false;

  const gather = () => {
    // What is at hand is enough for a step: moving the rest of the window to its front each time would cost more.
    if (input.availableBytes === 0 || window.end - window.start >= LEAST_STEP_BYTES) return;
    if (window.start > 0) {
      window.bytes.copyWithin(0, window.start, window.end);
      window.end -= window.start;
      window.start = 0;
    }
    window.end += input.copy(window.bytes, window.end);
  };

  /** @returns the bytes in `block`: fewer than it holds only at the end of the stream. */
  const fill = async (block: Buffer): Promise<number> => {
    let made = 0;
    while (made < block.length && !isStopped) {
      gather();
      if (window.end - window.start < LEAST_STEP_BYTES && !input.isEnded) {
        await input.more();
        continue;
      }
      const start = window.start;
      const n = await decoder.step(window, block, made);
      made += n;
      context.signal?.throwIfAborted();
      if (n > 0 || window.start > start) continue;
      if (!input.isEnded) {
        if (window.end - window.start === window.bytes.length) {
          throw new StreamProblem('damaged', 'a header has no end');
        }
        if (input.availableBytes === 0) await input.more();
        continue;
      }
      if (!decoder.isComplete || window.start < window.end) {
        throw fail('LAYER_TRUNCATED', { layer: context.label, format: decoder.format, offset: offset + made });
      }
      break;
    }
    offset += made;
    return made;
  };

  let pending: Promise<number> | undefined;
  const begin = (block: Buffer): Promise<number> => {
    const filling = fill(block).catch((error: unknown) => {
      throw error instanceof StreamProblem ? named(error, decoder.format, context.label, offset) : error;
    });
    // It may fail while the consumer is busy with the block before; it is looked at when the next one is asked for.
    filling.catch(() => {});
    return filling;
  };
  try {
    let block: Buffer = Buffer.allocUnsafeSlow(BLOCK_BYTES);
    let other: Buffer | undefined;
    pending = begin(block);
    for (;;) {
      const made: number = await pending;
      pending = undefined;
      if (made === 0) return;
      if (made < block.length) {
        yield block.subarray(0, made);
        return;
      }
      const full = block;
      block = other ??= Buffer.allocUnsafeSlow(BLOCK_BYTES);
      other = full;
      pending = begin(block);
      // One turn of the event loop for each block: a consumer that never waits would keep input from arriving.
      await turn();
      yield full;
    }
  } finally {
    isStopped = true;
    input.stop();
    // Another thread may still write into the block: neither it nor the decoder may go before it is done.
    await pending?.catch(() => {});
    decoder.close();
  }
}

function named(problem: StreamProblem, format: string, layer: string, offset: number): Error {
  return problem.kind === 'trailing'
    ? fail('LAYER_TRAILING', { layer, format })
    : fail('LAYER_DAMAGED', { layer, format, offset, problem: problem.message });
}
