/**
 * The structure of one layer: every inode reachable from its root is read whole but for file contents, every directory in
 * all its order, every extent looked up, and nothing of the metadata may lie on anything else. What is wrong is
 * reported, and the rest still looked at.
 */
import { type ByteString, display, isDsecError, messageOf } from '#base';
import { erofs } from '#converter';
import type { ByteSource } from './byte-source.ts';
import { clusterMapEnd } from './cluster-map.ts';
import type { DirEntry } from './directory.ts';
import type { ErofsReader } from './erofs-reader.ts';
import { type Inode, isDirectory, isRegular, isSymlink } from './inode.ts';

const { LAYOUT, CHUNK_FORMAT } = erofs;

export interface StructureCounts {
  inodes: number;
  directories: number;
  files: number;
  links: number;
  extents: number;
  fileBytes: number;
}

export type Report = (path: ByteString, problem: string) => void;

/** Places of the image that are taken. Kept in columns: there are several for each inode. */
class Places {
  readonly #start: number[] = [];
  readonly #end: number[] = [];
  /** The inode it belongs to; -1 for the superblock, -2 for shared xattrs. */
  readonly #owner: number[] = [];
  readonly #data: boolean[] = [];

  add(start: number, end: number, owner: number, data = false): void {
    if (end <= start) return;
    this.#start.push(start);
    this.#end.push(end);
    this.#owner.push(owner);
    this.#data.push(data);
  }

