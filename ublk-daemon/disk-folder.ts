/**
 * A disk in a folder: its `config.v1.json`, and its own layers beside it. Lower layers may lie anywhere; disks share them.
 *
 *     config.v1.json                    which layers, bottom first, and the writable one
 *     layer-<n>.data, layer-<n>.index   the n-th writable layer; a snapshot makes a sealed layer of the data file as it is
 *     layer-<n>.index.pending           what has not been flushed, for a process that takes over (writable/pending-file.ts)
 *
 * The configuration is replaced atomically and is what counts: files that it does not name and that look like the above are what a
 * process that died has left, and opening removes them.
 */
import { randomUUID } from 'node:crypto';
import { existsSync } from 'node:fs';
import { mkdir, readdir, rename, rm } from 'node:fs/promises';
import { basename, dirname, isAbsolute, join, resolve } from 'node:path';
import { failPoint, systemCode } from '#base';
import { replaceFile, syncFolder } from '#linux';
import { type DiskConfig, diskConfigText, lowerPlaces, readDiskConfig } from './config/config-v1.ts';
import { fail } from './errors.ts';
import { openStack } from './layer/stack.ts';
import { type LayerPlace, lowerOfPlace, type OpenStoreLayer, placeText } from './layer/store-layer.ts';
import { SECTOR } from './lsmt/header.ts';
import { type SealedUpper, StackedDisk } from './stacked-disk.ts';
import { LogUpper, type UpperFiles } from './writable/log-upper.ts';
import { pendingPath } from './writable/pending-file.ts';
import { openSparseUpper, SparseUpper } from './writable/sparse-upper.ts';
import type { Upper } from './writable/upper.ts';

const CONFIG = 'config.v1.json';
const OWN_FILE = /^layer-(\d+)\.(data(\.part-\d+|\.published(\.\d+)?)?|index(\.new|\.pending(\.new)?)?)$/;
/** Beside a sealed layer: as what it has been published. It goes with the layer. */
export const PUBLISHED = '.published';

export type UpperMode = 'log' | 'sparse';

/** A point that disks can be made from: the first `layers` lowers of the disk. */
export interface NamedSnapshot {
  readonly name: string;
  readonly layers: number;
  readonly uuid: string;
  readonly createdAt: string;
}

/** What DSec keeps of its own in the configuration, under `dsec`. */
export interface DiskFacts {
  /** Lowers that the disk was made with. */
  readonly baseLayers: number;
  readonly snapshots: readonly NamedSnapshot[];
  /** The image that it was made of. */
  readonly image?: ImageFacts;
}

export interface ImageFacts {
  readonly name: string;
  /** Of its manifest. */
  readonly digest: string;
  /** URL. */
  readonly store: string;
}

export interface CreateDiskOptions {
  readonly sizeBytes: number;
  /** Layers below, bottom first. */
  readonly lowers?: readonly LayerPlace[];
  readonly mode?: UpperMode;
  readonly image?: ImageFacts;
  readonly openStoreLayer?: OpenStoreLayer;
}

export interface OpenDiskOptions {
  /** For layers that are in a store; without it such a disk does not open. */
  readonly openStoreLayer?: OpenStoreLayer;
}

export interface OpenDisk {
  readonly folder: string;
  readonly disk: StackedDisk;
  /** Bottom first, without the writable one. */
  readonly lowers: readonly LayerPlace[];
  readonly facts: DiskFacts;
  /**
   * Seals what was written since the last one. The layers below the new writable one are the snapshot: a disk can be made of them.
   * @throws DISK_SNAPSHOT_EXISTS
   */
  snapshot(name?: string): Promise<SealedUpper & { readonly lowers: readonly LayerPlace[] }>;
  /**
   * Another size, in whole sectors; it costs a layer, a smaller one two. What lies beyond a smaller one is gone: `shrink` says that this is wanted. Who
   * serves the disk has to tell its clients.
   * @throws DISK_SIZE
   */
  resize(sizeBytes: number, options?: { readonly shrink?: boolean }): Promise<void>;
}

/** @throws DISK_EXISTS */
export async function createDisk(
  folder: string,
  { sizeBytes, lowers = [], mode = 'log', image, openStoreLayer }: CreateDiskOptions,
): Promise<void> {
  await mkdir(folder, { recursive: true, mode: 0o700 });
  const configPath = join(folder, CONFIG);
  if (existsSync(configPath)) throw fail('DISK_EXISTS', { folder });
  const places = lowers.map((place) => (typeof place === 'string' ? resolve(place) : place));
  // Read once, so that a disk is not made on what cannot be read.
  const stack = await openStack(places, sizeBytes, openStoreLayer);
  await stack.close();
  const upper = ownFiles(folder, 1);
  await removeStrays(folder, { lowers: [] });
  const fresh = await makeUpper(mode, upper, { virtualSize: sizeBytes, parentUuid: stack.uuid });
  await fresh.close();
  const facts: DiskFacts = { baseLayers: places.length, snapshots: [], ...(image === undefined ? {} : { image }) };
  await replaceConfig(configPath, {
    lowers: places.map(lowerOfPlace),
    upper: upperConfig(mode, upper),
    dsec: facts,
  });
  await syncFolder(folder);
}

