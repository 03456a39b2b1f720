/**
 * Refusals of a target carry the errno a block device would answer with: whoever serves it passes the number on, and a
 * program in the same process can look at `code` as it does with Node's own errors.
 */
import { constants } from 'node:os';
import { DsecError, type ErrorParams, systemCode } from '#base';
import { ublkDaemonErrors } from '../errors.ts';

const ERRNO_OF = {
  TARGET_CLOSED: 'ESHUTDOWN',
  TARGET_FILE_SHORT: 'EIO',
  TARGET_RANGE: 'EINVAL',
  TARGET_READ_ONLY: 'EPERM',
} as const;

export class TargetError extends DsecError {
  readonly row: keyof typeof ERRNO_OF;

  constructor(row: keyof typeof ERRNO_OF, params: ErrorParams = {}, cause?: unknown) {
    super(ERRNO_OF[row], ublkDaemonErrors[row], params, cause);
    this.name = 'TargetError';
    this.row = row;
  }
}

const ESHUTDOWN = 108;
const NUMBERS: Readonly<Record<string, number>> = { ...constants.errno, ESHUTDOWN };
const EIO = constants.errno.EIO;

/** The number for whatever a target threw; EIO where it names none. */
export function errnoOf(error: unknown): number {
  return NUMBERS[systemCode(error) ?? ''] ?? EIO;
}
