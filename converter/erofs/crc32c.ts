/** The checksum of an EROFS superblock. */
import { crc32cRaw } from '#base';
import { SB, SUPER_OFFSET } from './layout.ts';

export { crc32cRaw };

/**
 * Checksum of the superblock of an image whose first block is `firstBlock` (at least `blockSize` bytes): over bytes
 * 1024 to the block's end, the checksum field taken as zero. Blocks of 1024 bytes or less: over the block that holds it.
 */
export function superblockChecksum(firstBlock: Uint8Array, blockSize: number): number {
  const end = blockSize > SUPER_OFFSET ? blockSize : SUPER_OFFSET + blockSize;
  let crc = crc32cRaw(0xffffffff, firstBlock, SUPER_OFFSET, SUPER_OFFSET + SB.checksum);
  crc = crc32cRaw(crc, ZERO_FIELD);
  return crc32cRaw(crc, firstBlock, SUPER_OFFSET + SB.checksum + 4, end);
}

const ZERO_FIELD = new Uint8Array(4);
