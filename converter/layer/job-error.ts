/** Errors between threads: structured cloning drops their class and fields, so they travel as plain values. */
import { DsecError, isDsecError, messageOf } from '#base';
import type { FailedJob } from './layer-job.ts';

export function packError(error: unknown): FailedJob {
  const known = isDsecError(error);
  return {
    code: known ? error.code : ((error as { code?: string } | null)?.code ?? undefined),
    message: messageOf(error),
    hint: known ? error.hint : undefined,
    row: known ? { exit: error.exit, http: error.http, retryable: error.retryable } : undefined,
    stack: error instanceof Error ? error.stack : undefined,
  };
}

export function unpackError(failed: FailedJob): Error {
  if (failed.row === undefined) {
    const error = new Error(failed.message) as Error & { code?: string };
    if (failed.code !== undefined) error.code = failed.code;
    if (failed.stack !== undefined) error.stack = failed.stack;
    return error;
  }
  // Braces in the text are literal by now; without parameters nothing is filled in again.
  return new DsecError(failed.code!, {
    message: failed.message,
    exit: failed.row.exit,
    http: failed.row.http,
    retryable: failed.row.retryable,
    ...(failed.hint === undefined ? {} : { hint: failed.hint }),
  });
}
