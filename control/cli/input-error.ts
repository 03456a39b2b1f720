/** Why a file that a user named for input cannot be read. */
import { type DsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

export function inputError(path: string, error: unknown): DsecError {
  const code = systemCode(error);
  if (code === 'ENOENT') return fail('CLI_INPUT_MISSING', { path }, error);
  if (code === 'EACCES' || code === 'EPERM') return fail('CLI_INPUT_DENIED', { path }, error);
  return fail('CLI_INPUT_UNREADABLE', { path, reason: messageOf(error) }, error);
}
