/**
 * The file that is a blob, or that stands where a blob should be: making one fit to be published, and taking what is
 * damaged out of the way. A directory in the place of a blob is no blob; one that holds anything is never deleted, but
 * moved aside, to a name that no blob has.
 */
import { randomBytes } from 'node:crypto';
import { constants, lstat, open, rename, rmdir, stat, unlink } from 'node:fs/promises';
import { type Digest, systemCode } from '#base';
import { fail } from '../errors.ts';
import { FILE_MODE } from './durable-file.ts';

/** Makes a finished file fit to be a blob: its size as promised, 0644, as young as now and, with `sync`, on disk. */
export async function settle(path: string, digest: Digest, sizeBytes: number, sync: boolean): Promise<void> {
  // The file itself, not what a symlink names: link(2) would publish the symlink.
  const file = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW);
  try {
    const { size } = await file.stat();
    if (size !== sizeBytes) throw fail('STORE_SIZE_MISMATCH', { digest, path, actual: size, expected: sizeBytes });
    const now = new Date();
    await file.chmod(FILE_MODE);
    await file.utimes(now, now);
    if (sync) await file.sync();
  } finally {
    await file.close();
  }
}

export async function sizeOf(path: string): Promise<number | undefined> {
  const found = await stat(path).catch(undefinedIfMissing);
  return found?.isFile() ? found.size : undefined;
}

/** False when there is none. A directory in its place goes too; one that holds anything is kept, under a name that is no blob's. */
export async function removeFile(path: string): Promise<boolean> {
  try {
    await unlink(path);
    return true;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return false;
    if (!(await isDirectory(path))) throw error;
    await moveAway(path);
    return true;
  }
}

/** Renaming replaces whatever is at `target`, except a directory. */
export async function replaceDamaged(source: string, target: string): Promise<void> {
  if (await isDirectory(target)) await moveAway(target);
  await rename(source, target);
}

async function isDirectory(path: string): Promise<boolean> {
  return (await lstat(path).catch(undefinedIfMissing))?.isDirectory() === true;
}

async function moveAway(folder: string): Promise<void> {
  await rmdir(folder).catch(async (error) => {
    if (systemCode(error) === 'ENOENT') return;
    await rename(folder, `${folder}.aside-${randomBytes(4).toString('hex')}`).catch(undefinedIfMissing);
  });
}

export function undefinedIfMissing(error: unknown): undefined {
  if (systemCode(error) !== 'ENOENT') throw error;
  return undefined;
}
