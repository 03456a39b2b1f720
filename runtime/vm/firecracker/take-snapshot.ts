/**
 * Takes a snapshot of a machine under Firecracker: the same folder as of one under QEMU (snapshot/snapshot-folder.ts), only that `state` is in
 * Firecracker's form. Firecracker writes into its own root; what is kept is made of that. On a base that this machine's pages are counted from it writes only
 * those, else all, and what differs is found by comparing.
 *
 * Whatever fails, the machine goes on as before, and the next snapshot has all pages again: it cannot be known what is still counted.
 */
import { existsSync } from 'node:fs';
import { chmod, copyFile, mkdir, rename, rm, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { failPoint, messageOf } from '#base';
import { replaceFile, syncFolder } from '#linux';
import { fail } from '../../errors.ts';
import { type MemoryLayer, writeMemoryLayer } from '../snapshot/memory-layer.ts';
import {
  layersFrom,
  MEMORY,
  MOST_LAYERS,
  openMemory,
  RECORD,
  readSnapshot,
  type Snapshot,
  type SnapshotRecord,
  STATE,
} from '../snapshot/snapshot-folder.ts';
import type { SnapshotFacts } from '../vm-driver.ts';
import { writeDifferentialLayer } from './differential-layer.ts';
import type { FirecrackerVm } from './firecracker-vm.ts';
import { makeWritable } from './jail.ts';
import { SNAPSHOT_MEMORY, SNAPSHOT_STATE, snapshotRequest } from './requests.ts';

/** In Firecracker's root. */
const PLACE = 'snapshot';

export async function takeFirecrackerSnapshot(
  vm: FirecrackerVm,
  folder: string,
  { base: basePath, signal }: { readonly base?: string; readonly signal?: AbortSignal },
): Promise<SnapshotFacts> {
  const refuse = (reason: string, cause?: unknown) => fail('VM_SNAPSHOT', { id: vm.spec.id, folder, reason }, cause);
  if (existsSync(folder)) throw refuse('it is there already');
  const running = (await vm.state()) === 'running';
  const part = `${folder}.part`;
  let place: string | undefined;
  try {
    await rm(part, { recursive: true, force: true });
    await mkdir(part, { recursive: true, mode: 0o700 });
    const older = basePath === undefined ? undefined : await readSnapshot(basePath);
    const base = older !== undefined && older.layerPaths.length < MOST_LAYERS ? older : undefined;
    const differential = base !== undefined && vm.countedFrom === base.folder;
    place = makeWritable(vm.folder, PLACE, vm.jailer);
    if (running) await vm.stop();
    signal?.throwIfAborted();
    vm.countedFrom = undefined;
    await vm.ask(snapshotRequest(PLACE, differential));
    failPoint('vm-state-saved');
    const facts = await keep(vm, folder, part, place, base, differential, signal);
    failPoint('vm-memory-saved');
    await rename(part, folder);
    await syncFolder(dirname(folder));
    vm.countedFrom = folder;
    return facts;
  } catch (error) {
    await rm(part, { recursive: true, force: true }).catch(() => {});
    // Of one that has ended there is nothing to go on.
    if (running) await vm.cont().catch(() => {});
    throw refuse(messageOf(error), error);
  } finally {
    if (place !== undefined) await rm(place, { recursive: true, force: true }).catch(() => {});
  }
}

async function keep(
  vm: FirecrackerVm,
  folder: string,
  part: string,
  place: string,
  base: Snapshot | undefined,
  differential: boolean,
  signal?: AbortSignal,
): Promise<SnapshotFacts> {
  const { memoryBytes, id } = vm.spec;
  const state = join(part, STATE);
  await copyFile(join(place, SNAPSHOT_STATE), state);
  // A Firecracker of another user id reads it; the folder is closed to all others.
  await chmod(state, 0o644);
  const { size: stateBytes } = await stat(state);
  const memory = join(place, SNAPSHOT_MEMORY);
  const { size } = await stat(memory);
  if (size !== memoryBytes) throw new Error(`its memory file has ${size} bytes, the machine ${memoryBytes}`);
  const below = base === undefined ? undefined : await openMemory(base);
  try {
    const path = join(part, MEMORY);
    const layer: MemoryLayer =
      differential && below !== undefined
        ? await writeDifferentialLayer(path, memory, memoryBytes, below, signal)
        : await writeMemoryLayer(path, memory, memoryBytes, below, signal);
    const record: SnapshotRecord = {
      version: 1,
      machine: id,
      memoryBytes,
      layers: layersFrom(folder, base),
      stateBytes,
    };
    await replaceFile(join(part, RECORD), JSON.stringify(record));
    await syncFolder(part);
    const { size: memoryLayerBytes } = await stat(path);
    return { stateBytes, memoryLayerBytes, changedPages: layer.changedPages, zeroPages: layer.zeroPages };
  } finally {
    await below?.close();
  }
}
