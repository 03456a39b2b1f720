/**
 * Applies layers to a tree by the rules of the OCI image specification (image-spec, layer.md) and, where it is silent, the
 * way container engines do: whiteouts and opaque marks act on the layers below only, wherever they stand in the layer; a
 * directory over a directory replaces its attributes and keeps its children; anything else replaces; parents without an
 * entry are directories 0755 root:root; symlinks on the way resolve inside the root.
 */
import { type ByteString, display } from '#base';
import { canStoreXattr } from '../erofs/xattr.ts';
import { fail } from '../errors.ts';
import type { Entry } from '../layer/entry.ts';
import { type FileData, forEachEntry, type SpoolIndex } from '../layer/spool-format.ts';
import { DirNode, LeafNode, type Node, setAttributes } from './file-tree.ts';

const MAX_SYMLINKS = 40;
const MAX_NAME_BYTES = 255;
/** Longer paths are refused: nothing makes them, and every component costs a directory. */
const MAX_PATH_BYTES = 32768;
/** An inode's attribute area holds at most 65535 * 4 bytes. */
const MAX_XATTR_BYTES = 260_000;
const MAX_MAJOR = 0xfff;
const MAX_MINOR = 0xfffff;
/** PATH_MAX less its terminator. */
const MAX_TARGET_BYTES = 4095;
const OPAQUE_MARK = '.wh..wh..opq';

export interface LayerInput {
  /** For messages. */
  readonly label: string;
  readonly index: SpoolIndex;
  readonly data: readonly FileData[];
  /** Whether `.wh.` names mean whiteouts (tars) or are refused (folders, whose reader says `whiteout` itself). */
  readonly whiteoutNames: boolean;
}

export interface TreeOptions {
  /**
   * What lies below is not known to this tree (the layer of a writable upper): every whiteout and opaque mark is kept, and
   * the first group is written as an upper one.
   */
  readonly unknownBase?: boolean;
}

export class OverlayTree {
  readonly root: DirNode;
  group: number;
  readonly notes: string[] = [];
  /** Something that may have data was replaced or deleted: the layers' data is no longer all of the group's. */
  losesData = false;
  readonly #keepAll: boolean;

  constructor(options: TreeOptions = {}) {
    this.#keepAll = options.unknownBase ?? false;
    this.group = this.#keepAll ? 1 : 0;
    this.root = new DirNode(0);
  }

  /** Layers from now on belong to the next group. */
  nextGroup(): void {
    this.group++;
  }

  apply(layer: LayerInput): void {
    this.root.touched = this.group;
    this.#hidden.clear();
    this.#leftOut.clear();
    if (layer.index.hasMarks) forEachEntry(layer.index, (entry) => this.#hideLower(layer, entry));
    forEachEntry(layer.index, (entry, dataId) => this.#add(layer, entry, dataId < 0 ? undefined : layer.data[dataId]!));
  }

  // ---- first pass: what the layer hides below it

  /** What the layer's marks took out: its own hard links may still mean it, since they are read as the layer is. */
  readonly #hidden = new Map<DirNode, Map<ByteString, Node>>();
  /** Paths of 0:0 devices that were left out of the layer, and of the links to them. */
  readonly #leftOut = new Set<ByteString>();

  #hideLower(layer: LayerInput, entry: Entry): void {
    if (entry.kind === 'whiteout' || entry.kind === 'opaque') {
      const parts = this.#parts(layer, entry);
      const name = parts[parts.length - 1];
      if (entry.kind === 'opaque') {
        const dir = this.#walk(layer, entry, parts, this.#keepAll);
        if (dir !== undefined) this.#makeOpaque(dir);
      } else if (name !== undefined) {
        const parent = this.#walk(layer, entry, parts.slice(0, -1), this.#keepAll);
        if (parent !== undefined) this.#whiteout(parent, name);
      }
      return;
    }
    if (!layer.whiteoutNames || !entry.path.includes('.wh.')) return;
    const parts = this.#parts(layer, entry);
    const name = parts[parts.length - 1];
    if (name === undefined || !name.startsWith('.wh.')) return;
    if (name === '.wh.' || name === '.wh..' || name === '.wh...') {
      throw fail('LAYER_BARE_WHITEOUT', { layer: layer.label, path: display(entry.path) });
    }
    const isOpaque = name === OPAQUE_MARK;
    if (!isOpaque && isAufs(parts)) return;
    const parent = this.#walk(layer, entry, parts.slice(0, -1), false);
    if (parent === undefined) return;
    if (isOpaque) this.#makeOpaque(parent);
    else this.#whiteout(parent, name.slice('.wh.'.length));
  }

  #whiteout(parent: DirNode, name: ByteString): void {
    const gone = parent.children.get(name);
    if (gone !== undefined) this.#hide(parent, name, gone);
    else if (this.#keepAll) parent.hide(name, true, this.group);
  }

  #makeOpaque(dir: DirNode): void {
    for (const [name, child] of dir.children) this.#hide(dir, name, child);
    // OverlayFS merges the roots of all layers whatever their attributes: there, each name gets a whiteout.
    if (dir !== this.root) dir.opaque = this.group;
  }

