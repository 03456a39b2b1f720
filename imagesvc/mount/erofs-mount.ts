/**
 * One EROFS layer as a kernel mount: metadata image and device blobs, each proved first, each held open until the mount
 * stands so that what was proved is what is mounted.
 *
 * The kernel reads the files directly (6.12 and newer). Where it cannot (an older kernel, a file system that lacks what
 * EROFS needs, ENOTBLK in both cases), loop devices go between: all files then, as a block primary takes block devices
 * only. Metadata on a tmpfs or an OverlayFS is copied to the cache first.
 */

import { randomUUID } from 'node:crypto';
import { constants, copyFileSync, mkdirSync, renameSync, rmSync, statfsSync } from 'node:fs';
import { join } from 'node:path';
import { hexOf, isDsecError, systemCode } from '#base';
import {
  attachLoop,
  attachMount,
  createBind,
  createMount,
  type LoopDevice,
  MOUNT_ATTR,
  type MountParameter,
  MS,
  mount,
} from '#linux';
import type { ErofsLayer } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobFiles } from './blob-files.ts';
import { openBlob, openProven, type ProvenFile } from './blob-proof.ts';
import { checkDeviceTags } from './device-tags.ts';
import type { LazyLayer } from './mount-record.ts';
import { refusal } from './refusal.ts';

/**
 * How the layer is read: by the kernel's EROFS from files or through loop devices, or by our reader behind FUSE. `auto`: files,
 * loop devices where they are refused, the reader where the kernel has no EROFS that reads the layer.
 */
export const BACKINGS = ['auto', 'file', 'loop', 'reader'] as const;
export type Backing = (typeof BACKINGS)[number];

export interface PreparedLayer {
  readonly layer: ErofsLayer;
  readonly meta: ProvenFile;
  /** In slot order. */
  readonly devices: readonly ProvenFile[];
  /** Who serves the devices' data verifies it as it is read. */
  readonly verifiedOnRead: boolean;
  /** Whether data is read around the page cache of the devices' file system (a FUSE server would be cached twice). */
  readonly directIo: boolean;
  /** Where a data server answers for the data. */
  readonly lazy?: LazyLayer;
  /** Where our reader shows the layer, once it does: that is mounted then. */
  tree?: ReaderTree;
  /** Closes the files. Safe to call twice; a mount made from them stays. */
  close(): void;
}

/** A layer as the layer server shows it. */
export interface ReaderTree {
  readonly path: string;
  /** Id of the server. */
  readonly server: string;
}

/**
 * Finds and proves the files of `layer`. Mounts nothing.
 * @throws MOUNT_BLOB_MISSING, MOUNT_DIGEST_MISMATCH, MOUNT_DEVICE_MISMATCH, MOUNT_NOT_EROFS, MOUNT_STORE_NOT_LOCAL
 */
export async function prepareLayer(layer: ErofsLayer, files: BlobFiles, cacheDir: string): Promise<PreparedLayer> {
  const opened: ProvenFile[] = [];
  const close = () => {
    for (const file of opened) file.close();
  };
  try {
    const meta = await openMeta(layer, files, cacheDir);
    opened.push(meta);
    checkDeviceTags(meta.fd, meta.path, layer);
    let verifiedOnRead = false;
    for (const device of layer.devices) {
      const { blob } = device;
      const path = await files.fileFor(blob, device);
      if (files.verifiedOnRead?.(blob)) {
        verifiedOnRead = true;
        opened.push(openBlob(path, blob.digest));
      } else {
        opened.push(await openProven(path, blob.digest, blob.size, cacheDir));
      }
    }
    const lazy = await files.lazyLayer?.(layer);
    // All whole in the cache: its files are read as a local store's are.
    const directIo = verifiedOnRead && lazy?.served !== false;
    return { layer, meta, devices: opened.slice(1), verifiedOnRead, directIo, lazy, close };
  } catch (error) {
    close();
    throw error;
  }
}

