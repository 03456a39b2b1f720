/**
 * What the file system shows: a root folder with one read-only file for each blob, named by its 64 hex digits.
 *
 * Every answer follows from the request and the list of blobs alone: no handles, no lookup counts, nothing remembered of
 * earlier requests. So any thread of any server answers any request alike, and a server that dies leaves nothing behind
 * that its successor would need. OPEN and FLUSH are answered ENOSYS: the kernel then never asks again, and neither open()
 * nor close() waits for a server, not even while none runs.
 */
import { hexOf } from '#base';
import { fuse } from '#linux';
import type { ServedBlob } from './served-blob.ts';

const {
  decodeName,
  encodeAttributes,
  encodeDirent,
  encodeEntry,
  encodeOpen,
  encodeStatfs,
  ERRNO,
  OPCODE,
  readLength,
  readOffset,
} = fuse;
type Attributes = fuse.Attributes;
type RequestHeader = fuse.RequestHeader;

export const ROOT_NODE = 1;
export const FIRST_BLOB_NODE = 2;

const ROOT: Attributes = { node: ROOT_NODE, sizeBytes: 0, directory: true };

/** Answers with no reply: the kernel expects none. */
export const NO_REPLY = Number.MIN_SAFE_INTEGER;

export class BlobFilesSystem {
  readonly #byName = new Map<string, ServedBlob>();
  readonly #byNode = new Map<number, ServedBlob>();
  /** In the order of their nodes, which is the order of the listing: additions do not move what was listed. */
  #sorted: ServedBlob[] | undefined;
  #totalBytes = 0;

  add(blob: ServedBlob): void {
    if (this.#byNode.has(blob.node)) return;
    this.#byName.set(hexOf(blob.digest), blob);
    this.#byNode.set(blob.node, blob);
    this.#sorted = undefined;
    this.#totalBytes += blob.sizeBytes;
  }

  get blobs(): readonly ServedBlob[] {
    this.#sorted ??= [...this.#byNode.values()].sort((a, b) => a.node - b.node);
    return this.#sorted;
  }

  byName(name: string): ServedBlob | undefined {
    return this.#byName.get(name);
  }

  byNode(node: number): ServedBlob | undefined {
    return this.#byNode.get(node);
  }

  /**
   * Answers everything but READ.
   * @param request The request, `header.lengthBytes` of it.
   * @param reply Gets the reply's body behind its header.
   * @returns how many bytes the body has; a negative errno; or NO_REPLY
   */
  answer(header: RequestHeader, request: Buffer, reply: Buffer): number {
    switch (header.opcode) {
      case OPCODE.LOOKUP: {
        if (header.node !== ROOT_NODE) return -ERRNO.ENOTDIR;
        const blob = this.byName(decodeName(request, header.lengthBytes));
        return blob === undefined ? -ERRNO.ENOENT : encodeEntry(reply, attributesOf(blob));
      }
      case OPCODE.GETATTR: {
        if (header.node === ROOT_NODE) return encodeAttributes(reply, ROOT);
        const blob = this.byNode(header.node);
        return blob === undefined ? -ERRNO.ENOENT : encodeAttributes(reply, attributesOf(blob));
      }
      case OPCODE.READDIR:
        return this.#list(reply, readOffset(request), readLength(request));
      case OPCODE.OPENDIR:
        return encodeOpen(reply);
      case OPCODE.STATFS:
        return encodeStatfs(reply, this.#byNode.size, this.#totalBytes);
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
      default:
        return -ERRNO.ENOSYS;
    }
  }

  /** `offset` counts names: `.`, `..`, then the blobs. */
  #list(reply: Buffer, offset: number, lengthBytes: number): number {
    const limit = Math.min(lengthBytes, reply.length - 16);
    const { blobs } = this;
    let at = 0;
    for (let index = offset; index < blobs.length + 2; index++) {
      const blob = blobs[index - 2];
      const name = blob === undefined ? (index === 0 ? '.' : '..') : hexOf(blob.digest);
      const next = encodeDirent(reply, at, limit, name, blob === undefined ? ROOT : attributesOf(blob), index + 1);
      if (next < 0) break;
      at = next;
    }
    return at;
  }
}

function attributesOf(blob: ServedBlob): Attributes {
  return { node: blob.node, sizeBytes: blob.sizeBytes, directory: false };
}
