/** What a restore takes of a snapshot: its memory, into a file of the machine's own or one that many share, and the state of its devices. */
import { open } from 'node:fs/promises';
import { join } from 'node:path';
import { fail } from '../../errors.ts';
import { readMemoryInto } from './memory-layer.ts';
import { openMemory, type Snapshot, STATE, snapshotError } from './snapshot-folder.ts';
import { sendFile } from './state-transfer.ts';

/** `memoryFile` is there, and zeros. @throws VM_SNAPSHOT_DAMAGED */
export async function restoreMemory(snapshot: Snapshot, memoryFile: string): Promise<void> {
  const stack = await openMemory(snapshot);
  try {
    const file = await open(memoryFile, 'r+');
    try {
      await readMemoryInto(file, stack);
    } finally {
      await file.close();
    }
  } finally {
    await stack.close();
  }
}

/** To the machine that listens at `socketPath`. @throws VM_SNAPSHOT_DAMAGED */
export async function sendState(
  { folder, record }: Snapshot,
  socketPath: string,
  ended: Promise<unknown>,
): Promise<void> {
  const path = join(folder, STATE);
  const file = await open(path, 'r').catch((error) => {
    throw snapshotError(path, error, 'the state of its devices is missing');
  });
  const { size } = await file.stat().finally(() => file.close());
  if (size !== record.stateBytes) {
    throw fail('VM_SNAPSHOT_DAMAGED', { path, problem: `${size} bytes, expected ${record.stateBytes}` });
  }
  await sendFile(path, socketPath, ended);
}
