/**
 * One EROFS image and its devices, read without mounting.
 *
 * Nothing in the image is trusted: a damaged or hostile one gives EROFS_CORRUPT (which inode, which byte), one that uses
 * what we do not know EROFS_UNSUPPORTED; never a crash, an endless loop or an allocation that the image's size does
 * not justify. Metadata is read synchronously, file data asynchronously.
 */
import type { ByteString } from '#base';
import { byteString } from '#base';
import { erofs } from '#converter';
import type { ByteSource, MetaBytes } from './byte-source.ts';
import { decodeExtent } from './decode.ts';
import { type DirEntry, Directory } from './directory.ts';
import { type Extent, extentsOf } from './extent.ts';
import { fileTypeOf, type Inode, isDirectory, isSymlink, readInode } from './inode.ts';
import { Metadata } from './metadata.ts';
import type { Superblock } from './superblock.ts';
import { findXattr, type LongPrefixes, readLongPrefixes, readXattrs, type StoredXattr, storedXattrs } from './xattr.ts';

/** Extents of one file are joined only up to here, so that one read of a device stays reasonable. */
const READ_STEP_BYTES = 1024 * 1024;

export class ErofsReader {
  readonly meta: Metadata;
  readonly #devices: readonly ByteSource[];
  #packed: Inode | undefined;
  #prefixes: LongPrefixes | undefined;
  /** The latest decoded cluster: reads in order meet each cluster several times. */
  #decoded: { nid: number; logical: number; bytes: Buffer } | undefined;

  /** `devices[k - 1]` is slot k. There may be fewer than slots: their data then fails to read. */
  constructor(bytes: MetaBytes, devices: readonly ByteSource[], image: string) {
    this.meta = new Metadata(bytes, image);
    this.#devices = devices;
  }

  get sb(): Superblock {
    return this.meta.sb;
  }

  get rootNid(): number {
    return this.meta.sb.rootNid;
  }

  /** @throws EROFS_CORRUPT, EROFS_UNSUPPORTED */
  inode(nid: number): Inode {
    return readInode(this.meta, nid);
  }

  /** The inode of a directory entry; its type must be what the entry says. */
  inodeOf(entry: DirEntry): Inode {
    const inode = readInode(this.meta, entry.nid);
    if (entry.fileType !== fileTypeOf(inode.mode)) {
      throw this.meta.corrupt(
        entry.nid,
        `a directory entry gives it the type ${entry.fileType}, its mode is 0${inode.mode.toString(8)}`,
      );
    }
    return inode;
  }

  root(): Inode {
    const inode = this.inode(this.rootNid);
    if (!isDirectory(inode)) throw this.meta.corrupt(inode.nid, 'the root is not a directory');
    return inode;
  }

  /** Sorted; without `.` and `..` unless asked for. */
  readdir(inode: Inode, dots = false): DirEntry[] {
    return this.#directory(inode).entries(dots);
  }

  find(inode: Inode, name: ByteString): DirEntry | undefined {
    if (name === '.' || name === '..' || name === '') return undefined;
    return this.#directory(inode).find(name);
  }

