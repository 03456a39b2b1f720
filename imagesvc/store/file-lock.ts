/**
 * flock on a file of the store. The kernel drops it with the process, however that ends, which is what makes staging
 * folders of dead processes recognizable. Where a shared file system keeps flock to one node, the store's rules for
 * other nodes apply (staging.ts). Loaded late: commands that only read never pay for it.
 */
import type { FileLock, LockMode } from '#linux';

export type { FileLock };

/** The lock, or undefined when someone else has it. Makes the file where it is missing. */
export async function tryLock(path: string, mode: LockMode): Promise<FileLock | undefined> {
  const linux = await import('#linux');
  return linux.tryLock(path, mode);
}
