/**
 * How much memory the indexes of one disk may take: a quarter of what this process may have, or $DSEC_DISK_INDEX_BYTES. A layer says how many
 * entries it has before they are read, so that one that would not fit is refused and nothing is killed for it.
 */
import { totalmem } from 'node:os';
import { fail } from '../errors.ts';
import { SEGMENT_BYTES } from './segment.ts';

/** A segment is in the index of its layer, in the merged one, and, while that is made, in one half of it or in the bytes that were read. */
const BYTES_AN_ENTRY = 3 * SEGMENT_BYTES;
const SHARE = 1 / 4;

export class IndexMemory {
  readonly mostBytes: number;
  private bytes = 0;

  constructor(mostBytes = defaultBytes()) {
    this.mostBytes = mostBytes;
  }

  /** For a layer more of the disk. @throws DISK_INDEX_MEMORY */
  take(entries: number, file: string): void {
    this.bytes += entries * BYTES_AN_ENTRY;
    if (this.bytes <= this.mostBytes) return;
    throw fail('DISK_INDEX_MEMORY', { file, entries, bytes: this.bytes, most: Math.floor(this.mostBytes) });
  }
}

function defaultBytes(): number {
  const asked = Number(process.env.DSEC_DISK_INDEX_BYTES);
  if (asked > 0) return asked;
  // 0, or more than there is, where no control group limits it.
  const limit = process.constrainedMemory();
  return (limit > 0 ? Math.min(limit, totalmem()) : totalmem()) * SHARE;
}
