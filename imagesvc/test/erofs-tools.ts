/**
 * fsck.erofs of erofs-utils, as many versions as there are: the system's, and a newer one that knows more codecs. And what lets
 * it read file data.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { erofs } from '#converter';
import { isRegular } from '../reader/inode.ts';
import type { OpenLayer } from '../reader/open-layer.ts';
import { seal } from './reader-fixture.ts';

export interface FsckErofs {
  readonly path: string;
  readonly version: string;
  readonly codecs: readonly string[];
  /** It takes `--xattrs`, and makes hard links again. */
  readonly restoresAll: boolean;
}

/** The one on the PATH, $FSCK_EROFS, and the one that was built with $MKFS_EROFS. Older ones first. */
export function findFsck(): readonly FsckErofs[] {
  const beside = process.env.MKFS_EROFS ? dirname(process.env.MKFS_EROFS) : undefined;
  const paths = [
    'fsck.erofs',
    process.env.FSCK_EROFS,
    ...(beside === undefined ? [] : [join(beside, 'fsck.erofs'), join(beside, '../fsck/fsck.erofs')]),
  ];
  const found = new Map<string, FsckErofs>();
  for (const path of paths) {
    if (!path || (path.includes('/') && !existsSync(path))) continue;
    const help = spawnSync(path, ['--help'], { encoding: 'utf8' });
    const said = spawnSync(path, ['-V'], { encoding: 'utf8' });
    if (help.error !== undefined || said.error !== undefined) continue;
    const text = `${help.stdout}${help.stderr}`;
    const version = /(\d+\.\d+(?:\.\d+)?)/.exec(`${said.stdout}${said.stderr}`)?.[1] ?? 'of unknown version';
    const codecs = /algorithms(?: are)?: *([\w, ]+)/.exec(text)?.[1]?.split(/, */) ?? [];
    found.set(version, { path, version, codecs, restoresAll: text.includes('xattrs') });
  }
  return [...found.values()].sort((a, b) => a.version.localeCompare(b.version, 'en', { numeric: true }));
}

/**
 * The layer as one file that needs no device: its blobs behind the metadata, which is where unified addresses say that they are.
 * erofs-utils (up to 1.9.3) take the start of a device off such an address and read on in the primary, where the
 * kernel goes to the device; of one file they read all.
 */
export function writeFlat(path: string, layer: OpenLayer, metaPath: string, devices: readonly string[]): void {
  const meta = readFileSync(metaPath);
  const { sb } = layer.reader;
  const parts: Buffer[] = [meta];
  let blocks = sb.blocks;
  for (const [k, device] of devices.entries()) {
    const slot = sb.devices[k]!;
    if (slot.uniaddr !== blocks) throw new Error(`slot ${k + 1} is at block ${slot.uniaddr}, not at ${blocks}`);
    const bytes = readFileSync(device);
    parts.push(bytes, Buffer.alloc(slot.blocks * erofs.BLOCK_BYTES - bytes.length));
    blocks += slot.blocks;
  }
  for (const nid of fileNids(layer)) nameBlocksUnified(layer, nid, meta);
  const at = (field: number) => erofs.SUPER_OFFSET + field;
  meta.writeUInt32LE(blocks, at(erofs.SB.blocks));
  const incompat = meta.readUInt32LE(at(erofs.SB.featureIncompat));
  meta.writeUInt32LE(incompat & ~erofs.INCOMPAT.DEVICE_TABLE, at(erofs.SB.featureIncompat));
  meta.writeUInt16LE(0, at(erofs.SB.extraDevices));
  meta.writeUInt16LE(0, at(erofs.SB.devtSlotOff));
  seal(meta);
  writeFileSync(path, Buffer.concat(parts));
}

function fileNids({ reader }: OpenLayer): Set<number> {
  const found = new Set<number>();
  const todo = [reader.root()];
  for (let dir = todo.pop(); dir !== undefined; dir = todo.pop()) {
    for (const entry of reader.readdir(dir)) {
      const inode = reader.inodeOf(entry);
      if (entry.fileType === erofs.FILE_TYPE.DIRECTORY) todo.push(inode);
      else if (isRegular(inode)) found.add(entry.nid);
    }
  }
  return found;
}

/** Chunk maps name slot and block of it: here the primary's, which holds all of them. */
function nameBlocksUnified({ reader }: OpenLayer, nid: number, meta: Buffer): void {
  const inode = reader.inode(nid);
  if (inode.layout !== erofs.LAYOUT.CHUNK_BASED) return;
  const { CHUNK_INDEX, CHUNK_INDEX_SIZE, CHUNK_FORMAT } = erofs;
  const chunkBytes = erofs.BLOCK_BYTES * 2 ** (inode.union & CHUNK_FORMAT.blockBitsMask);
  const map = Math.ceil(inode.bodyOffset / CHUNK_INDEX_SIZE) * CHUNK_INDEX_SIZE;
  for (let i = 0; i * chunkBytes < inode.sizeBytes; i++) {
    const at = map + i * CHUNK_INDEX_SIZE;
    const block = meta.readUInt32LE(at + CHUNK_INDEX.startBlk);
    if (block === erofs.NULL_ADDR) continue;
    const slot = meta.readUInt16LE(at + CHUNK_INDEX.deviceId);
    meta.writeUInt16LE(0, at + CHUNK_INDEX.deviceId);
    meta.writeUInt32LE(block + reader.sb.devices[slot - 1]!.uniaddr, at + CHUNK_INDEX.startBlk);
  }
}
