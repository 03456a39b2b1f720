/**
 * The disk of a full machine: an image of kind `disk` (OverlayBD layers) as a sparse raw file, once for all machines of it, and over it a qcow2 file of the machine's
 * own. So a machine needs no other process for its disk, whoever is restarted.
 */
import { execFile } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { open, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { hexOf, messageOf } from '#base';
import type { BlobStore, Image } from '#imagesvc';
import { type LayerPlace, type OpenStoreLayer, openStack } from '#ublk-daemon';
import { fail } from '../../errors.ts';
import { readMemoryInto } from '../snapshot/memory-layer.ts';

const run = promisify(execFile);

/** One that is being made is waited for. */
const making = new Map<string, Promise<string>>();

/** @throws VM_SPEC when the image is no disk, DISK_* */
export function baseDisk(
  store: BlobStore,
  image: Image,
  cacheDir: string,
  openStoreLayer?: OpenStoreLayer,
): Promise<string> {
  const path = join(cacheDir, 'vm-disks', `${hexOf(image.manifestDigest)}.raw`);
  let made = making.get(path);
  if (made === undefined) {
    made = make(path, store, image, openStoreLayer).finally(() => making.delete(path));
    making.set(path, made);
  }
  return made;
}

async function make(path: string, store: BlobStore, image: Image, openStoreLayer?: OpenStoreLayer): Promise<string> {
  const { disk } = image;
  if (disk === undefined) {
    const problem = `it is of kind ${image.kind}; a full machine starts from a disk (dsec disk pack)`;
    throw fail('VM_SPEC', { id: image.name, field: 'image', problem });
  }
  if (existsSync(path)) return path;
  const places = disk.layers.map(({ blob, chunkDigests }): LayerPlace => {
    const local = store.localPath(blob.digest);
    if (local !== undefined) return local;
    return { store: store.url, digest: blob.digest, size: blob.size, chunkDigests: chunkDigests.digest };
  });
  mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
  const part = `${path}.part-${process.pid}`;
  const stack = await openStack(places, disk.sizeBytes, openStoreLayer);
  try {
    const file = await open(part, 'w', 0o600);
    try {
      await file.truncate(stack.virtualSize);
      await readMemoryInto(file, stack);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(part, path);
    return path;
  } catch (error) {
    await rm(part, { force: true });
    throw error;
  } finally {
    await stack.close();
  }
}

/** What the machine writes. @throws VM_START */
export async function overlayDisk(base: string, path: string, machine: string): Promise<void> {
  try {
    await run('qemu-img', ['create', '-q', '-f', 'qcow2', '-b', base, '-F', 'raw', path]);
  } catch (error) {
    const { stderr } = error as { stderr?: string };
    const reason = `its disk: ${stderr?.trim() || messageOf(error)} (qemu-img is in the package qemu-utils)`;
    throw fail('VM_START', { id: machine, reason }, error);
  }
}
