/**
 * The merged view of an image's layers, as OverlayFS shows them when they are mounted on each other: whiteouts hide, opaque
 * directories cut off what lies below, directories merge with the topmost one's attributes, anything else covers.
 *
 * Nothing is read before it is asked for. Names and attributes come from metadata that is in memory: those calls are
 * synchronous. Only file contents are awaited.
 */
import { type ByteString, display, isDsecError } from '#base';
import { erofs } from '#converter';
import type { Image } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import type { Extent } from './extent.ts';
import { type Inode, isDirectory, isRegular, isSymlink, isWhiteout, type Kind } from './inode.ts';
import { type OpenLayer, openLayer } from './open-layer.ts';
import { type Part, TreeNode } from './tree-node.ts';
import { ChunkCache } from './verified-blob.ts';
import { WalkGuard } from './walk-guard.ts';

/** As in stat(2), with what only an image knows. */
export interface TreeStat {
  readonly path: ByteString;
  readonly kind: Kind;
  /** Type and permission bits. */
  readonly mode: number;
  readonly sizeBytes: number;
  /** 512-byte blocks. */
  readonly blocks: number;
  readonly nlink: number;
  readonly uid: number;
  readonly gid: number;
  readonly mtimeSec: number;
  readonly mtimeNsec: number;
  /** Unique in its layer. */
  readonly ino: number;
  readonly layer: number;
  readonly major: number;
  readonly minor: number;
}

/** An extent, and the blob that holds its bytes. */
export interface PlacedExtent extends Extent {
  /** Digest (or path) of the data blob or metadata image; undefined for holes. */
  readonly blob: string | undefined;
}

export interface WalkItem {
  readonly path: ByteString;
  readonly node: TreeNode;
  /** Path under which the same inode came before. */
  readonly linkTo: ByteString | undefined;
}

const LINKS_FOLLOWED_MAX = 40;
const OVERLAY_PREFIX = 'trusted.overlay.';
const OPAQUE = 'trusted.overlay.opaque';

/** @throws what the store throws, EROFS_CORRUPT, EROFS_UNSUPPORTED, EROFS_DEVICE_MISMATCH, STORE_CHUNK_TABLE */
export async function openTree(store: BlobStore, image: Image): Promise<ImageTree> {
  const cache = new ChunkCache();
  const layers: OpenLayer[] = [];
  try {
    for (const layer of image.layers) layers.push(await openLayer(store, layer, cache));
    return new ImageTree(image.name, layers);
  } catch (error) {
    for (const layer of layers) await layer.reader.close();
    throw error;
  }
}

export class ImageTree {
  /** For messages. */
  readonly name: string;
  /** Bottom first. */
  readonly layers: readonly OpenLayer[];
  readonly root: TreeNode;

  constructor(name: string, layers: readonly OpenLayer[]) {
    this.name = name;
    this.layers = layers;
    const parts: Part[] = [];
    for (let layer = layers.length - 1; layer >= 0; layer--) {
      const { reader } = layers[layer]!;
      const inode = reader.root();
      parts.push({ layer, inode });
      if (this.#isOpaque(layer, inode)) break;
    }
    this.root = new TreeNode('', undefined, parts);
  }

  /** The node at `path`. Links on the way are followed inside the image; the last one only when asked for. */
  find(path: ByteString, followLast = false): TreeNode | undefined {
    let node = this.root;
    let links = 0;
    const rest = path.split('/').reverse();
    while (rest.length > 0) {
      const name = rest.pop()!;
      if (name === '' || name === '.') continue;
      if (name === '..') {
        node = node.parent ?? node;
        continue;
      }
      if (!isDirectory(node.inode)) return undefined;
      const child = this.child(node, name);
      if (child === undefined) return undefined;
      if (isSymlink(child.inode) && (followLast || rest.some((left) => left !== ''))) {
        if (++links > LINKS_FOLLOWED_MAX) {
          throw fail('TREE_LINK_LOOP', { image: this.name, path: display(path), limit: LINKS_FOLLOWED_MAX });
        }
        const target = this.readlink(child);
        if (target.startsWith('/')) node = this.root;
        rest.push(...target.split('/').reverse());
        continue;
      }
      node = child;
    }
    // A trailing slash asks for a directory.
    return path.endsWith('/') && !isDirectory(node.inode) ? undefined : node;
  }

  /** @throws TREE_NOT_FOUND, TREE_LINK_LOOP */
  lookup(path: ByteString, followLast = false): TreeNode {
    const node = this.find(path, followLast);
    if (node === undefined) throw fail('TREE_NOT_FOUND', { image: this.name, path: display(path) });
    return node;
  }

  child(dir: TreeNode, name: ByteString): TreeNode | undefined {
    return this.#naming(dir, () => {
      const parts: Part[] = [];
      for (const part of dir.parts) {
        const entry = this.#reader(part).find(part.inode, name);
        if (entry === undefined) continue;
        if (!this.#stack(parts, part.layer, this.#reader(part).inodeOf(entry), part !== dir.parts.at(-1))) break;
      }
      return parts.length === 0 ? undefined : new TreeNode(name, dir, parts);
    });
  }

