/**
 * What the file system shows: a root folder with a folder for each EROFS layer, named by the 64 hex digits of its metadata,
 * holding the layer's tree as the kernel's EROFS would show it: whiteouts, `trusted.overlay.*` and all, so that OverlayFS
 * can stand on it.
 *
 * Every answer follows from the request and the layers alone: no handles, no lookup counts. So any thread of any server
 * answers any request alike, and a server that dies leaves nothing behind that its successor would need. What needs a layer
 * that is not open here, or bytes that somebody fetches, is answered `LATER`.
 */
import { type ByteString, fromText, hexOf, isDsecError } from '#base';
import { erofs } from '#converter';
import { fuse } from '#linux';
import { NO_REPLY } from '../data-server/blob-files-system.ts';
import type { DirEntry } from '../reader/directory.ts';
import type { ErofsReader } from '../reader/erofs-reader.ts';
import { type Inode, isDirectory, isRegular } from '../reader/inode.ts';
import { layerNumberOf, nidOf, nodeOf, type OpenedLayer, ROOT_NODE } from './layer-facts.ts';
import { readerOf } from './open-layer-files.ts';
import {
  callerUid,
  encodeName,
  encodeNoEntry,
  encodeOpenDirectory,
  encodeSeek,
  encodeTreeAttributes,
  encodeTreeEntry,
  encodeXattrSize,
  SEEK_DATA,
  SEEK_HOLE,
  seekOf,
  TREE_ERRNO,
  TREE_OPCODE,
  type TreeEntry,
  xattrName,
  xattrRoom,
} from './tree-protocol.ts';

const { decodeName, encodeStatfs, ERRNO, OPCODE, readLength, readOffset, REPLY_BODY } = fuse;
type RequestHeader = fuse.RequestHeader;

/** It cannot be answered here and now. */
export const LATER = Number.MIN_SAFE_INTEGER + 1;

const ROOT: TreeEntry = { node: ROOT_NODE, inode: undefined, blocks: 0 };
const SECTOR_BYTES = 512;
/** Listings kept between the requests that read one. */
const LISTINGS_KEPT = 8;

interface Shown {
  readonly number: number;
  readonly name: string;
  readonly reader: ErofsReader;
}

export class LayerFilesSystem {
  readonly #byNumber = new Map<number, Shown>();
  readonly #byName = new Map<ByteString, Shown>();
  readonly #listings = new Map<number, readonly DirEntry[]>();

  /** Again: its files have moved. */
  add(layer: OpenedLayer): void {
    const shown = { number: layer.number, name: hexOf(layer.digest), reader: readerOf(layer) };
    this.#byNumber.set(shown.number, shown);
    this.#byName.set(fromText(shown.name), shown);
  }

  has(number: number): boolean {
    return this.#byNumber.has(number);
  }

  /**
   * Answers everything but READ.
   * @returns how many bytes the reply's body has; a negative errno; NO_REPLY; or LATER
   */
  answer(header: RequestHeader, request: Buffer, reply: Buffer): number {
    try {
      return this.#answer(header, request, reply);
    } catch (error) {
      return -errnoOf(error);
    }
  }

  #answer(header: RequestHeader, request: Buffer, reply: Buffer): number {
    switch (header.opcode) {
      case OPCODE.STATFS:
        return encodeStatfs(reply, this.#byNumber.size, 0);
      case OPCODE.RELEASE:
      case OPCODE.RELEASEDIR:
      case OPCODE.ACCESS:
      case OPCODE.DESTROY:
        return 0;
      // A read goes on whatever signal its reader got: EINTR for a page of a mapped file would be an error.
      case OPCODE.INTERRUPT:
      case OPCODE.FORGET:
      case OPCODE.BATCH_FORGET:
        return NO_REPLY;
    }
    if (header.node === ROOT_NODE) return this.#answerRoot(header, request, reply);
    const layer = this.#byNumber.get(layerNumberOf(header.node));
    if (layer === undefined) return LATER;
    const { reader } = layer;
    const inode = reader.inode(nidOf(header.node));
    switch (header.opcode) {
      case OPCODE.LOOKUP:
        return this.#lookup(layer, inode, decodeName(request, header.lengthBytes), reply);
      case OPCODE.GETATTR:
        return encodeTreeAttributes(reply, entryOf(layer, inode));
      case TREE_OPCODE.READLINK: {
        const target = reader.readlink(inode);
        return reply.write(target, REPLY_BODY, 'latin1');
      }
      case TREE_OPCODE.GETXATTR: {
        const value = reader.xattr(inode, xattrName(request, header.lengthBytes));
        return value === undefined ? -TREE_ERRNO.ENODATA : answerXattr(value, request, reply);
      }
      case TREE_OPCODE.LISTXATTR:
        return answerXattr(listOf(reader, inode, callerUid(request) === 0), request, reply);
      case OPCODE.OPENDIR:
        return encodeOpenDirectory(reply, true);
      case OPCODE.READDIR:
      case TREE_OPCODE.READDIRPLUS:
        return this.#list(layer, inode, request, reply, header.opcode === TREE_OPCODE.READDIRPLUS);
      case TREE_OPCODE.LSEEK: {
        const { offset, whence } = seekOf(request);
        const found = seek(reader, inode, offset, whence);
        return found < 0 ? found : encodeSeek(reply, found);
      }
      default:
        return -ERRNO.ENOSYS;
    }
  }

