/**
 * A range source that fails now and then, for tests: of each read the seed decides alone which fault it gets, so that a run can be
 * repeated. `short` and `corrupt` break what a source promises: whoever verifies must notice.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { abortSignalOf, type StopSignal } from '#base';
import type { RangeSource } from '#chunk-cache';
import { fail } from '../../errors.ts';

export const FAULTS = ['error', 'short', 'corrupt', 'stall', 'late'] as const;
export type Fault = (typeof FAULTS)[number];

export interface FaultOptions {
  readonly seed?: number;
  /** Share of reads (0 to 1) that get each fault. */
  readonly rates: Readonly<Partial<Record<Fault, number>>>;
  /** How long `late` takes; 50 ms. */
  readonly lateMs?: number;
}

export interface FaultySource extends RangeSource {
  readonly injected: Readonly<Record<Fault, number>>;
}

export function withFaults(source: RangeSource, { seed = 1, rates, lateMs = 50 }: FaultOptions): FaultySource {
  const injected: Record<Fault, number> = { error: 0, short: 0, corrupt: 0, stall: 0, late: 0 };
  const random = randomFrom(seed);
  let count = 0;
  return {
    injected,
    async readRange(blob, offset, lengthBytes, options) {
      count++;
      // Both drawn for every read: which faults are on does not change the fate of the others.
      const [drawn, where] = [random(), random()];
      const fault = pick(drawn, rates);
      if (fault !== undefined) injected[fault]++;
      if (fault === 'error') throw fail('STORE_FAULT', { kind: fault, count });
      if (fault === 'stall') await untilAborted(options.signal);
      if (fault === 'late')
        await delay(lateMs, undefined, {
          signal: options.signal && abortSignalOf(options.signal),
        });
      const bytes = await source.readRange(blob, offset, lengthBytes, options);
      const at = Math.floor(where * bytes.length);
      if (fault === 'short') return Buffer.from(bytes.subarray(0, at));
      if (fault !== 'corrupt' || bytes.length === 0) return bytes;
      const damaged = Buffer.from(bytes);
      damaged[at]! ^= 1 << (Math.floor(drawn * 1e6) % 8);
      return damaged;
    },
  };
}

function pick(drawn: number, rates: FaultOptions['rates']): Fault | undefined {
  let below = 0;
  for (const fault of FAULTS) {
    below += rates[fault] ?? 0;
    if (drawn < below) return fault;
  }
  return undefined;
}

function untilAborted(signal: StopSignal | undefined): Promise<never> {
  return new Promise((_, reject) => {
    if (signal?.aborted) reject(signal.reason);
    signal?.addEventListener('abort', () => reject(signal.reason), { once: true });
  });
}

/** mulberry32: small, and the same everywhere. */
function randomFrom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
