/**
 * Tries again what may succeed later (`DsecError.retryable`): exponential back-off with full jitter, a time limit for each try, the
 * server's Retry-After, and an end to it all. Tries, time and the share of retries are bounded: a server in trouble gets
 * fewer requests, not more, and nobody waits for ever.
 */
import { type DsecError, isDsecError, StopController, type StopSignal } from '#base';
import { fail } from '../../errors.ts';

const BUDGET_MS = 60_000;
const TRY_TIMEOUT_MS = 30_000;
/** Before a failure is told that there was no retry left for. */
const NO_RETRY_PAUSE_MS = 500;

export interface RetryOptions {
  /** Tries in all; 6. */
  readonly attempts?: number;
  /** Tries until the time is up instead, slowly once the allowance is spent: for who has nowhere to go, as the reader of a mount. */
  readonly patient?: boolean;
  /** No try begins after this; 60 s. */
  readonly budgetMs?: number;
  /** One try; 30 s. */
  readonly tryTimeoutMs?: number;
  readonly baseDelayMs?: number;
  readonly maxDelayMs?: number;
  /** Shared by the calls to one server. */
  readonly allowance?: RetryAllowance;
  readonly clock?: RetryClock;
  readonly onRetry?: (error: DsecError, attempt: number, delayMs: number) => void;
}

export interface RetryClock {
  now(): number;
  random(): number;
  /** Rejects with the signal's reason. */
  sleep(ms: number, signal?: StopSignal): Promise<void>;
}

export const systemClock: RetryClock = {
  now: () => performance.now(),
  random: Math.random,
  sleep: (ms, signal) =>
    new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason);
      const onAbort = () => {
        clearTimeout(timer);
        reject(signal!.reason);
      };
      const timer = setTimeout(() => {
        signal?.removeEventListener('abort', onAbort);
        resolve();
      }, ms);
      signal?.addEventListener('abort', onAbort, { once: true });
    }),
};

/**
 * How many retries a server gets for its successes: each retry takes one from the purse, each success puts a part back. When most
 * calls fail, the purse is empty and each failure is told after one pause: whoever asks again at once, as a reader of a mount may,
 * would otherwise keep this process and the server as busy as they can be.
 */
export class RetryAllowance {
  readonly #most: number;
  readonly #perSuccess: number;
  #left: number;

  constructor(most = 100, perSuccess = 0.5) {
    this.#most = most;
    this.#perSuccess = perSuccess;
    this.#left = most;
  }

  take(): boolean {
    if (this.#left < 1) return false;
    this.#left--;
    return true;
  }

  succeeded(): void {
    this.#left = Math.min(this.#most, this.#left + this.#perSuccess);
  }
}

/** A connection slower than this is as good as broken. */
const SLOWEST_BYTES_PER_SECOND = 64 * 1024;

/** The same, with more time for what brings many bytes. */
export function retryFor(bytes: number, options: RetryOptions): RetryOptions {
  const moreMs = Math.min(600, Math.floor(bytes / SLOWEST_BYTES_PER_SECOND)) * 1000;
  const { tryTimeoutMs = TRY_TIMEOUT_MS, budgetMs = BUDGET_MS } = options;
  return { ...options, tryTimeoutMs: tryTimeoutMs + moreMs, budgetMs: budgetMs + 2 * moreMs };
}

/** @throws the last try's error, or the reason of `signal` */
export async function retryCall<T>(
  work: (signal: StopSignal | undefined) => Promise<T>,
  what: () => string,
  options: RetryOptions = {},
  signal?: StopSignal,
): Promise<T> {
  const {
    patient = false,
    attempts = patient ? Number.POSITIVE_INFINITY : 6,
    budgetMs = BUDGET_MS,
    tryTimeoutMs = TRY_TIMEOUT_MS,
    baseDelayMs = 50,
    maxDelayMs = 5_000,
  } = options;
  const { allowance, clock = systemClock, onRetry } = options;
  const endMs = clock.now() + budgetMs;
  for (let attempt = 1; ; attempt++) {
    signal?.throwIfAborted();
    try {
      const result = await oneTry(work, what, Math.min(tryTimeoutMs, Math.max(1, endMs - clock.now())), signal);
      allowance?.succeeded();
      return result;
    } catch (error) {
      signal?.throwIfAborted();
      if (!isDsecError(error) || !error.retryable || attempt >= attempts) throw error;
      const spent = allowance?.take() === false;
      if (spent && !patient) {
        await clock.sleep(Math.min(NO_RETRY_PAUSE_MS, maxDelayMs), signal);
        throw error;
      }
      const backOff = spent ? maxDelayMs : clock.random() * Math.min(maxDelayMs, baseDelayMs * 2 ** attempt);
      const asked = error.params.retryAfterMs;
      const delayMs = Math.max(backOff, typeof asked === 'number' ? asked : 0);
      if (clock.now() + delayMs >= endMs) throw error;
      onRetry?.(error, attempt, delayMs);
      await clock.sleep(delayMs, signal);
    }
  }
}

/** Ends after `timeoutMs`, and with the signal, even when `work` does not listen to its own. */
function oneTry<T>(
  work: (signal: StopSignal | undefined) => Promise<T>,
  what: () => string,
  timeoutMs: number,
  signal: StopSignal | undefined,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const ending = new StopController();
    const over = () => {
      clearTimeout(timer);
      signal?.removeEventListener('abort', onAbort);
    };
    const end = (reason: Error) => {
      over();
      reject(reason);
      ending.abort(reason);
    };
    const onAbort = () => end(signal!.reason);
    const timer = setTimeout(() => {
      end(fail('STORE_TIMEOUT', { what: what(), timeoutMs: Math.round(timeoutMs) }));
    }, timeoutMs);
    signal?.addEventListener('abort', onAbort, { once: true });
    const failed = (error: unknown) => {
      over();
      reject(error);
    };
    try {
      work(ending.signal).then((value) => {
        over();
        resolve(value);
      }, failed);
    } catch (error) {
      failed(error);
    }
  });
}
