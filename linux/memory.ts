/**
 * Memory at fixed addresses: where a Buffer's bytes are, pages that neither move nor are collected, and files mapped into
 * memory. System calls that keep an address beyond the call (io_uring, ublk) need these.
 *
 * A view over pages that were unmapped crashes the process when it is touched: whoever unmaps has dropped every view before.
 */
import { address, type Bound, bind, syscallError, viewOf } from './libc.ts';

const MMAP = { name: 'mmap', result: 'int64_t', args: ['size_t', 'size_t', 'int', 'int', 'int', 'int64_t'] } as const;
const MUNMAP = { name: 'munmap', result: 'int', args: ['size_t', 'size_t'] } as const;

const MADVISE = { name: 'madvise', result: 'int', args: ['size_t', 'size_t', 'int'] } as const;

const MADV_DONTNEED = 4;
const PROT_READ = 1;
const PROT_WRITE = 2;
const MAP_SHARED = 0x01;
const MAP_PRIVATE = 0x02;
const MAP_ANONYMOUS = 0x20;
const MAP_NORESERVE = 0x4000;
const MAP_POPULATE = 0x8000;

let mmap: Bound | undefined;
let munmap: Bound | undefined;
let madvise: Bound | undefined;

/** Addresses of user space are below 2^47 (2^57 only for who asks): a number holds them exactly. */
const known = new WeakMap<ArrayBufferLike, number>();

/** Where the Buffer's first byte is. It stays there as long as the Buffer lives. */
export function addressOf(buffer: Buffer): number {
  let base = known.get(buffer.buffer);
  if (base === undefined) {
    base = Number(address(buffer)) - buffer.byteOffset;
    known.set(buffer.buffer, base);
  }
  return base + buffer.byteOffset;
}

export interface Mapping {
  readonly address: number;
  readonly sizeBytes: number;
  /** All of it, as bytes. */
  readonly bytes: Buffer;
  /** `bytes` and every view of it must not be touched any more. Twice is no error. */
  unmap(): void;
}

/** Zeroed pages; they take room once they are touched. `sizeBytes` is at most 4 GiB. @throws SyscallError */
export function mapPages(sizeBytes: number): Mapping {
  return map(sizeBytes, -1, 0, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
}

/** Pages that another thread of this process has mapped, and unmaps when nobody looks at them any more. */
export function viewPages(at: number, sizeBytes: number): Buffer {
  const bytes = Buffer.from(viewOf(at, sizeBytes));
  known.set(bytes.buffer, at - bytes.byteOffset);
  return bytes;
}

/** A part of a file or device, shared with the kernel. @throws SyscallError */
export function mapFile(
  fd: number,
  sizeBytes: number,
  offset: number,
  how: { readonly writable?: boolean } = {},
): Mapping {
  return map(
    sizeBytes,
    fd,
    offset,
    how.writable === false ? PROT_READ : PROT_READ | PROT_WRITE,
    MAP_SHARED | MAP_POPULATE,
  );
}

/** Memory of which there is an address alone. */
export interface KernelMapping extends Omit<Mapping, 'bytes'> {
  /** Its pages do not count as this process's any more, until they are touched again. Nothing of the file is lost. */
  letGo(): void;
}

/**
 * A file of any size, shared, for the kernel to copy from and to (transfer.ts). JavaScript must not look at it: a file that shrinks or
 * cannot be read would end the process. @throws SyscallError
 */
export function mapForKernel(fd: number, sizeBytes: number, how: { readonly writable: boolean }): KernelMapping {
  const placed = place(sizeBytes, fd, 0, how.writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED);
  return {
    ...placed,
    letGo() {
      madvise ??= bind(MADVISE);
      madvise.call(placed.address, sizeBytes, MADV_DONTNEED);
    },
  };
}

function map(sizeBytes: number, fd: number, offset: number, protection: number, flags: number): Mapping {
  const placed = place(sizeBytes, fd, offset, protection, flags);
  const bytes = Buffer.from(viewOf(placed.address, sizeBytes));
  known.set(bytes.buffer, placed.address - bytes.byteOffset);
  return { ...placed, bytes };
}

function place(
  sizeBytes: number,
  fd: number,
  offset: number,
  protection: number,
  flags: number,
): Omit<Mapping, 'bytes'> {
  mmap ??= bind(MMAP);
  munmap ??= bind(MUNMAP);
  const at = mmap.call(0, sizeBytes, protection, flags, fd, offset);
  if (at === -1) throw syscallError('mmap', mmap.errno(), fd < 0 ? 'pages' : `fd ${fd}`);
  let mapped = true;
  return {
    address: at,
    sizeBytes,
    unmap() {
      if (!mapped) return;
      mapped = false;
      munmap!.call(at, sizeBytes);
    },
  };
}
