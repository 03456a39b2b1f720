/**
 * Writes the metadata image of one EROFS layer: superblock, device table, inodes with their attributes, maps and inline
 * data, shared attributes, directory blocks. File data stays outside, in data blobs on device slots; inodes name it by
 * unified block addresses (flat and compressed files) or by slot and block (files with holes).
 *
 * Same tree, same spools, same options: same bytes. Nothing here looks at a clock, a locale or the order of a hash.
 */
import { type ByteString, writeByteString } from '#base';
import type { CodecName } from '../layer/cluster-codec.ts';
import type { FileData } from '../layer/spool-format.ts';
import type { DirNode, LeafNode, Node } from '../tree/file-tree.ts';
import type { GroupView, Named } from '../tree/group-view.ts';
import { clusterIndexBytes, encodeClusterIndex } from './cluster-index.ts';
import { superblockChecksum } from './crc32c.ts';
import type { DataPlacement } from './data-blob.ts';
import { directoryBytes, encodeDirectory, withDots } from './directory.ts';
import { ALGORITHM_OF, ImageHeader } from './image-header.ts';
import { fitsInline, GAP_WINDOW_BYTES, InodeAllocator } from './inode-plan.ts';
import {
  BLOCK_BYTES,
  CHUNK_FORMAT,
  CHUNK_INDEX_SIZE,
  COMPACT_INODE,
  COMPACT_INODE_SIZE,
  EXTENDED_INODE,
  EXTENDED_INODE_SIZE,
  encodeDevice,
  FILE_TYPE,
  INODE_FORMAT,
  INODE_SLOT_SIZE,
  LAYOUT,
  MAP_ADVISE,
  MAP_HEADER,
  MAP_HEADER_SIZE,
  MODE_TYPE,
  NULL_ADDR,
  SB,
  SUPER_OFFSET,
} from './layout.ts';
import { MetaFile } from './meta-file.ts';
import { XattrTable } from './xattr.ts';

export interface TailReader {
  /** Copies a file's inline tail into `into`. */
  read(data: FileData, into: Buffer): void;
}

export interface WriterInput {
  readonly root: DirNode;
  readonly view: GroupView;
  readonly tails: TailReader;
  /** Codec of the clusters in the spools, if any. */
  readonly codec: CodecName | undefined;
}

interface Inode {
  readonly node: Node;
  readonly xattrs: ReadonlyMap<ByteString, Buffer> | undefined;
  position: number;
  extended: boolean;
  headBytes: number;
  inlineBytes: number;
}

interface Directory extends Inode {
  readonly node: DirNode;
  readonly parent: Directory | undefined;
  /** With `.` and `..`, sorted. */
  readonly entries: readonly Named[];
  readonly sizeBytes: number;
  readonly subdirectories: number;
  /** First of its whole blocks in the primary, if it has any. */
  firstBlock: number;
}

const OPAQUE: readonly [ByteString, Buffer] = ['trusted.overlay.opaque', Buffer.from('y')];

/**
 * An image laid out in memory. `prepare` walks the tree; then the caller knows which data is live, places it, and
 * `write` puts the image out.
 */
export class ErofsWriter {
  readonly #input: WriterInput;
  readonly #inodes: Inode[] = [];
  readonly #xattrs = new XattrTable();
  readonly #live = new Set<FileData>();
  #epoch: { sec: number; nsec: number } = { sec: 0, nsec: 0 };

  constructor(input: WriterInput) {
    this.#input = input;
    this.#walk();
    this.#chooseEpoch();
  }

  get inodeCount(): number {
    return this.#inodes.length;
  }

  /** Every file's data, each object once. */
  get liveData(): ReadonlySet<FileData> {
    return this.#live;
  }

