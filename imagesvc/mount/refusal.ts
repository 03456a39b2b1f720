/** Turns what the kernel answers to a mount into an error of this service: what was to be done, why not, what helps. */
import { type DsecError, messageOf } from '#base';
import { SyscallError } from '#linux';
import { fail } from '../errors.ts';

/** `what`: "the OverlayFS of 3 layers". Errors that are not the kernel's pass as they are. */
export function refusal(error: unknown, what: string, target: string): unknown {
  if (!(error instanceof SyscallError)) return error;
  const said = error.cause instanceof Error ? `: ${error.cause.message}` : '';
  const reason = `${messageOf(error)}${said}`;
  return refusalRow(error.code, what, target, reason, error);
}

function refusalRow(code: string, what: string, target: string, reason: string, cause: unknown): DsecError {
  switch (code) {
    case 'EPERM':
    case 'EACCES':
      return fail('MOUNT_DENIED', { what, target, reason }, cause);
    case 'ENODEV':
    case 'ENOSYS':
    case 'EOPNOTSUPP':
      return fail('MOUNT_FEATURE_MISSING', { what, target, reason }, cause);
    default:
      return fail('MOUNT_REFUSED', { what, target, reason }, cause);
  }
}
