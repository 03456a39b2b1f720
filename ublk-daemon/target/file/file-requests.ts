/**
 * What the kernel asks of the file, answered from a target. What the target has at hand is answered before `take` returns, in the buffer that the
 * reply leaves from; the rest when the target has it, in any order.
 *
 * Nothing is remembered between requests, so that a server may follow another one. OPEN and FLUSH (close) are answered with ENOSYS: the kernel
 * never asks again, and opening and closing wait for nobody. The kernel keeps pages of the file (reads are 1 MiB ahead), and writes
 * them through: a write is answered when the target has it. What has been answered is safe after fsync, as with any file.
 */
import { fuse } from '#linux';
import type { BlockTarget } from '../block-target.ts';
import { type Extents, extentsOf, type Immediate, immediateOf } from '../capabilities.ts';
import { errnoOf } from '../target-error.ts';
import { WholeBlocks } from './whole-blocks.ts';

const { ERRNO, FALLOCATE_MODE, OPCODE, REPLY_BODY, REPLY_HEADER_BYTES, WHENCE, WRITABLE_OPCODE, WRITE_DATA } = fuse;

/** Largest read and write. */
export const MAX_TRANSFER_BYTES = fuse.MAX_READ_BYTES;
/** A request with a write in it, and room for its header. */
export const REQUEST_BYTES = MAX_TRANSFER_BYTES + 4096;

/** A write that waits up to here is copied; above, its whole buffer is kept, and the next request gets another one. */
const COPIED_BYTES = 128 * 1024;

const EINVAL = 22;
const ENOSPC = 28;
const ENXIO = 6;
const EPERM = 1;
const EROFS = 30;
const EOPNOTSUPP = 95;

/** Answers with no reply: the kernel expects none. */
const NO_REPLY = Number.MIN_SAFE_INTEGER;

/** Bytes; a negative errno or 0; or what fills the buffer that all replies share: called when the reply is about to leave. */
type Result = Buffer | number | ((reply: Buffer) => number);

/**
 * With all of its pages there. The kernel copies requests into it page by page; a page that it has to bring first cannot be had by a process that
 * is being killed, and the request would end with EIO instead of waiting for the next server.
 */
function residentBuffer(lengthBytes: number): Buffer {
  return Buffer.allocUnsafeSlow(lengthBytes).fill(0);
}

export class FileRequests {
  /** Where the next request goes. */
  request: Buffer = residentBuffer(REQUEST_BYTES);
  /** Bytes of reads and writes that wait for the target. */
  heldBytes = 0;
  /** Requests that wait for the target. */
  waiting = 0;
  readonly #fd: number;
  readonly #target: BlockTarget;
  readonly #readOnly: boolean;
  readonly #shared: boolean;
  readonly #immediate: Immediate | undefined;
  readonly #extents: Extents | undefined;
  readonly #blocks: WholeBlocks;
  readonly #reply = residentBuffer(REPLY_HEADER_BYTES + MAX_TRANSFER_BYTES);
  readonly #header = fuse.emptyHeader();
  readonly #timeSec = Math.floor(Date.now() / 1000);
  readonly #onAnswered: () => void;
  #spare: Buffer | undefined;
  #ended = false;

  /** `shared`: any user may open it. `onAnswered`: something that waited does not any more. */
  constructor(
    fd: number,
    target: BlockTarget,
    { readOnly, shared }: { readonly readOnly: boolean; readonly shared: boolean },
    onAnswered: () => void,
  ) {
    this.#fd = fd;
    this.#target = target;
    this.#readOnly = readOnly;
    this.#shared = shared;
    this.#immediate = immediateOf(target);
    this.#extents = extentsOf(target);
    this.#blocks = new WholeBlocks(target);
    this.#onAnswered = onAnswered;
  }

