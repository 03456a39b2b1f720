/**
 * A start that failed because a disk is full, told as that: which folder, and what helps. Whatever step it was, the file system says ENOSPC or EDQUOT;
 * so does the kernel where something else has run out (mounts, namespaces), so without a path of ours the folder itself is looked at.
 */
import { statfsSync } from 'node:fs';
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import type { RuntimeFolders } from './state-folders.ts';

/** What is left of a disk that is as good as full: a sandbox takes less before its command runs. */
const FEW_BYTES = 1 << 20;
const FEW_FILES = 64;

/** What `start` throws; RUNTIME_NO_SPACE in place of what only says that there is no space. @throws RUNTIME_NO_SPACE */
export async function tellingOfFullDisk<T>(folders: RuntimeFolders, start: () => Promise<T>): Promise<T> {
  try {
    return await start();
  } catch (error) {
    const full = fullFolder(error, folders);
    if (full === undefined) throw error;
    throw fail('RUNTIME_NO_SPACE', { ...full, reason: messageOf(error) }, error);
  }
}

/** Undefined: it is something else, or said already. */
function fullFolder(
  error: unknown,
  { stateDir, cacheDir, runDir }: RuntimeFolders,
): { readonly folder: string; readonly variable: string } | undefined {
  if (isDsecError(error) && error.http === 507) return undefined;
  const full = causesOf(error).find((cause) => ['ENOSPC', 'EDQUOT'].includes(systemCode(cause) ?? ''));
  if (full === undefined) return undefined;
  const places = [
    { folder: stateDir, variable: '$DSEC_STATE' },
    { folder: cacheDir, variable: '$DSEC_CACHE' },
    { folder: runDir, variable: '$DSEC_RUN' },
  ];
  const { path, dest } = full as { readonly path?: unknown; readonly dest?: unknown };
  const named = places.find(({ folder }) => [path, dest].some((one) => `${one}`.startsWith(`${folder}/`)));
  return named ?? places.find(({ folder }) => isAsGoodAsFull(folder));
}

function causesOf(error: unknown): unknown[] {
  const found: unknown[] = [];
  for (let one = error; one instanceof Error && !found.includes(one); one = one.cause) found.push(one);
  return found;
}

function isAsGoodAsFull(folder: string): boolean {
  try {
    const { bavail, bsize, files, ffree } = statfsSync(folder);
    return bavail * bsize < FEW_BYTES || (files > 0 && ffree < FEW_FILES);
  } catch {
    return false;
  }
}
