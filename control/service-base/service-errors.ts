/** How anything thrown in a service of the cluster crosses HTTP: `{"error":{code,message,hint,retryable,exit,requestId}}`, with the status of its row. */
import { DsecError, messageOf } from '#base';
import { fail } from '../errors.ts';

/** An error of a table: itself, or what stands for an error of the framework or of ours. */
export function serviceErrorOf(thrown: unknown): DsecError {
  if (thrown instanceof DsecError) return thrown;
  const { code, statusCode, validation } = (thrown ?? {}) as {
    readonly code?: unknown;
    readonly statusCode?: unknown;
    readonly validation?: unknown;
  };
  const problem = messageOf(thrown);
  // Of the request's own connection: those to others are errors of a table.
  if (code === 'ECONNRESET' && problem === 'aborted') return fail('API_CALLER_GONE', {}, thrown);
  if (code === 'FST_ERR_CTP_BODY_TOO_LARGE') return fail('SERVICE_BODY_TOO_LARGE', {}, thrown);
  if (code === 'FST_ERR_CTP_INVALID_MEDIA_TYPE') return fail('SERVICE_MEDIA_TYPE', {}, thrown);
  if (validation !== undefined || (typeof statusCode === 'number' && statusCode >= 400 && statusCode < 500)) {
    return fail('SERVICE_BAD_REQUEST', { problem }, thrown);
  }
  return fail('SERVICE_INTERNAL', {}, thrown);
}

/** `reason`: of a sandbox that is gone, where it is known, as its `end` has it: `expired`, `out-of-memory`. */
export function errorBody({ code, message, hint, retryable, exit, params }: DsecError, requestId: string | undefined) {
  return { error: { code, message, reason: params.ended, hint, retryable, exit, requestId } };
}

const DEFAULT_RETRY_SECONDS = 1;

/** Where waiting helps: in how many seconds to ask again. An error's own `retryAfter` (seconds) goes first. */
export function retryAfterOf({ http, retryable, params }: DsecError): number | undefined {
  if (http !== 429 && http !== 503) return undefined;
  if (typeof params.retryAfter === 'number') return Math.max(1, Math.ceil(params.retryAfter));
  return retryable ? DEFAULT_RETRY_SECONDS : undefined;
}
