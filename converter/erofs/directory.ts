/**
 * Directory contents: blocks of 4096 bytes, each an array of dirents and then their names, sorted by bytes over the whole
 * directory with `.` and `..` in their places. The last block is cut at its last name.
 */
import { type ByteString, writeByteString } from '#base';
import { BLOCK_BYTES, DIRENT, DIRENT_SIZE } from './layout.ts';

export interface Dirent {
  readonly name: ByteString;
  readonly nid: number;
  readonly fileType: number;
}

/** Puts `.` and `..` into a sorted list of names. */
export function withDots<T extends { readonly name: ByteString }>(sorted: readonly T[], dot: T, dotDot: T): T[] {
  const out: T[] = [];
  const dots = [dot, dotDot];
  for (const item of sorted) {
    while (dots.length > 0 && dots[0]!.name < item.name) out.push(dots.shift()!);
    out.push(item);
  }
  return [...out, ...dots];
}

/** Size in bytes of a directory with these names (`.` and `..` among them). */
export function directoryBytes(sorted: readonly { readonly name: ByteString }[]): number {
  let blocks = 0;
  let used = 0;
  for (const { name } of sorted) {
    const size = DIRENT_SIZE + name.length;
    if (used + size > BLOCK_BYTES) {
      blocks++;
      used = 0;
    }
    used += size;
  }
  return blocks * BLOCK_BYTES + used;
}

/** The contents, `directoryBytes` long. */
export function encodeDirectory(sorted: readonly Dirent[], sizeBytes: number): Buffer {
  const out = Buffer.alloc(sizeBytes);
  let block = 0;
  for (let first = 0; first < sorted.length; ) {
    let last = first;
    let used = 0;
    while (last < sorted.length && used + DIRENT_SIZE + sorted[last]!.name.length <= BLOCK_BYTES) {
      used += DIRENT_SIZE + sorted[last]!.name.length;
      last++;
    }
    let nameOff = (last - first) * DIRENT_SIZE;
    for (let i = first; i < last; i++) {
      const { name, nid, fileType } = sorted[i]!;
      const at = block + (i - first) * DIRENT_SIZE;
      out.writeUInt32LE(nid >>> 0, at + DIRENT.nid);
      if (nid > 0xffff_ffff) out.writeUInt32LE(Math.floor(nid / 2 ** 32), at + DIRENT.nid + 4);
      out.writeUInt16LE(nameOff, at + DIRENT.nameOff);
      out[at + DIRENT.fileType] = fileType;
      nameOff += writeByteString(out, name, block + nameOff);
    }
    first = last;
    block += BLOCK_BYTES;
  }
  return out;
}
