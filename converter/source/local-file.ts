/**
 * Files that a user or an image layout names. Only regular files are read: opening a pipe would wait for ever, a
 * device would never end. What is read whole has a limit.
 */
import { constants, type Stats } from 'node:fs';
import { type FileHandle, open, stat } from 'node:fs/promises';
import { type DsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

/** @throws SOURCE_PATH, SOURCE_DENIED unless `path` is a regular file that may be read. The caller closes the handle. */
export async function openRegular(path: string): Promise<{ handle: FileHandle; sizeBytes: number }> {
  let handle: FileHandle;
  try {
    // Non-blocking, or the open itself waits for a pipe's other end.
    handle = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
  } catch (error) {
    throw pathError(path, error);
  }
  try {
    const stats = await handle.stat();
    if (!stats.isFile()) throw notRegular(path, stats);
    return { handle, sizeBytes: stats.size };
  } catch (error) {
    await handle.close();
    throw error;
  }
}

/** Size of a regular file, or undefined when there is none. @throws SOURCE_PATH, SOURCE_DENIED for everything else */
export async function regularSize(path: string): Promise<number | undefined> {
  try {
    const stats = await stat(path);
    if (!stats.isFile()) throw notRegular(path, stats);
    return stats.size;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
    throw systemCode(error)?.startsWith('E') ? pathError(path, error) : error;
  }
}

/** The whole file. @throws SOURCE_PATH, SOURCE_TOO_LARGE */
export async function readWhole(path: string, limit: number): Promise<Buffer> {
  const { handle, sizeBytes } = await openRegular(path);
  try {
    if (sizeBytes > limit) throw fail('SOURCE_TOO_LARGE', { where: path, what: 'the file', actual: sizeBytes, limit });
    return await readExactly(handle, path, 0, sizeBytes);
  } finally {
    await handle.close();
  }
}

/** @throws SOURCE_PATH when the file ends early */
export async function readExactly(handle: FileHandle, path: string, offset: number, length: number): Promise<Buffer> {
  const out = Buffer.allocUnsafe(length);
  let done = 0;
  while (done < length) {
    const { bytesRead } = await handle.read(out, done, length - done, offset + done);
    if (bytesRead === 0) {
      throw fail('SOURCE_PATH', {
        path,
        problem: `ends at byte ${offset + done}, ${offset + length} expected`,
        remedy: 'the file is cut off or is being written; copy it again',
      });
    }
    done += bytesRead;
  }
  return out;
}

export function pathError(path: string, error: unknown, expected = 'file or folder'): DsecError {
  const code = systemCode(error);
  if (code === 'EACCES' || code === 'EPERM') return fail('SOURCE_DENIED', { path }, error);
  const [problem, remedy] =
    code === 'ENOENT'
      ? [`no such ${expected}`, 'check the path']
      : code === 'ENOTDIR'
        ? ['a part of the path is not a folder', 'check the path']
        : code === 'EISDIR'
          ? ['a folder, but a file is expected', 'check the path, or use dir: or oci: for a folder']
          : [messageOf(error), 'check the path'];
  return fail('SOURCE_PATH', { path, problem, remedy }, error);
}

function notRegular(path: string, stats: Stats): DsecError {
  const what = stats.isDirectory()
    ? 'a folder'
    : stats.isFIFO()
      ? 'a pipe'
      : stats.isSocket()
        ? 'a socket'
        : 'a device';
  return fail('SOURCE_PATH', {
    path,
    problem: `${what}, but a regular file is expected`,
    remedy: stats.isDirectory() ? 'use dir: or oci: for a folder' : 'copy its content into a file first',
  });
}