  /** File data may be shared by files; metadata may share its place with nothing. */
  overlaps(report: (a: number, b: number, at: number) => void): void {
    const order = [...this.#start.keys()].sort((a, b) => this.#start[a]! - this.#start[b]!);
    // The reaches of what came before, with who reached so far.
    let metaEnd = 0;
    let metaOwner = -1;
    let dataEnd = 0;
    let dataOwner = -1;
    for (const k of order) {
      const start = this.#start[k]!;
      const end = this.#end[k]!;
      const owner = this.#owner[k]!;
      if (start < metaEnd) report(metaOwner, owner, start);
      else if (!this.#data[k] && start < dataEnd) report(dataOwner, owner, start);
      if (this.#data[k]) {
        if (end > dataEnd) [dataEnd, dataOwner] = [end, owner];
      } else if (end > metaEnd) [metaEnd, metaOwner] = [end, owner];
    }
  }
}

interface Visit {
  readonly inode: Inode;
  readonly path: ByteString;
  readonly parentNid: number;
}

export function verifyStructure(reader: ErofsReader, devices: readonly ByteSource[], report: Report): StructureCounts {
  return new Verification(reader, devices, report).run();
}

class Verification {
  readonly #reader: ErofsReader;
  readonly #devices: readonly ByteSource[];
  readonly #report: Report;
  readonly #places = new Places();
  /** Names found of each inode that is not a directory, and its own count. */
  readonly #names = new Map<number, { found: number; nlink: number; path: ByteString }>();
  readonly #directories = new Set<number>();
  readonly #shared = new Set<number>();
  readonly #counts: StructureCounts = { inodes: 0, directories: 0, files: 0, links: 0, extents: 0, fileBytes: 0 };

  constructor(reader: ErofsReader, devices: readonly ByteSource[], report: Report) {
    this.#reader = reader;
    this.#devices = devices;
    this.#report = report;
  }

  run(): StructureCounts {
    const { sb } = this.#reader;
    this.#places.add(erofs.SUPER_OFFSET, sb.endBytes, -1);
    this.#checkSlots();
    this.#guarded('/', () => {
      const root = this.#reader.root();
      const stack: Visit[] = [{ inode: root, path: '/', parentNid: root.nid }];
      this.#directories.add(root.nid);
      this.#inode(root, '/');
      for (let visit = stack.pop(); visit !== undefined; visit = stack.pop()) {
        const { path } = visit;
        this.#guarded(path, () => this.#directory(visit as Visit, stack));
      }
    });
    if (sb.packedNid !== 0) {
      this.#guarded('(packed inode)', () => this.#inode(this.#reader.packed(sb.packedNid), '(packed inode)'));
    }
    for (const [nid, { found, nlink, path }] of this.#names) {
      if (found !== nlink) this.#report(path, `nid ${nid} has ${found} names, its link count is ${nlink}`);
    }
    if (sb.inodes !== this.#counts.inodes) {
      this.#report('/', `${this.#counts.inodes} inodes are reachable, the superblock says ${sb.inodes}`);
    }
    this.#places.overlaps((a, b, at) => {
      this.#report('/', `byte ${at} of the metadata belongs to ${ownerText(a)} and to ${ownerText(b)}`);
    });
    return this.#counts;
  }

  #checkSlots(): void {
    const { sb } = this.#reader;
    let taken = sb.blocks;
    const slots = sb.devices.map((slot, k) => ({ ...slot, k })).filter((slot) => slot.uniaddr !== 0);
    slots.sort((a, b) => a.uniaddr - b.uniaddr);
    for (const slot of slots) {
      if (slot.uniaddr < taken) {
        this.#report('/', `device slot ${slot.k + 1} begins at block ${slot.uniaddr}, which is taken up to ${taken}`);
      }
      taken = Math.max(taken, slot.uniaddr + slot.blocks);
    }
  }

  #directory(visit: Visit, stack: Visit[]): void {
    const { inode, path, parentNid } = visit;
    let dot = false;
    let dotDot = false;
    const below: Visit[] = [];
    for (const entry of this.#reader.readdir(inode, true)) {
      if (entry.name === '.') {
        dot = true;
        if (entry.nid !== inode.nid) this.#report(path, `its "." names nid ${entry.nid}`);
      } else if (entry.name === '..') {
        dotDot = true;
        if (entry.nid !== parentNid) this.#report(path, `its ".." names nid ${entry.nid}, its parent is ${parentNid}`);
      } else {
        const child = path === '/' ? `/${entry.name}` : `${path}/${entry.name}`;
        this.#guarded(child, () => this.#child(entry, child, inode.nid, below));
      }
    }
    if (!dot || !dotDot) this.#report(path, `it has no "${dot ? '..' : '.'}"`);
    stack.push(...below.reverse());
  }

  #child(entry: DirEntry, path: ByteString, parentNid: number, below: Visit[]): void {
    const known = this.#names.get(entry.nid);
    if (known !== undefined) {
      known.found++;
      this.#counts.links++;
      return;
    }
    const inode = this.#reader.inodeOf(entry);
    if (isDirectory(inode)) {
      if (this.#directories.has(inode.nid)) {
        this.#report(path, `directory nid ${inode.nid} is reached by two paths`);
        return;
      }
      this.#directories.add(inode.nid);
      below.push({ inode, path, parentNid });
    } else {
      this.#names.set(inode.nid, { found: 1, nlink: inode.nlink, path });
    }
    this.#inode(inode, path);
  }

  #inode(inode: Inode, path: ByteString): void {
    this.#counts.inodes++;
    if (isDirectory(inode)) this.#counts.directories++;
    else if (isRegular(inode)) {
      this.#counts.files++;
      this.#counts.fileBytes += inode.sizeBytes;
    }
    const reader = this.#reader;
    this.#places.add(inode.offset, this.#bodyEnd(inode), inode.nid);
    if (inode.xattrBytes > 0) {
      reader.xattrs(inode);
      for (const entry of reader.storedXattrs(inode)) {
        if (!entry.shared || this.#shared.has(entry.offset)) continue;
        this.#shared.add(entry.offset);
        this.#places.add(entry.offset, entry.next, -2);
      }
    }
    if (isSymlink(inode)) reader.readlink(inode);
    if (!isDirectory(inode) && !isRegular(inode) && !isSymlink(inode)) return;
    for (const extent of reader.extents(inode)) {
      this.#counts.extents++;
      if (extent.encoding === 'hole' || extent.encoding === 'fragment') continue;
      if (extent.device > 0) {
        const source = this.#devices[extent.device - 1];
        if (source !== undefined && extent.offset + extent.storedLength > source.sizeBytes) {
          this.#report(
            path,
            `file byte ${extent.logical} lies at byte ${extent.offset} of device ${extent.device}, which has ${source.sizeBytes} bytes`,
          );
        }
      } else if (extent.offset < inode.offset || extent.offset >= this.#bodyEnd(inode)) {
        this.#places.add(extent.offset, extent.offset + extent.storedLength, inode.nid, !isDirectory(inode));
      }
    }
  }

  /** Where the inode with all that follows it ends. */
  #bodyEnd(inode: Inode): number {
    const { sb, meta } = this.#reader;
    if (!isDirectory(inode) && !isRegular(inode) && !isSymlink(inode)) return inode.bodyOffset;
    switch (inode.layout) {
      case LAYOUT.FLAT_INLINE: {
        if (inode.sizeBytes === 0) return inode.bodyOffset;
        return inode.bodyOffset + (inode.sizeBytes - (Math.ceil(inode.sizeBytes / sb.blockSize) - 1) * sb.blockSize);
      }
      case LAYOUT.CHUNK_BASED: {
        const format = inode.union & 0xffff;
        const unit = format & CHUNK_FORMAT.indexes ? erofs.CHUNK_INDEX_SIZE : erofs.BLOCK_MAP_ENTRY_SIZE;
        const chunks = Math.ceil(inode.sizeBytes / 2 ** (sb.blockBits + (format & CHUNK_FORMAT.blockBitsMask)));
        return Math.ceil(inode.bodyOffset / unit) * unit + chunks * unit;
      }
      case LAYOUT.COMPRESSED_COMPACT:
      case LAYOUT.COMPRESSED_FULL:
        return clusterMapEnd(meta, inode);
      default:
        return inode.bodyOffset;
    }
  }

  #guarded(path: ByteString, work: () => void): void {
    try {
      work();
    } catch (error) {
      if (!isDsecError(error)) throw error;
      this.#report(path, messageOf(error));
    }
  }
}

function ownerText(owner: number): string {
  return owner === -1 ? 'the superblock' : owner === -2 ? 'a shared xattr' : `nid ${owner}`;
}

/** For reports. */
export function problemText(path: ByteString, problem: string): string {
  return `${display(path)}: ${problem}`;
}
