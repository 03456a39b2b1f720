/**
 * Trying again. Work that may succeed later throws a TransientFailure, which holds the error the caller gets when
 * patience ends; everything else passes through at once. Waits grow twofold from half a second, with jitter so that
 * many clients do not come back together; a server's Retry-After is honoured up to a minute.
 */
import { setTimeout as sleepFor } from 'node:timers/promises';
import type { DsecError } from '#base';

export class TransientFailure extends Error {
  /** What to throw when there is no other try. */
  readonly error: DsecError;
  readonly retryAfterMs: number | undefined;

  constructor(error: DsecError, retryAfterMs?: number) {
    super(error.message);
    this.error = error;
    this.retryAfterMs = retryAfterMs;
  }
}

export interface Clock {
  now(): number;
  sleep(ms: number, signal: AbortSignal | undefined): Promise<void>;
  /** 0 <= x < 1 */
  random(): number;
}

export const systemClock: Clock = {
  now: Date.now,
  sleep: async (ms, signal) => {
    await sleepFor(ms, undefined, { signal });
  },
  random: Math.random,
};

export const MAX_TRIES = 5;
const BASE_MS = 500;
const MAX_BACKOFF_MS = 15_000;
const MAX_RETRY_AFTER_MS = 60_000;

/** Calls `work` until it succeeds, at most `MAX_TRIES` times. */
export async function withRetries<T>(
  clock: Clock,
  signal: AbortSignal | undefined,
  work: () => Promise<T>,
): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    signal?.throwIfAborted();
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof TransientFailure)) throw error;
      if (attempt >= MAX_TRIES) throw error.error;
      await clock.sleep(delayMs(attempt, error.retryAfterMs, clock), signal);
    }
  }
}

export function delayMs(attempt: number, retryAfterMs: number | undefined, clock: Clock): number {
  const backoff = Math.min(BASE_MS * 2 ** (attempt - 1), MAX_BACKOFF_MS);
  const jittered = backoff * (0.5 + clock.random() / 2);
  return Math.max(jittered, Math.min(retryAfterMs ?? 0, MAX_RETRY_AFTER_MS));
}

/** A Retry-After header, seconds or a date, as milliseconds from now. */
export function parseRetryAfter(value: string | undefined, nowMs: number): number | undefined {
  if (value === undefined) return undefined;
  if (/^\d{1,9}$/.test(value)) return Number(value) * 1000;
  // Date.parse alone takes "-1" for a year.
  const date = /^[A-Za-z]{3}/.test(value) ? Date.parse(value) : Number.NaN;
  return Number.isNaN(date) ? undefined : Math.max(0, date - nowMs);
}