/** Gives a disk that nobody uses another folder, which must not be there. */
export async function relocateDisk(from: string, to: string): Promise<void> {
  const config = await readConfig(from);
  const moved = (path: string) =>
    path.startsWith(`${resolve(from)}/`) ? join(resolve(to), path.slice(resolve(from).length + 1)) : path;
  const { data, index } = config.upper ?? {};
  await replaceConfig(join(from, CONFIG), {
    ...config,
    lowers: config.lowers.map((lower) => (lower.file === undefined ? lower : { ...lower, file: moved(lower.file) })),
    upper: data === undefined ? undefined : { ...config.upper, data: moved(data), index: index && moved(index) },
  });
  await rename(from, to);
  await syncFolder(dirname(to));
}

/** Leaves out what it does not understand: the file may have been written by others. */
export function diskFacts({ dsec, lowers }: DiskConfig): DiskFacts {
  const facts = (typeof dsec === 'object' && dsec !== null ? dsec : {}) as Partial<DiskFacts>;
  const { baseLayers, snapshots, image } = facts;
  const isImage = [image?.name, image?.digest, image?.store].every((text) => typeof text === 'string');
  return {
    ...(isImage ? { image: image as ImageFacts } : {}),
    baseLayers: Number.isSafeInteger(baseLayers) ? Math.min(Number(baseLayers), lowers.length) : 0,
    snapshots: (Array.isArray(snapshots) ? snapshots : []).filter(
      (one: Partial<NamedSnapshot> | null) =>
        typeof one?.name === 'string' && Number.isSafeInteger(one.layers) && Number(one.layers) <= lowers.length,
    ),
  };
}

/** Without an upper in the configuration it is a read-only disk. */
export async function openDisk(folder: string, options: OpenDiskOptions = {}): Promise<OpenDisk> {
  for (let tries = 0; ; tries++) {
    const config = await readConfig(folder);
    const upper = config.upper === undefined ? undefined : await openUpper(folder, config.upper);
    // Between reading and locking another process may have made a snapshot and gone.
    if (upper !== undefined && tries < 10 && diskConfigText(await readConfig(folder)) !== diskConfigText(config)) {
      await upper.close();
      continue;
    }
    return finishOpen(folder, config, upper, options);
  }
}

async function finishOpen(
  folder: string,
  first: DiskConfig,
  upper: Upper | undefined,
  { openStoreLayer }: OpenDiskOptions,
): Promise<OpenDisk> {
  let config = first;
  try {
    const lowers = lowerPlaces(config, folder, existsSync);
    const stack = await openStack(lowers, upper?.virtualSize, openStoreLayer);
    if (upper !== undefined) {
      if (stack.layers.length > 0 && upper.parentUuid !== stack.uuid) {
        await stack.close();
        throw fail('DISK_PARENT_MISMATCH', {
          file: upper.dataPath,
          parent: upper.parentUuid,
          below: placeText(lowers.at(-1)!),
          actual: stack.uuid,
        });
      }
      await removeStrays(folder, config);
    }
    const disk = new StackedDisk(stack, upper);
    const mode: UpperMode = upper instanceof SparseUpper ? 'sparse' : 'log';
    /** Seals the upper and puts a new one on top, perhaps of another size. */
    const restack = async ({ name, sizeBytes }: { name?: string; sizeBytes?: number }): Promise<SealedUpper> => {
      const number = nextNumber(await readdir(folder));
      const files = ownFiles(folder, number);
      const coverFiles = ownFiles(folder, number + 1);
      const old = config.upper;
      let syncError: unknown;
      try {
        const sealed = await disk.snapshot(
          // Zeros take no room in a layer with an index, whatever the disk's own way is.
          ({ cover, ...facts }) => makeUpper(cover ? 'log' : mode, cover ? coverFiles : files, facts),
          async (sealed) => {
            const lowers = [...config.lowers, ...sealed.map(({ path }) => ({ file: resolve(path) }))];
            const { uuid } = sealed.at(-1)!;
            const facts = diskFacts(config);
            const named = { name: name ?? '', layers: lowers.length, uuid, createdAt: new Date().toISOString() };
            const snapshots = name === undefined ? facts.snapshots : [...facts.snapshots, named];
            const next = { ...config, lowers, upper: upperConfig(mode, files), dsec: { ...facts, snapshots } };
            await replaceConfig(join(folder, CONFIG), next);
            config = next;
            // Too late to go back: what the disk is made of has changed.
            await syncFolder(folder).catch((error) => {
              syncError = error;
            });
            failPoint('disk-config-replaced');
          },
          sizeBytes,
        );
        if (syncError !== undefined) throw syncError;
        if (old?.index !== undefined) await rm(absolute(folder, old.index), { force: true });
        await rm(coverFiles.index, { force: true });
        return sealed;
      } catch (error) {
        if (config.upper?.data !== files.data) {
          for (const path of [files, coverFiles].flatMap(({ data, index }) => [data, index, pendingPath(index)])) {
            await rm(path, { force: true });
          }
        }
        throw error;
      }
    };
    return {
      folder,
      disk,
      get lowers() {
        return lowerPlaces(config, folder, existsSync);
      },
      get facts() {
        return diskFacts(config);
      },
      async snapshot(name) {
        const { snapshots } = diskFacts(config);
        if (name !== undefined && snapshots.some((other) => other.name === name)) {
          throw fail('DISK_SNAPSHOT_EXISTS', { folder, name });
        }
        const sealed = await restack({ name });
        return { ...sealed, lowers: lowerPlaces(config, folder, existsSync) };
      },
      async resize(sizeBytes, { shrink = false } = {}) {
        const refuse = (problem: string) => fail('DISK_SIZE', { folder, sizeBytes, actual: disk.sizeBytes, problem });
        if (!Number.isSafeInteger(sizeBytes) || sizeBytes <= 0 || sizeBytes % SECTOR !== 0) {
          throw refuse(`not a number of whole sectors of ${SECTOR} bytes`);
        }
        if (sizeBytes < disk.sizeBytes && !shrink) throw refuse('smaller: what lies beyond would be lost');
        if (sizeBytes !== disk.sizeBytes) await restack({ sizeBytes });
      },
    };
  } catch (error) {
    await upper?.close();
    throw error;
  }
}