async function openMeta(layer: ErofsLayer, files: BlobFiles, cacheDir: string): Promise<ProvenFile> {
  const { digest, size } = layer.meta;
  const meta = await openProven(await files.fileFor(layer.meta), digest, size, cacheDir);
  if (canBackErofs(meta.kernelPath)) return meta;
  const folder = join(cacheDir, 'meta');
  const copy = join(folder, hexOf(digest));
  try {
    try {
      const cached = await openProven(copy, digest, size, cacheDir);
      meta.close();
      return cached;
    } catch (error) {
      // Not there yet, or damaged: it is made (again).
      if (!isDsecError(error, 'MOUNT_BLOB_MISSING') && !isDsecError(error, 'MOUNT_DIGEST_MISMATCH')) throw error;
    }
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    if (!canBackErofs(folder)) return meta;
    const fresh = join(folder, `.${hexOf(digest)}.${randomUUID()}`);
    try {
      copyFileSync(meta.kernelPath, fresh, constants.COPYFILE_EXCL);
      renameSync(fresh, copy);
    } finally {
      rmSync(fresh, { force: true });
    }
    const cached = await openProven(copy, digest, size, cacheDir);
    meta.close();
    return cached;
  } catch (error) {
    // A cache that cannot be used costs the faster way only: loop devices take any file.
    if (systemCode(error) === undefined) {
      meta.close();
      throw error;
    }
    return meta;
  }
}

/** File systems without read_folio: EROFS refuses a metadata image on them. Others are tried. */
const CANNOT_BACK = new Set([
  0x01021994 /* tmpfs */, 0x858458f6 /* ramfs */, 0x794c7630 /* overlay */, 0xe0f5e1e2 /* erofs */,
]);

function canBackErofs(path: string): boolean {
  return !CANNOT_BACK.has(statfsSync(path).type);
}

/**
 * Mounts a prepared layer read-only at the folder `mountPoint`, in one step.
 * @throws MOUNT_FEATURE_MISSING, MOUNT_DENIED, MOUNT_REFUSED
 */
export function mountErofs(
  prepared: PreparedLayer,
  mountPoint: string,
  backing: Backing = 'auto',
): Exclude<Backing, 'auto'> {
  if (prepared.tree !== undefined) {
    mountTree(prepared.tree, prepared, mountPoint);
    return 'reader';
  }
  if (backing !== 'loop') {
    try {
      const devices = prepared.devices.map((file) => file.kernelPath);
      attachErofs(prepared.meta.kernelPath, devices, mountPoint, prepared.directIo);
      return 'file';
    } catch (error) {
      if (systemCode(error) !== 'ENOTBLK' || backing === 'file') throw layerRefusal(error, prepared, mountPoint);
    }
  }
  // Autoclear: each device ends with the mount, or with our descriptor when there is none.
  const loops: LoopDevice[] = [];
  try {
    for (const file of [prepared.meta, ...prepared.devices]) loops.push(attachLoop(file.fd, { name: file.path }));
    const [meta, ...devices] = loops.map((loop) => loop.path);
    attachErofs(meta!, devices, mountPoint, false);
    return 'loop';
  } catch (error) {
    throw layerRefusal(error, prepared, mountPoint);
  } finally {
    for (const loop of loops) loop.close();
  }
}

/** A mount of its own, so that it is counted, listed and taken away like any layer's. */
function mountTree({ path }: ReaderTree, prepared: PreparedLayer, mountPoint: string): void {
  try {
    attachMount(createBind(path, { readOnly: true }), mountPoint);
  } catch (error) {
    throw layerRefusal(error, prepared, mountPoint);
  }
}

function attachErofs(source: string, devices: readonly string[], mountPoint: string, directIo: boolean): void {
  if (directIo) {
    try {
      attachWith(source, devices, mountPoint, true);
      return;
    } catch (error) {
      // Kernels before 6.15 do not know the option: there the pages are cached twice.
      if (systemCode(error) !== 'EINVAL') throw error;
    }
  }
  attachWith(source, devices, mountPoint, false);
}

function attachWith(source: string, devices: readonly string[], mountPoint: string, directIo: boolean): void {
  const parameters: MountParameter[] = [
    ['source', source],
    ['ro'],
    ...devices.map((device) => ['device', device] as const),
  ];
  if (directIo) parameters.push(['directio']);
  try {
    attachMount(createMount('erofs', parameters, MOUNT_ATTR.RDONLY), mountPoint);
  } catch (error) {
    // A seccomp profile may know mount(2) only. The paths are ours: no comma in them.
    if (systemCode(error) !== 'ENOSYS') throw error;
    const options = devices.map((device) => `device=${device}`);
    if (directIo) options.push('directio');
    mount(source, mountPoint, 'erofs', MS.RDONLY, options.join(','));
  }
}

function layerRefusal(error: unknown, prepared: PreparedLayer, mountPoint: string): unknown {
  if (systemCode(error) === 'ENOTBLK') {
    return fail(
      'MOUNT_FEATURE_MISSING',
      {
        what: `EROFS layer ${prepared.layer.meta.digest}`,
        target: mountPoint,
        reason: 'the kernel does not mount EROFS from a file there',
      },
      error,
    );
  }
  return refusal(error, `EROFS layer ${prepared.layer.meta.digest}`, mountPoint);
}
