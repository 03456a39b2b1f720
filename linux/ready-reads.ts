/**
 * Reads of one file that never wait: of what the page cache holds, and of all of a file that is in memory as a whole (tmpfs, ramfs),
 * whose file systems cannot tell because there is nothing to tell.
 */
import { readSync, statfsSync } from 'node:fs';
import { readNow } from './read-now.ts';

const TMPFS = 0x01021994;
const RAMFS = 0x858458f6;

/** Whether reading such a file never waits. @param path may be of a descriptor: `/proc/self/fd/N` */
export function isInMemory(path: string): boolean {
  const { type } = statfsSync(path);
  return type === TMPFS || type === RAMFS;
}

export class ReadyReads {
  readonly #fd: number;
  #held: 'all' | 'ask' | 'none';

  /** @param fd stays the caller's */
  constructor(fd: number) {
    this.#fd = fd;
    this.#held = isInMemory(`/proc/self/fd/${fd}`) ? 'all' : 'ask';
  }

  /**
   * Copies up to `length` bytes of the file from `position` to `into[at..]`.
   * @returns how many: fewer than asked where the rest would have to be waited for, or the file ends
   * @throws what reading a file throws
   */
  read(into: Buffer, at: number, length: number, position: number): number {
    if (this.#held === 'none') return 0;
    if (this.#held === 'all') return readSync(this.#fd, into, at, length, position);
    const count = readNow(this.#fd, into, at, length, position);
    // A file system that cannot tell: asking again is of no use.
    if (count === undefined) this.#held = 'none';
    return count ?? 0;
  }
}