  #answerRoot(header: RequestHeader, request: Buffer, reply: Buffer): number {
    switch (header.opcode) {
      case OPCODE.LOOKUP: {
        const name = decodeName(request, header.lengthBytes);
        if (name === '.' || name === '..') return encodeTreeEntry(reply, ROOT);
        const layer = this.#byName.get(name);
        // Layers come: nothing is remembered of one that is not there.
        return layer === undefined ? LATER : encodeTreeEntry(reply, entryOf(layer, layer.reader.root()));
      }
      case OPCODE.GETATTR:
        return encodeTreeAttributes(reply, ROOT);
      case OPCODE.OPENDIR:
        return encodeOpenDirectory(reply, false);
      case OPCODE.READDIR:
      case TREE_OPCODE.READDIRPLUS:
        return this.#listRoot(request, reply, header.opcode === TREE_OPCODE.READDIRPLUS);
      case TREE_OPCODE.GETXATTR:
        return -TREE_ERRNO.ENODATA;
      case TREE_OPCODE.LISTXATTR:
        return answerXattr(Buffer.alloc(0), request, reply);
      default:
        return -ERRNO.ENOSYS;
    }
  }

  #lookup(layer: Shown, directory: Inode, name: ByteString, reply: Buffer): number {
    const { reader, number } = layer;
    // The kernel asks so for a file that it knows by number alone, from a handle that OverlayFS kept; and with a slash when it
    // makes sure that such a file is still there.
    if (name === '.' || name === '/') return encodeTreeEntry(reply, entryOf(layer, directory));
    if (!isDirectory(directory)) return -ERRNO.ENOTDIR;
    if (name === '..') {
      if (directory.nid === reader.rootNid) return encodeTreeEntry(reply, ROOT);
      const parent = reader.readdir(directory, true).find((entry) => entry.name === '..');
      if (parent === undefined) return -ERRNO.ENOENT;
      return encodeTreeEntry(reply, entryOf(layer, reader.inode(parent.nid)));
    }
    const entry = reader.find(directory, name);
    if (entry === undefined) return encodeNoEntry(reply);
    const inode = reader.inodeOf(entry);
    return encodeTreeEntry(reply, { ...entryOf(layer, inode), node: nodeOf(number, inode.nid) });
  }

  /** `offset` counts names, `.` and `..` where the layer has them. */
  #list(layer: Shown, directory: Inode, request: Buffer, reply: Buffer, plus: boolean): number {
    const { number } = layer;
    const entries = this.#entries(layer, directory);
    const limit = Math.min(readLength(request), reply.length - REPLY_BODY);
    let at = 0;
    for (let index = readOffset(request); index < entries.length; index++) {
      const entry = entries[index]!;
      const named = { name: entry.name, node: nodeOf(number, entry.nid), fileType: entry.fileType };
      const whole = plus ? () => wholeEntry(layer, entry) : undefined;
      const next = encodeName(reply, at, limit, named, index + 1, whole);
      if (next < 0) break;
      at = next;
    }
    return at;
  }

  #entries({ reader, number }: Shown, directory: Inode): readonly DirEntry[] {
    const node = nodeOf(number, directory.nid);
    let entries = this.#listings.get(node);
    if (entries === undefined) {
      entries = reader.readdir(directory, true);
      if (this.#listings.size >= LISTINGS_KEPT) {
        for (const oldest of this.#listings.keys()) {
          this.#listings.delete(oldest);
          break;
        }
      }
      this.#listings.set(node, entries);
    }
    return entries;
  }

  #listRoot(request: Buffer, reply: Buffer, plus: boolean): number {
    const limit = Math.min(readLength(request), reply.length - REPLY_BODY);
    const fileType = erofs.FILE_TYPE.DIRECTORY;
    const names = [
      { name: '.', node: ROOT_NODE, fileType },
      { name: '..', node: ROOT_NODE, fileType },
    ];
    const layers = [...this.#byNumber.values()].sort((a, b) => a.number - b.number);
    for (const { name, number, reader } of layers) {
      names.push({ name, node: nodeOf(number, reader.rootNid), fileType });
    }
    let at = 0;
    for (let index = readOffset(request); index < names.length; index++) {
      const whole = plus ? () => entryOf(layers[index - 2]!, layers[index - 2]!.reader.root()) : undefined;
      const next = encodeName(reply, at, limit, names[index]!, index + 1, whole);
      if (next < 0) break;
      at = next;
    }
    return at;
  }

  /** READ, at once; undefined: later. @throws what `errnoOf` knows */
  readNow(node: number, offset: number, length: number): Buffer | undefined {
    const layer = this.#byNumber.get(layerNumberOf(node));
    if (layer === undefined) return undefined;
    const inode = fileOf(layer.reader, node);
    return layer.reader.readNow(inode, offset, length);
  }

  /** READ, by whoever may wait. The layer must be here. */
  async read(node: number, offset: number, length: number): Promise<Buffer> {
    const { reader } = this.#byNumber.get(layerNumberOf(node))!;
    return reader.read(fileOf(reader, node), offset, length);
  }
}

