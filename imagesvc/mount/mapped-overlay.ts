/**
 * The parts of an overlay for a sandbox with a user namespace: each layer, and the upper, as copies of their mounts whose owners are
 * shifted into the sandbox's range. On disk, and so in the upper, ids are those that the sandbox sees; nothing that reads an upper has to know.
 *
 * Before Linux 6.15 a layer must be mounted somewhere. Then the copies are attached below a folder of the node for the
 * moment in which the overlay is made: under the node's lock, so that what lies there at another time is what a crash left.
 */
import { close, mkdirSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { fromText } from '#base';
import {
  type DetachedMount,
  mappedClone,
  moveMount,
  readMountInfo,
  SyscallError,
  umount,
  withFileSystemIds,
} from '#linux';
import { fail } from '../errors.ts';
import { textOf } from './mount-table.ts';

export interface IdMapping {
  /** Descriptor of a user namespace whose mapping it is; closed by `mountImage`. */
  readonly userNamespace: number;
  /** What its root is outside: OverlayFS works on the upper as that user. */
  readonly owner: number;
}

export interface MappedPaths {
  readonly lowers: readonly string[];
  readonly upper?: string;
  readonly work?: string;
}

/**
 * @param create Makes the overlay of these paths; called twice where the kernel does not take mounts that are nowhere.
 * @throws MOUNT_ID_MAPPING where the kernel or a file system cannot shift owners; what `create` throws
 */
export function composeMapped(
  { lowers, upper, work }: MappedPaths,
  mapping: IdMapping,
  stage: string,
  create: (paths: MappedPaths) => DetachedMount,
): DetachedMount {
  const clones: number[] = [];
  const clone = (path: string): number => {
    try {
      const fd = mappedClone(path, mapping.userNamespace);
      clones.push(fd);
      return fd;
    } catch (error) {
      if (!(error instanceof SyscallError)) throw error;
      throw fail('MOUNT_ID_MAPPING', { path, reason: error.message }, error);
    }
  };
  try {
    const layers = lowers.map(clone);
    const above = upper === undefined || work === undefined ? undefined : commonFolder(upper, work);
    const writable = above === undefined ? undefined : clone(above);
    const made = (place: (fd: number) => string): DetachedMount => {
      const mapped: MappedPaths = { lowers: layers.map(place) };
      const folder = writable === undefined ? undefined : place(writable);
      const inside = (path: string | undefined) =>
        folder === undefined || path === undefined ? undefined : join(folder, relative(above!, path));
      return withFileSystemIds(mapping.owner, () => create({ ...mapped, upper: inside(upper), work: inside(work) }));
    };
    try {
      return made((fd) => `/proc/self/fd/${fd}`);
    } catch (error) {
      if (!(error instanceof SyscallError) || error.code !== 'EINVAL') throw error;
    }
    return whileAttached(clones, stage, (places) => made((fd) => places.get(fd)!));
  } finally {
    // The overlay has its own hold on them. The last close of a mount waits for all processors, so it is another thread that waits.
    for (const fd of clones) close(fd, () => {});
  }
}

function whileAttached<T>(clones: readonly number[], stage: string, work: (places: Map<number, string>) => T): T {
  mkdirSync(stage, { recursive: true, mode: 0o700 });
  detachBelow(stage);
  const places = new Map(clones.map((fd, index) => [fd, join(stage, String(index))]));
  try {
    for (const [fd, folder] of places) {
      mkdirSync(folder, { recursive: true, mode: 0o700 });
      moveMount(fd, folder);
    }
    return work(places);
  } finally {
    detachBelow(stage);
  }
}

function detachBelow(stage: string): void {
  const found = readMountInfo().filter((row) => row.mountPoint.startsWith(`${fromText(stage)}/`));
  for (const row of found.reverse()) umount(textOf(row.mountPoint), { lazy: true });
}

/** The upper and its work folder have to lie on one mount. */
function commonFolder(upper: string, work: string): string {
  let folder = dirname(upper);
  while (relative(folder, work).startsWith('..')) folder = dirname(folder);
  return folder;
}
