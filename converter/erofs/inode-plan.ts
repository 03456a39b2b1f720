/**
 * Where every inode of a metadata image comes to lie.
 *
 * Inodes stand in the order of a walk that keeps a directory's children together (what `ls -l` reads), each at a multiple
 * of 32 bytes; its number (nid) is its position divided by 32. What lies inline behind an inode may not cross a block;
 * the gaps that this leaves are filled by later inodes that fit.
 */
import { BLOCK_BYTES, INODE_SLOT_SIZE } from './layout.ts';

const MAX_GAPS = 64;
/** Gaps further back than this are given up, so that the writer's window stays small. */
export const GAP_WINDOW_BYTES = 512 * 1024;

export interface InodeSpace {
  /** Inode, attributes, maps: may cross blocks. */
  readonly headBytes: number;
  /** Inline data right behind it: may not. */
  readonly inlineBytes: number;
}

export class InodeAllocator {
  #cursor: number;
  #gaps: { at: number; bytes: number }[] = [];

  constructor(startByte: number) {
    this.#cursor = align(startByte);
  }

  /** End of what is allocated, in bytes. */
  get endByte(): number {
    return this.#cursor;
  }

  /** Position of the next inode, in bytes. */
  place({ headBytes, inlineBytes }: InodeSpace): number {
    const bytes = headBytes + inlineBytes;
    const gap = this.#takeGap(bytes);
    if (gap !== undefined) return gap;
    let at = this.#cursor;
    if (inlineBytes > 0) {
      at = fitInline(at, headBytes, inlineBytes);
      if (at > this.#cursor) {
        this.#gaps.push({ at: this.#cursor, bytes: at - this.#cursor });
        if (this.#gaps.length > MAX_GAPS) this.#gaps.shift();
      }
    }
    this.#cursor = align(at + bytes);
    return at;
  }

  /** The smallest gap that holds it. A gap lies within one block, so inline data in it does not cross. */
  #takeGap(bytes: number): number | undefined {
    let best = -1;
    for (let i = 0; i < this.#gaps.length; i++) {
      const gap = this.#gaps[i]!;
      if (gap.bytes >= bytes && (best < 0 || gap.bytes < this.#gaps[best]!.bytes)) best = i;
    }
    while (this.#gaps.length > 0 && this.#gaps[0]!.at < this.#cursor - GAP_WINDOW_BYTES / 2) {
      this.#gaps.shift();
      best--;
    }
    if (best < 0) return undefined;
    const gap = this.#gaps[best]!;
    const at = gap.at;
    const used = align(bytes);
    gap.at += used;
    gap.bytes -= used;
    if (gap.bytes < INODE_SLOT_SIZE) this.#gaps.splice(best, 1);
    return at;
  }
}

/** First position from `at` on where the inline data stays in one block: with its inode if that can be, else just itself. */
function fitInline(at: number, headBytes: number, inlineBytes: number): number {
  const blockEnd = (Math.floor(at / BLOCK_BYTES) + 1) * BLOCK_BYTES;
  const whole = headBytes + inlineBytes;
  if (at + whole <= blockEnd) return at;
  if (whole <= BLOCK_BYTES) return blockEnd;
  let candidate = at;
  while (Math.floor((candidate + headBytes) / BLOCK_BYTES) !== Math.floor((candidate + whole - 1) / BLOCK_BYTES)) {
    candidate += INODE_SLOT_SIZE;
  }
  return candidate;
}

/** Whether inline data of this size can always be placed behind an inode with that head. */
export function fitsInline(headBytes: number, inlineBytes: number): boolean {
  return headBytes % INODE_SLOT_SIZE === 0 ? inlineBytes <= BLOCK_BYTES : inlineBytes <= BLOCK_BYTES - INODE_SLOT_SIZE;
}

function align(bytes: number): number {
  return Math.ceil(bytes / INODE_SLOT_SIZE) * INODE_SLOT_SIZE;
}
