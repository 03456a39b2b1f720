/** One name in the merged view of an image. */
import type { ByteString } from '#base';
import type { Inode, Kind } from './inode.ts';
import { kindOf } from './inode.ts';

/** A directory of one layer that contributes to a merged one. */
export interface Part {
  readonly layer: number;
  readonly inode: Inode;
}

export class TreeNode {
  /** Empty for the root. */
  readonly name: ByteString;
  readonly parent: TreeNode | undefined;
  /** Topmost first. What is seen of the node itself is `parts[0]`; the others only add names to a directory. */
  readonly parts: readonly Part[];

  constructor(name: ByteString, parent: TreeNode | undefined, parts: readonly Part[]) {
    this.name = name;
    this.parent = parent;
    this.parts = parts;
  }

  get inode(): Inode {
    return this.parts[0]!.inode;
  }

  /** Index of the layer it is seen from, 0 = bottom. */
  get layer(): number {
    return this.parts[0]!.layer;
  }

  get kind(): Kind {
    return kindOf(this.parts[0]!.inode.mode);
  }

  /** Absolute, `/` for the root. */
  get path(): ByteString {
    const names: ByteString[] = [];
    for (let node: TreeNode = this; node.parent !== undefined; node = node.parent) names.push(node.name);
    return `/${names.reverse().join('/')}`;
  }
}
