/** A tree of this machine, unpacked into a folder of its own: what is measured there changes under nobody's hands. */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { writeLayer } from './machine-layers.ts';
import { timedCommand } from './timed-command.ts';
import type { Tree } from './trees.ts';

export interface UnpackedTree {
  readonly name: string;
  readonly folder: string;
  readonly members: number;
}

export async function unpackTree(tree: Tree, folder: string): Promise<UnpackedTree> {
  const target = join(folder, `tree-${tree.name}`);
  const layer = await writeLayer(tree.paths, join(folder, `${tree.name}.tar.gz`));
  mkdirSync(target);
  await timedCommand(['tar', '-xzpf', layer.path, '-C', target]);
  return { name: tree.name, folder: target, members: layer.members };
}