  /** Sorted by bytes. @throws TREE_NOT_A_DIRECTORY */
  readdir(dir: TreeNode): TreeNode[] {
    if (!isDirectory(dir.inode)) {
      throw fail('TREE_NOT_A_DIRECTORY', { image: this.name, path: display(dir.path), kind: dir.kind });
    }
    return this.#naming(dir, () => (dir.parts.length === 1 ? this.#readdirOne(dir) : this.#readdirMerged(dir)));
  }

  #readdirOne(dir: TreeNode): TreeNode[] {
    const { layer, inode } = dir.parts[0]!;
    const { reader } = this.layers[layer]!;
    const out: TreeNode[] = [];
    for (const entry of reader.readdir(inode)) {
      const child = reader.inodeOf(entry);
      if (!isWhiteout(child)) out.push(new TreeNode(entry.name, dir, [{ layer, inode: child }]));
    }
    return out;
  }

  #readdirMerged(dir: TreeNode): TreeNode[] {
    const found = new Map<ByteString, { parts: Part[]; open: boolean }>();
    for (const part of dir.parts) {
      const reader = this.#reader(part);
      const more = part !== dir.parts.at(-1);
      for (const entry of reader.readdir(part.inode)) {
        let child = found.get(entry.name);
        if (child === undefined) {
          child = { parts: [], open: true };
          found.set(entry.name, child);
        }
        if (child.open) child.open = this.#stack(child.parts, part.layer, reader.inodeOf(entry), more);
      }
    }
    const out: TreeNode[] = [];
    for (const name of [...found.keys()].sort()) {
      const { parts } = found.get(name)!;
      if (parts.length > 0) out.push(new TreeNode(name, dir, parts));
    }
    return out;
  }

  /** Adds what a lower layer has under a name to what the upper ones had. False when nothing below it counts. */
  #stack(parts: Part[], layer: number, inode: Inode, more: boolean): boolean {
    if (isWhiteout(inode)) return false;
    const directory = isDirectory(inode);
    if (!directory && parts.length > 0) return false;
    parts.push({ layer, inode });
    return directory && more && !this.#isOpaque(layer, inode);
  }

  #isOpaque(layer: number, inode: Inode): boolean {
    return inode.xattrBytes > 0 && this.layers[layer]!.reader.xattr(inode, OPAQUE)?.toString('latin1') === 'y';
  }

  readlink(node: TreeNode): ByteString {
    return this.#naming(node, () => this.#reader(node.parts[0]!).readlink(node.inode));
  }

  /** Without OverlayFS's own; its escaped ones (of an overlay inside the image) under their names. */
  xattrs(node: TreeNode): Map<ByteString, Buffer> {
    if (node.inode.xattrBytes === 0) return new Map();
    return this.#naming(node, () => {
      const out = new Map<ByteString, Buffer>();
      for (const [name, value] of this.#reader(node.parts[0]!).xattrs(node.inode)) {
        if (!name.startsWith(OVERLAY_PREFIX)) out.set(name, value);
        else if (name.startsWith('overlay.', OVERLAY_PREFIX.length)) {
          out.set(OVERLAY_PREFIX + name.slice(OVERLAY_PREFIX.length + 'overlay.'.length), value);
        }
      }
      return out;
    });
  }

  stat(node: TreeNode): TreeStat {
    const { inode, kind } = node;
    const { sb } = this.layers[node.layer]!.reader;
    const device = kind === 'char' || kind === 'block' ? erofs.decodeDevice(inode.union) : { major: 0, minor: 0 };
    const compressed =
      inode.layout === erofs.LAYOUT.COMPRESSED_COMPACT || inode.layout === erofs.LAYOUT.COMPRESSED_FULL;
    const blocks = compressed ? inode.union : Math.ceil(inode.sizeBytes / sb.blockSize);
    return {
      path: node.path,
      kind,
      mode: inode.mode,
      sizeBytes: inode.sizeBytes,
      blocks: blocks * (sb.blockSize / 512),
      // OverlayFS does not count the subdirectories of a merged directory.
      nlink: node.parts.length > 1 ? 1 : inode.nlink,
      uid: inode.uid,
      gid: inode.gid,
      mtimeSec: inode.mtimeSec,
      mtimeNsec: inode.mtimeNsec,
      ino: inode.nid,
      layer: node.layer,
      ...device,
    };
  }

  /** Bytes of a regular file, fewer where it ends. The result may be shared: do not change it. @throws TREE_NOT_A_FILE */
  async read(node: TreeNode, offset: number, length: number): Promise<Buffer> {
    this.#needFile(node);
    try {
      return await this.#reader(node.parts[0]!).read(node.inode, offset, length);
    } catch (error) {
      throw this.named(node, error);
    }
  }

  /** A regular file's bytes in order, in pieces of up to 1 MiB. @throws TREE_NOT_A_FILE */
  async *stream(node: TreeNode, offset = 0, length = node.inode.sizeBytes - offset): AsyncGenerator<Buffer> {
    this.#needFile(node);
    try {
      yield* this.#reader(node.parts[0]!).stream(node.inode, offset, length);
    } catch (error) {
      throw this.named(node, error);
    }
  }

  #needFile(node: TreeNode): void {
    if (!isRegular(node.inode)) {
      throw fail('TREE_NOT_A_FILE', { image: this.name, path: display(node.path), kind: node.kind });
    }
  }

  /** Where a file's bytes lie; for regular files, links and directories. */
  *extents(node: TreeNode): Generator<PlacedExtent> {
    const layer = this.layers[node.layer]!;
    try {
      for (const extent of layer.reader.extents(node.inode)) yield { ...extent, blob: blobOf(layer, extent) };
    } catch (error) {
      throw this.named(node, error);
    }
  }

  /** Everything below `start` and itself, parents before children, siblings by name. */
  *walk(start: TreeNode = this.root): Generator<WalkItem> {
    const guard = new WalkGuard(this);
    const files = this.layers.map(() => new Map<number, ByteString>());
    const stack: TreeNode[][] = [[start]];
    const paths: ByteString[] = [start.parent === undefined ? '' : start.parent.path.replace(/\/$/, '')];
    while (stack.length > 0) {
      const node = stack.at(-1)!.pop();
      if (node === undefined) {
        stack.pop();
        paths.pop();
        continue;
      }
      const path = node.parent === undefined ? '/' : `${paths.at(-1)}/${node.name}`;
      if (isDirectory(node.inode)) {
        guard.enter(node, stack.length);
        yield { path, node, linkTo: undefined };
        stack.push(this.readdir(node).reverse());
        paths.push(node.parent === undefined ? '' : path);
        continue;
      }
      let linkTo: ByteString | undefined;
      if (node.inode.nlink > 1) {
        const first = files[node.layer]!;
        linkTo = first.get(node.inode.nid);
        if (linkTo === undefined) first.set(node.inode.nid, path);
      }
      yield { path, node, linkTo };
    }
  }

  #reader(part: Part) {
    return this.layers[part.layer]!.reader;
  }

  #naming<T>(node: TreeNode, work: () => T): T {
    try {
      return work();
    } catch (error) {
      throw this.named(node, error);
    }
  }

  /** The same error, saying by what path we came to the inode. */
  named(node: TreeNode, error: unknown): unknown {
    if (!isDsecError(error) || error.params.path !== undefined) return error;
    if (error.code !== 'EROFS_CORRUPT' && error.code !== 'EROFS_UNSUPPORTED') return error;
    const path = display(node.path);
    const { where } = error.params;
    const at = where === `nid ${node.inode.nid}` ? `${where} (${path})` : `${where} (at or in ${path})`;
    return fail(error.code, { ...error.params, where: at, path }, error);
  }

  async close(): Promise<void> {
    for (const layer of this.layers) await layer.reader.close();
  }
}

function blobOf(layer: OpenLayer, extent: Extent): string | undefined {
  if (extent.encoding === 'hole') return undefined;
  return extent.device === 0 ? layer.id : layer.deviceIds[extent.device - 1];
}
