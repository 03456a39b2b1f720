/**
 * gzip through our own library (linux/native/), where it is built: as fast as ISA-L, on every x64 machine with a Rust compiler, and
 * without a hand-over between threads. Output comes in pieces of whatever size is there; the other thread goes on meanwhile, as
 * far as the rings reach.
 */
import { availableParallelism } from 'node:os';
import { setImmediate as turn } from 'node:timers/promises';
import { Gunzip, type GunzipPause, type GunzipRings, gunzipFallback, gunzipRings } from '#linux';
import { fail } from '../errors.ts';
import type { InflateContext, InflateEngine } from './inflate-engine.ts';
import { Prefetch } from './prefetch.ts';

/**
 * How far inflating may be ahead of the consumer: where data is slow to inflate or to consume, the other side has something to do. With
 * more cores several layers go side by side, and even that out.
 */
const OUT_BYTES = availableParallelism() > 2 ? 8 << 20 : 64 << 20;
const INPUT_BYTES = availableParallelism() > 2 ? 8 << 20 : 16 << 20;
const PREFETCH_BYTES = 4 << 20;
/** All that one stream may hold of its source. */
export const AHEAD_BYTES = OUT_BYTES + INPUT_BYTES + PREFETCH_BYTES;
/** A run is not begun for less, unless no more comes. */
const LEAST_INPUT_BYTES = 256 << 10;
/** Of one piece. Small, since nothing else is done by this thread meanwhile: input that has arrived waits. */
const MOST_BYTES = 512 << 10;
/** Less is waited for, unless no more comes: each piece costs a turn of the event loop. */
const LEAST_BYTES = 256 << 10;

/** Of streams before, for the next ones: new memory costs more than what is in it already. */
const spare: GunzipRings[] = [];
const MOST_SPARE = 2;

/** `giveRings` once no run is under way. */
export function takeRings(): GunzipRings {
  return spare.pop() ?? gunzipRings(OUT_BYTES, INPUT_BYTES);
}

export function giveRings(rings: GunzipRings): void {
  if (spare.length < MOST_SPARE) spare.push(rings);
}

/** What a stream that cannot go on is refused with. */
export function gunzipProblem(pause: Exclude<GunzipPause, string>, layer: string, offset: number): Error {
  const about = { layer, format: 'gzip' };
  if (pause.kind === 'unreadable') return pause.error;
  if (pause.kind === 'trailing') return fail('LAYER_TRAILING', about);
  return fail('LAYER_DAMAGED', { ...about, offset, problem: pause.problem });
}

export function nativeGzipEngine(): InflateEngine | undefined {
  if (gunzipFallback() !== undefined) return undefined;
  return { name: 'linux/native', format: 'gzip', inflate };
}

async function* inflate(source: AsyncIterable<Buffer>, context: InflateContext): AsyncGenerator<Buffer> {
  const rings = takeRings();
  const inflation = new Inflation(source, context.signal, rings);
  const { stream } = inflation;
  let offset = 0;
  try {
    for (;;) {
      context.signal?.throwIfAborted();
      inflation.advance();
      const bytes = stream.output(MOST_BYTES);
      if (bytes.length > 0 && (stream.waitingBytes >= LEAST_BYTES || inflation.running === undefined)) {
        offset += bytes.length;
        yield bytes;
        stream.take(bytes.length);
        // A consumer that never waits would keep input from arriving.
        await turn();
      } else if (inflation.running !== undefined) {
        if (stream.isRunning) stream.wait(LEAST_BYTES);
        if (!stream.isRunning) await inflation.running;
        else if (stream.waitingBytes < LEAST_BYTES) await turn();
      } else if (typeof inflation.pause === 'object') {
        throw gunzipProblem(inflation.pause, context.label, offset);
      } else if (inflation.arriving !== undefined) {
        await inflation.arriving;
      } else if (stream.isComplete) {
        return;
      } else {
        throw fail('LAYER_TRUNCATED', { layer: context.label, format: 'gzip', offset });
      }
    }
  } finally {
    await inflation.stop();
    giveRings(rings);
  }
}

/** Goes on by itself as far as the rings reach: also while its consumer is busy, or has another layer to do first. */
class Inflation {
  readonly stream: Gunzip;
  readonly #input: Prefetch;
  /** The run that is under way. */
  running: Promise<void> | undefined;
  /** Why the last run ended. */
  pause: GunzipPause = 'input';
  /** Input that a run waits for; rejected with what the source has failed with. */
  arriving: Promise<void> | undefined;
  #isStopped = false;

  constructor(source: AsyncIterable<Buffer>, signal: AbortSignal | undefined, rings: GunzipRings) {
    this.stream = new Gunzip(rings);
    this.#input = new Prefetch(source, PREFETCH_BYTES, signal);
  }

  advance(): void {
    if (this.#isStopped) return;
    this.#feed();
    if (this.running !== undefined || typeof this.pause === 'object') return;
    const { stream } = this;
    if (this.pause === 'room') {
      if (stream.hasRoom) this.#run();
    } else if (stream.unreadBytes >= LEAST_INPUT_BYTES || (stream.unreadBytes > 0 && this.#input.isEnded)) {
      this.#run();
    } else if (this.arriving === undefined && !this.#input.isEnded) {
      this.#await();
    }
  }

  #feed(): void {
    while (this.#input.availableBytes > 0) {
      const space = this.stream.space();
      if (space.length === 0) return;
      this.stream.put(this.#input.copy(space, 0));
    }
  }

  #run(): void {
    this.running = this.stream.run().then((pause) => {
      this.pause = pause;
      this.running = undefined;
      this.advance();
    });
    // It may fail while the consumer is busy; it is waited for when there is nothing else to do.
    this.running.catch(() => {});
  }

  #await(): void {
    this.arriving = this.#input.more().then(() => {
      this.arriving = undefined;
      this.advance();
    });
    this.arriving.catch(() => {});
  }

  /** Until the other thread is done with the rings: in a moment, since nobody takes anything out any more. */
  async stop(): Promise<void> {
    this.#isStopped = true;
    this.#input.stop();
    await this.running?.catch(() => {});
  }
}
