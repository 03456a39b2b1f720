/** The files of writable layers: taken by one process at a time, made whole or not at all, and their headers. */
import { fstatSync, statSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { type FileLock, tryLock } from '#linux';
import { fail } from '../errors.ts';
import { writeAll } from '../layer/byte-sink.ts';
import { LSMT_BLOCK, type LsmtHeader, parseHeader } from '../lsmt/header.ts';

/** For this process alone. @throws DISK_BUSY when another one, or this one already, has it */
export function lockLayer(path: string): FileLock {
  // A lock would make the file, and wait for the other end of a pipe.
  if (!statSync(path).isFile()) throw fail('DISK_NOT_A_FILE', { path });
  const lock = tryLock(path);
  if (lock === undefined) throw fail('DISK_BUSY', { file: path });
  return lock;
}

/** Unlike Promise.all it waits for all of them, whichever fails. */
export async function allDone(work: readonly Promise<void>[]): Promise<void> {
  for (const result of await Promise.allSettled(work)) if (result.status === 'rejected') throw result.reason;
}

export async function writeNew(path: string, bytes: Buffer): Promise<void> {
  const file = await open(path, 'wx', 0o600);
  try {
    await writeAll(file, bytes, 0);
    await file.sync();
  } finally {
    await file.close();
  }
}

export async function readHeader(file: FileHandle, path: string): Promise<LsmtHeader> {
  if (!fstatSync(file.fd).isFile()) throw fail('DISK_NOT_A_FILE', { path });
  const block = Buffer.alloc(LSMT_BLOCK);
  const { bytesRead } = await file.read(block, 0, LSMT_BLOCK, 0);
  return parseHeader(block.subarray(0, bytesRead), path);
}