/** A name whose inode is damaged is listed all the same; who looks at it gets the error. */
function wholeEntry(layer: Shown, entry: DirEntry): TreeEntry | undefined {
  try {
    return entryOf(layer, layer.reader.inodeOf(entry));
  } catch {
    return undefined;
  }
}

function fileOf(reader: ErofsReader, node: number): Inode {
  const inode = reader.inode(nidOf(node));
  if (!isRegular(inode)) throw Object.assign(new Error('it is no file'), { code: 'EISDIR' });
  return inode;
}

function entryOf({ reader, number }: Shown, inode: Inode): TreeEntry {
  const { blockSize } = reader.sb;
  const { COMPRESSED_COMPACT, COMPRESSED_FULL } = erofs.LAYOUT;
  const compressed = inode.layout === COMPRESSED_COMPACT || inode.layout === COMPRESSED_FULL;
  const blocks = compressed ? inode.union : Math.ceil(inode.sizeBytes / blockSize);
  return { node: nodeOf(number, inode.nid), inode, blocks: blocks * (blockSize / SECTOR_BYTES) };
}

function answerXattr(value: Buffer, request: Buffer, reply: Buffer): number {
  const room = xattrRoom(request);
  if (room === 0) return encodeXattrSize(reply, value.length);
  if (value.length > room) return -TREE_ERRNO.ERANGE;
  value.copy(reply, REPLY_BODY);
  return value.length;
}

/** Names, each with a NUL behind it. Those of `trusted.` are for root alone, as everywhere. */
function listOf(reader: ErofsReader, inode: Inode, forRoot: boolean): Buffer {
  const names = reader.storedXattrs(inode).map(({ name }) => name);
  const shown = forRoot ? names : names.filter((name) => !name.startsWith('trusted.'));
  return Buffer.from(shown.map((name) => `${name}\0`).join(''), 'latin1');
}

/** As lseek(2): where data or a hole begins, from `offset` on; the end of the file counts as a hole. */
function seek(reader: ErofsReader, inode: Inode, offset: number, whence: number): number {
  if (whence !== SEEK_DATA && whence !== SEEK_HOLE) return -TREE_ERRNO.EINVAL;
  if (!isRegular(inode)) return -TREE_ERRNO.EINVAL;
  if (offset >= inode.sizeBytes) return -TREE_ERRNO.ENXIO;
  for (const { logical, encoding } of reader.extents(inode, offset)) {
    if ((encoding === 'hole') === (whence === SEEK_HOLE)) return Math.max(logical, offset);
  }
  return whence === SEEK_HOLE ? inode.sizeBytes : -TREE_ERRNO.ENXIO;
}

/** What a reader of the file system is told. */
export function errnoOf(error: unknown): number {
  // The kernel's EROFS says the same of a damaged image.
  if (isDsecError(error, 'EROFS_CORRUPT')) return TREE_ERRNO.EUCLEAN;
  return (error as { code?: unknown }).code === 'EISDIR' ? ERRNO.EISDIR : ERRNO.EIO;
}
