/** `dsec dump`: what is on disk, as it is there: superblocks, device tables, and one inode with its xattrs and extents. */
import { type ByteString, display, isDsecError } from '#base';
import { erofs } from '#converter';
import { fail } from '../errors.ts';
import { jsonText, modeText, octalMode, timeText } from './format-entry.ts';
import type { ImageTree } from './image-tree.ts';
import { isDirectory, isRegular, isSymlink, kindOf } from './inode.ts';
import type { OpenLayer } from './open-layer.ts';

export interface DumpTarget {
  /** In the merged view; links on the way are followed, the last one not. */
  readonly path?: ByteString;
  /** In one layer, for what no path leads to. */
  readonly nid?: number | 'root';
  /** The layer of `nid`, counted from 1 (default), the bottom one. */
  readonly layer?: number;
}

export type Dump = Record<string, unknown>;

const LAYOUT_NAMES = [
  'flat plain',
  'compressed, full index',
  'flat inline',
  'compressed, compact index',
  'chunk based',
];
const EXTENTS_LISTED = 10_000;

/** JSON-able. @throws TREE_NOT_FOUND, TREE_NO_INODE, EROFS_CORRUPT */
export function dump(tree: ImageTree, target: DumpTarget = {}): Dump {
  const out: Dump = { image: tree.name, layers: tree.layers.map(dumpLayer) };
  if (target.path !== undefined) {
    const node = tree.lookup(target.path);
    out.inodes = node.parts.map((part) => dumpInode(tree, part.layer, part.inode.nid));
    Object.assign(out, jsonText('path', node.path));
  } else if (target.nid !== undefined) {
    const layer = target.layer ?? 1;
    if (tree.layers[layer - 1] === undefined) {
      throw fail('TREE_NOT_FOUND', {
        image: tree.name,
        path: `layer ${layer} (it has layers 1 to ${tree.layers.length})`,
      });
    }
    out.inodes = [dumpNid(tree, layer - 1, target.nid)];
  }
  return out;
}

function dumpLayer(layer: OpenLayer): Dump {
  const { sb, meta } = layer.reader;
  return {
    meta: layer.id,
    sizeBytes: meta.bytes.sizeBytes,
    superblock: {
      blockSize: sb.blockSize,
      checksum: hex(sb.checksum),
      compat: flags(sb.compat, erofs.COMPAT),
      incompat: flags(sb.incompat, erofs.INCOMPAT),
      rootNid: sb.rootNid,
      inodes: sb.inodes,
      epoch: sb.epoch,
      fixedNsec: sb.fixedNsec,
      blocks: sb.blocks,
      metaBlkAddr: sb.metaBlkAddr,
      xattrBlkAddr: sb.xattrBlkAddr,
      uuid: sb.uuid,
      volumeName: display(sb.volumeName),
      algorithms: ['lz4', 'lzma', 'deflate', 'zstd'].filter((_, k) => sb.algorithms & (1 << k)),
      xattrPrefixes: sb.xattrPrefixCount,
      packedNid: sb.packedNid,
    },
    devices: sb.devices.map((slot, k) => ({
      slot: k + 1,
      tag: display(slot.tag),
      blocks: slot.blocks,
      uniaddr: slot.uniaddr,
      blob: layer.deviceIds[k],
    })),
  };
}

/** Any number may be asked for: what does not read as an inode is most likely none. */
function dumpNid(tree: ImageTree, layer: number, wanted: number | 'root'): Dump {
  const root = tree.layers[layer]!.reader.rootNid;
  const nid = wanted === 'root' ? root : wanted;
  try {
    return dumpInode(tree, layer, nid);
  } catch (error) {
    if (!isDsecError(error, 'EROFS_CORRUPT') && !isDsecError(error, 'EROFS_UNSUPPORTED')) throw error;
    throw fail('TREE_NO_INODE', { image: tree.name, layer: layer + 1, nid, root, why: error.message }, error);
  }
}

function dumpInode(tree: ImageTree, layer: number, nid: number): Dump {
  const { reader, id, deviceIds } = tree.layers[layer]!;
  const inode = reader.inode(nid);
  const kind = kindOf(inode.mode);
  const out: Dump = {
    layer: layer + 1,
    nid,
    offset: inode.offset,
    form: inode.extended ? 'extended' : 'compact',
    layout: `${inode.layout} (${LAYOUT_NAMES[inode.layout]})`,
    kind,
    mode: octalMode(inode.mode),
    modeText: modeText(kind, inode.mode),
    sizeBytes: inode.sizeBytes,
    nlink: inode.nlink,
    uid: inode.uid,
    gid: inode.gid,
    mtime: `${timeText(inode.mtimeSec)}.${String(inode.mtimeNsec).padStart(9, '0')}`,
    union: hex(inode.union),
    xattrBytes: inode.xattrBytes,
    bodyOffset: inode.bodyOffset,
  };
  if (kind === 'char' || kind === 'block') Object.assign(out, erofs.decodeDevice(inode.union));
  if (isSymlink(inode)) Object.assign(out, jsonText('target', reader.readlink(inode)));
  const values = reader.xattrs(inode);
  out.xattrs = reader.storedXattrs(inode).map((entry) => ({
    ...jsonText('name', entry.name),
    offset: entry.offset,
    shared: entry.shared,
    valueBase64: values.get(entry.name)!.toString('base64'),
  }));
  if (isDirectory(inode)) {
    out.entries = reader
      .readdir(inode, true)
      .map((entry) => ({ ...jsonText('name', entry.name), nid: entry.nid, fileType: entry.fileType }));
  }
  if (isDirectory(inode) || isRegular(inode) || isSymlink(inode)) {
    const extents: Dump[] = [];
    for (const extent of reader.extents(inode)) {
      if (extents.length === EXTENTS_LISTED) {
        out.moreExtents = true;
        break;
      }
      const blob = extent.encoding === 'hole' ? undefined : extent.device === 0 ? id : deviceIds[extent.device - 1];
      extents.push({ ...extent, blob });
    }
    out.extents = extents;
  }
  return out;
}

function hex(value: number): string {
  return `0x${value.toString(16)}`;
}

/** `0x3 (SB_CHKSUM MTIME)` */
function flags(value: number, names: Readonly<Record<string, number>>): string {
  const set = Object.keys(names).filter((name) => value & names[name]!);
  return set.length === 0 ? hex(value) : `${hex(value)} (${set.join(' ')})`;
}

/** The same as indented lines. */
export function dumpText(value: unknown, indent = ''): string {
  let text = '';
  for (const [key, item] of Object.entries(value as Dump)) {
    if (item === undefined) continue;
    if (Array.isArray(item)) {
      text += `${indent}${key}: ${item.length === 0 ? 'none' : ''}\n`;
      for (const [k, element] of item.entries()) {
        if (typeof element !== 'object') text += `${indent}  ${element}\n`;
        else if (isFlat(element)) text += `${indent}  ${flatText(element as Dump)}\n`;
        else text += `${indent}  #${k + 1}\n${dumpText(element, `${indent}    `)}`;
      }
    } else if (typeof item === 'object' && item !== null) text += `${indent}${key}:\n${dumpText(item, `${indent}  `)}`;
    else text += `${indent}${key}: ${item}\n`;
  }
  return text;
}

function isFlat(value: object): boolean {
  return Object.values(value).length <= 10 && Object.values(value).every((item) => typeof item !== 'object');
}

function flatText(value: Dump): string {
  return Object.entries(value)
    .filter(([, item]) => item !== undefined)
    .map(([key, item]) => `${key}=${item}`)
    .join(' ');
}
