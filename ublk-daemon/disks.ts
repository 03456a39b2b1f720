/**
 * The disks of this node by name: a folder each (disk-folder.ts) in the state folder. What one makes of another's snapshot shares its
 * layers, so a disk whose layers others use is not removed. Whoever makes or removes one holds the lock of the folder.
 */
import { existsSync } from 'node:fs';
import { mkdir, mkdtemp, open, readdir, rm, stat } from 'node:fs/promises';
import { homedir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { failPoint, messageOf, systemCode } from '#base';
import { dataRuns, type FileLock, syncFolder, withLock } from '#linux';
import { type DiskConfig, type LowerConfig, lowerPlaces, readDiskConfig } from './config/config-v1.ts';
import {
  createDisk,
  type DiskFacts,
  diskFacts,
  type ImageFacts,
  type NamedSnapshot,
  nextLayerFile,
  type OpenDisk,
  type OpenDiskOptions,
  openDisk,
  readConfig,
  relocateDisk,
  removeStrays,
  replaceConfig,
  type UpperMode,
} from './disk-folder.ts';
import { fail } from './errors.ts';
import { mergeLayers } from './layer/merge-layers.ts';
import { openStack } from './layer/stack.ts';
import { type LayerPlace, type StoreLayer, storeLayerOf } from './layer/store-layer.ts';
import { SECTOR } from './lsmt/header.ts';
import { runTool } from './run-tool.ts';
import { lockLayer, readHeader } from './writable/upper-files.ts';

const CONFIG = 'config.v1.json';
const LOCK = '.lock';
const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;
const COPY_BYTES = 256 * 1024;
const ZERO_BYTES = 4096;
const ZEROS = Buffer.alloc(ZERO_BYTES);

export interface DiskSummary {
  readonly name: string;
  readonly sizeBytes: number;
  readonly layers: number;
  /** What the disk's own files take. */
  readonly diskBytes: number;
  readonly snapshots: readonly NamedSnapshot[];
  /** The image that it was made of. */
  readonly image?: ImageFacts;
  /** Why it cannot be read: then there are only zeros above. */
  readonly problem?: string;
}

export interface NamedDiskOptions extends OpenDiskOptions {
  /** The folder of all disks. */
  readonly root?: string;
}

/** Where the disks are: $DSEC_STATE/disks. */
export function disksFolder(): string {
  if (process.env.DSEC_STATE) return resolve(process.env.DSEC_STATE, 'disks');
  if (process.geteuid?.() === 0) return '/var/lib/dsec/disks';
  return join(process.env.XDG_STATE_HOME || join(homedir(), '.local/state'), 'dsec/disks');
}

export function diskFolder(name: string, root = disksFolder()): string {
  if (!NAME.test(name)) throw fail('DISK_NAME', { name, problem: 'not a name' });
  return join(root, name);
}

export type DiskOrigin =
  /** Layers of a `config.v1.json`. */
  | { readonly kind: 'config'; readonly path: string }
  | { readonly kind: 'raw'; readonly path: string }
  | { readonly kind: 'qcow2'; readonly path: string }
  /** Layers, bottom first: of an image mostly. */
  | { readonly kind: 'layers'; readonly lowers: readonly LayerPlace[]; readonly image?: ImageFacts }
  /** A new ext4 file system, with what a folder has where one is named. */
  | { readonly kind: 'ext4'; readonly folder?: string };

export interface CreateNamedOptions extends OpenDiskOptions {
  readonly sizeBytes?: number;
  readonly origin?: DiskOrigin;
  readonly mode?: UpperMode;
}

export async function createNamedDisk(name: string, options: CreateNamedOptions, root = disksFolder()): Promise<void> {
  const folder = diskFolder(name, root);
  const refuseTwin = () => {
    if (existsSync(join(folder, CONFIG))) throw fail('DISK_EXISTS', { folder });
  };
  await mkdir(root, { recursive: true, mode: 0o700 });
  refuseTwin();
  await sweep(root);
  const work = await mkdtemp(join(root, `.new-${process.pid}-`));
  try {
    const made = join(work, 'disk');
    const { origin, mode = 'log', openStoreLayer } = options;
    let refuseGone = async () => {};
    if (origin?.kind === 'config' || origin?.kind === 'layers') {
      const lowers = origin.kind === 'layers' ? origin.lowers : await lowersOf(origin.path);
      const image = origin.kind === 'layers' ? origin.image : undefined;
      refuseGone = await layersStay(root, lowers);
      const stack = await openStack(lowers, undefined, openStoreLayer);
      await stack.close();
      const sizeBytes = options.sizeBytes ?? stack.virtualSize;
      await createDisk(made, { sizeBytes, lowers, mode, image, openStoreLayer });
    } else {
      const raw = await rawOf(origin, options.sizeBytes, work);
      await createDisk(made, { sizeBytes: raw.sizeBytes, mode });
      if (raw.path !== undefined) await importRaw(made, raw.path);
    }
    // The work is done without the lock; under it the disk gets its name.
    await withLock(join(root, LOCK), async () => {
      refuseTwin();
      await refuseGone();
      await rm(folder, { recursive: true, force: true });
      await relocateDisk(made, folder);
    });
  } finally {
    await rm(work, { recursive: true, force: true });
  }
}

/**
 * To be called under the lock: whether the layers are still those that they are now. From then on the new disk holds them: whoever removes or
 * merges the disk whose they are looks for it.
 * @throws DISK_LAYER_MISSING
 */
async function layersStay(root: string, lowers: readonly LayerPlace[]): Promise<() => Promise<void>> {
  const files = lowers.flatMap((place, at) =>
    typeof place === 'string' ? [{ path: resolve(place), layer: at + 1 }] : [],
  );
  const stamp = async ({ path }: { path: string }) => {
    const found = await stat(path, { bigint: true }).catch(() => undefined);
    return found && `${found.dev} ${found.ino} ${found.size} ${found.mtimeNs}`;
  };
  const before = await Promise.all(files.map(stamp));
  return async () => {
    for (const [at, file] of files.entries()) {
      const isThere = before[at] !== undefined && (await stamp(file)) === before[at];
      if (!isThere || !(await isNamed(root, file.path))) throw fail('DISK_LAYER_MISSING', file);
    }
  };
}

/** A merge takes a layer out of the configuration first, and then away. */
async function isNamed(root: string, path: string): Promise<boolean> {
  const folder = dirname(path);
  if (dirname(folder) !== resolve(root)) return true;
  const config = await readConfig(folder).catch(() => undefined);
  return config?.lowers.some(({ file }) => file !== undefined && resolve(folder, file) === path) === true;
}

async function lowersOf(configPath: string): Promise<LayerPlace[]> {
  return lowerPlaces(await readDiskConfig(configPath), dirname(resolve(configPath)), existsSync);
}

/** What processes that died while they made a disk have left. */
async function sweep(root: string): Promise<void> {
  for (const name of await readdir(root)) {
    const pid = Number(/^\.new-(\d+)-/.exec(name)?.[1]);
    if (!Number.isSafeInteger(pid) || isAlive(pid)) continue;
    await rm(join(root, name), { recursive: true, force: true });
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return systemCode(error) === 'EPERM';
  }
}

/** A new disk of a snapshot of another one. */
export async function restoreDisk(
  from: string,
  snapshot: string,
  name: string,
  { root = disksFolder(), openStoreLayer }: NamedDiskOptions = {},
): Promise<void> {
  const folder = diskFolder(name, root);
  await withLock(join(root, LOCK), async () => {
    if (existsSync(join(folder, CONFIG))) throw fail('DISK_EXISTS', { folder });
    const source = diskFolder(from, root);
    const config = await readConfig(source);
    const found = diskFacts(config).snapshots.find((one) => one.name === snapshot);
    if (found === undefined) throw fail('DISK_SNAPSHOT_MISSING', { name: from, snapshot });
    const lowers = lowerPlaces(config, source, existsSync).slice(0, found.layers);
    const stack = await openStack(lowers, undefined, openStoreLayer);
    await stack.close();
    await createDisk(folder, { sizeBytes: stack.virtualSize, lowers, openStoreLayer });
    await syncFolder(root);
  });
}

export async function listDisks(root = disksFolder()): Promise<DiskSummary[]> {
  const disks: DiskSummary[] = [];
  for (const name of await diskNames(root)) {
    try {
      disks.push(await summaryOf(name, join(root, name)));
    } catch (error) {
      // Removed meanwhile.
      if (!existsSync(join(root, name, CONFIG))) continue;
      // One that is damaged hides no other.
      disks.push({ name, sizeBytes: 0, layers: 0, diskBytes: 0, snapshots: [], problem: messageOf(error) });
    }
  }
  return disks;
}

async function summaryOf(name: string, folder: string): Promise<DiskSummary> {
  const config = await readConfig(folder);
  const top = config.upper?.data ?? config.lowers.at(-1)?.file;
  const { snapshots, image } = diskFacts(config);
  return {
    name,
    sizeBytes: top === undefined ? 0 : await virtualSizeOf(resolve(folder, top)),
    layers: config.lowers.length + (config.upper === undefined ? 0 : 1),
    diskBytes: await folderBytes(folder),
    snapshots,
    ...(image === undefined ? {} : { image }),
  };
}

/** @throws DISK_IN_USE, DISK_BUSY */
export async function removeDisk(name: string, root = disksFolder()): Promise<void> {
  const folder = diskFolder(name, root);
  await withLock(join(root, LOCK), async () => {
    await readConfig(folder);
    await refuseShared(root, name, (file) => file.startsWith(`${folder}/`));
    // Nobody opens it while it goes: its layers need not be readable for that.
    const lock = await lockUpper(folder);
    try {
      // The configuration last would leave a disk without layers: it goes first.
      await rm(join(folder, CONFIG));
      await syncFolder(folder);
      await rm(folder, { recursive: true, force: true });
    } finally {
      lock?.release();
    }
  });
}

/** Undefined where there is nothing to lock. @throws DISK_BUSY */
async function lockUpper(folder: string): Promise<FileLock | undefined> {
  const pathNow = async () => {
    const { upper } = await readConfig(folder);
    return upper === undefined ? undefined : resolve(folder, upper.data);
  };
  for (;;) {
    const path = await pathNow();
    const isFile = path !== undefined && (await stat(path).catch(() => undefined))?.isFile() === true;
    const lock = isFile ? lockLayer(path) : undefined;
    // A snapshot that was made meanwhile has put another layer on top.
    if ((await pathNow()) === path) return lock;
    lock?.release();
  }
}

/** Whether another disk lies on such a file of this one. @throws DISK_IN_USE */
async function refuseShared(root: string, name: string, isWanted: (file: string) => boolean): Promise<void> {
  const others: string[] = [];
  for (const other of await diskNames(root)) {
    if (other === name) continue;
    const config = await readConfig(join(root, other));
    if (config.lowers.some(({ file }) => file !== undefined && isWanted(file))) others.push(other);
  }
  if (others.length > 0) throw fail('DISK_IN_USE', { name, others: others.join(', ') });
}

export interface MergeDiskOptions extends NamedDiskOptions {
  readonly dropSnapshots?: boolean;
  readonly whole?: boolean;
  /** Ends it; the disk stays as it is. */
  readonly signal?: AbortSignal;
}

export interface MergedDisk {
  readonly layersBefore: number;
  readonly layersAfter: number;
}

/**
 * Makes fewer layers of a disk that nobody uses: those between two of its snapshots become one, and with `dropSnapshots` all that it has
 * of its own. What it was made of stays shared, but with `whole`, which makes it depend on nothing else.
 * @throws DISK_IN_USE where another disk lies on one of the layers, DISK_BUSY
 */
export async function mergeDisk(name: string, options: MergeDiskOptions = {}): Promise<MergedDisk> {
  const { root = disksFolder(), openStoreLayer, dropSnapshots = false, whole = false, signal } = options;
  const folder = diskFolder(name, root);
  // Open, nobody else changes its layers.
  const opened = await openDisk(folder, { openStoreLayer });
  try {
    const config = await readConfig(folder);
    const facts = diskFacts(config);
    const first = whole ? 0 : facts.baseLayers;
    const kept = dropSnapshots ? [] : facts.snapshots;
    const cuts = [...new Set([first, ...kept.map(({ layers }) => layers), config.lowers.length])].filter(
      (cut) => cut >= first,
    );
    cuts.sort((a, b) => a - b);
    const runs = cuts.slice(1).map((end, at) => ({ start: cuts[at]!, end }));
    const gone = new Set(
      runs.flatMap(({ start, end }) => (end - start > 1 ? filesOf(config, folder, start, end) : [])),
    );
    await refuseShared(root, name, (file) => gone.has(file));
    const places = lowerPlaces(config, folder, existsSync);
    const lowers: LowerConfig[] = config.lowers.slice(0, first);
    const placeAfter = new Map<number, number>([[first, first]]);
    for (const { start, end } of runs) {
      if (end - start > 1 || (whole && !isOwn(places[start]!, folder))) {
        const file = await nextLayerFile(folder);
        await mergeLayers(places.slice(start, end), file, { openStoreLayer, signal });
        lowers.push({ file });
      } else lowers.push(...config.lowers.slice(start, end));
      placeAfter.set(end, lowers.length);
    }
    const { image, ...own } = facts;
    const next: DiskFacts = {
      ...(whole || image === undefined ? own : facts),
      baseLayers: whole ? 0 : facts.baseLayers,
      snapshots: kept.map((one) => ({ ...one, layers: placeAfter.get(one.layers) ?? one.layers })),
    };
    failPoint('disk-merge-written');
    await withLock(join(root, LOCK), async () => {
      await refuseShared(root, name, (file) => gone.has(file));
      await replaceConfig(join(folder, CONFIG), { ...config, lowers, dsec: next });
      await syncFolder(folder);
    });
    return { layersBefore: config.lowers.length, layersAfter: lowers.length };
  } finally {
    // What is not named any more, or was not to be named after all. While the disk is ours: the next one makes new files before it names them.
    await readConfig(folder)
      .then((config) => removeStrays(folder, config))
      .catch(() => {});
    await opened.disk.close();
  }
}

/** Files of the folder's own among lowers `start` to `end`. */
function filesOf({ lowers }: DiskConfig, folder: string, start: number, end: number): string[] {
  return lowers
    .slice(start, end)
    .flatMap(({ file }) => (file === undefined ? [] : [resolve(folder, file)]))
    .filter((file) => isOwn(file, folder));
}

function isOwn(place: LayerPlace, folder: string): boolean {
  return typeof place === 'string' && dirname(place) === resolve(folder);
}

/** What the disks of this node read out of stores: no collection may take it. */
export async function layersInStores(root = disksFolder()): Promise<{ disk: string; layers: StoreLayer[] }[]> {
  const found: { disk: string; layers: StoreLayer[] }[] = [];
  for (const disk of await diskNames(root)) {
    const { lowers } = await readConfig(join(root, disk));
    const layers = lowers.flatMap((lower) => storeLayerOf(lower) ?? []);
    if (layers.length > 0) found.push({ disk, layers });
  }
  return found;
}

export async function openNamedDisk(
  name: string,
  { root = disksFolder(), ...options }: NamedDiskOptions = {},
): Promise<OpenDisk> {
  return openDisk(diskFolder(name, root), options);
}

async function rawOf(
  origin: Exclude<DiskOrigin, { kind: 'config' | 'layers' }> | undefined,
  wanted: number | undefined,
  work: string,
): Promise<{ path?: string; sizeBytes: number }> {
  const grown = (sizeBytes: number) => Math.max(wanted ?? 0, Math.ceil(sizeBytes / 4096) * 4096);
  if (origin === undefined || origin.kind === 'ext4') {
    if (wanted === undefined) throw fail('LSMT_OPTION', { what: 'size', problem: 'a new disk needs one' });
    if (origin === undefined) return { sizeBytes: wanted };
    const path = join(work, 'raw');
    const file = await open(path, 'wx', 0o600);
    await file.truncate(wanted);
    await file.close();
    const from = origin.folder === undefined ? [] : ['-d', origin.folder];
    await runTool('mkfs.ext4', 'e2fsprogs', ['-q', '-F', ...from, path]);
    return { path, sizeBytes: wanted };
  }
  if (origin.kind === 'raw') return { path: origin.path, sizeBytes: grown((await stat(origin.path)).size) };
  const path = join(work, 'raw');
  await runTool('qemu-img', 'qemu-utils', ['convert', '-f', 'qcow2', '-O', 'raw', origin.path, path]);
  return { path, sizeBytes: grown((await stat(path)).size) };
}

async function importRaw(folder: string, path: string): Promise<void> {
  const { disk } = await openDisk(folder);
  const file = await open(path, 'r');
  try {
    const { size } = await file.stat();
    const bytes = Buffer.alloc(COPY_BYTES);
    for (const run of dataRuns(file.fd, size)) {
      const end = Math.ceil((run.offset + run.length) / SECTOR) * SECTOR;
      for (let at = run.offset - (run.offset % SECTOR); at < end; at += COPY_BYTES) {
        const length = Math.min(COPY_BYTES, end - at);
        const { bytesRead } = await file.read(bytes, 0, length, at);
        bytes.fill(0, bytesRead, length);
        for (const [from, to] of dataParts(bytes, length)) await disk.write(at + from, bytes.subarray(from, to));
      }
    }
  } finally {
    await file.close();
    await disk.close();
  }
}

/** Parts that are not whole blocks of zeros: the disk is new, and has zeros there. */
function* dataParts(bytes: Buffer, length: number): Generator<[number, number]> {
  let start: number | undefined;
  for (let at = 0; at < length; at += ZERO_BYTES) {
    const end = Math.min(length, at + ZERO_BYTES);
    const isZero = bytes.compare(ZEROS, 0, end - at, at, end) === 0;
    if (!isZero) start ??= at;
    else if (start !== undefined) {
      yield [start, at];
      start = undefined;
    }
  }
  if (start !== undefined) yield [start, length];
}

async function diskNames(root: string): Promise<string[]> {
  try {
    const names = await readdir(root);
    return names.filter((name) => NAME.test(name) && existsSync(join(root, name, CONFIG))).sort();
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw error;
  }
}

async function virtualSizeOf(path: string): Promise<number> {
  const file = await open(path, 'r');
  try {
    return (await readHeader(file, path)).virtualSize;
  } finally {
    await file.close();
  }
}

async function folderBytes(folder: string): Promise<number> {
  let bytes = 0;
  for (const name of await readdir(folder)) bytes += (await stat(join(folder, name))).blocks * 512;
  return bytes;
}
