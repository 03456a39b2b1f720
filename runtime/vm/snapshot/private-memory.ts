/**
 * The memory of a snapshot for many machines at once: one file in memory that each maps privately, so that a page is copied when a machine writes to it.
 * A machine that was made from a snapshot (a fork, the warm pool) costs what it changes.
 *
 * Sealed, for one reason above all: a balloon that gives pages back has QEMU punch them out of the file, and this file is everybody's.
 */
import { closeSync, ftruncateSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { makeMemoryFile, sealMemoryFile } from '#linux';
import { readMemoryInto } from './memory-layer.ts';
import { openMemory, type Snapshot } from './snapshot-folder.ts';

const known = new Map<string, Promise<number>>();

/** A path that opens it, while this process lives. @throws VM_SNAPSHOT_DAMAGED */
export async function privateMemory(snapshot: Snapshot): Promise<string> {
  let made = known.get(snapshot.folder);
  if (made === undefined) {
    made = make(snapshot);
    known.set(snapshot.folder, made);
    made.catch(() => known.delete(snapshot.folder));
  }
  return `/proc/${process.pid}/fd/${await made}`;
}

/** Machines that have it mapped keep it; one that has yet to open its path must not be under way. */
export function forgetPrivateMemory(folder: string): void {
  const made = known.get(folder);
  known.delete(folder);
  made?.then(closeSync, () => {});
}

async function make(snapshot: Snapshot): Promise<number> {
  const stack = await openMemory(snapshot);
  const fd = makeMemoryFile('dsec-vm-memory');
  try {
    ftruncateSync(fd, snapshot.record.memoryBytes);
    const file = await open(`/proc/self/fd/${fd}`, 'r+');
    try {
      await readMemoryInto(file, stack);
    } finally {
      await file.close();
    }
    sealMemoryFile(fd);
    return fd;
  } catch (error) {
    closeSync(fd);
    throw error;
  } finally {
    await stack.close();
  }
}
