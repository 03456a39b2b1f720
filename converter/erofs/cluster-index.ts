/**
 * The compact index of a compressed file (inode layout 3): one entry per 4096 bytes of the file, in packs of 2 entries in
 * 8 bytes and, where 32-byte alignment allows, of 16 entries in 32 bytes. Each pack ends with a block number from which the
 * kernel counts.
 *
 * Our clusters are 64 KiB of the file: a head, then non-heads of which the first carries the number of blocks. A cluster
 * that did not shrink is 16 plain heads of a block each.
 */
import { BLOCK_BYTES, CBLK_COUNT, LCLUSTER_TYPE } from './layout.ts';

const CLUSTER_LCLUSTERS = 16;
/** Bits of an entry's value; its type is in the 2 bits above. */
const VALUE_BITS = 12;

export interface ClusterIndexPlace {
  /** Position in the image where the map header ends, in bytes; a multiple of 8. */
  readonly startByte: number;
  readonly sizeBytes: number;
}

function split(place: ClusterIndexPlace) {
  const total = Math.ceil(place.sizeBytes / BLOCK_BYTES);
  const initial = Math.min(total, ((32 - (place.startByte % 32)) / 4) % 8);
  const short = total - initial - ((total - initial) % 16);
  return { total, initial, short };
}

/** Size of the index; depends on `startByte` only modulo 32. */
export function clusterIndexBytes(place: ClusterIndexPlace): number {
  const { total, initial, short } = split(place);
  const long = total - short;
  // Packs of two: the second half of a last, odd one is there too.
  const tail = total - initial - short;
  return long * 4 + short * 2 + (initial % 2) * 4 + (tail % 2) * 4;
}

/** `map[i] & 0xff`: blocks of cluster i, bit 8: plain. `firstBlock`: where cluster 0 lies, in the unified address space. */
export function encodeClusterIndex(map: Int32Array, firstBlock: number, place: ClusterIndexPlace): Buffer {
  const { total, initial, short } = split(place);
  const types = new Uint8Array(total);
  const values = new Uint16Array(total);
  /** Of a non-head: entries on to the next head. */
  const ahead = new Uint16Array(total);
  const blocks = new Float64Array(total);
  let block = firstBlock;
  map.forEach((cluster, i) => {
    const first = i * CLUSTER_LCLUSTERS;
    const end = Math.min(total, first + CLUSTER_LCLUSTERS);
    for (let at = first; at < end; at++) {
      if ((cluster & 0x100) !== 0) {
        types[at] = LCLUSTER_TYPE.PLAIN;
        blocks[at] = block++;
      } else if (at === first) {
        types[at] = LCLUSTER_TYPE.HEAD1;
        blocks[at] = block;
      } else {
        types[at] = LCLUSTER_TYPE.NONHEAD;
        values[at] = at === first + 1 ? CBLK_COUNT | (cluster & 0xff) : at - first;
        ahead[at] = end - at;
      }
    }
    if ((cluster & 0x100) === 0) block += cluster & 0xff;
  });
  const out = Buffer.alloc(clusterIndexBytes(place));
  let position = 0;
  const pack = (from: number, count: number, bytes: number) => {
    const bits = ((bytes - 4) * 8) / count;
    for (let i = 0; i < count; i++) {
      const at = from + i;
      if (at >= total) break;
      let value = values[at]!;
      // The last entry of a pack tells the way ahead, since the way back follows from the entry before it.
      if (i + 1 === count && types[at] === LCLUSTER_TYPE.NONHEAD && (value & CBLK_COUNT) === 0) value = ahead[at]!;
      putBits(out, position * 8 + i * bits, bits, value | (types[at]! << VALUE_BITS));
    }
    out.writeUInt32LE(packBase(from, Math.min(total, from + count)), position + bytes - 4);
    position += bytes;
  };
  /** What the kernel adds to: the first head's block, less a cluster whose head ended the pack before. */
  const packBase = (from: number, to: number): number => {
    let head = from;
    while (head < to && types[head] === LCLUSTER_TYPE.NONHEAD) head++;
    if (head === to) return 0;
    const before =
      types[from] === LCLUSTER_TYPE.NONHEAD && (values[from]! & CBLK_COUNT) !== 0 ? values[from]! & ~CBLK_COUNT : 0;
    return blocks[head]! - before;
  };
  for (let at = 0; at < initial; at += 2) pack(at, 2, 8);
  for (let at = initial; at < initial + short; at += 16) pack(at, 16, 32);
  for (let at = initial + short; at < total; at += 2) pack(at, 2, 8);
  return out;
}

function putBits(out: Buffer, bit: number, count: number, value: number): void {
  for (let done = 0; done < count; ) {
    const at = bit + done;
    const room = Math.min(8 - (at % 8), count - done);
    out[at >> 3]! |= ((value >> done) & ((1 << room) - 1)) << (at % 8);
    done += room;
  }
}
