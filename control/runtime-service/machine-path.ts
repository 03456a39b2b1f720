/** Paths of this machine that are copied from and to: what is wrong with one is its user's to mend, and no fault of the service. */
import { lstat } from 'node:fs/promises';
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

/** @throws SANDBOX_COPY_NONE, SANDBOX_COPY_HERE */
export async function requireSource(path: string): Promise<void> {
  await onMachinePath(path, () => lstat(path));
}

/** @throws SANDBOX_COPY_NONE, SANDBOX_COPY_HERE for what the file system of this machine refuses; what else `work` throws */
export async function onMachinePath<T>(path: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    const { syscall, path: refused = path } = error as { syscall?: unknown; path?: string };
    if (isDsecError(error) || syscall === undefined) throw error;
    if (systemCode(error) === 'ENOENT') throw fail('SANDBOX_COPY_NONE', { path: refused }, error);
    throw fail('SANDBOX_COPY_HERE', { path: refused, reason: messageOf(error) }, error);
  }
}
