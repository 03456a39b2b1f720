/**
 * A snapshot of a machine in a folder:
 *
 *     snapshot.json    what it is; written last
 *     state            the devices, in QEMU's form, without the guest's memory
 *     memory.lsmt      memory as a sealed LSMT layer: pages that differ from those of the layers below
 *
 * The layers below are those of older snapshots, named by paths from this folder: a chain, bottom first. It is whole when it has its name.
 */
import { link, mkdir, readFile, writeFile } from 'node:fs/promises';
import { join, relative, resolve } from 'node:path';
import { messageOf, systemCode } from '#base';
import { type LayerStack, openStack } from '#ublk-daemon';
import { fail } from '../../errors.ts';

/** Then the next snapshot stores all pages again: a resume reads through all layers. */
export const MOST_LAYERS = 16;

export interface SnapshotRecord {
  readonly version: 1;
  readonly machine: string;
  readonly memoryBytes: number;
  /** From the folder, bottom first; the last is its own. */
  readonly layers: readonly string[];
  readonly stateBytes: number;
}

export const STATE = 'state';
export const MEMORY = 'memory.lsmt';
export const RECORD = 'snapshot.json';

export interface Snapshot {
  readonly folder: string;
  readonly record: SnapshotRecord;
  readonly layerPaths: readonly string[];
}

/** What ails this host, not the files that it reads. */
const SHORT_OF = ['EMFILE', 'ENFILE', 'ENOMEM'];

/** What is wrong with a snapshot; an error of a host that is short of something stays as it is, and the snapshot is tried again. */
export function snapshotError(path: string, error: unknown, problem: string = messageOf(error)): unknown {
  for (let cause = error; cause !== undefined; cause = (cause as { cause?: unknown } | null)?.cause) {
    if (SHORT_OF.includes(systemCode(cause) ?? '')) return cause;
  }
  return fail('VM_SNAPSHOT_DAMAGED', { path, problem }, error);
}

/** @throws VM_SNAPSHOT_DAMAGED */
export async function readSnapshot(folder: string): Promise<Snapshot> {
  const path = join(folder, RECORD);
  const refuse = (problem: string) => fail('VM_SNAPSHOT_DAMAGED', { path, problem });
  let record: SnapshotRecord;
  try {
    record = JSON.parse(await readFile(path, 'utf8')) as SnapshotRecord;
  } catch (error) {
    throw snapshotError(path, error);
  }
  if (record?.version !== 1) throw refuse('of a version that is not known');
  const { layers, memoryBytes, stateBytes } = record;
  if (!Number.isSafeInteger(memoryBytes) || !Number.isSafeInteger(stateBytes) || memoryBytes <= 0) {
    throw refuse('its sizes are no numbers');
  }
  if (!Array.isArray(layers) || layers.length === 0 || !layers.every((layer) => typeof layer === 'string')) {
    throw refuse('it names no layers');
  }
  return { folder, record, layerPaths: layers.map((layer) => resolve(folder, layer)) };
}

/** Paths of layers as a snapshot at `folder` has them. */
export function layersFrom(folder: string, base: Snapshot | undefined): string[] {
  return [...(base?.layerPaths.map((path) => relative(folder, path)) ?? []), MEMORY];
}

/** The same snapshot in another folder of the same file system, which stays when the first one and those below it go. */
export async function linkSnapshot({ folder, record, layerPaths }: Snapshot, to: string): Promise<void> {
  await mkdir(to, { mode: 0o700 });
  await link(join(folder, STATE), join(to, STATE));
  const layers = layerPaths.map((_, at) => `${at}-${MEMORY}`);
  for (const [at, path] of layerPaths.entries()) await link(path, join(to, layers[at]!));
  await writeFile(join(to, RECORD), JSON.stringify({ ...record, layers }), { mode: 0o600 });
}

/** Its memory, read through all layers. @throws VM_SNAPSHOT_DAMAGED */
export async function openMemory({ record, layerPaths, folder }: Snapshot): Promise<LayerStack> {
  try {
    const stack = await openStack(layerPaths);
    if (stack.virtualSize === record.memoryBytes) return stack;
    await stack.close();
    throw new Error(`its layers have ${stack.virtualSize} bytes, the machine ${record.memoryBytes}`);
  } catch (error) {
    throw snapshotError(join(folder, MEMORY), error);
  }
}
