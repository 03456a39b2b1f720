/**
 * A range source that tries again: see retry-call.ts. Large ranges get more time. Goes around hedging, so that each try may be hedged, and
 * inside of limits, whose queue must not count as time of a try. Prefetch has retries of its own: it must not use up those of
 * readers, and is never patient.
 */
import type { FetchPriority, RangeSource } from '#chunk-cache';
import { RetryAllowance, type RetryOptions, retryCall, retryFor } from './retry-call.ts';

export function withRetry(source: RangeSource, options: RetryOptions = {}): RangeSource {
  const kinds: Record<FetchPriority, RetryOptions> = {
    interactive: { ...options, allowance: options.allowance ?? new RetryAllowance() },
    prefetch: { ...options, allowance: new RetryAllowance(), patient: false },
  };
  return {
    readRange: (blob, offset, lengthBytes, { signal, ...rest }) =>
      retryCall(
        (tried) => source.readRange(blob, offset, lengthBytes, { ...rest, signal: tried }),
        () => `read of ${blob}, bytes ${offset} to ${offset + lengthBytes - 1}`,
        retryFor(lengthBytes, kinds[rest.priority]),
        signal,
      ),
  };
}
