/**
 * The disks of a sandbox that is a virtual machine: OverlayBD disks in its folder, each on top of an empty ext4 that all of one size share.
 * This process serves it to the machine over NBD; were it killed, the machine waits for the next one, and what was answered is there
 * (ublk-daemon keeps it in a file until it is on the disk).
 */
import { existsSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { withLock } from '#linux';
import {
  createDisk,
  createNamedDisk,
  diskFolder,
  type LayerPlace,
  type NbdExport,
  type OpenDisk,
  openDisk,
  openNamedDisk,
  serveNbd,
} from '#ublk-daemon';
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
  /** Nobody is served any more, and all of it is on the disk. */
  close(): Promise<void>;
}

/** A sandbox's disks, by the names that its machine asks for them. @param socket What the machine connects to. @throws NBD_LISTEN, DISK_* */
export async function serveDisks(sandboxFolder: string, socket: string): Promise<ServedDisks> {
  const opened: OpenDisk[] = [];
  const closeAll = async () => {
    for (const { disk } of opened) await disk.close();
  };
  try {
    const exports: NbdExport[] = [];
    for (const [name, folder] of [
      [UPPER_DISK, upperDiskFolder(sandboxFolder)],
      [DOCKER_DISK, dockerDiskFolder(sandboxFolder)],
    ] as const) {
      if (!existsSync(folder)) continue;
      const disk = await openDisk(folder);
      opened.push(disk);
      exports.push({ name, target: disk.disk });
    }
    // Whoever had it was killed: the disk's lock says so.
    rmSync(socket, { force: true });
    const server = await serveNbd({ listen: `unix:${socket}`, exports });
    const leaveCompact = keepCompact(opened.map(({ disk }) => disk));
    let closed: Promise<void> | undefined;
    return {
      upper: opened[0]!,
      close() {
        leaveCompact();
        closed ??= server.close(GRACE_MS).finally(closeAll);
        return closed;
      },
    };
  } catch (error) {
    await closeAll();
    throw error;
  }
}