  #walk(): void {
    const todo: Directory[] = [this.#addDirectory(this.#input.root, undefined, '')];
    while (todo.length > 0) {
      const dir = todo.pop()!;
      const below: Directory[] = [];
      for (const { name, node } of dir.entries) {
        if (name === '.' || name === '..') continue;
        if (node.kind === 'dir') {
          below.push(this.#addDirectory(node, dir, name));
        } else if (node.nid !== SEEN) {
          node.nid = SEEN;
          node.links = 1;
          this.#addInode(node, node.xattrs);
          if (node.data !== undefined) this.#live.add(node.data);
        } else {
          node.links++;
        }
      }
      for (const next of below.reverse()) todo.push(next);
    }
  }

  #addDirectory(node: DirNode, parent: Directory | undefined, name: ByteString): Directory {
    const { view } = this.#input;
    const names = view.children(node);
    const opaque = view.isOpaque(parent?.node, name, node);
    const xattrs = opaque ? new Map([...(node.xattrs ?? []), OPAQUE]) : node.xattrs;
    const entries = withDots(names, { name: '.', node }, { name: '..', node: parent?.node ?? node });
    const dir: Directory = {
      node,
      parent,
      entries,
      xattrs,
      sizeBytes: directoryBytes(entries),
      subdirectories: names.reduce((n, child) => n + (child.node.kind === 'dir' ? 1 : 0), 0),
      position: -1,
      extended: false,
      headBytes: 0,
      inlineBytes: 0,
      firstBlock: -1,
    };
    this.#register(dir);
    return dir;
  }

