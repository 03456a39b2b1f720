/**
 * The disks of a sandbox that is a virtual machine: OverlayBD disks in its folder, each on top of an empty ext4 that all of one size share.
 * This process serves it to the machine: over NBD where its driver knows that, else as a device or a file of this host (ublk, FUSE). Were it killed, the
 * machine waits for the next one, and what was answered is there (ublk-daemon keeps it in a file until it is on the disk).
 */
import { existsSync, linkSync, mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { systemCode } from '#base';
import { withLock } from '#linux';
import {
  createDisk,
  createNamedDisk,
  diskFolder,
  type LayerPlace,
  type NbdExport,
  type OpenDisk,
  type OwnDevice,
  openDisk,
  openNamedDisk,
  openStack,
  serveNbd,
  serveOwnDevice,
} from '#ublk-daemon';
import { diskLayerOf } from '../fork/moment.ts';
import type { VmDrive } from '../vm-driver.ts';
import { keepCompact } from './keep-compact.ts';

const MIB = 1024 * 1024;
/** It takes as much room as was written. */
export const DEFAULT_DISK_BYTES = 64 * 1024 * MIB;
/** What ext4's journal leaves room beside. */
export const LEAST_DISK_BYTES = 16 * MIB;
/** For a machine's end: it is gone, or going. */
const GRACE_MS = 0;

/** Names of a sandbox's disks, for its machine. */
export const UPPER_DISK = 'upper';
export const DOCKER_DISK = 'docker';

/** In the sandbox's folder. */
export function upperDiskFolder(sandboxFolder: string): string {
  return join(sandboxFolder, 'vm-disk');
}
/** Of a disk of its own for a container engine inside: what that writes is no change of the sandbox. */
export function dockerDiskFolder(sandboxFolder: string): string {
  return join(sandboxFolder, 'vm-docker');
}

/** @throws DISK_* */
export async function makeExt4Disk(stateDir: string, folder: string, sizeBytes: number): Promise<void> {
  const size = Math.ceil(sizeBytes / MIB) * MIB;
  const lowers = await emptyFileSystem(join(stateDir, 'vm/ext4'), size);
  await createDisk(folder, { sizeBytes: size, lowers });
}

/** Where the disks of a sandbox are, by name. */
const DISK_FOLDERS: readonly (readonly [name: string, folder: (sandboxFolder: string) => string])[] = [
  [UPPER_DISK, upperDiskFolder],
  [DOCKER_DISK, dockerDiskFolder],
];

/** A sealed layer, in the folder of a disk that was made on it (its own files are called layer-N there). */
const FORKED = 'forked.lsmt';

/** Disks that begin as those of a moment were: on its layers, which stay when that is discarded. @throws DISK_* */
export async function makeForkedDisks(momentFolder: string, sandboxFolder: string): Promise<void> {
  for (const [name, folderOf] of DISK_FOLDERS) {
    const layer = diskLayerOf(momentFolder, name);
    if (!existsSync(layer)) continue;
    const folder = folderOf(sandboxFolder);
    const own = join(folder, FORKED);
    mkdirSync(folder, { mode: 0o700 });
    linkSync(layer, own);
    const stack = await openStack([own]);
    await stack.close();
    await createDisk(folder, { sizeBytes: stack.virtualSize, lowers: [own] });
  }
}

/** Made once. */
async function emptyFileSystem(root: string, sizeBytes: number): Promise<readonly LayerPlace[]> {
  const name = `ext4-${sizeBytes / MIB}m`;
  const sealed = async () => {
    if (!existsSync(join(diskFolder(name, root), 'config.v1.json'))) return undefined;
    const disk = await openNamedDisk(name, { root });
    try {
      return disk.lowers.length > 0 ? disk.lowers : (await disk.snapshot()).lowers;
    } finally {
      await disk.disk.close();
    }
  };
  return withLock(`${root}.lock`, async () => {
    const before = await sealed();
    if (before !== undefined) return before;
    await createNamedDisk(name, { sizeBytes, origin: { kind: 'ext4' } }, root);
    return (await sealed())!;
  });
}

export interface ServedDisks {
  /** With what the sandbox changes. */
  readonly upper: OpenDisk;
  /** Of all of them, by name. */
  readonly named: readonly { readonly name: string; readonly disk: OpenDisk['disk'] }[];
  /** What its machine has as the drive of this name. */
  source(name: string): VmDrive['source'];
  /** As if this process had died: the machine waits for the next one. All that was answered is on the disk. */
  leave(): Promise<void>;
  /** Nobody is served any more, and all of it is on the disk. */
  close(): Promise<void>;
}

export interface DiskPlace {
  /** Of the machine. */
  readonly folder: string;
  /** What the machine connects to. */
  readonly diskSocket: string;
}

interface Way {
  source(name: string): VmDrive['source'];
  leave(): Promise<void>;
  close(): Promise<void>;
}

/** A sandbox's disks, by the names that its machine asks for them. @param nbd Whether it knows that. @throws NBD_LISTEN, UBLK_*, FILE_*, DISK_* */
export async function serveDisks(sandboxFolder: string, place: DiskPlace, nbd: boolean): Promise<ServedDisks> {
  const opened: OpenDisk[] = [];
  const closeAll = async () => {
    for (const { disk } of opened) await disk.close();
  };
  try {
    const exports: NbdExport[] = [];
    for (const [name, folderOf] of DISK_FOLDERS) {
      const folder = folderOf(sandboxFolder);
      if (!existsSync(folder)) continue;
      const disk = await openDisk(folder);
      opened.push(disk);
      exports.push({ name, target: disk.disk });
    }
    const way = nbd ? await overNbd(exports, place.diskSocket) : await asDevices(exports, place.folder);
    const leaveCompact = keepCompact(opened.map(({ disk }) => disk));
    const closed = closedOnce(closeAll);
    const done = (end: () => Promise<void>) => {
      leaveCompact();
      return closed(end);
    };
    return {
      upper: opened[0]!,
      named: exports.map(({ name }, at) => ({ name, disk: opened[at]!.disk })),
      source: (name) => way.source(name),
      leave: () => done(way.leave),
      close: () => done(way.close),
    };
  } catch (error) {
    if (systemCode(error) !== 'UBLK_TIMEOUT') await closeAll();
    throw error;
  }
}

/**
 * Ends who serves disks, then closes them; once, however often it is asked for. What the kernel has not let go of (UBLK_TIMEOUT) it still reads and
 * writes: then nothing is closed, and it is tried again when it is asked for again.
 */
export function closedOnce(closeAll: () => Promise<void>): (end: () => Promise<void>) => Promise<void> {
  let closed: Promise<void> | undefined;
  return (end) => {
    closed ??= end().then(closeAll, async (error) => {
      if (systemCode(error) === 'UBLK_TIMEOUT') closed = undefined;
      else await closeAll();
      throw error;
    });
    return closed;
  };
}

/** `work` on each, whatever becomes of the others. @throws what one of them did; UBLK_TIMEOUT where there is that */
export async function withEach<T>(all: Iterable<T>, work: (one: T) => Promise<void>): Promise<void> {
  const settled = await Promise.allSettled([...all].map(work));
  const failures = settled.filter((one) => one.status === 'rejected').map(({ reason }) => reason as unknown);
  if (failures.length === 0) return;
  throw failures.find((one) => systemCode(one) === 'UBLK_TIMEOUT') ?? failures[0];
}

async function overNbd(exports: readonly NbdExport[], socket: string): Promise<Way> {
  // Whoever had it was killed: the disk's lock says so.
  rmSync(socket, { force: true });
  const server = await serveNbd({ listen: `unix:${socket}`, exports });
  const close = () => server.close(GRACE_MS);
  return { source: (name) => ({ nbd: socket, export: name }), leave: close, close };
}

async function asDevices(exports: readonly NbdExport[], folder: string): Promise<Way> {
  const devices = new Map<string, OwnDevice>();
  const each = (work: (device: OwnDevice) => Promise<void>) => withEach(devices.values(), work);
  try {
    for (const { name, target } of exports) devices.set(name, await serveOwnDevice(target, folder, name));
  } catch (error) {
    await each((device) => device.end()).catch((late) => {
      if (systemCode(late) === 'UBLK_TIMEOUT') throw late;
    });
    throw error;
  }
  return {
    source(name) {
      const { path, isFile } = devices.get(name)!;
      return isFile ? { file: path, isServed: true } : { file: path };
    },
    leave: () => each((device) => device.leave()),
    close: () => each((device) => device.end()),
  };
}
