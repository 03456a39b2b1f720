/**
 * `dsec diff`: what image B has that image A has not, the other way round, and what differs, in path order.
 *
 * Images that share layers share them by digest: a directory that comes from the same inodes of the same layers in both
 * is equal with all below it, and is not even listed.
 */
import type { ByteString } from '#base';
import { erofs } from '#converter';
import { jsonText, shown } from './format-entry.ts';
import type { ImageTree } from './image-tree.ts';
import { type Inode, isDirectory, isRegular, type Kind, typeOf } from './inode.ts';
import { sameContent } from './same-content.ts';
import type { TreeNode } from './tree-node.ts';
import { WalkGuard } from './walk-guard.ts';

export type Aspect = 'type' | 'content' | 'target' | 'device' | 'mode' | 'owner' | 'mtime' | 'xattrs';

export interface Change {
  readonly path: ByteString;
  readonly change: 'added' | 'deleted' | 'changed';
  /** Of B's, for deleted ones of A's. */
  readonly kind: Kind;
  /** What differs, for changed ones. */
  readonly what: readonly Aspect[];
  /** Of a file in A; 0 for what has no content there. */
  readonly sizeBefore: number;
  readonly sizeAfter: number;
}

export interface DiffOptions {
  /** Times alone make no change. */
  readonly ignoreMtime?: boolean;
}

interface Pair {
  readonly path: ByteString;
  readonly before: TreeNode | undefined;
  readonly after: TreeNode | undefined;
}

/** @throws EROFS_CORRUPT, STORE_CHUNK_MISMATCH */
export async function* diffTrees(a: ImageTree, b: ImageTree, options: DiffOptions = {}): AsyncGenerator<Change> {
  const guardA = new WalkGuard(a);
  const guardB = new WalkGuard(b);
  const stack: { pair: Pair; depth: number }[] = [{ pair: { path: '/', before: a.root, after: b.root }, depth: 1 }];
  for (let next = stack.pop(); next !== undefined; next = stack.pop()) {
    const { path, before, after } = next.pair;
    if (before !== undefined && after !== undefined && sameNodes(a, before, b, after)) continue;
    const change = await compare(a, b, next.pair, options);
    if (change !== undefined) yield change;
    const dirBefore = before !== undefined && isDirectory(before.inode) ? before : undefined;
    const dirAfter = after !== undefined && isDirectory(after.inode) ? after : undefined;
    if (dirBefore !== undefined) guardA.enter(dirBefore, next.depth);
    if (dirAfter !== undefined) guardB.enter(dirAfter, next.depth);
    const children = joined(
      path === '/' ? '/' : `${path}/`,
      dirBefore === undefined ? [] : a.readdir(dirBefore),
      dirAfter === undefined ? [] : b.readdir(dirAfter),
    );
    for (let k = children.length - 1; k >= 0; k--) stack.push({ pair: children[k]!, depth: next.depth + 1 });
  }
}

/** Both lists are sorted. */
function joined(prefix: ByteString, before: readonly TreeNode[], after: readonly TreeNode[]): Pair[] {
  const out: Pair[] = [];
  let i = 0;
  let j = 0;
  while (i < before.length || j < after.length) {
    const x = before[i];
    const y = after[j];
    const takeX = x !== undefined && (y === undefined || x.name <= y.name);
    const takeY = y !== undefined && (x === undefined || y.name <= x.name);
    out.push({
      path: prefix + (takeX ? x.name : y!.name),
      before: takeX ? x : undefined,
      after: takeY ? y : undefined,
    });
    if (takeX) i++;
    if (takeY) j++;
  }
  return out;
}

/** The same inodes of the same layers: equal, and so is all below. */
function sameNodes(a: ImageTree, before: TreeNode, b: ImageTree, after: TreeNode): boolean {
  if (before.parts.length !== after.parts.length) return false;
  return before.parts.every((part, k) => {
    const other = after.parts[k]!;
    return part.inode.nid === other.inode.nid && a.layers[part.layer]!.id === b.layers[other.layer]!.id;
  });
}

async function compare(a: ImageTree, b: ImageTree, pair: Pair, options: DiffOptions): Promise<Change | undefined> {
  const { path, before, after } = pair;
  if (before === undefined) {
    return { path, change: 'added', kind: after!.kind, what: [], sizeBefore: 0, sizeAfter: contentSize(after!.inode) };
  }
  if (after === undefined) {
    return {
      path,
      change: 'deleted',
      kind: before.kind,
      what: [],
      sizeBefore: contentSize(before.inode),
      sizeAfter: 0,
    };
  }
  const what = await aspects(a, before, b, after, options);
  if (what.length === 0) return undefined;
  return {
    path,
    change: 'changed',
    kind: after.kind,
    what,
    sizeBefore: contentSize(before.inode),
    sizeAfter: contentSize(after.inode),
  };
}

async function aspects(
  a: ImageTree,
  before: TreeNode,
  b: ImageTree,
  after: TreeNode,
  options: DiffOptions,
): Promise<Aspect[]> {
  const x = before.inode;
  const y = after.inode;
  const what: Aspect[] = [];
  if (typeOf(x) !== typeOf(y)) what.push('type');
  else if (isRegular(x)) {
    if (!(await sameContent({ tree: a, node: before }, { tree: b, node: after }))) what.push('content');
  } else if (before.kind === 'symlink') {
    if (a.readlink(before) !== b.readlink(after)) what.push('target');
  } else if ((before.kind === 'char' || before.kind === 'block') && x.union !== y.union) what.push('device');
  if (((x.mode ^ y.mode) & ~erofs.MODE_TYPE.mask) !== 0) what.push('mode');
  if (x.uid !== y.uid || x.gid !== y.gid) what.push('owner');
  if (!options.ignoreMtime && (x.mtimeSec !== y.mtimeSec || x.mtimeNsec !== y.mtimeNsec)) what.push('mtime');
  if (!sameXattrs(a.xattrs(before), b.xattrs(after))) what.push('xattrs');
  return what;
}

function sameXattrs(a: ReadonlyMap<ByteString, Buffer>, b: ReadonlyMap<ByteString, Buffer>): boolean {
  if (a.size !== b.size) return false;
  for (const [name, value] of a) if (!b.get(name)?.equals(value)) return false;
  return true;
}

function contentSize(inode: Inode): number {
  return isRegular(inode) ? inode.sizeBytes : 0;
}

const LETTERS = { added: 'A', deleted: 'D', changed: 'C' } as const;

/** `C /etc/passwd (content, mtime) 120 -> 180` */
export function changeText(change: Change): string {
  const { sizeBefore, sizeAfter, what } = change;
  const size =
    change.kind !== 'file' && sizeBefore === 0
      ? ''
      : change.change === 'changed'
        ? sizeBefore === sizeAfter
          ? ` ${sizeAfter}`
          : ` ${sizeBefore} -> ${sizeAfter}`
        : ` ${change.change === 'added' ? sizeAfter : sizeBefore}`;
  const slash = change.kind === 'dir' && change.path !== '/' ? '/' : '';
  return `${LETTERS[change.change]} ${shown(change.path)}${slash}${what.length > 0 ? ` (${what.join(', ')})` : ''}${size}`;
}

export function changeJson(change: Change): Record<string, unknown> {
  const { path, ...rest } = change;
  return { ...jsonText('path', path), ...rest };
}
