/**
 * The layers of a sandbox as drives of its machine: the very files that a container's mounts are of, so that a lazy store is read lazily here too, each a
 * drive of its own; or, to be read in place (DAX), one file for each layer, which all machines of the node share.
 */
import { chmodSync, closeSync, existsSync, mkdirSync, openSync, readSync } from 'node:fs';
import { type FileHandle, open, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { hexOf } from '#base';
import type { BlobFiles, ErofsLayer } from '#imagesvc';
import { syncFolder, withLock } from '#linux';
import { fail } from '../../errors.ts';
import type { VmDrive } from '../vm-driver.ts';
import type { GuestLayer } from './guest-order.ts';

export interface LayerDrives {
  readonly drives: readonly VmDrive[];
  readonly layers: readonly GuestLayer[];
}

/** What a machine takes beside its own devices. */
const MOST_DRIVES = 14;
const PMEM_STEP = 2 << 20;
const COPY_BYTES = 1 << 20;
/** A jailed machine reads it as another user; the folder is closed to all others. */
const FILE_MODE = 0o644;
/** Whoever wants the same waits for it. */
const COPY_MS = 600_000;

export interface LayerDrivesOptions {
  /** Bottom first. */
  readonly layers: readonly ErofsLayer[];
  readonly files: BlobFiles;
  /** Whole layers are kept below it. */
  readonly cacheDir: string;
  readonly pmem: boolean;
}

/** @throws RUNTIME_LAYER_LIMIT */
export async function layerDrives({ layers, files, cacheDir, pmem }: LayerDrivesOptions): Promise<LayerDrives> {
  const count = layers.reduce((sum, { devices }) => sum + 1 + devices.length, 0);
  // Too many: then each layer is one, which costs a copy.
  const whole = pmem || count > MOST_DRIVES;
  if (whole && layers.length > MOST_DRIVES)
    throw fail('RUNTIME_LAYER_LIMIT', { layers: layers.length, limit: MOST_DRIVES });
  const drives: VmDrive[] = [];
  const told: GuestLayer[] = [];
  for (const [number, layer] of layers.entries()) {
    if (whole) {
      const file = await wholeLayer(layer, files, join(cacheDir, 'vm-layers'));
      const id = `l${number}`;
      drives.push({ id, source: { file }, readOnly: true, transport: pmem ? 'pmem' : 'blk' });
      told.push({ devices: [pmem ? `pmem${number}` : id], dax: pmem });
      continue;
    }
    const paths = [await files.fileFor(layer.meta)];
    for (const device of layer.devices) paths.push(await files.fileFor(device.blob, device));
    const ids = paths.map((_, part) => (part === 0 ? `l${number}` : `l${number}-${part}`));
    for (const [part, file] of paths.entries()) {
      drives.push({ id: ids[part]!, source: { file }, readOnly: true, transport: 'blk' });
    }
    told.push({ devices: ids, dax: false });
  }
  return { drives, layers: told };
}

/**
 * Metadata and data in one file, each where EROFS looks for it without devices: data blobs at the blocks that their slots name. Whole 2 MiB, as memory
 * devices are. Whoever comes second finds it.
 */
async function wholeLayer(layer: ErofsLayer, files: BlobFiles, folder: string): Promise<string> {
  const path = join(folder, `${hexOf(layer.meta.digest)}.erofs`);
  if (existsSync(path)) {
    // Older ones were for root alone.
    chmodSync(path, FILE_MODE);
    return path;
  }
  const meta = await files.fileFor(layer.meta);
  const parts = [{ file: meta, at: 0 }];
  const places = devicePlaces(meta);
  for (const [number, device] of layer.devices.entries()) {
    const at = places[number];
    if (at === undefined || at === 0) {
      const problem = `the layer ${layer.meta.digest} has no place for data blob ${number + 1} in one file`;
      throw fail('RUNTIME_START_FAILED', { runtime: 'microvm', reason: problem });
    }
    parts.push({ file: await files.fileFor(device.blob, device), at });
  }
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const copied = async () => {
    if (!existsSync(path)) await writeParts(parts, path);
    return path;
  };
  return withLock(`${path}.lock`, copied, { timeoutMs: COPY_MS });
}

/** Under a name of its own until it is whole and on the disk; what somebody before us had begun is begun anew. */
async function writeParts(
  parts: readonly { readonly file: string; readonly at: number }[],
  path: string,
): Promise<void> {
  const work = `${path}.new`;
  const out = await open(work, 'w', FILE_MODE);
  try {
    let end = 0;
    for (const { file, at } of parts) end = Math.max(end, await copyInto(out, file, at));
    await out.truncate(Math.ceil(end / PMEM_STEP) * PMEM_STEP);
    // Whatever the umask is.
    await out.chmod(FILE_MODE);
    await out.sync();
    await rename(work, path);
    await syncFolder(dirname(path));
  } finally {
    await out.close();
    await rm(work, { force: true });
  }
}

/** Blocks of zeros become holes. Where it ends. */
async function copyInto(out: FileHandle, file: string, at: number): Promise<number> {
  const from = await open(file, 'r');
  try {
    const bytes = Buffer.alloc(COPY_BYTES);
    const zeros = Buffer.alloc(COPY_BYTES);
    const { size } = await from.stat();
    for (let offset = 0; offset < size; ) {
      const { bytesRead } = await from.read(bytes, 0, Math.min(COPY_BYTES, size - offset), offset);
      if (bytesRead === 0) throw new Error(`${file} ends before its ${size} bytes`);
      const isZero = bytes.compare(zeros, 0, bytesRead, 0, bytesRead) === 0;
      for (let written = isZero ? bytesRead : 0; written < bytesRead; ) {
        written += (await out.write(bytes, written, bytesRead - written, at + offset + written)).bytesWritten;
      }
      offset += bytesRead;
    }
    return at + size;
  } finally {
    await from.close();
  }
}

const SUPERBLOCK = { at: 1024, bytes: 128, blockBits: 12, incompatible: 80, devices: 86, slots: 88 };
const DEVICE_TABLE = 8;
const SLOT = { bytes: 128, place: 68, placeHigh: 74 };

/** In bytes, from the beginning of the unified space, in slot order; the image has been verified. */
export function devicePlaces(meta: string): number[] {
  const fd = openSync(meta, 'r');
  try {
    const superblock = Buffer.alloc(SUPERBLOCK.bytes);
    readSync(fd, superblock, 0, superblock.length, SUPERBLOCK.at);
    if ((superblock.readUInt32LE(SUPERBLOCK.incompatible) & DEVICE_TABLE) === 0) return [];
    const blockBytes = 2 ** superblock.readUInt8(SUPERBLOCK.blockBits);
    const count = superblock.readUInt16LE(SUPERBLOCK.devices);
    const table = superblock.readUInt16LE(SUPERBLOCK.slots) * SLOT.bytes;
    return Array.from({ length: count }, (_, number) => {
      const slot = Buffer.alloc(SLOT.bytes);
      readSync(fd, slot, 0, slot.length, table + number * SLOT.bytes);
      const place = slot.readUInt32LE(SLOT.place) + slot.readUInt16LE(SLOT.placeHigh) * 2 ** 32;
      return place * blockBytes;
    });
  } finally {
    closeSync(fd);
  }
}