async function makeUpper(
  mode: UpperMode,
  files: UpperFiles,
  { virtualSize, parentUuid }: { virtualSize: number; parentUuid: string },
): Promise<Upper> {
  const identity = { virtualSize, parentUuid, uuid: randomUUID().toUpperCase() };
  return mode === 'sparse' ? SparseUpper.create(files.data, identity) : LogUpper.create(files, identity);
}

async function openUpper(folder: string, { data, index }: NonNullable<DiskConfig['upper']>): Promise<Upper> {
  const dataPath = absolute(folder, data);
  try {
    const sparse = await openSparseUpper(dataPath);
    if (sparse !== undefined) return sparse;
    if (!index) throw fail('DISK_CONFIG', { file: join(folder, CONFIG), problem: 'its upper has no index' });
    return await LogUpper.open({ data: dataPath, index: absolute(folder, index) });
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
    throw fail('DISK_UPPER_MISSING', { folder, data: dataPath }, error);
  }
}

export async function readConfig(folder: string): Promise<DiskConfig> {
  try {
    return await readDiskConfig(join(folder, CONFIG));
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
    throw fail('DISK_NOT_FOUND', { folder, name: basename(folder) }, error);
  }
}

/** Safe when the folder has been synced, which the caller does: when that fails the new one counts all the same. */
export async function replaceConfig(path: string, config: DiskConfig): Promise<void> {
  await replaceFile(path, diskConfigText(config), { onWritten: () => failPoint('disk-config-written') });
}

export async function removeStrays(folder: string, config: Pick<DiskConfig, 'lowers' | 'upper'>): Promise<void> {
  const named = new Set(
    [...config.lowers.map(({ file }) => file), config.upper?.data, config.upper?.index]
      .filter((path) => path !== undefined && path !== '')
      .map((path) => absolute(folder, path!)),
  );
  if (config.upper?.index) named.add(pendingPath(absolute(folder, config.upper.index)));
  for (const name of await readdir(folder)) {
    const path = join(resolve(folder), name);
    if (!OWN_FILE.test(name) && name !== `${CONFIG}.new`) continue;
    const owner = path.endsWith(PUBLISHED) ? path.slice(0, -PUBLISHED.length) : path;
    if (!named.has(owner)) await rm(path, { force: true });
  }
}

/** A file for a sealed layer of the disk that nobody has yet. */
export async function nextLayerFile(folder: string): Promise<string> {
  return ownFiles(folder, nextNumber(await readdir(folder))).data;
}

function ownFiles(folder: string, number: number): UpperFiles {
  const stem = join(resolve(folder), `layer-${number}`);
  return { data: `${stem}.data`, index: `${stem}.index` };
}

function upperConfig(mode: UpperMode, files: UpperFiles): { data: string; index?: string } {
  return mode === 'sparse' ? { data: files.data } : files;
}

function nextNumber(names: readonly string[]): number {
  return 1 + Math.max(0, ...names.map((name) => Number(OWN_FILE.exec(name)?.[1] ?? 0)));
}

function absolute(folder: string, path: string): string {
  return isAbsolute(path) ? path : resolve(folder, path);
}
