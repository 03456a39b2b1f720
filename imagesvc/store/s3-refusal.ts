/**
 * What an S3 server says, in the store's words: which answers are worth another try, which are for good, and what the user can do.
 * One place for both ways to a server: our own requests, and the SDK's.
 */
import { type DsecError, isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

/** Where something was asked for. */
export interface Asked {
  /** URL of the store. */
  readonly store: string;
  readonly bucket: string;
  /** `read of blobs/sha256/…` */
  readonly action: string;
}

export interface Answer {
  readonly status: number;
  /** `<Code>` and `<Message>` of an error's XML. */
  readonly code?: string;
  readonly message?: string;
  /** Where the bucket is, when the server says. */
  readonly region?: string;
  readonly retryAfter?: string;
}

const RETRYABLE = new Set([408, 425, 429, 500, 502, 503, 504]);
const RETRYABLE_CODES = new Set([
  'RequestTimeout',
  'SlowDown',
  'InternalError',
  'OperationAborted',
  'ServiceUnavailable',
]);
const EXPIRED = new Set(['ExpiredToken', 'TokenRefreshRequired', 'InvalidToken', 'ExpiredTokenException']);
/** What a server may make us wait between two tries, at most. */
const MAX_RETRY_AFTER_MS = 300_000;

/** The error for an answer that is no success. Answers that mean "no such object" are the caller's. */
export function refusal(asked: Asked, answer: Answer): DsecError {
  const { store, action, bucket } = asked;
  const { status, code, region } = answer;
  const reason = [code ?? `status ${status}`, answer.message].filter(Boolean).join(': ').slice(0, 300);
  if (code === 'NoSuchBucket') return fail('STORE_BUCKET', { store, bucket });
  if (region !== undefined && [301, 307, 308, 400].includes(status)) return fail('STORE_REGION', { store, region });
  if (RETRYABLE.has(status) || (code !== undefined && RETRYABLE_CODES.has(code))) {
    return fail('STORE_REMOTE', { store, action, reason, retryAfterMs: parseRetryAfter(answer.retryAfter) });
  }
  if (status === 401 || status === 403 || isExpired(answer))
    return fail('STORE_REMOTE_ACCESS', { store, action, reason });
  if (status === 507) return fail('STORE_FULL', { store, path: store, reason });
  return fail('STORE_REMOTE_ANSWER', { store, action, what: reason });
}

export function isExpired(answer: Answer): boolean {
  return answer.code !== undefined && EXPIRED.has(answer.code);
}

/** The header's seconds or date, in milliseconds from now. */
export function parseRetryAfter(text: string | undefined, nowMs = Date.now()): number | undefined {
  if (text === undefined) return undefined;
  const ms = /^\d+$/.test(text.trim()) ? Number(text) * 1000 : Date.parse(text) - nowMs;
  return Number.isFinite(ms) ? Math.min(MAX_RETRY_AFTER_MS, Math.max(0, ms)) : undefined;
}

/** The error for a connection that failed. Ours pass through. */
export function connectionFailure(asked: Asked, error: unknown): DsecError {
  if (isDsecError(error)) return error;
  const { store, action } = asked;
  const code = systemCode(error) ?? systemCode((error as { cause?: unknown } | null)?.cause) ?? '';
  if (/CERT|SELF_SIGNED|UNABLE_TO|ALTNAME/.test(code)) return fail('STORE_CERTIFICATE', { store, reason: code }, error);
  if (/WRONG_VERSION_NUMBER|EPROTO|PACKET_LENGTH|UNSUPPORTED_PROTOCOL/.test(code)) {
    return fail(
      'STORE_REMOTE_ANSWER',
      { store, action, what: 'no TLS (is the endpoint http instead of https?)' },
      error,
    );
  }
  return fail('STORE_REMOTE', { store, action, reason: describe(error, code) }, error);
}

function describe(error: unknown, code: string): string {
  switch (code) {
    case 'ECONNREFUSED':
      return 'connection refused';
    case 'ENOTFOUND':
      return `no such host (${messageOf(error)})`;
    case 'UND_ERR_CONNECT_TIMEOUT':
      return 'no connection in time';
    case 'UND_ERR_HEADERS_TIMEOUT':
      return 'no answer came in time';
    case 'UND_ERR_BODY_TIMEOUT':
      return 'nothing more came';
    case 'UND_ERR_SOCKET':
    case 'ECONNRESET':
    case 'EPIPE':
    case 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH':
      return 'the connection broke';
    default:
      return (messageOf(error) || code).slice(0, 200);
  }
}

/** What the SDK throws. */
export function sdkFailure(asked: Asked, error: unknown): DsecError {
  if (isDsecError(error)) return error;
  const thrown = error as {
    name?: unknown;
    message?: unknown;
    $metadata?: { httpStatusCode?: unknown };
    $response?: { headers?: Record<string, string> };
    Region?: unknown;
  } | null;
  const name = typeof thrown?.name === 'string' ? thrown.name : '';
  if (name === 'CredentialsProviderError') {
    return fail('STORE_CREDENTIALS', { store: asked.store, reason: messageOf(error) }, error);
  }
  const status = thrown?.$metadata?.httpStatusCode;
  if (typeof status !== 'number') return connectionFailure(asked, error);
  const headers = thrown?.$response?.headers ?? {};
  const region = typeof thrown?.Region === 'string' ? thrown.Region : headers['x-amz-bucket-region'];
  return refusal(asked, { status, code: name, message: messageOf(error), region, retryAfter: headers['retry-after'] });
}
