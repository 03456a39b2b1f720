/**
 * What one group's EROFS layer holds: the part of the tree that the group made or passed through, with OverlayFS whiteouts
 * and opaque marks where a lower group's names must not show through. A group at the bottom needs none.
 */
import type { ByteString } from '#base';
import { bareEntry } from '../layer/entry.ts';
import { type DirNode, LeafNode, type Node } from './file-tree.ts';

/** A name in the layer. `opaque` only for directories. */
export interface Named {
  readonly name: ByteString;
  readonly node: Node;
}

export class GroupView {
  readonly #group: number;
  /** One node for all whiteouts of the layer would save inodes, but tools expect single links: one node each. */
  readonly #bottom: boolean;

  constructor(group: number) {
    this.#group = group;
    this.#bottom = group === 0;
  }

  /** The directory's names in the layer, sorted by their bytes. */
  children(dir: DirNode): Named[] {
    const out: Named[] = [];
    for (const [name, node] of dir.children) {
      if ((node.kind === 'dir' ? node.touched : node.group) === this.#group) out.push({ name, node });
    }
    const shadow = this.#bottom || dir.opaque === this.#group ? undefined : dir.shadowIn(this.#group);
    if (shadow !== undefined) {
      for (const name of shadow.keys()) if (!dir.children.has(name)) out.push({ name, node: whiteout(this.#group) });
    }
    return out.sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  /** Whether `dir`, called `name` in `parent`, must hide what lower groups have at its path. */
  isOpaque(parent: DirNode | undefined, name: ByteString, dir: DirNode): boolean {
    if (this.#bottom) return false;
    if (dir.opaque === this.#group) return true;
    return parent !== undefined && parent.opaque !== this.#group && parent.shadowIn(this.#group)?.get(name) === true;
  }
}

function whiteout(group: number): LeafNode {
  return new LeafNode('char', bareEntry('', 'char'), group, undefined);
}
