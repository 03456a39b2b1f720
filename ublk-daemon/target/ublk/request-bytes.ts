/**
 * The bytes of a request, where the server copies them itself (USER_COPY): reading and writing /dev/ublkcN at a place of the request's own.
 * Into or out of any memory, a mapped file too: then what a disk's file holds goes to whoever asked with one copy, where
 * buffers take two, and no buffer is pinned.
 */
import { type KernelMapping, mapForKernel, Residency, readTo, writeFrom } from '#linux';

/** Where the kernel's header has the first request's bytes, and how far tags and queues are apart. */
const FIRST = 0x80000000;
const TAG_BYTES = 2 ** 25;
const QUEUE_BYTES = 2 ** 41;

export class RequestBytes {
  readonly #device: number;
  readonly #first: number;

  constructor(device: number, queue: number) {
    this.#device = device;
    this.#first = FIRST + queue * QUEUE_BYTES;
  }

  /** Of a write, to memory. False: not all of them, which no request that is at work is refused. */
  take(tag: number, address: number, length: number): boolean {
    return readTo(address, length, this.#device, this.#first + tag * TAG_BYTES) === length;
  }

  /** Of a read, from memory. */
  give(tag: number, address: number, length: number): boolean {
    return writeFrom(address, length, this.#device, this.#first + tag * TAG_BYTES) === length;
  }
}

const PAGE = 4096;
/** What is looked at together: neighbours are asked for next, and the kernel maps as much with one page fault. */
const BLOCK_BYTES = 64 * 1024;
/** A block of which pages are mapped; and one that is in memory for good, all of it, since there is no other place for it. */
const MAPPED = 1;
const COMPLETE = 2;
/** Blocks mapped, 1 GiB of them, after which all are let go: they count as this process's memory, though the page cache has them. */
const MOST_BLOCKS = 16 * 1024;

export interface FileFacts {
  readonly file: number;
  readonly sizeBytes: number;
  readonly readOnly: boolean;
  /** Of a file system that is memory alone. */
  readonly inMemory: boolean;
  readonly maxIoBytes: number;
}

/**
 * Requests straight between the caller's pages and those of the disk's file. Each answers false where that would wait for a disk, or make
 * pages of a hole, or where it failed: then the way over a buffer does it, or says what is wrong.
 */
export class MappedFile {
  readonly #bytes: RequestBytes;
  readonly #map: KernelMapping;
  readonly #residency: Residency;
  readonly #inMemory: boolean;
  readonly #writable: boolean;
  /** 0, MAPPED or COMPLETE, by block. */
  readonly #blocks: Uint8Array;
  #mappedBlocks = 0;

  /** @throws SyscallError where there is no room for the mapping */
  constructor(bytes: RequestBytes, { file, sizeBytes, readOnly, inMemory, maxIoBytes }: FileFacts) {
    this.#bytes = bytes;
    this.#inMemory = inMemory;
    // Pages of other file systems are written out, and the kernel has to be told before each change: pinned ones are not.
    this.#writable = inMemory && !readOnly;
    this.#residency = new Residency(maxIoBytes + 2 * BLOCK_BYTES);
    this.#blocks = new Uint8Array(Math.ceil(sizeBytes / BLOCK_BYTES));
    this.#map = mapForKernel(file, sizeBytes, { writable: this.#writable });
  }

  read(tag: number, offset: number, length: number): boolean {
    return this.#has(offset, length) && this.#bytes.give(tag, this.#map.address + offset, length);
  }

  write(tag: number, offset: number, length: number): boolean {
    if (!this.#writable || offset + length > this.#map.sizeBytes) return false;
    this.#note(Math.floor(offset / BLOCK_BYTES), Math.floor((offset + length - 1) / BLOCK_BYTES), MAPPED);
    return this.#bytes.take(tag, this.#map.address + offset, length);
  }

  /** A range becomes a hole. */
  forget(offset: number, length: number): void {
    this.#blocks.fill(0, Math.floor(offset / BLOCK_BYTES), Math.ceil((offset + length) / BLOCK_BYTES));
  }

  unmap(): void {
    this.#map.unmap();
  }

  #has(offset: number, length: number): boolean {
    const end = offset + length;
    const { address, sizeBytes } = this.#map;
    if (end > sizeBytes) return false;
    const firstBlock = Math.floor(offset / BLOCK_BYTES);
    const lastBlock = Math.floor((end - 1) / BLOCK_BYTES);
    if (this.#inMemory) {
      if (this.#areComplete(firstBlock, lastBlock)) return true;
      const first = firstBlock * BLOCK_BYTES;
      const last = Math.min(sizeBytes, (lastBlock + 1) * BLOCK_BYTES);
      if (this.#residency.has(address + first, last - first)) {
        this.#note(firstBlock, lastBlock, COMPLETE);
        return true;
      }
    }
    const page = offset - (offset % PAGE);
    if (!this.#residency.has(address + page, end - page)) return false;
    this.#note(firstBlock, lastBlock, MAPPED);
    return true;
  }

  #areComplete(first: number, last: number): boolean {
    for (let block = first; block <= last; block++) if (this.#blocks[block] !== COMPLETE) return false;
    return true;
  }

  #note(first: number, last: number, as: number): void {
    const blocks = this.#blocks;
    for (let block = first; block <= last; block++) {
      if (blocks[block] === 0) this.#mappedBlocks++;
      if (blocks[block]! < as) blocks[block] = as;
    }
    if (this.#mappedBlocks <= MOST_BLOCKS) return;
    this.#map.letGo();
    blocks.fill(0);
    this.#mappedBlocks = 0;
  }
}