  #hide(parent: DirNode, name: ByteString, child: Node): void {
    const names = this.#hidden.get(parent) ?? new Map<ByteString, Node>();
    names.set(name, child);
    this.#hidden.set(parent, names);
    this.#remove(parent, name, child);
  }

  /** Takes a name out, remembering it if a lower group has it. */
  #remove(parent: DirNode, name: ByteString, child: Node): void {
    parent.children.delete(name);
    if (child.kind === 'dir' ? child.children.size > 0 : (child.data?.blocks ?? 0) > 0) this.losesData = true;
    if (this.#isLower(child)) parent.hide(name, child.kind === 'dir', this.group);
  }

  #isLower(node: Node): boolean {
    return (node.kind === 'dir' ? node.born : node.group) < this.group;
  }

  // ---- second pass: what it adds, in order

  #add(layer: LayerInput, entry: Entry, data: FileData | undefined): void {
    if (entry.kind === 'whiteout' || entry.kind === 'opaque') return;
    const parts = this.#parts(layer, entry);
    if (entry.path.includes('.wh.')) {
      if (layer.whiteoutNames) {
        if (isAufs(parts) || parts[parts.length - 1]?.startsWith('.wh.')) {
          // The parents of a marker are made, as engines do; but the layer may have put something else in a parent's place.
          if (!isAufs(parts)) this.#walk(layer, entry, parts.slice(0, -1), 'where possible');
          return;
        }
      }
      if (parts.some((part) => part.startsWith('.wh.'))) {
        throw fail('LAYER_WHITEOUT_NAME', { layer: layer.label, path: display(entry.path) });
      }
    }
    const name = parts.pop();
    if (name === undefined) {
      if (entry.kind === 'dir') setAttributes(this.root, this.#cleaned(layer, entry));
      return;
    }
    if (entry.kind === 'char' && entry.major === 0 && entry.minor === 0) {
      this.#leaveOut(
        layer,
        entry,
        [...parts, name],
        'character device 0:0 left out (OverlayFS would read it as a whiteout)',
      );
      return;
    }
    if (entry.kind === 'hardlink' && this.#leftOut.has(splitPath(entry.target).join('/'))) {
      this.#leaveOut(layer, entry, [...parts, name], 'link to a character device 0:0 left out');
      return;
    }
    checkRepresentable(layer, entry);
    const parent = this.#walk(layer, entry, parts, true)!;
    this.#place(layer, parent, name, this.#cleaned(layer, entry), data);
  }

  #leaveOut(layer: LayerInput, entry: Entry, parts: readonly ByteString[], why: string): void {
    this.#leftOut.add(parts.join('/'));
    this.notes.push(`${layer.label}: ${display(entry.path)}: ${why}`);
  }

  #place(layer: LayerInput, parent: DirNode, name: ByteString, entry: Entry, data: FileData | undefined): void {
    const old = parent.children.get(name);
    if (entry.kind === 'dir') {
      if (old?.kind === 'dir') {
        old.touched = this.group;
        setAttributes(old, entry);
        return;
      }
      if (old !== undefined) this.#remove(parent, name, old);
      const fresh = new DirNode(this.group);
      setAttributes(fresh, entry);
      parent.children.set(name, fresh);
      return;
    }
    const node =
      entry.kind === 'hardlink'
        ? this.#linkTarget(layer, entry)
        : new LeafNode(entry.kind as LeafNode['kind'], entry, this.group, data);
    if (node === old) return;
    if (old !== undefined) this.#remove(parent, name, old);
    parent.children.set(name, node);
  }

  #linkTarget(layer: LayerInput, entry: Entry): LeafNode {
    const parts = splitPath(entry.target);
    const name = parts.pop();
    const parent = name === undefined ? undefined : this.#walk(layer, entry, parts, 'also hidden');
    const target = parent?.children.get(name!) ?? (parent && this.#hidden.get(parent)?.get(name!));
    const what = { layer: layer.label, path: display(entry.path), target: display(entry.target) };
    if (target === undefined) throw fail('LAYER_LINK_TARGET', what);
    if (target.kind === 'dir') throw fail('LAYER_LINK_TO_DIRECTORY', what);
    if (target.group === this.group) return target;
    // The group's own layer must hold the file: names in different EROFS layers cannot share an inode.
    if (target.successor?.group !== this.group)
      target.successor = new LeafNode(target.kind, target, this.group, target.data);
    return target.successor!;
  }

  /**
   * The directory at `parts`, following symlinks inside the root. Undefined when it does not exist. True: what is missing is
   * made. `where possible`: unless something else is in its place. `also hidden`: what the layer's marks took out is found, too.
   * Every directory on the way becomes part of the group's layer, but for the last of these.
   */
  #walk(
    layer: LayerInput,
    entry: Entry,
    parts: readonly ByteString[],
    mode: boolean | 'where possible' | 'also hidden',
  ): DirNode | undefined {
    const create = mode === true || mode === 'where possible';
    const todo = parts.slice().reverse();
    const stack: DirNode[] = [this.root];
    let hops = 0;
    while (todo.length > 0) {
      const name = todo.pop()!;
      if (name === '' || name === '.') continue;
      if (name === '..') {
        if (stack.length > 1) stack.pop();
        continue;
      }
      const here = stack[stack.length - 1]!;
      let next = here.children.get(name) ?? (mode === 'also hidden' ? this.#hidden.get(here)?.get(name) : undefined);
      if (next === undefined) {
        if (!create) return undefined;
        next = new DirNode(this.group);
        here.children.set(name, next);
      }
      if (next.kind === 'dir') {
        stack.push(next);
      } else if (next.kind === 'symlink') {
        if (++hops > MAX_SYMLINKS) {
          throw fail('LAYER_SYMLINK_LOOP', { layer: layer.label, path: display(entry.path) });
        }
        if (next.target.startsWith('/')) stack.length = 1;
        for (const part of next.target.split('/').reverse()) todo.push(part);
      } else if (mode === true) {
        throw fail('LAYER_PARENT_NOT_DIRECTORY', {
          layer: layer.label,
          path: display(entry.path),
          parent: display(name),
        });
      } else {
        return undefined;
      }
    }
    if (mode !== 'also hidden') for (const dir of stack) dir.touched = this.group;
    return stack[stack.length - 1]!;
  }

  #parts(layer: LayerInput, entry: Entry): ByteString[] {
    if (entry.path.length > MAX_PATH_BYTES) {
      throw fail('LAYER_PATH_TOO_LONG', {
        layer: layer.label,
        path: `${display(entry.path.slice(0, 80))}...`,
        limit: MAX_PATH_BYTES,
      });
    }
    const parts = splitPath(entry.path);
    for (const part of parts) {
      if (part.length > MAX_NAME_BYTES) {
        throw fail('LAYER_NAME_TOO_LONG', { layer: layer.label, path: display(entry.path), limit: MAX_NAME_BYTES });
      }
    }
    return parts;
  }

  /**
   * The entry without what cannot or must not be in an image: attributes that OverlayFS keeps for itself (an image must not
   * be able to forge redirects or opaque marks), and names that EROFS has no way to write.
   */
  #cleaned(layer: LayerInput, entry: Entry): Entry {
    if (entry.xattrs === undefined) return entry;
    let bytes = 0;
    for (const [name, value] of entry.xattrs) {
      const internal = name.startsWith('trusted.overlay.') || name.startsWith('user.overlay.');
      if (!internal && canStoreXattr(name, value)) {
        bytes += name.length + value.length + 8;
        continue;
      }
      entry.xattrs.delete(name);
      const why = internal ? "it is OverlayFS's own" : 'EROFS cannot store it';
      this.notes.push(`${layer.label}: ${display(entry.path)}: attribute ${display(name)} left out (${why})`);
    }
    if (bytes > MAX_XATTR_BYTES) {
      throw fail('LAYER_XATTRS_TOO_LARGE', {
        layer: layer.label,
        path: display(entry.path),
        size: bytes,
        limit: MAX_XATTR_BYTES,
      });
    }
    if (entry.xattrs.size === 0) entry.xattrs = undefined;
    return entry;
  }
}

