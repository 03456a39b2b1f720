/**
 * What a disk holds, as a file for other programs. It appears under its name when it is whole and on the disk, and replaces none; ended by its
 * signal it leaves nothing.
 */
import { randomUUID } from 'node:crypto';
import { existsSync } from 'node:fs';
import { link, open, rename, rm } from 'node:fs/promises';
import { dirname } from 'node:path';
import { systemCode } from '#base';
import { syncFolder } from '#linux';
import { fail } from './errors.ts';
import { writeAll } from './layer/byte-sink.ts';
import { SECTOR } from './lsmt/header.ts';
import { runTool } from './run-tool.ts';
import type { StackedDisk } from './stacked-disk.ts';

const COPY_BYTES = 256 * 1024;
/** Sectors whose runs are looked up at once: 1 GiB. */
const WINDOW = 2 ** 21;

/** Sparse. @throws DISK_OUTPUT_EXISTS */
export async function exportRaw(disk: StackedDisk, path: string, signal?: AbortSignal): Promise<void> {
  const part = partOf(path, 'part');
  try {
    await writeRaw(disk, part, signal);
    await giveName(part, path);
  } finally {
    await rm(part, { force: true });
  }
}

/** One process may be writing several. */
function partOf(path: string, what: string): string {
  return `${path}.${what}-${process.pid}-${randomUUID().slice(0, 8)}`;
}

/** Unlike a rename it does not replace a file. @throws DISK_OUTPUT_EXISTS */
async function giveName(part: string, path: string): Promise<void> {
  try {
    await link(part, path);
  } catch (error) {
    if (systemCode(error) === 'EEXIST') throw fail('DISK_OUTPUT_EXISTS', { path }, error);
    // File systems without links: looking first is the best there is.
    if (!NO_LINKS.has(systemCode(error) ?? '') || existsSync(path)) throw error;
    await rename(part, path);
  }
  await syncFolder(dirname(path));
}

const NO_LINKS = new Set(['EPERM', 'EOPNOTSUPP', 'ENOTSUP', 'ENOSYS', 'EMLINK']);

async function writeRaw(disk: StackedDisk, path: string, signal?: AbortSignal): Promise<void> {
  const file = await open(path, 'wx', 0o600);
  try {
    await file.truncate(disk.sizeBytes);
    const sectors = disk.sizeBytes / SECTOR;
    // Not all runs of a large disk in memory at once.
    for (let from = 0; from < sectors; from += WINDOW) {
      for (const [start, end] of disk.dataRuns(from, Math.min(sectors, from + WINDOW))) {
        for (let at = start * SECTOR; at < end * SECTOR; at += COPY_BYTES) {
          signal?.throwIfAborted();
          const bytes = await disk.read(at, Math.min(COPY_BYTES, end * SECTOR - at));
          await writeAll(file, bytes, at);
        }
      }
    }
    await file.sync();
    await file.close();
  } catch (error) {
    await file.close().catch(() => {});
    await rm(path, { force: true });
    throw error;
  }
}

export async function exportQcow2(disk: StackedDisk, path: string, signal?: AbortSignal): Promise<void> {
  const raw = partOf(path, 'raw');
  const part = partOf(path, 'part');
  try {
    await writeRaw(disk, raw, signal);
    await runTool('qemu-img', 'qemu-utils', ['convert', '-f', 'raw', '-O', 'qcow2', raw, part], signal);
    await giveName(part, path);
  } finally {
    await rm(raw, { force: true });
    await rm(part, { force: true });
  }
}
