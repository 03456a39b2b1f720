/** Where a command's large output goes: a file that is there whole or not at all, or stdout. */
import { lstat, open, rename, rm } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';
import { isDsecError, nodePath, systemCode } from '#base';
import { fail } from '../errors.ts';
import type { Context } from './context.ts';

/**
 * Writes to `path`, or to stdout for `-`. A file appears under its name only when all is written; a device or pipe is written to as it is.
 * @returns Bytes written. @throws CLI_OUTPUT_FILE, and what `pieces` throws
 */
export async function writeOutput(
  pieces: AsyncIterable<Buffer>,
  path: string,
  { output, signal, defer }: Pick<Context, 'output' | 'signal' | 'defer'>,
): Promise<number> {
  let sizeBytes = 0;
  if (path === '-') {
    for await (const piece of pieces) {
      signal.throwIfAborted();
      sizeBytes += piece.length;
      await output.write(piece);
    }
    return sizeBytes;
  }
  const temporary = (await isSpecial(path))
    ? undefined
    : join(dirname(path), `.${basename(path)}.${process.pid}.partial`);
  if (temporary !== undefined) defer(() => rm(nodePath(temporary), { force: true }));
  const file = await open(nodePath(temporary ?? path), 'w').catch(told(path));
  try {
    for await (const piece of pieces) {
      signal.throwIfAborted();
      sizeBytes += piece.length;
      await file.writeFile(piece).catch(told(path));
    }
  } finally {
    await file.close();
  }
  if (temporary !== undefined) await rename(nodePath(temporary), nodePath(path)).catch(told(path));
  return sizeBytes;
}

/** By the name that was asked for, not by that of the temporary file. */
function told(path: string): (error: unknown) => never {
  return (error) => {
    const code = systemCode(error);
    if (code === undefined || isDsecError(error)) throw error;
    // Ends with the status for a missing privilege, as everywhere.
    if (code === 'EACCES' || code === 'EPERM')
      throw Object.assign(new Error(`cannot write ${path}: ${code}`), { code });
    throw fail('CLI_OUTPUT_FILE', { path, reason: code }, error);
  };
}

/** Whether something is there that a rename must not replace: /dev/null, a named pipe, a link. */
async function isSpecial(path: string): Promise<boolean> {
  const stat = await lstat(nodePath(path)).catch(() => undefined);
  return stat !== undefined && !stat.isFile();
}
