/** A profile's paths as an order of the tree's data: what a start reads comes first in a blob. */
import type { ByteString } from '#base';
import type { FileOrder } from '../erofs/data-blob.ts';
import type { FileData } from '../layer/spool-format.ts';
import type { Node } from './file-tree.ts';
import type { OverlayTree } from './overlay-merge.ts';

/** The data of the files that the tree has at these paths; links are not followed, paths that name no file are passed by. */
export function orderOf(tree: OverlayTree, profile: readonly ByteString[]): FileOrder {
  const order = new Map<FileData, number>();
  for (const path of profile) {
    let node: Node | undefined = tree.root;
    for (const name of path.split('/')) {
      if (name !== '') node = node?.kind === 'dir' ? node.children.get(name) : undefined;
    }
    if (node?.kind === 'file' && node.data !== undefined && !order.has(node.data)) order.set(node.data, order.size);
  }
  return order;
}
