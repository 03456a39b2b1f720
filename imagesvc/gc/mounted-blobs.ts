/**
 * Blobs that this node's mounts read from, whatever names have gone since: their images were removed, but the kernel, or a
 * data server that fetches on demand, goes on reading.
 *
 * The mount table names the image's manifest and the metadata image of each layer; a metadata image names the data blobs of
 * its device slots. A record counts whoever wrote it and in whatever state: too much is kept rather than too little.
 */
import { join } from 'node:path';
import { type Digest, digestFromHex, isDsecError, systemCode } from '#base';
import { erofs } from '#converter';
import { reachable } from '../catalog/collect-garbage.ts';
import { readRecords } from '../mount/mount-record.ts';
import { type NodeFolders, nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore } from '../store/blob-store.ts';

const { SB, DEVICE_SLOT, DEVICE_SLOT_SIZE, SUPER_MAGIC, SUPER_OFFSET, SUPER_SIZE, INCOMPAT } = erofs;

export async function mountedBlobs(store: BlobStore, folders: Partial<NodeFolders> = {}): Promise<Set<Digest>> {
  const needed = new Set<Digest>();
  for (const record of recordsOf(nodeFolders(folders).runDir)) {
    const manifest = record.image?.manifest;
    // It may be of another store.
    if (manifest !== undefined) for (const digest of await here(reachable(store, manifest), [])) needed.add(digest);
    for (const { blobs } of record.lazy ?? []) for (const digest of blobs) needed.add(digest);
    for (const meta of record.layers) {
      if (needed.has(meta)) continue;
      needed.add(meta);
      for (const digest of await here(deviceBlobs(store, meta), [])) needed.add(digest);
    }
  }
  return needed;
}

function recordsOf(runDir: string) {
  try {
    return readRecords(join(runDir, 'mounts')).records;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw error;
  }
}

async function here<T>(found: Promise<T>, otherwise: T | never[]): Promise<T | never[]> {
  try {
    return await found;
  } catch (error) {
    if (isDsecError(error, 'STORE_BLOB_MISSING') || isDsecError(error, 'STORE_SHORT_READ')) return otherwise;
    throw error;
  }
}

/** The data blobs that the device table of a metadata image names. */
async function deviceBlobs(store: BlobStore, meta: Digest): Promise<Digest[]> {
  const superblock = await store.read(meta, SUPER_OFFSET, SUPER_SIZE);
  if (superblock.readUInt32LE(SB.magic) !== SUPER_MAGIC) return [];
  if ((superblock.readUInt32LE(SB.featureIncompat) & INCOMPAT.DEVICE_TABLE) === 0) return [];
  const count = superblock.readUInt16LE(SB.extraDevices);
  const start = superblock.readUInt16LE(SB.devtSlotOff) * DEVICE_SLOT_SIZE;
  const table = await store.read(meta, start, count * DEVICE_SLOT_SIZE);
  const blobs: Digest[] = [];
  for (let slot = 0; slot < count; slot++) {
    const at = slot * DEVICE_SLOT_SIZE + DEVICE_SLOT.tag;
    const tag = table.toString('latin1', at, at + DEVICE_SLOT.tagSize).replace(/\0+$/, '');
    if (/^[0-9a-f]{64}$/.test(tag)) blobs.push(digestFromHex(tag));
  }
  return blobs;
}
