/**
 * The one shape of every error of DSec that a person or a program may see.
 *
 * Each folder declares its errors as one table (`errors.ts`), a row an error; code that fails makes one from its row.
 * Whoever catches looks at `code`, never at the text.
 */

export interface ErrorRow {
  /** What went wrong, with `{name}` placeholders that the caller fills: "{path}: size {actual}, expected {expected}". */
  readonly message: string;
  /** What the reader can do about it. */
  readonly hint?: string;
  /** Whether the same call may succeed later with nothing changed. */
  readonly retryable?: boolean;
  /** Exit status of the command line. 1 general, 2 usage, 3 bad input, 4 not found, 5 missing privilege or feature, 6 remote. */
  readonly exit: number;
  /** HTTP status where the error crosses an API. */
  readonly http: number;
}

export type ErrorParams = Readonly<Record<string, string | number | bigint | undefined>>;

export class DsecError extends Error {
  readonly code: string;
  readonly hint: string | undefined;
  readonly retryable: boolean;
  readonly exit: number;
  readonly http: number;
  readonly params: ErrorParams;

  constructor(code: string, row: ErrorRow, params: ErrorParams = {}, cause?: unknown) {
    super(fill(row.message, params), cause === undefined ? undefined : { cause });
    this.name = 'DsecError';
    this.code = code;
    this.hint = row.hint === undefined ? undefined : fill(row.hint, params);
    this.retryable = row.retryable ?? false;
    this.exit = row.exit;
    this.http = row.http;
    this.params = params;
  }
}

function fill(text: string, params: ErrorParams): string {
  return text.replace(/\{(\w+)\}/g, (whole, key: string) => {
    const value = params[key];
    return value === undefined ? whole : String(value);
  });
}

/** Binds a table to a function that makes its errors: `throw fail('ENTRY_CHECKSUM', { layer, offset })`. */
export function errorTable<T extends Record<string, ErrorRow>>(table: T) {
  return (code: keyof T & string, params?: ErrorParams, cause?: unknown): DsecError =>
    new DsecError(code, table[code] as ErrorRow, params, cause);
}

export function isDsecError(error: unknown, code?: string): error is DsecError {
  return error instanceof DsecError && (code === undefined || error.code === code);
}

/** `code` of a Node system error (`ENOENT`, ...), or undefined. */
export function systemCode(error: unknown): string | undefined {
  const code = (error as { code?: unknown } | null | undefined)?.code;
  return typeof code === 'string' ? code : undefined;
}

/** The text of anything thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
