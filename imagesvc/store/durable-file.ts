/**
 * The few file operations that must survive a power failure, and must not depend on the umask. Order is everything:
 * contents are synced before a name points to them, and a folder is synced after a name in it changed.
 */
import { chmod, type FileHandle, mkdir, open, stat } from 'node:fs/promises';
import { dirname } from 'node:path';
import { systemCode } from '#base';
import { syncFolder } from '#linux';

export const FILE_MODE = 0o644;
export const FOLDER_MODE = 0o755;

/** Makes `path` and the parents that are missing, each 0755 and durable. Safe beside others doing the same. */
export async function ensureFolder(path: string): Promise<void> {
  try {
    await mkdir(path);
  } catch (error) {
    const code = systemCode(error);
    if (code === 'ENOENT' && dirname(path) !== path) {
      await ensureFolder(dirname(path));
      return ensureFolder(path);
    }
    if (code !== 'EEXIST') throw error;
    if (!(await stat(path)).isDirectory()) throw notAFolder(path);
    return;
  }
  // Another process may have removed it again already (an empty folder of refs): the caller's next step tells.
  await chmod(path, FOLDER_MODE).catch(unlessGone);
  await syncFolder(dirname(path));
}

function notAFolder(path: string): Error {
  return Object.assign(new Error(`ENOTDIR: not a directory, '${path}'`), { code: 'ENOTDIR' });
}

function unlessGone(error: unknown): void {
  if (systemCode(error) !== 'ENOENT') throw error;
}

/** A new file with these bytes, 0644. `sync`: on disk before this returns. */
export async function writeNewFile(path: string, bytes: Buffer, sync: boolean): Promise<void> {
  const file = await open(path, 'wx', FILE_MODE);
  try {
    await file.chmod(FILE_MODE);
    await file.writeFile(bytes);
    // The kernel's own stamp lags behind the clock by some milliseconds: garbage collection compares with the clock.
    const now = new Date();
    await file.utimes(now, now);
    if (sync) await file.sync();
  } finally {
    await file.close();
  }
}

/** Reads until `buffer` is full or the file ends; returns how much it got. */
export async function readFully(file: FileHandle, buffer: Buffer, position: number): Promise<number> {
  let done = 0;
  while (done < buffer.length) {
    const { bytesRead } = await file.read(buffer, done, buffer.length - done, position + done);
    if (bytesRead === 0) break;
    done += bytesRead;
  }
  return done;
}
