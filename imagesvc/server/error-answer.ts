/** How anything thrown crosses HTTP: `{"error":{code,message,hint,requestId}}` with the status of its row. */
import { DsecError, messageOf } from '#base';
import { fail } from '../errors.ts';

export interface ErrorAnswer {
  readonly error: {
    readonly code: string;
    readonly message: string;
    readonly hint?: string;
    readonly retryable: boolean;
    readonly requestId: string;
  };
}

/** What fastify throws before a handler runs: its own errors have a code and a status. */
interface FastifyLike {
  readonly code?: unknown;
  readonly statusCode?: unknown;
  readonly validation?: unknown;
}

/** An error of a table: itself, or what stands for an error of the framework or of ours. */
export function dsecErrorOf(thrown: unknown, limits: { readonly bodyLimitBytes: number }): DsecError {
  if (thrown instanceof DsecError) return thrown;
  const { code, statusCode, validation } = (thrown ?? {}) as FastifyLike;
  if (validation !== undefined) return fail('SERVER_BAD_REQUEST', { problem: messageOf(thrown) }, thrown);
  if (code === 'FST_ERR_CTP_BODY_TOO_LARGE') {
    return fail('SERVER_BODY_TOO_LARGE', { limit: limits.bodyLimitBytes }, thrown);
  }
  if (code === 'FST_ERR_CTP_INVALID_MEDIA_TYPE') {
    return fail('SERVER_MEDIA_TYPE', { type: /: (.*)$/.exec(messageOf(thrown))?.[1] ?? '' }, thrown);
  }
  if (typeof statusCode === 'number' && statusCode >= 400 && statusCode < 500) {
    return fail('SERVER_BAD_REQUEST', { problem: messageOf(thrown) }, thrown);
  }
  return fail('SERVER_INTERNAL', {}, thrown);
}

export function errorAnswer({ code, message, hint, retryable }: DsecError, requestId: string): ErrorAnswer {
  return { error: { code, message, ...(hint === undefined ? {} : { hint }), retryable, requestId } };
}
