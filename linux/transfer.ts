/**
 * Reads and writes between a file and memory that is known by its address alone: pages of memory.ts, of which there need be no view. A
 * count, or minus an errno: for paths where each call counts. Memory that is not there any more (the file it maps has shrunk, or could
 * not be read) is EFAULT, no signal: the kernel does the copying.
 */
import { type Bound, bind } from './libc.ts';

const PREAD = { name: 'pread', result: 'long', args: ['int', 'size_t', 'size_t', 'int64_t'] } as const;
const PWRITE = { ...PREAD, name: 'pwrite' } as const;
const MINCORE = { name: 'mincore', result: 'int', args: ['size_t', 'size_t', 'void*'] } as const;

const EINTR = 4;

let pread: Bound | undefined;
let pwrite: Bound | undefined;
let mincore: Bound | undefined;

/** From `position` of the file on. May be fewer than asked. */
export function readTo(address: number, length: number, fd: number, position: number): number {
  pread ??= bind(PREAD);
  return transfer(pread, fd, address, length, position);
}

/** The same in the other direction. */
export function writeFrom(address: number, length: number, fd: number, position: number): number {
  pwrite ??= bind(PWRITE);
  return transfer(pwrite, fd, address, length, position);
}

function transfer(bound: Bound, fd: number, address: number, length: number, position: number): number {
  for (;;) {
    const count = bound.call(fd, address, length, position);
    if (count >= 0) return count;
    const errno = bound.errno();
    if (errno !== EINTR) return -errno;
  }
}

/**
 * Whether all these pages of a mapped file are in memory, so that touching them waits for nothing; holes never are. Where the kernel
 * will not tell, it says yes. `address` is that of a page.
 */
export class Residency {
  readonly #pages: Buffer;

  /** @param mostBytes that will be asked for at once */
  constructor(mostBytes: number) {
    this.#pages = Buffer.alloc(Math.ceil(mostBytes / 4096) + 1);
    mincore ??= bind(MINCORE);
  }

  has(address: number, length: number): boolean {
    const pages = this.#pages;
    if (mincore!.call(address, length, pages) !== 0) return false;
    for (let page = 0; page << 12 < length; page++) if ((pages[page]! & 1) === 0) return false;
    return true;
  }
}