  #directory(inode: Inode): Directory {
    if (!isDirectory(inode)) throw this.meta.corrupt(inode.nid, 'used as a directory, but is none');
    return new Directory(this.meta, inode, (of, offset, length) => this.readLocal(of, offset, length));
  }

  readlink(inode: Inode): ByteString {
    if (!isSymlink(inode)) throw this.meta.corrupt(inode.nid, 'used as a symbolic link, but is none');
    const target = byteString(this.readLocal(inode, 0, inode.sizeBytes));
    if (target === '' || target.includes('\0'))
      throw this.meta.corrupt(inode.nid, 'a link target that is empty or holds a NUL');
    return target;
  }

  xattrs(inode: Inode): Map<ByteString, Buffer> {
    return readXattrs(this.meta, inode, inode.xattrBytes === 0 ? [] : this.#longPrefixes());
  }

  xattr(inode: Inode, name: ByteString): Buffer | undefined {
    return inode.xattrBytes === 0 ? undefined : findXattr(this.meta, inode, this.#longPrefixes(), name);
  }

  storedXattrs(inode: Inode): StoredXattr[] {
    return storedXattrs(this.meta, inode, inode.xattrBytes === 0 ? [] : this.#longPrefixes());
  }

  #longPrefixes(): LongPrefixes {
    if (this.#prefixes !== undefined) return this.#prefixes;
    const { sb, bytes } = this.meta;
    if (sb.xattrPrefixCount === 0) {
      this.#prefixes = [];
    } else if (sb.packedNid > 0 && !(sb.compat & erofs.COMPAT.PLAIN_XATTR_PFX)) {
      const packed = this.packed(sb.packedNid);
      this.#prefixes = readLongPrefixes(
        this.meta,
        (offset, length) => {
          const got = this.readLocal(packed, offset, length);
          if (got.length < length)
            throw this.meta.corrupt(packed.nid, `ends before its xattr prefixes at byte ${offset}`);
          return got;
        },
        packed.nid,
      );
    } else {
      this.#prefixes = readLongPrefixes(
        this.meta,
        (offset, length) => {
          const at = this.meta.at(this.rootNid, offset, length, 'long xattr prefixes');
          return Buffer.from(bytes.buf.subarray(at, at + length));
        },
        this.rootNid,
      );
    }
    return this.#prefixes;
  }

  /** Extents of a file, symbolic link or directory: whole, unless `from` and `to` say otherwise. */
  extents(inode: Inode, from = 0, to = inode.sizeBytes): Iterable<Extent> {
    return extentsOf(this.meta, inode, from, to);
  }

  /** Bytes of a file, fewer where it ends. The result may be shared: do not change it. */
  async read(inode: Inode, offset: number, length: number): Promise<Buffer> {
    const pieces = new Pieces(inode, offset, length);
    for (const extent of extentsOf(this.meta, inode, offset, pieces.end)) {
      const { skip, count } = pieces.of(extent);
      if (extent.encoding === 'hole') continue;
      const bytes = await this.#extentBytes(inode, extent, skip, count);
      if (pieces.put(extent, count, bytes)) break;
    }
    return pieces.bytes;
  }

  /** Like `read`, at once; undefined when a device would have to wait for its bytes. */
  readNow(inode: Inode, offset: number, length: number): Buffer | undefined {
    const pieces = new Pieces(inode, offset, length);
    for (const extent of extentsOf(this.meta, inode, offset, pieces.end)) {
      const { skip, count } = pieces.of(extent);
      if (extent.encoding === 'hole') continue;
      const bytes = this.#extentNow(inode, extent, skip, count);
      if (bytes === undefined) return undefined;
      if (pieces.put(extent, count, bytes)) break;
    }
    return pieces.bytes;
  }

  /** A file's bytes in order, in pieces of up to 1 MiB. */
  async *stream(inode: Inode, offset = 0, length = inode.sizeBytes - offset): AsyncGenerator<Buffer> {
    const end = Math.min(offset + length, inode.sizeBytes);
    for (let at = offset; at < end; ) {
      const step = Math.min(READ_STEP_BYTES - (at % READ_STEP_BYTES), end - at);
      yield await this.read(inode, at, step);
      at += step;
    }
  }

  /** Like `read`, for what must lie in the metadata image: directories, link targets, the packed inode's tables. */
  readLocal(inode: Inode, offset: number, length: number): Buffer {
    const wanted = Math.max(0, Math.min(length, inode.sizeBytes - offset));
    const out = Buffer.alloc(wanted);
    if (wanted === 0) return out;
    for (const extent of extentsOf(this.meta, inode, offset, offset + wanted)) {
      const skip = Math.max(0, offset - extent.logical);
      const count = Math.min(extent.length, offset + wanted - extent.logical) - skip;
      if (extent.encoding === 'hole') continue;
      if (extent.device !== 0) throw this.meta.unsupported(inode.nid, 'a directory or link target on a data device');
      out.set(this.#localBytes(inode, extent, skip, count), extent.logical + skip - offset);
    }
    return out;
  }

  async #extentBytes(inode: Inode, extent: Extent, skip: number, count: number): Promise<Buffer> {
    if (extent.encoding === 'fragment')
      return this.read(this.#fragmentHolder(inode, extent), extent.offset + skip, count);
    if (extent.device === 0) return this.#localBytes(inode, extent, skip, count);
    if (extent.encoding === 'raw') return this.#device(inode, extent.device, extent.offset + skip, count);
    const known = this.#decoded;
    if (known !== undefined && known.nid === inode.nid && known.logical === extent.logical) {
      return known.bytes.subarray(skip, skip + count);
    }
    const stored = await this.#device(inode, extent.device, extent.offset, extent.storedLength);
    return this.#decode(inode, extent, stored).subarray(skip, skip + count);
  }

  #extentNow(inode: Inode, extent: Extent, skip: number, count: number): Buffer | undefined {
    if (extent.encoding === 'fragment') {
      return this.readNow(this.#fragmentHolder(inode, extent), extent.offset + skip, count);
    }
    if (extent.device === 0) return this.#localBytes(inode, extent, skip, count);
    const from = (offset: number, length: number) =>
      this.#deviceSource(inode, extent.device, offset, length).readNow?.(offset, length);
    if (extent.encoding === 'raw') return from(extent.offset + skip, count);
    const known = this.#decoded;
    if (known !== undefined && known.nid === inode.nid && known.logical === extent.logical) {
      return known.bytes.subarray(skip, skip + count);
    }
    const stored = from(extent.offset, extent.storedLength);
    return stored && this.#decode(inode, extent, stored).subarray(skip, skip + count);
  }

  #localBytes(inode: Inode, extent: Extent, skip: number, count: number): Buffer {
    const { meta } = this;
    if (extent.encoding === 'fragment') {
      return this.readLocal(this.#fragmentHolder(inode, extent), extent.offset + skip, count);
    }
    if (extent.encoding === 'raw') {
      const at = meta.at(inode.nid, extent.offset + skip, count, 'data');
      return meta.bytes.buf.subarray(at, at + count);
    }
    const known = this.#decoded;
    if (known !== undefined && known.nid === inode.nid && known.logical === extent.logical) {
      return known.bytes.subarray(skip, skip + count);
    }
    const at = meta.at(inode.nid, extent.offset, extent.storedLength, 'data');
    const stored = meta.bytes.buf.subarray(at, at + extent.storedLength);
    return this.#decode(inode, extent, stored).subarray(skip, skip + count);
  }

  #decode(inode: Inode, extent: Extent, stored: Buffer): Buffer {
    const bytes = decodeExtent(this.meta, inode, extent, stored);
    this.#decoded = { nid: inode.nid, logical: extent.logical, bytes };
    return bytes;
  }

  async #device(inode: Inode, device: number, offset: number, length: number): Promise<Buffer> {
    return this.#deviceSource(inode, device, offset, length).read(offset, length);
  }

  /** The device, which has these bytes. @throws EROFS_CORRUPT */
  #deviceSource(inode: Inode, device: number, offset: number, length: number): ByteSource {
    const source = this.#devices[device - 1];
    if (source === undefined)
      throw this.meta.corrupt(inode.nid, `its data lies on device ${device}, which is not there`);
    if (offset + length > source.sizeBytes) {
      throw this.meta.corrupt(
        inode.nid,
        `its data lies at byte ${offset} of device ${device}, ${length} bytes long, which has ${source.sizeBytes} bytes`,
      );
    }
    return source;
  }

  /** The packed inode, for an extent of another one that lies in it. */
  #fragmentHolder(inode: Inode, extent: Extent): Inode {
    const { packedNid } = this.meta.sb;
    if (packedNid === 0) throw this.meta.corrupt(inode.nid, 'a fragment, but the image has no packed inode');
    if (inode.nid === packedNid) throw this.meta.corrupt(inode.nid, 'the packed inode points into itself');
    const packed = this.packed(packedNid);
    if (extent.offset + extent.length > packed.sizeBytes) {
      throw this.meta.corrupt(inode.nid, `fragment at byte ${extent.offset} of a packed inode of ${packed.sizeBytes}`);
    }
    return packed;
  }

  packed(nid: number): Inode {
    this.#packed ??= this.inode(nid);
    return this.#packed;
  }

  async close(): Promise<void> {
    this.meta.bytes.close();
    for (const device of this.#devices) await device.close();
  }
}

/** The bytes of a read, put together from those of its extents; what no extent has is zero. */
class Pieces {
  readonly end: number;
  readonly #offset: number;
  #out: Buffer | undefined;

  constructor(inode: Inode, offset: number, length: number) {
    this.#offset = offset;
    this.end = offset + Math.max(0, Math.min(length, inode.sizeBytes - offset));
  }

  /** Which part of the extent is wanted. */
  of(extent: Extent): { skip: number; count: number } {
    const skip = Math.max(0, this.#offset - extent.logical);
    return { skip, count: Math.min(extent.length, this.end - extent.logical) - skip };
  }

  /** `bytes`: of the wanted part. True when nothing is missing any more. */
  put(extent: Extent, count: number, bytes: Buffer): boolean {
    const at = Math.max(extent.logical, this.#offset) - this.#offset;
    if (count === this.end - this.#offset) {
      // One extent has it all: not copied.
      this.#out = bytes;
      return true;
    }
    this.bytes.set(bytes, at);
    return false;
  }

  get bytes(): Buffer {
    this.#out ??= Buffer.alloc(this.end - this.#offset);
    return this.#out;
  }
}
