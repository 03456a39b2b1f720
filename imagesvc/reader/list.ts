/**
 * `dsec ls`: names, `-l` and `-R` as ls(1) lays them out (numeric owners, times in UTC, hidden names included), or one
 * JSON object a line. Text comes in pieces of many lines: 100,000 entries must not cost 100,000 writes.
 */
import type { ByteString } from '#base';
import { erofs } from '#converter';
import { jsonEntry, modeText, shown, timeText } from './format-entry.ts';
import type { ImageTree } from './image-tree.ts';
import { isDirectory } from './inode.ts';
import type { TreeNode } from './tree-node.ts';
import { WalkGuard } from './walk-guard.ts';

export interface ListOptions {
  readonly long?: boolean;
  readonly recursive?: boolean;
  readonly json?: boolean;
}

const PIECE_CHARS = 64 * 1024;

/** @throws TREE_NOT_FOUND, EROFS_CORRUPT */
export function* list(tree: ImageTree, path: ByteString, options: ListOptions = {}): Generator<string> {
  // As in ls: a link that is listed itself is shown as a link by -l.
  const start = tree.lookup(path, options.long !== true || path.endsWith('/'));
  let piece = '';
  for (const text of isDirectory(start.inode) ? directories(tree, start, options) : one(tree, start, options)) {
    piece += text;
    if (piece.length < PIECE_CHARS) continue;
    yield piece;
    piece = '';
  }
  if (piece !== '') yield piece;
}

function one(tree: ImageTree, node: TreeNode, options: ListOptions): string[] {
  return [lines(tree, [node], node.parent?.path ?? '/', options)];
}

function* directories(tree: ImageTree, start: TreeNode, options: ListOptions): Generator<string> {
  const guard = new WalkGuard(tree);
  const waiting: { node: TreeNode; path: ByteString; depth: number }[] = [{ node: start, path: start.path, depth: 1 }];
  let first = true;
  for (let next = waiting.pop(); next !== undefined; next = waiting.pop()) {
    const { node, path, depth } = next;
    guard.enter(node, depth);
    const entries = tree.readdir(node);
    if (options.recursive && !options.json) {
      yield `${first ? '' : '\n'}${shown(path)}:\n`;
      first = false;
    }
    yield lines(tree, entries, path, options);
    if (!options.recursive) return;
    for (let k = entries.length - 1; k >= 0; k--) {
      const entry = entries[k]!;
      if (isDirectory(entry.inode)) waiting.push({ node: entry, path: joined(path, entry.name), depth: depth + 1 });
    }
  }
}

function joined(dir: ByteString, name: ByteString): ByteString {
  return dir === '/' ? `/${name}` : `${dir}/${name}`;
}

function lines(tree: ImageTree, nodes: readonly TreeNode[], dir: ByteString, options: ListOptions): string {
  let text = '';
  if (options.json) {
    for (const node of nodes) {
      const path = node.parent === undefined ? '/' : joined(dir, node.name);
      text += `${jsonEntry(tree, node, path)}\n`;
    }
    return text;
  }
  if (!options.long) {
    for (const node of nodes) text += `${shown(node.name || '/')}\n`;
    return text;
  }
  const rows = nodes.map((node) => {
    const { inode, kind } = node;
    const device = kind === 'char' || kind === 'block' ? erofs.decodeDevice(inode.union) : undefined;
    return {
      nlink: String(node.parts.length > 1 ? 1 : inode.nlink),
      uid: String(inode.uid),
      gid: String(inode.gid),
      size: device === undefined ? String(inode.sizeBytes) : `${device.major}, ${device.minor}`,
    };
  });
  const nlinkWidth = widest(rows, 'nlink');
  const uidWidth = widest(rows, 'uid');
  const gidWidth = widest(rows, 'gid');
  const sizeWidth = widest(rows, 'size');
  for (let k = 0; k < nodes.length; k++) {
    const node = nodes[k]!;
    const { nlink, uid, gid, size } = rows[k]!;
    const { inode, kind } = node;
    const time = timeText(inode.mtimeSec).slice(0, -3);
    const target = kind === 'symlink' ? ` -> ${shown(tree.readlink(node))}` : '';
    text += `${modeText(kind, inode.mode)} ${nlink.padStart(nlinkWidth)} ${uid.padStart(uidWidth)} ${gid.padStart(gidWidth)} ${size.padStart(sizeWidth)} ${time} ${shown(node.name || '/')}${target}\n`;
  }
  return text;
}

function widest<K extends string>(rows: readonly Readonly<Record<K, string>>[], column: K): number {
  let width = 0;
  for (const row of rows) if (row[column].length > width) width = row[column].length;
  return width;
}
