/** The kind of records that say which image a trace is of, and what traces may be called. */

export const TRACE_RECORDS = 'trace';

/** 1 to 64 of `a-z 0-9 . -`, a letter or digit first and last. They are part of record keys. */
const NAME = /^[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?$/;

export function isTraceName(value: unknown): value is string {
  return typeof value === 'string' && NAME.test(value);
}
