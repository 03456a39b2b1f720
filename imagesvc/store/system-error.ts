/** What the file system says, in the store's words: one place, so that every operation reports a full disk the same way. */
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

/** The error to throw for `error`, which an operation on `path` of the store at `store` made. Our own errors pass through. */
export function storeError(error: unknown, store: string, path: string): Error {
  if (isDsecError(error)) return error;
  const params = { store, path, reason: messageOf(error) };
  switch (systemCode(error)) {
    case 'ENOSPC':
    case 'EDQUOT':
      return fail('STORE_FULL', params, error);
    case 'EACCES':
    case 'EPERM':
      return fail('STORE_ACCESS', params, error);
    case 'EROFS':
      return fail('STORE_READ_ONLY', params, error);
    case 'ENOTDIR':
      return fail('STORE_NOT_FOLDER', params, error);
    default:
      return fail('STORE_IO', params, error);
  }
}