  /** The request in `request`. */
  take(): void {
    const header = this.#header;
    fuse.decodeHeader(this.request, header);
    let result: number;
    try {
      result = this.#answer(header);
    } catch (error) {
      result = -errnoOf(error);
    }
    if (result !== NO_REPLY) fuse.sendBody(this.#fd, this.#reply, header, result);
  }

  /** Answers no more: the descriptor is about to be closed. */
  end(): void {
    this.#ended = true;
  }

  /** Bytes of the reply, a negative errno, or NO_REPLY: it comes later, or never. */
  #answer(header: fuse.RequestHeader): number {
    switch (header.opcode) {
      case OPCODE.READ:
        return this.#read(header);
      case WRITABLE_OPCODE.WRITE:
        return this.#readOnly ? -EROFS : this.#write(header);
      case WRITABLE_OPCODE.FSYNC:
        return this.#later(header, 0, async () => {
          await this.#target.flush();
          return 0;
        });
      case WRITABLE_OPCODE.FALLOCATE:
        return this.#readOnly ? -EROFS : this.#allocate(header);
      case WRITABLE_OPCODE.LSEEK:
        return this.#seek(header);
      case OPCODE.GETATTR:
        return this.#attributes(this.#reply);
      case WRITABLE_OPCODE.SETATTR:
        return this.#change();
      case OPCODE.STATFS:
        return fuse.encodeStatfs(this.#reply, 1, this.#target.sizeBytes);
      case OPCODE.RELEASE:
      case OPCODE.ACCESS:
      case OPCODE.DESTROY:
        return 0;
      // What was begun goes on, whatever signal its caller got.
      case OPCODE.INTERRUPT:
      case OPCODE.FORGET:
      case OPCODE.BATCH_FORGET:
        return NO_REPLY;
      default:
        return -ERRNO.ENOSYS;
    }
  }

  #read(header: fuse.RequestHeader): number {
    const offset = fuse.readOffset(this.request);
    const wanted = Math.min(fuse.readLength(this.request), MAX_TRANSFER_BYTES);
    const length = Math.max(0, Math.min(wanted, this.#target.sizeBytes - offset));
    if (length === 0) return 0;
    if (this.#blocks.fits(offset, length) && this.#immediate?.readNow(this.#reply, REPLY_BODY, offset, length)) {
      return length;
    }
    return this.#later(header, length, () => this.#blocks.read(offset, length));
  }

  /** A write past the end is cut there, as on a block device. */
  #write(header: fuse.RequestHeader): number {
    const { request } = this;
    const offset = fuse.readOffset(request);
    const wanted = Math.min(fuse.readLength(request), request.length - WRITE_DATA);
    const length = Math.min(wanted, this.#target.sizeBytes - offset);
    if (length <= 0) return wanted === 0 ? fuse.encodeWritten(this.#reply, 0) : -ENOSPC;
    const data = request.subarray(WRITE_DATA, WRITE_DATA + length);
    if (!this.#blocks.busy && this.#blocks.fits(offset, length) && this.#immediate?.writeNow(offset, data)) {
      return fuse.encodeWritten(this.#reply, length);
    }
    const kept = length <= COPIED_BYTES ? Buffer.from(data) : this.#keepRequest(data);
    return this.#later(header, length, async () => {
      try {
        await this.#blocks.write(offset, kept);
      } finally {
        if (kept === data) this.#spare = Buffer.from(kept.buffer);
      }
      return (reply) => fuse.encodeWritten(reply, length);
    });
  }

  #keepRequest(data: Buffer): Buffer {
    this.request = this.#spare ?? residentBuffer(REQUEST_BYTES);
    this.#spare = undefined;
    return data;
  }

  #allocate(header: fuse.RequestHeader): number {
    const mode = fuse.fallocateMode(this.request);
    const offset = fuse.readOffset(this.request);
    const length = Math.min(fuse.fallocateLength(this.request), this.#target.sizeBytes - offset);
    const punch = (mode & FALLOCATE_MODE.PUNCH_HOLE) !== 0;
    // A disk takes room when it is written: it cannot be promised before.
    if (!punch && (mode & FALLOCATE_MODE.ZERO_RANGE) === 0) return -EOPNOTSUPP;
    if (length <= 0) return punch ? 0 : -ENOSPC;
    const target = this.#target;
    return this.#later(header, 0, async () => {
      await this.#blocks.zero(offset, length, (at, many) =>
        punch ? target.discard(at, many) : target.writeZeroes(at, many, { mayUnmap: false }),
      );
      return 0;
    });
  }

  #seek(header: fuse.RequestHeader): number {
    const offset = fuse.readOffset(this.request);
    const whence = fuse.seekWhence(this.request);
    const { sizeBytes } = this.#target;
    if (whence !== WHENCE.DATA && whence !== WHENCE.HOLE) return -EINVAL;
    if (offset >= sizeBytes) return -ENXIO;
    const extents = this.#extents;
    if (extents === undefined) {
      return fuse.encodePosition(this.#reply, whence === WHENCE.DATA ? offset : sizeBytes);
    }
    return this.#later(header, 0, async () => {
      const found = await this.#find(extents, offset, whence === WHENCE.HOLE);
      // Behind the last byte is a hole.
      if (found === undefined && whence === WHENCE.DATA) return -ENXIO;
      return (reply) => fuse.encodePosition(reply, found ?? sizeBytes);
    });
  }

  async #find(extents: Extents, offset: number, hole: boolean): Promise<number | undefined> {
    const { blockSize, sizeBytes } = this.#target;
    for (let at = offset - (offset % blockSize); at < sizeBytes; ) {
      for (const extent of await extents.extents(at, sizeBytes - at)) {
        if (extent.zero === hole) return Math.max(at, offset);
        at += extent.length;
      }
    }
    return undefined;
  }

  /**
   * One block less than it could take where there may be holes: copying programs then ask where. Counting would cost more than it tells.
   */
  #attributes(reply: Buffer): number {
    const { sizeBytes } = this.#target;
    const blocks = Math.max(1, sizeBytes / 512 - (this.#extents === undefined ? 0 : 1));
    const [readOnly, shared, timeSec] = [this.#readOnly, this.#shared, this.#timeSec];
    return fuse.encodeFileAttributes(reply, { sizeBytes, blocks, readOnly, shared, timeSec });
  }

  /** The size stays. Emptied by a program that opens it to overwrite it (O_TRUNC), it stays as it is, as a block device does. */
  #change(): number {
    const { sizeBytes, access, byHandle } = fuse.decodeSetattr(this.request);
    if (access) return -EPERM;
    const opened = sizeBytes === 0 && !byHandle;
    if (sizeBytes !== undefined && sizeBytes !== this.#target.sizeBytes && !opened) return -EINVAL;
    return this.#attributes(this.#reply);
  }

  #later(
    { uniqueLow, uniqueHigh, opcode, node, lengthBytes }: fuse.RequestHeader,
    heldBytes: number,
    work: () => Promise<Result>,
  ): number {
    const header = { uniqueLow, uniqueHigh, opcode, node, lengthBytes };
    this.heldBytes += heldBytes;
    this.waiting++;
    void this.#finish(header, work).finally(() => {
      this.heldBytes -= heldBytes;
      this.waiting--;
      this.#onAnswered();
    });
    return NO_REPLY;
  }

  async #finish(header: fuse.RequestHeader, work: () => Promise<Result>): Promise<void> {
    let result: Result;
    try {
      result = await work();
    } catch (error) {
      result = -errnoOf(error);
    }
    if (this.#ended) return;
    if (Buffer.isBuffer(result)) fuse.sendBytes(this.#fd, this.#reply, header, result);
    else fuse.sendBody(this.#fd, this.#reply, header, typeof result === 'number' ? result : result(this.#reply));
  }
}
