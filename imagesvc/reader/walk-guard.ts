/**
 * Ends walks that a damaged or hostile image would make endless: no directory of a layer may be entered twice, and
 * none lies deeper than a kernel's longest path reaches.
 */
import type { ImageTree } from './image-tree.ts';
import type { TreeNode } from './tree-node.ts';

const DEPTH_MAX = 4096;

export class WalkGuard {
  readonly #tree: ImageTree;
  readonly #entered: readonly Set<number>[];

  constructor(tree: ImageTree) {
    this.#tree = tree;
    this.#entered = tree.layers.map(() => new Set<number>());
  }

  /** To be called once for each directory of the walk. @throws EROFS_CORRUPT */
  enter(node: TreeNode, depth: number): void {
    for (const part of node.parts) {
      const entered = this.#entered[part.layer]!;
      const { nid } = part.inode;
      const { meta } = this.#tree.layers[part.layer]!.reader;
      if (entered.has(nid)) {
        throw this.#tree.named(node, meta.corrupt(nid, 'this directory is reached by two paths'));
      }
      entered.add(nid);
      if (depth > DEPTH_MAX) throw meta.corrupt(nid, `directories nested more than ${DEPTH_MAX} deep`);
    }
  }
}
