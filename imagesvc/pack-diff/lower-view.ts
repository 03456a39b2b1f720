/**
 * What the layers below an upper show at a path, as OverlayFS sees it: name by name, no symlink followed.
 *
 * pack-diff needs it because an upper alone does not tell which of its marks matter. OverlayFS (with `xino=on`, as we mount)
 * marks every new directory opaque, also where nothing lies below; kept, such a mark of a toolkit that made `/opt` would
 * hide the `/opt` of every other base the toolkit is laid over.
 */
import type { ByteString } from '#base';
import type { ErofsLayer } from '../catalog/image.ts';
import { ImageTree } from '../reader/image-tree.ts';
import { isDirectory } from '../reader/inode.ts';
import { type OpenLayer, openLayer } from '../reader/open-layer.ts';
import type { TreeNode } from '../reader/tree-node.ts';
import { ChunkCache } from '../reader/verified-blob.ts';
import type { BlobStore } from '../store/blob-store.ts';

export interface LowerView {
  /** `path`: relative to the root, without a leading slash, as entries have it. */
  at(path: ByteString): 'dir' | 'other' | undefined;
  close(): Promise<void>;
}

/** `layers`: bottom first; `name`: what to call them in messages. @throws as `openTree` */
export async function openLowerView(store: BlobStore, name: string, layers: readonly ErofsLayer[]): Promise<LowerView> {
  const cache = new ChunkCache();
  const opened: OpenLayer[] = [];
  try {
    for (const layer of layers) opened.push(await openLayer(store, layer, cache));
  } catch (error) {
    for (const layer of opened) await layer.reader.close();
    throw error;
  }
  const tree = new ImageTree(name, opened);
  const at = lowerLookup(tree);
  return { at, close: () => tree.close() };
}

/** Directories last looked up: a walk asks for siblings one after the other. */
const REMEMBERED = 4096;

function lowerLookup(tree: ImageTree): LowerView['at'] {
  const folders = new Map<ByteString, TreeNode | undefined>([['', tree.root]]);
  const folderAt = (path: ByteString): TreeNode | undefined => {
    if (folders.has(path)) return folders.get(path);
    const node = nodeAt(path);
    const folder = node !== undefined && isDirectory(node.inode) ? node : undefined;
    if (folders.size >= REMEMBERED) {
      folders.clear();
      folders.set('', tree.root);
    }
    folders.set(path, folder);
    return folder;
  };
  const nodeAt = (path: ByteString): TreeNode | undefined => {
    const slash = path.lastIndexOf('/');
    const parent = folderAt(slash < 0 ? '' : path.slice(0, slash));
    return parent === undefined ? undefined : tree.child(parent, path.slice(slash + 1));
  };
  return (path) => {
    if (path === '' || path === '.') return 'dir';
    const node = nodeAt(path);
    return node === undefined ? undefined : isDirectory(node.inode) ? 'dir' : 'other';
  };
}
