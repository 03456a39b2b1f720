/** Layers as lists of entries, and the tree they give, for tests. */
import { bareEntry, type Entry } from '../layer/entry.ts';
import { SpoolIndexWriter } from '../layer/spool-format.ts';
import { DirNode } from '../tree/file-tree.ts';
import { GroupView } from '../tree/group-view.ts';
import { OverlayTree } from '../tree/overlay-merge.ts';

export type Made = Partial<Entry> & Pick<Entry, 'path' | 'kind'>;

export const file = (path: string, more: Partial<Entry> = {}): Made => ({ path, kind: 'file', mode: 0o644, ...more });
export const dir = (path: string, mode = 0o755, more: Partial<Entry> = {}): Made => ({
  path,
  kind: 'dir',
  mode,
  ...more,
});
export const symlink = (path: string, target: string): Made => ({ path, kind: 'symlink', target, mode: 0o777 });
export const hardlink = (path: string, target: string): Made => ({ path, kind: 'hardlink', target });
export const gone = (path: string): Made => file(path.replace(/([^/]+)$/, '.wh.$1'));
export const opaque = (path: string): Made => file(`${path}/.wh..wh..opq`);

export function layerOf(entries: readonly Made[], label = 'layer') {
  const index = new SpoolIndexWriter();
  for (const entry of entries) {
    const full = { ...bareEntry(entry.path, entry.kind), ...entry };
    index.add(full, undefined);
  }
  return { label, index: index.finish(), data: [], whiteoutNames: true };
}

/** Applies layers, one group each unless `together`. Returns what each group's EROFS layer would hold, as lines. */
export function groupsOf(layers: readonly (readonly Made[])[], together = false): string[][] {
  const tree = new OverlayTree();
  const out: string[][] = [];
  layers.forEach((entries, i) => {
    tree.apply(layerOf(entries, `layer ${i + 1}`));
    if (together && i < layers.length - 1) return;
    out.push(linesOf(tree.root, new GroupView(tree.group)));
    tree.nextGroup();
  });
  return out;
}

/** `path` with `/` after directories, `!` after opaque ones, `-` before whiteouts, `=N` after hard links. */
export function linesOf(root: DirNode, view: GroupView): string[] {
  const out: string[] = [];
  const ids = new Map<object, number>();
  const counts = new Map<object, number>();
  const visit = (dir: DirNode, path: string, count: boolean) => {
    for (const { name, node } of view.children(dir)) {
      const at = path === '' ? name : `${path}/${name}`;
      if (node instanceof DirNode) {
        if (!count) out.push(`${at}/${view.isOpaque(dir, name, node) ? '!' : ''}`);
        visit(node, at, count);
      } else if (node.kind === 'char' && node.major === 0) {
        if (!count) out.push(`-${at}`);
      } else if (count) {
        counts.set(node, (counts.get(node) ?? 0) + 1);
      } else {
        const linked = (counts.get(node) ?? 0) > 1;
        if (linked && !ids.has(node)) ids.set(node, ids.size + 1);
        out.push(linked ? `${at}=${ids.get(node)}` : at);
      }
    }
  };
  visit(root, '', true);
  visit(root, '', false);
  return out;
}
