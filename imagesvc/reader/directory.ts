/**
 * Directories: blocks of entries, each followed by its names, strictly sorted by bytes through the whole directory.
 *
 * What comes out is valid: names of 1 to 255 bytes without `/` and NUL, in order, so none twice. Order also bounds a
 * hostile directory: blocks cannot repeat.
 */
import { type ByteString, byteString } from '#base';
import { erofs } from '#converter';
import type { Inode } from './inode.ts';
import type { Metadata } from './metadata.ts';

const { DIRENT, LAYOUT } = erofs;

export interface DirEntry {
  readonly name: ByteString;
  readonly nid: number;
  /** One of FILE_TYPE. */
  readonly fileType: number;
}

/** Reads bytes of a file that lie in the metadata image; for directories in layouts other than the flat ones. */
export type LocalReader = (inode: Inode, offset: number, length: number) => Buffer;

interface Block {
  readonly buf: Buffer;
  readonly start: number;
  readonly end: number;
  readonly entries: number;
}

export class Directory {
  readonly #meta: Metadata;
  readonly #inode: Inode;
  readonly #readLocal: LocalReader;
  readonly #blocks: number;

  constructor(meta: Metadata, inode: Inode, readLocal: LocalReader) {
    this.#meta = meta;
    this.#inode = inode;
    this.#readLocal = readLocal;
    this.#blocks = Math.ceil(inode.sizeBytes / meta.sb.blockSize);
  }

  /** All entries in order, `.` and `..` only when asked for. @throws EROFS_CORRUPT */
  entries(dots = false): DirEntry[] {
    const out: DirEntry[] = [];
    let previous = '';
    for (let number = 0; number < this.#blocks; number++) {
      const block = this.#block(number);
      const { buf, start } = block;
      let nameAt = buf.readUInt16LE(start + DIRENT.nameOff);
      for (let k = 0; k < block.entries; k++) {
        const at = start + k * erofs.DIRENT_SIZE;
        const nameEnd =
          k + 1 < block.entries
            ? buf.readUInt16LE(at + erofs.DIRENT_SIZE + DIRENT.nameOff)
            : this.#lastNameEnd(block, nameAt);
        const name = this.#name(block, number, k, nameAt, nameEnd);
        if (name <= previous) throw this.#corrupt(number, `entry ${k} is not in order`);
        previous = name;
        nameAt = nameEnd;
        if (!dots && (name === '.' || name === '..')) continue;
        out.push({ name, nid: this.#nid(buf, at, number, k), fileType: buf[at + DIRENT.fileType]! });
      }
    }
    return out;
  }

  /** The entry with this name, found by halving. @throws EROFS_CORRUPT */
  find(name: ByteString): DirEntry | undefined {
    let low = 0;
    let high = this.#blocks - 1;
    // The last block whose first name is not after `name`.
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.#nameAt(this.#block(middle), middle, 0) <= name) low = middle;
      else high = middle - 1;
    }
    if (this.#blocks === 0) return undefined;
    const block = this.#block(low);
    let first = 0;
    let last = block.entries - 1;
    while (first <= last) {
      const middle = (first + last) >>> 1;
      const found = this.#nameAt(block, low, middle);
      if (found === name) {
        const at = block.start + middle * erofs.DIRENT_SIZE;
        return { name, nid: this.#nid(block.buf, at, low, middle), fileType: block.buf[at + DIRENT.fileType]! };
      }
      if (found < name) first = middle + 1;
      else last = middle - 1;
    }
    return undefined;
  }

  #nameAt(block: Block, number: number, k: number): ByteString {
    const at = block.start + k * erofs.DIRENT_SIZE;
    const nameAt = block.buf.readUInt16LE(at + DIRENT.nameOff);
    const nameEnd =
      k + 1 < block.entries
        ? block.buf.readUInt16LE(at + erofs.DIRENT_SIZE + DIRENT.nameOff)
        : this.#lastNameEnd(block, nameAt);
    return this.#name(block, number, k, nameAt, nameEnd);
  }

  #name(block: Block, number: number, k: number, nameAt: number, nameEnd: number): ByteString {
    const length = nameEnd - nameAt;
    if (nameAt < block.entries * erofs.DIRENT_SIZE || length < 1 || block.start + nameEnd > block.end) {
      throw this.#corrupt(number, `entry ${k} has its name at bytes ${nameAt} to ${nameEnd}`);
    }
    if (length > erofs.NAME_MAX_BYTES) throw this.#corrupt(number, `entry ${k} has a name of ${length} bytes`);
    const name = byteString(block.buf, block.start + nameAt, block.start + nameEnd);
    if (name.includes('/') || name.includes('\0')) {
      throw this.#corrupt(number, `entry ${k} has a name that holds a slash or a NUL`);
    }
    return name;
  }

  /** The last name of a block ends at the block's end or at a NUL. */
  #lastNameEnd(block: Block, nameAt: number): number {
    if (block.start + nameAt >= block.end) return nameAt;
    const nul = block.buf.subarray(block.start + nameAt, block.end).indexOf(0);
    return nul < 0 ? block.end - block.start : nameAt + nul;
  }

  #nid(buf: Buffer, at: number, number: number, k: number): number {
    const high = buf.readUInt32LE(at + DIRENT.nid + 4);
    if (high > 0xffff) throw this.#corrupt(number, `entry ${k} names inode 0x${high.toString(16)}00000000`);
    return high * 0x1_0000_0000 + buf.readUInt32LE(at + DIRENT.nid);
  }

  #block(number: number): Block {
    const meta = this.#meta;
    const inode = this.#inode;
    const { blockSize } = meta.sb;
    const length = Math.min(blockSize, inode.sizeBytes - number * blockSize);
    let start: number;
    let buf: Buffer;
    if (inode.layout === LAYOUT.FLAT_PLAIN || (inode.layout === LAYOUT.FLAT_INLINE && number < this.#blocks - 1)) {
      const offset = (inode.union + number) * blockSize;
      start = meta.bytes.locate(offset, length);
      buf = meta.bytes.buf;
      // Not in the image: the general way says what is wrong, or finds it on a device.
      if (start < 0) [buf, start] = [this.#readLocal(inode, number * blockSize, length), 0];
    } else {
      [buf, start] = [this.#readLocal(inode, number * blockSize, length), 0];
    }
    if (length < erofs.DIRENT_SIZE) throw this.#corrupt(number, `a block of ${length} bytes`);
    const namesAt = buf.readUInt16LE(start + DIRENT.nameOff);
    if (namesAt < erofs.DIRENT_SIZE || namesAt % erofs.DIRENT_SIZE !== 0 || namesAt >= length) {
      throw this.#corrupt(number, `names begin at byte ${namesAt} of ${length}`);
    }
    return { buf, start, end: start + length, entries: namesAt / erofs.DIRENT_SIZE };
  }

  #corrupt(block: number, problem: string) {
    return this.#meta.corrupt(this.#inode.nid, `directory block ${block}: ${problem}`);
  }
}
