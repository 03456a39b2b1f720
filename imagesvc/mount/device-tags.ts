/**
 * Which blobs an EROFS metadata image was made for, read from its device table, and whether the manifest names the same.
 * The kernel binds `device=` options to slots by their order alone and never looks at the tags.
 */
import { readSync } from 'node:fs';
import { hexOf } from '#base';
import { erofs } from '#converter';
import type { ErofsLayer } from '../catalog/image.ts';
import { fail } from '../errors.ts';

const { SB, DEVICE_SLOT, DEVICE_SLOT_SIZE, SUPER_MAGIC, SUPER_OFFSET, SUPER_SIZE, INCOMPAT } = erofs;

/** Tags of the device slots, in slot order, as text. @throws MOUNT_NOT_EROFS */
export function readDeviceTags(fd: number, path: string): string[] {
  const superblock = readExactly(fd, SUPER_OFFSET, SUPER_SIZE, path);
  if (superblock.readUInt32LE(SB.magic) !== SUPER_MAGIC) {
    throw fail('MOUNT_NOT_EROFS', { path, why: 'it has no EROFS superblock' });
  }
  // Without the flag the field may hold anything.
  if ((superblock.readUInt32LE(SB.featureIncompat) & INCOMPAT.DEVICE_TABLE) === 0) return [];
  const count = superblock.readUInt16LE(SB.extraDevices);
  const start = superblock.readUInt16LE(SB.devtSlotOff) * DEVICE_SLOT_SIZE;
  const table = readExactly(fd, start, count * DEVICE_SLOT_SIZE, path);
  const tags: string[] = [];
  for (let slot = 0; slot < count; slot++) {
    const tag = slot * DEVICE_SLOT_SIZE + DEVICE_SLOT.tag;
    tags.push(table.toString('latin1', tag, tag + DEVICE_SLOT.tagSize).replace(/\0+$/, ''));
  }
  return tags;
}

/** @throws MOUNT_DEVICE_MISMATCH when slots and manifest differ in number, order or digest; MOUNT_NOT_EROFS */
export function checkDeviceTags(fd: number, path: string, layer: ErofsLayer): void {
  const tags = readDeviceTags(fd, path);
  if (tags.length !== layer.devices.length) {
    throw fail('MOUNT_DEVICE_MISMATCH', {
      path,
      why: `it has ${tags.length} device slots, the manifest names ${layer.devices.length} data blobs`,
    });
  }
  layer.devices.forEach((device, index) => {
    const wanted = hexOf(device.blob.digest);
    if (tags[index] !== wanted) {
      throw fail('MOUNT_DEVICE_MISMATCH', {
        path,
        why: `slot ${index + 1} is bound to "${tags[index]}", the manifest names ${wanted}`,
      });
    }
  });
}

function readExactly(fd: number, offset: number, length: number, path: string): Buffer {
  const bytes = Buffer.alloc(length);
  for (let have = 0; have < length; ) {
    const got = readSync(fd, bytes, have, length - have, offset + have);
    if (got === 0) throw fail('MOUNT_NOT_EROFS', { path, why: `it ends at byte ${offset + have}` });
    have += got;
  }
  return bytes;
}
