/** `dsec stat`: what stat(1) tells, and where in the image it comes from. */
import { type ByteString, display } from '#base';
import { jsonText, modeText, octalMode, shown, timeText } from './format-entry.ts';
import type { ImageTree, PlacedExtent, TreeStat } from './image-tree.ts';

export interface PathStat extends TreeStat {
  /** Of a link. */
  readonly target: ByteString | undefined;
  readonly xattrs: ReadonlyMap<ByteString, Buffer>;
  /** Digest of the metadata image it is seen from. */
  readonly layerId: string;
  /** Layers whose directories are merged in it, topmost first. */
  readonly mergedLayers: readonly number[];
  readonly extents: readonly PlacedExtent[];
  /** There are more extents than listed. */
  readonly moreExtents: boolean;
}

const EXTENTS_LISTED = 1000;

/** @throws TREE_NOT_FOUND, EROFS_CORRUPT */
export function statPath(tree: ImageTree, path: ByteString, followLast = false): PathStat {
  const node = tree.lookup(path, followLast);
  const stat = tree.stat(node);
  const extents: PlacedExtent[] = [];
  let moreExtents = false;
  if (stat.kind === 'file') {
    for (const extent of tree.extents(node)) {
      if (extents.length === EXTENTS_LISTED) {
        moreExtents = true;
        break;
      }
      extents.push(extent);
    }
  }
  return {
    ...stat,
    target: stat.kind === 'symlink' ? tree.readlink(node) : undefined,
    xattrs: tree.xattrs(node),
    layerId: tree.layers[node.layer]!.id,
    mergedLayers: node.parts.map((part) => part.layer),
    extents,
    moreExtents,
  };
}

/** Layers count from 1, the bottom one, as in `dsec inspect`. */
export function statText(stat: PathStat): string {
  const target = stat.target === undefined ? '' : ` -> ${shown(stat.target)}`;
  const device = stat.kind === 'char' || stat.kind === 'block' ? `  Device type: ${stat.major},${stat.minor}` : '';
  const time = `${timeText(stat.mtimeSec)}.${String(stat.mtimeNsec).padStart(9, '0')}`;
  let text = `  File: ${shown(stat.path)}${target}\n`;
  text += `  Size: ${stat.sizeBytes}\tBlocks: ${stat.blocks}\t${stat.kind}${device}\n`;
  text += ` Inode: ${stat.ino}\tLinks: ${stat.nlink}\n`;
  text += `Access: (${octalMode(stat.mode)}/${modeText(stat.kind, stat.mode)})  Uid: ${stat.uid}  Gid: ${stat.gid}\n`;
  text += `Modify: ${time} UTC\n`;
  text += ` Layer: ${stat.layer + 1} ${stat.layerId}\n`;
  if (stat.mergedLayers.length > 1)
    text += `Merged: layers ${stat.mergedLayers.map((layer) => layer + 1).join(', ')}\n`;
  for (const [name, value] of stat.xattrs) text += ` Xattr: ${shown(name)} = ${display(value.toString('latin1'))}\n`;
  for (const extent of stat.extents) text += `Extent: ${extentText(extent)}\n`;
  if (stat.moreExtents) text += `Extent: ... (more than ${stat.extents.length})\n`;
  return text;
}

export function extentText(extent: PlacedExtent): string {
  const range = `${extent.logical}..${extent.logical + extent.length}`;
  if (extent.encoding === 'hole') return `${range} hole`;
  if (extent.encoding === 'fragment') return `${range} in the packed inode at ${extent.offset}`;
  const stored = extent.encoding === 'raw' ? '' : ` (${extent.storedLength} bytes, ${extent.encoding})`;
  return `${range} at ${extent.offset} of ${extent.device === 0 ? 'metadata' : `device ${extent.device}`} ${extent.blob}${stored}`;
}

export function statJson(stat: PathStat): Record<string, unknown> {
  const { path, target, xattrs, mode, layer, mergedLayers, ...rest } = stat;
  return {
    ...jsonText('path', path),
    ...rest,
    mode: octalMode(mode),
    layer: layer + 1,
    mergedLayers: mergedLayers.map((merged) => merged + 1),
    ...(target === undefined ? {} : jsonText('target', target)),
    xattrs: [...xattrs].map(([name, value]) => ({ ...jsonText('name', name), valueBase64: value.toString('base64') })),
  };
}