/** Refuses what Linux cannot hold: it would come out as something else. */
function checkRepresentable(layer: LayerInput, entry: Entry): void {
  const where = () => ({ layer: layer.label, path: display(entry.path) });
  if (entry.kind === 'char' || entry.kind === 'block') {
    const { major, minor } = entry;
    if (major > MAX_MAJOR || minor > MAX_MINOR) throw fail('LAYER_DEVICE_NUMBER', { ...where(), major, minor });
  }
  if (entry.kind === 'symlink' && (entry.target === '' || entry.target.length > MAX_TARGET_BYTES)) {
    throw fail('LAYER_SYMLINK_TARGET', { ...where(), length: entry.target.length, limit: MAX_TARGET_BYTES });
  }
}

/** Components of a path, cleaned lexically and clamped at the root. */
function splitPath(path: ByteString): ByteString[] {
  const out: ByteString[] = [];
  for (const part of path.split('/')) {
    if (part === '..') out.pop();
    else if (part !== '' && part !== '.') out.push(part);
  }
  return out;
}

/** `.wh..wh.plnk` and its like: housekeeping of AUFS, ignored with everything below. */
function isAufs(parts: readonly ByteString[]): boolean {
  return parts.some((part, i) => part.startsWith('.wh..wh.') && !(part === OPAQUE_MARK && i === parts.length - 1));
}