  #addInode(node: LeafNode, xattrs: Inode['xattrs']): void {
    this.#register({ node, xattrs, position: -1, extended: false, headBytes: 0, inlineBytes: 0 });
  }

  #register(inode: Inode): void {
    this.#inodes.push(inode);
    if (inode.xattrs !== undefined) this.#xattrs.count(inode.xattrs);
  }

  /** Compact inodes carry no time of their own: the image's is the one that most of its inodes have. */
  #chooseEpoch(): void {
    const counts = new Map<string, { sec: number; nsec: number; n: number }>();
    for (const { node } of this.#inodes) {
      if (node.mtimeSec < 0) continue;
      const key = `${node.mtimeSec}.${node.mtimeNsec}`;
      const known = counts.get(key);
      if (known) known.n++;
      else counts.set(key, { sec: node.mtimeSec, nsec: node.mtimeNsec, n: 1 });
    }
    let best = { sec: 0, nsec: 0, n: 0 };
    for (const c of counts.values()) {
      const earlier = c.sec < best.sec || (c.sec === best.sec && c.nsec < best.nsec);
      if (c.n > best.n || (c.n === best.n && earlier)) best = c;
    }
    this.#epoch = { sec: best.sec, nsec: best.nsec };
  }

  /**
   * @param path Where the image goes.
   * @param placement Where the live data lies.
   * @param tags Per device slot, 64 characters that name its blob.
   */
  write(path: string, placement: DataPlacement, tags: readonly string[]): { sizeBytes: number; hex: string } {
    const devices = placement.devices.map((d, i) => ({ blocks: d.blocks, tag: tags[i]! }));
    const header = new ImageHeader(this.#input.codec, devices);

    const allocator = new InodeAllocator(header.endByte);
    for (const inode of this.#inodes) {
      this.#measure(inode);
      inode.position = allocator.place(inode);
      inode.node.nid = inode.position / INODE_SLOT_SIZE;
    }
    const sharedAt = Math.ceil(allocator.endByte / 4) * 4;
    const sharedBlock = Math.floor(sharedAt / BLOCK_BYTES);
    const shared = this.#xattrs.share(sharedAt - sharedBlock * BLOCK_BYTES);
    const blocksAt = Math.ceil((sharedAt + shared.length) / BLOCK_BYTES);
    let block = blocksAt;
    for (const inode of this.#inodes) block = this.#placeBlocks(inode, block);
    const primaryBlocks = Math.max(1, block);

    const uniaddr: number[] = [];
    let next = primaryBlocks;
    for (const device of devices) {
      uniaddr.push(next);
      next += device.blocks;
    }

    const file = new MetaFile(path, 4 << 20, (head) => {
      const sum = superblockChecksum(head, BLOCK_BYTES);
      head.writeUInt32LE(sum, SUPER_OFFSET + SB.checksum);
    });
    try {
      header.write(file.at(0, header.endByte), {
        uniaddr,
        primaryBlocks,
        sharedBlock: shared.length > 0 ? sharedBlock : 0,
        inodes: this.#inodes.length,
        rootNid: this.#inodes[0]!.position / INODE_SLOT_SIZE,
        epoch: this.#epoch,
        hasChunks: this.#hasChunks,
      });
      let number = 0;
      let settleAt = 0;
      for (const inode of this.#inodes) {
        this.#writeInode(file, inode, ++number, placement, uniaddr);
        if (inode.position < settleAt) continue;
        file.settle(Math.floor(Math.max(0, inode.position - GAP_WINDOW_BYTES) / BLOCK_BYTES) * BLOCK_BYTES);
        settleAt = inode.position + SETTLE_BYTES;
      }
      shared.copy(file.at(sharedAt, shared.length));
      for (const inode of this.#inodes) {
        this.#writeBlocks(file, inode);
        file.settle(Math.floor(sharedAt / BLOCK_BYTES) * BLOCK_BYTES);
      }
      const sizeBytes = primaryBlocks * BLOCK_BYTES;
      return { sizeBytes, hex: file.finish(sizeBytes) };
    } finally {
      file.close();
    }
  }

  // ---- sizes

  #measure(inode: Inode): void {
    const { node } = inode;
    inode.extended = this.#needsExtended(inode);
    const base = (inode.extended ? EXTENDED_INODE_SIZE : COMPACT_INODE_SIZE) + this.#xattrs.bodyBytes(inode.xattrs);
    inode.headBytes = base;
    inode.inlineBytes = 0;
    if (node.kind === 'dir') {
      const tail = (inode as Directory).sizeBytes % BLOCK_BYTES;
      if (tail > 0 && fitsInline(base, tail)) inode.inlineBytes = tail;
    } else if (node.kind === 'symlink') {
      if (fitsInline(base, node.target.length)) inode.inlineBytes = node.target.length;
    } else if (node.data?.form === 'chunks') {
      inode.headBytes = align8(base) + node.data.map!.length * CHUNK_INDEX_SIZE;
    } else if (node.data?.form === 'clusters') {
      const startByte = align8(base) + MAP_HEADER_SIZE;
      inode.headBytes = startByte + clusterIndexBytes({ startByte, sizeBytes: node.sizeBytes });
    } else if (node.data !== undefined) {
      inode.inlineBytes = node.data.tailBytes;
    }
  }

  #needsExtended(inode: Inode): boolean {
    const { node } = inode;
    return (
      node.mtimeSec !== this.#epoch.sec ||
      node.mtimeNsec !== this.#epoch.nsec ||
      node.uid > 0xffff ||
      node.gid > 0xffff ||
      this.#linksOf(inode) > 0xffff ||
      this.#sizeOf(inode) > 0xffffffff
    );
  }

  #linksOf(inode: Inode): number {
    return inode.node.kind === 'dir' ? 2 + (inode as Directory).subdirectories : inode.node.links;
  }

  #sizeOf(inode: Inode): number {
    const { node } = inode;
    if (node.kind === 'dir') return (inode as Directory).sizeBytes;
    if (node.kind === 'symlink') return node.target.length;
    return node.kind === 'file' ? node.sizeBytes : 0;
  }

  /** Gives directory and symlink data that is not inline its blocks. Returns the next free one. */
  #placeBlocks(inode: Inode, block: number): number {
    const { node } = inode;
    if (node.kind === 'dir') {
      const dir = inode as Directory;
      const blocks =
        inode.inlineBytes > 0 ? Math.floor(dir.sizeBytes / BLOCK_BYTES) : Math.ceil(dir.sizeBytes / BLOCK_BYTES);
      if (blocks === 0) return block;
      dir.firstBlock = block;
      return block + blocks;
    }
    if (node.kind === 'symlink' && inode.inlineBytes === 0) {
      this.#symlinkBlocks.set(node, block);
      return block + 1;
    }
    return block;
  }

  readonly #symlinkBlocks = new Map<LeafNode, number>();

  // ---- bytes

  get #hasChunks(): boolean {
    for (const data of this.#live) if (data.form === 'chunks') return true;
    return false;
  }

  #writeInode(
    file: MetaFile,
    inode: Inode,
    number: number,
    placement: DataPlacement,
    uniaddr: readonly number[],
  ): void {
    const { node } = inode;
    const at = file.room(inode.position, inode.headBytes + inode.inlineBytes);
    const { view } = file;
    const body = inode.xattrs === undefined || inode.xattrs.size === 0 ? undefined : this.#xattrs.body(inode.xattrs);
    const xattrCount = body === undefined ? 0 : (body.length - 12) / 4 + 1;
    const inodeBytes = inode.extended ? EXTENDED_INODE_SIZE : COMPACT_INODE_SIZE;
    const mapAt = align8(inodeBytes + (body?.length ?? 0));
    const [layout, union] = this.#layoutOf(inode, placement, uniaddr);
    const format = (inode.extended ? INODE_FORMAT.extended : 0) | (layout << INODE_FORMAT.layoutShift);
    const mode = TYPES[node.kind].mode | node.mode;
    const size = this.#sizeOf(inode);
    const links = this.#linksOf(inode);
    view.setUint16(at + EXTENDED_INODE.format, format, true);
    view.setUint16(at + EXTENDED_INODE.xattrCount, xattrCount, true);
    view.setUint16(at + EXTENDED_INODE.mode, mode, true);
    view.setUint32(at + EXTENDED_INODE.union, union, true);
    view.setUint32(at + EXTENDED_INODE.ino, number, true);
    view.setUint32(at + EXTENDED_INODE.size, size, true);
    if (inode.extended) {
      view.setUint32(at + EXTENDED_INODE.size + 4, Math.floor(size / 2 ** 32), true);
      view.setUint32(at + EXTENDED_INODE.uid, node.uid, true);
      view.setUint32(at + EXTENDED_INODE.gid, node.gid, true);
      // Both halves of a signed number: what does not fit is cut off.
      view.setUint32(at + EXTENDED_INODE.mtime, node.mtimeSec, true);
      view.setUint32(at + EXTENDED_INODE.mtime + 4, Math.floor(node.mtimeSec / 2 ** 32), true);
      view.setUint32(at + EXTENDED_INODE.mtimeNsec, node.mtimeNsec, true);
      view.setUint32(at + EXTENDED_INODE.nlink, links, true);
    } else {
      view.setUint16(at + COMPACT_INODE.nlink, links, true);
      view.setUint16(at + COMPACT_INODE.uid, node.uid, true);
      view.setUint16(at + COMPACT_INODE.gid, node.gid, true);
    }
    if (body !== undefined) body.copy(file.at(inode.position, inodeBytes + body.length), inodeBytes);
    if (node.kind === 'file' && node.data?.map !== undefined) {
      const map = file.at(inode.position + mapAt, inode.headBytes - mapAt);
      if (node.data.form === 'chunks') this.#writeChunkMap(map, node.data, placement);
      else this.#writeClusterMap(map, inode.position + mapAt, node, placement, uniaddr);
    }
    if (inode.inlineBytes > 0) this.#writeInline(file.at(inode.position + inode.headBytes, inode.inlineBytes), inode);
  }

  /** Layout number and what the inode's union holds. */
  #layoutOf(inode: Inode, placement: DataPlacement, uniaddr: readonly number[]): [number, number] {
    const { node } = inode;
    const flat = inode.inlineBytes > 0 ? LAYOUT.FLAT_INLINE : LAYOUT.FLAT_PLAIN;
    if (node.kind === 'dir')
      return [flat, (inode as Directory).firstBlock >= 0 ? (inode as Directory).firstBlock : NULL_ADDR];
    if (node.kind === 'symlink') return [flat, this.#symlinkBlocks.get(node) ?? NULL_ADDR];
    if (node.kind === 'char' || node.kind === 'block') return [LAYOUT.FLAT_PLAIN, encodeDevice(node.major, node.minor)];
    const { data } = node;
    if (data === undefined) return [LAYOUT.FLAT_PLAIN, node.kind === 'file' ? NULL_ADDR : 0];
    if (data.form === 'chunks') return [LAYOUT.CHUNK_BASED, (data.unitBits - 12) | CHUNK_FORMAT.indexes];
    if (data.form === 'clusters') return [LAYOUT.COMPRESSED_COMPACT, data.blocks];
    if (data.blocks === 0) return [flat, NULL_ADDR];
    const { slot, block } = placement.placeOf(data);
    return [flat, uniaddr[slot - 1]! + block];
  }

  #writeChunkMap(out: Buffer, data: FileData, placement: DataPlacement): void {
    const place = data.blocks === 0 ? undefined : placement.placeOf(data);
    data.map!.forEach((first, i) => {
      const at = i * CHUNK_INDEX_SIZE;
      if (first < 0) {
        out.fill(0xff, at, at + CHUNK_INDEX_SIZE);
        // A hole's device id does not count; zero is what other writers have there.
        out.writeUInt16LE(0, at + 2);
        return;
      }
      out.writeUInt16LE(place!.slot, at + 2);
      out.writeUInt32LE(place!.block + first, at + 4);
    });
  }

  #writeClusterMap(
    out: Buffer,
    position: number,
    node: LeafNode,
    placement: DataPlacement,
    uniaddr: readonly number[],
  ): void {
    const data = node.data!;
    const { slot, block } = placement.placeOf(data);
    out.writeUInt16LE(
      MAP_ADVISE.COMPACTED_2B | MAP_ADVISE.BIG_PCLUSTER_1 | MAP_ADVISE.BIG_PCLUSTER_2,
      MAP_HEADER.advise,
    );
    out[MAP_HEADER.algorithm] = ALGORITHM_OF[this.#input.codec!];
    const place = { startByte: position + MAP_HEADER_SIZE, sizeBytes: node.sizeBytes };
    encodeClusterIndex(data.map!, uniaddr[slot - 1]! + block, place).copy(out, MAP_HEADER_SIZE);
  }

  #writeInline(out: Buffer, inode: Inode): void {
    const { node } = inode;
    if (node.kind === 'dir') {
      const dir = inode as Directory;
      this.#directoryData(dir).copy(out, 0, dir.sizeBytes - inode.inlineBytes);
    } else if (node.kind === 'symlink') {
      writeByteString(out, node.target, 0);
    } else {
      this.#input.tails.read(node.data!, out);
    }
  }

  #writeBlocks(file: MetaFile, inode: Inode): void {
    const { node } = inode;
    if (node.kind === 'dir') {
      const dir = inode as Directory;
      if (dir.firstBlock < 0) return;
      const bytes = this.#directoryData(dir).subarray(0, dir.sizeBytes - dir.inlineBytes);
      bytes.copy(file.at(dir.firstBlock * BLOCK_BYTES, bytes.length));
    } else if (node.kind === 'symlink' && inode.inlineBytes === 0) {
      writeByteString(file.at(this.#symlinkBlocks.get(node)! * BLOCK_BYTES, BLOCK_BYTES), node.target, 0);
    }
  }

  #directoryData(dir: Directory): Buffer {
    const dirents = dir.entries.map(({ name, node }) => ({ name, nid: node.nid, fileType: TYPES[node.kind].dirent }));
    return encodeDirectory(dirents, dir.sizeBytes);
  }
}

/** The image goes out in such steps at least. */
const SETTLE_BYTES = 256 << 10;
/** Mark of a leaf that the walk has met, until it has a number. */
const SEEN = -2;
const TYPES: Readonly<Record<Node['kind'], { mode: number; dirent: number }>> = {
  file: { mode: MODE_TYPE.REGULAR, dirent: FILE_TYPE.REGULAR },
  dir: { mode: MODE_TYPE.DIRECTORY, dirent: FILE_TYPE.DIRECTORY },
  symlink: { mode: MODE_TYPE.SYMLINK, dirent: FILE_TYPE.SYMLINK },
  char: { mode: MODE_TYPE.CHAR, dirent: FILE_TYPE.CHAR },
  block: { mode: MODE_TYPE.BLOCK, dirent: FILE_TYPE.BLOCK },
  fifo: { mode: MODE_TYPE.FIFO, dirent: FILE_TYPE.FIFO },
  socket: { mode: MODE_TYPE.SOCKET, dirent: FILE_TYPE.SOCKET },
};

function align8(bytes: number): number {
  return Math.ceil(bytes / 8) * 8;
}
