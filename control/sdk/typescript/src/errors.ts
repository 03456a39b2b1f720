/**
 * Every error of this library, one class a kind. Whoever catches looks at the class or at `code`, never at the text. The Python library has the
 * same table; control/sdk/errors.json is what both are held to.
 */
import type { CommandResult } from './command-result.ts';

export interface ErrorFacts {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
  readonly retryable?: boolean;
  readonly requestId?: string;
  readonly status?: number;
  readonly retryAfterMs?: number;
  readonly reason?: string;
  readonly backend?: string;
  readonly cause?: unknown;
}

export class DSecError extends Error {
  /** Of the API (docs/errors.md), or of this library. */
  readonly code: string;
  /** What can be done about it. */
  readonly hint: string | undefined;
  /** Whether the same call may succeed later with nothing changed. */
  readonly retryable: boolean;
  /** Of the request, as the service's logs have it. */
  readonly requestId: string | undefined;
  /** Of HTTP; undefined for errors that were made here. */
  readonly status: number | undefined;
  readonly retryAfterMs: number | undefined;

  constructor(facts: ErrorFacts) {
    super(facts.message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.code = facts.code;
    this.hint = facts.hint;
    this.retryable = facts.retryable ?? false;
    this.requestId = facts.requestId;
    this.status = facts.status;
    this.retryAfterMs = facts.retryAfterMs;
  }
}

export class AuthenticationError extends DSecError {}
export class PermissionDenied extends DSecError {}
export class QuotaExceeded extends DSecError {}
export class RateLimited extends DSecError {}
export class NoCapacity extends DSecError {}
export class CommandNotStarted extends DSecError {}
export class ShellLost extends DSecError {}
export class FileError extends DSecError {}
export class FileChanged extends DSecError {}
export class InvalidRequest extends DSecError {}
export class NotFound extends DSecError {}
export class Conflict extends DSecError {}
export class Unavailable extends DSecError {}
export class ServerError extends DSecError {}
export class ConnectionLost extends DSecError {}
export class DSecTimeoutError extends DSecError {}
export class ProtocolError extends DSecError {}
export class ConfigurationError extends DSecError {}

/** As the API tells them, and how its words for people begin. */
const END_REASONS: readonly (readonly [reason: string, ...words: string[]])[] = [
  ['stopped', 'it was stopped'],
  ['expired', 'its time was up'],
  ['idle', 'nobody had used it'],
  ['out-of-memory', 'memory ran out'],
  ['killed', 'its agent was ended by signal'],
  ['failed', 'its agent broke', 'its agent exited'],
  ['lost', 'the process that kept it', 'it had ended'],
];

/** Never a failed command: that has a result. */
export class SandboxGone extends DSecError {
  /** `stopped`, `expired`, `idle`, `out-of-memory`, `killed`, `failed`, `lost`; undefined when it is not known (any more). */
  readonly reason: string | undefined;

  constructor(facts: ErrorFacts) {
    super(facts);
    const told = facts.message.split(': ').slice(1).join(': ');
    const known = END_REASONS.find((words) => words.some((begin) => told.startsWith(begin)));
    this.reason = facts.reason ?? known?.[0];
  }
}

export class UnsupportedError extends DSecError {
  readonly backend: string | undefined;

  constructor(facts: ErrorFacts) {
    super(facts);
    this.backend = facts.backend ?? /\bbackend "?([a-z]+)/.exec(facts.message)?.[1];
  }
}

export class CommandFailed extends DSecError {
  readonly result: CommandResult;

  constructor(result: CommandResult) {
    const how = result.timedOut ? 'was ended at its time-out' : `exited with ${result.exitCode}`;
    const said = result.stderr.trim().slice(-2000);
    super({ code: 'COMMAND_FAILED', message: `the command ${how}${said === '' ? '' : `: ${said}`}` });
    this.result = result;
  }
}

type Row = readonly [make: new (facts: ErrorFacts) => DSecError, codes: readonly string[], statuses: readonly number[]];

/** In order; a code is looked for before a status. */
export const ERROR_TABLE: readonly Row[] = [
  [AuthenticationError, ['IAM_TOKEN_INVALID'], [401]],
  [PermissionDenied, ['IAM_DENIED'], [403]],
  [QuotaExceeded, ['IAM_QUOTA'], []],
  [RateLimited, [], [429]],
  [NoCapacity, ['EDGE_REFUSED', 'PLACEMENT_NO_ROOM'], []],
  [SandboxGone, ['RUNTIME_SANDBOX_GONE', 'RUNTIME_SANDBOX_NOT_FOUND', 'SANDBOX_GONE'], []],
  [CommandNotStarted, ['RUNTIME_COMMAND_NOT_EXECUTABLE', 'RUNTIME_COMMAND_NOT_FOUND'], []],
  [ShellLost, ['RUNTIME_SHELL_LOST'], []],
  [FileError, ['RUNTIME_FILE', 'SANDBOX_NO_FILE'], []],
  [FileChanged, ['RUNTIME_UPLOAD_DIGEST', 'FILE_CHANGED'], []],
  [UnsupportedError, ['RUNTIME_UNSUPPORTED'], [501]],
  [InvalidRequest, [], [400, 413, 415, 422]],
  [NotFound, [], [404]],
  [Conflict, [], [409]],
  [Unavailable, ['EDGE_UNREACHABLE'], [502, 503, 504]],
  [ServerError, [], [500]],
];

/** Of errors inside an answer (a line of a batch, the end of a stream), which have the exit status of the command line alone. */
const STATUS_OF_EXIT: Readonly<Record<number, number>> = { 2: 400, 3: 422, 4: 404, 6: 503 };

export function errorFrom(facts: ErrorFacts & { readonly exit?: number }): DSecError {
  const status = facts.status ?? STATUS_OF_EXIT[facts.exit ?? 0] ?? 0;
  const row =
    ERROR_TABLE.find(([, codes]) => codes.includes(facts.code)) ??
    ERROR_TABLE.find(([, , statuses]) => statuses.includes(status));
  return new (row?.[0] ?? DSecError)(facts);
}

export function protocolError(problem: string, cause?: unknown): ProtocolError {
  return new ProtocolError({ code: 'PROTOCOL', message: `the API does not answer as it should: ${problem}`, cause });
}

export function connectionLost(problem: string, cause?: unknown): ConnectionLost {
  return new ConnectionLost({
    code: 'CONNECTION_LOST',
    message: `the API gave no answer: ${problem}`,
    hint: 'is it there? The URL is in the context, or in $DSEC_API',
    retryable: true,
    cause,
  });
}
