/**
 * Extents of compressed files (layouts 1 and 3).
 *
 * A file is cut in logical clusters; the index has one entry for each: PLAIN and HEAD entries begin an extent, NONHEAD
 * ones belong to the extent that began before. The compact index packs 2 or 16 entries with one block address.
 * All steps back and on are bounded by the largest extent the format allows, so a damaged index cannot make us search for long.
 */
import { erofs } from '#converter';
import { type Encoding, type Extent, resolve } from './extent.ts';
import type { Inode } from './inode.ts';
import type { Metadata } from './metadata.ts';

const { MAP_HEADER, MAP_ADVISE, LCLUSTER_TYPE, LCLUSTER_INDEX, LAYOUT, CBLK_COUNT } = erofs;

/** The map header of one inode, and where its last extent begins if that one is stored apart. */
interface ClusterMap {
  readonly advise: number;
  readonly algorithms: readonly [number, number];
  readonly clusterBits: number;
  readonly clusters: number;
  /** First byte of the index. */
  readonly indexAt: number;
  /** The whole file lies in the packed inode. */
  readonly wholeFragment: boolean;
  fragmentOffset: number;
  readonly inlineBytes: number;
  /** Of the last extent when it is a fragment or inline, else -1. */
  tailHead: number;
  inlineAt: number;
}

/** One index entry. */
interface Cluster {
  readonly lcn: number;
  readonly type: number;
  /** Where in the cluster the extent begins; a whole cluster for NONHEAD. */
  readonly startsAt: number;
  /** NONHEAD: clusters back to the head. */
  readonly back: number;
  /** NONHEAD: clusters on to the next head. */
  readonly forward: number;
  /** NONHEAD right after its head: blocks of the physical cluster; 0 = not told. */
  readonly blocks: number;
  /** HEAD and PLAIN. */
  readonly blkAddr: number;
  readonly partial: boolean;
  /** Where the index (pack) goes on: an inline tail follows the last one. */
  readonly nextAt: number;
}

const ENCODINGS: readonly Encoding[] = ['lz4', 'lzma', 'deflate', 'zstd'];

/** Maps are kept as long as their inode object lives: sequential reads parse the header once. */
const MAPS = new WeakMap<Inode, ClusterMap>();

function mapOf(meta: Metadata, inode: Inode): ClusterMap {
  let map = MAPS.get(inode);
  if (map === undefined) {
    map = openMap(meta, inode);
    MAPS.set(inode, map);
  }
  return map;
}

function openMap(meta: Metadata, inode: Inode): ClusterMap {
  const { nid } = inode;
  const headerAt = Math.ceil(inode.bodyOffset / 8) * 8;
  const at = meta.at(nid, headerAt, erofs.MAP_HEADER_SIZE, 'compression map header');
  const { buf } = meta.bytes;
  const clusterByte = buf.readUInt8(at + MAP_HEADER.clusterBits);
  if (clusterByte & erofs.FRAGMENT_INODE) {
    const high = buf.readUInt32LE(at + 4) & 0x7fffffff;
    return {
      advise: MAP_ADVISE.FRAGMENT,
      algorithms: [0, 0],
      clusterBits: meta.sb.blockBits,
      clusters: 0,
      indexAt: 0,
      wholeFragment: true,
      fragmentOffset: high * 0x1_0000_0000 + buf.readUInt32LE(at),
      inlineBytes: 0,
      tailHead: -1,
      inlineAt: 0,
    };
  }
  const advise = buf.readUInt16LE(at + MAP_HEADER.advise);
  const full = inode.layout === LAYOUT.COMPRESSED_FULL;
  if (full && advise & MAP_ADVISE.EXTENTS) throw meta.unsupported(nid, 'a compression index of extent records');
  if (advise & ~0x3f) throw meta.unsupported(nid, `compression advice 0x${advise.toString(16)}`);
  if (!full && !(advise & MAP_ADVISE.BIG_PCLUSTER_1) !== !(advise & MAP_ADVISE.BIG_PCLUSTER_2)) {
    throw meta.corrupt(nid, `compression map header at byte ${headerAt}: compact index with one big-cluster flag`);
  }
  const clusterBits = meta.sb.blockBits + (clusterByte & 0xf);
  if (clusterBits > 20 || (!full && clusterBits > 14)) {
    throw meta.corrupt(nid, `compression map header at byte ${headerAt}: logical clusters of 2^${clusterBits} bytes`);
  }
  const algorithm = buf.readUInt8(at + MAP_HEADER.algorithm);
  const fragment = (advise & MAP_ADVISE.FRAGMENT) !== 0;
  const map: ClusterMap = {
    advise,
    algorithms: [algorithm & 0xf, algorithm >> 4],
    clusterBits,
    clusters: Math.ceil(inode.sizeBytes / 2 ** clusterBits),
    indexAt: headerAt + erofs.MAP_HEADER_SIZE + (full ? erofs.FULL_INDEX_GAP : 0),
    wholeFragment: false,
    fragmentOffset: fragment ? buf.readUInt32LE(at + MAP_HEADER.fragmentOff) : 0,
    inlineBytes: !fragment && advise & MAP_ADVISE.INLINE_PCLUSTER ? buf.readUInt16LE(at + MAP_HEADER.idataSize) : 0,
    tailHead: -1,
    inlineAt: 0,
  };
  if (inode.sizeBytes > 0 && (fragment || map.inlineBytes > 0)) findTail(meta, inode, map);
  return map;
}

function findTail(meta: Metadata, inode: Inode, map: ClusterMap): void {
  const last = inode.sizeBytes - 1;
  const entry = clusterAt(meta, inode, map, Math.floor(last / 2 ** map.clusterBits));
  map.inlineAt = entry.nextAt;
  const head = headOf(meta, inode, map, entry, last);
  map.tailHead = head.lcn;
  if (map.advise & MAP_ADVISE.FRAGMENT && inode.layout === LAYOUT.COMPRESSED_FULL) {
    map.fragmentOffset += head.blkAddr * 0x1_0000_0000;
  }
}

/** Most logical clusters one extent may span. */
function reach(map: ClusterMap): number {
  return Math.ceil(erofs.PCLUSTER_MAX_DECODED_BYTES / 2 ** map.clusterBits) + 1;
}

/** The entry that begins the extent of file byte `position`, which lies in cluster `entry`. */
function headOf(meta: Metadata, inode: Inode, map: ClusterMap, entry: Cluster, position: number): Cluster {
  const within = position % 2 ** map.clusterBits;
  if (entry.type !== LCLUSTER_TYPE.NONHEAD && within >= entry.startsAt) return entry;
  let { lcn } = entry;
  let back = entry.type === LCLUSTER_TYPE.NONHEAD ? entry.back : 1;
  const lowest = lcn - reach(map);
  for (;;) {
    if (back < 1 || back > lcn || lcn - back < lowest) {
      throw meta.corrupt(inode.nid, `cluster ${lcn} of the compression index points ${back} clusters back`);
    }
    lcn -= back;
    const head = clusterAt(meta, inode, map, lcn);
    if (head.type !== LCLUSTER_TYPE.NONHEAD) return head;
    back = head.back;
  }
}

/** End of the extent that `head` begins: where the next one begins, or the file's end. */
function endOf(meta: Metadata, inode: Inode, map: ClusterMap, head: Cluster): number {
  const clusterBytes = 2 ** map.clusterBits;
  const highest = head.lcn + reach(map);
  for (let lcn = head.lcn + 1; ; ) {
    if (lcn * clusterBytes >= inode.sizeBytes) return inode.sizeBytes;
    if (lcn > highest) throw meta.corrupt(inode.nid, `the extent of cluster ${head.lcn} of the index has no end`);
    const entry = clusterAt(meta, inode, map, lcn);
    if (entry.type !== LCLUSTER_TYPE.NONHEAD) return Math.min(lcn * clusterBytes + entry.startsAt, inode.sizeBytes);
    lcn += Math.max(1, entry.forward);
  }
}

/** Bytes of the physical cluster of `head`. */
function storedBytes(meta: Metadata, inode: Inode, map: ClusterMap, head: Cluster): number {
  const { blockSize } = meta.sb;
  const big = map.advise & (head.type === LCLUSTER_TYPE.HEAD1 ? MAP_ADVISE.BIG_PCLUSTER_1 : MAP_ADVISE.BIG_PCLUSTER_2);
  if (!big || (head.lcn + 1) * 2 ** map.clusterBits >= inode.sizeBytes) return blockSize;
  const next = clusterAt(meta, inode, map, head.lcn + 1);
  if (next.type !== LCLUSTER_TYPE.NONHEAD) return blockSize;
  if (next.blocks === 0) {
    throw meta.corrupt(inode.nid, `cluster ${next.lcn} of the compression index does not tell its block count`);
  }
  return next.blocks * blockSize;
}

export function clusterExtentAt(meta: Metadata, inode: Inode, position: number): Extent {
  const map = mapOf(meta, inode);
  const { nid, sizeBytes } = inode;
  if (map.wholeFragment) return fragment(0, sizeBytes, map.fragmentOffset);
  const clusterBytes = 2 ** map.clusterBits;
  const entry = clusterAt(meta, inode, map, Math.floor(position / clusterBytes));
  const head = headOf(meta, inode, map, entry, position);
  const logical = head.lcn * clusterBytes + head.startsAt;
  if (head.lcn === map.tailHead && map.inlineBytes === 0) {
    return fragment(logical, sizeBytes - logical, map.fragmentOffset);
  }
  const inline = head.lcn === map.tailHead;
  const length = (inline ? sizeBytes : endOf(meta, inode, map, head)) - logical;
  const storedLength = inline ? map.inlineBytes : storedBytes(meta, inode, map, head);
  if (length > erofs.PCLUSTER_MAX_DECODED_BYTES || storedLength > erofs.PCLUSTER_MAX_BYTES) {
    throw meta.corrupt(nid, `cluster ${head.lcn}: ${storedLength} stored bytes that decode to ${length}`);
  }
  const extent: Extent = {
    logical,
    length,
    encoding: encodingOf(meta, inode, map, head, length, storedLength),
    device: 0,
    offset: inline ? map.inlineAt : head.blkAddr * meta.sb.blockSize,
    storedLength,
    partial: head.partial,
  };
  if (!inline) return resolve(meta, nid, extent);
  if ((map.inlineAt % meta.sb.blockSize) + storedLength > meta.sb.blockSize) {
    throw meta.corrupt(nid, `inline cluster at byte ${map.inlineAt}, ${storedLength} bytes long, crosses a block`);
  }
  meta.at(nid, map.inlineAt, storedLength, 'inline cluster');
  return extent;
}

function encodingOf(
  meta: Metadata,
  inode: Inode,
  map: ClusterMap,
  head: Cluster,
  length: number,
  storedLength: number,
): Encoding {
  if (head.type === LCLUSTER_TYPE.PLAIN) {
    if (length > storedLength) {
      throw meta.corrupt(inode.nid, `cluster ${head.lcn}: ${length} plain bytes in ${storedLength} stored ones`);
    }
    return map.advise & MAP_ADVISE.INTERLACED ? 'interlaced' : 'plain';
  }
  const algorithm = map.algorithms[head.type === LCLUSTER_TYPE.HEAD2 ? 1 : 0];
  const encoding = ENCODINGS[algorithm];
  if (encoding === undefined) throw meta.unsupported(inode.nid, `compression algorithm ${algorithm}`);
  if (!(meta.sb.algorithms & (1 << algorithm))) {
    throw meta.corrupt(inode.nid, `compressed with ${encoding}, which the superblock does not announce`);
  }
  return encoding;
}

function fragment(logical: number, length: number, offset: number): Extent {
  return { logical, length, encoding: 'fragment', device: 0, offset, storedLength: length, partial: false };
}

function clusterAt(meta: Metadata, inode: Inode, map: ClusterMap, lcn: number): Cluster {
  if (lcn >= map.clusters) throw meta.corrupt(inode.nid, `cluster ${lcn} of ${map.clusters}`);
  const entry =
    inode.layout === LAYOUT.COMPRESSED_FULL
      ? fullClusterAt(meta, inode, map, lcn)
      : compactClusterAt(meta, inode, map, lcn);
  if (entry.type !== LCLUSTER_TYPE.NONHEAD && entry.startsAt >= 2 ** map.clusterBits) {
    throw meta.corrupt(inode.nid, `cluster ${lcn} of the compression index begins ${entry.startsAt} bytes into itself`);
  }
  return entry;
}

function fullClusterAt(meta: Metadata, inode: Inode, map: ClusterMap, lcn: number): Cluster {
  const entryAt = map.indexAt + lcn * erofs.LCLUSTER_INDEX_SIZE;
  const at = meta.at(inode.nid, entryAt, erofs.LCLUSTER_INDEX_SIZE, `cluster ${lcn} of the compression index`);
  const { buf } = meta.bytes;
  const advise = buf.readUInt16LE(at + LCLUSTER_INDEX.advise);
  const type = advise & LCLUSTER_TYPE.mask;
  const nextAt = entryAt + erofs.LCLUSTER_INDEX_SIZE;
  if (type !== LCLUSTER_TYPE.NONHEAD) {
    return {
      lcn,
      type,
      startsAt: buf.readUInt16LE(at + LCLUSTER_INDEX.clusterOfs),
      back: 0,
      forward: 0,
      blocks: 0,
      blkAddr: buf.readUInt32LE(at + LCLUSTER_INDEX.blkAddr),
      partial: (advise & LCLUSTER_TYPE.partialRef) !== 0,
      nextAt,
    };
  }
  const delta0 = buf.readUInt16LE(at + LCLUSTER_INDEX.delta0);
  const forward = buf.readUInt16LE(at + LCLUSTER_INDEX.delta1);
  return nonHead(meta, inode, map, lcn, delta0, forward, nextAt);
}

function nonHead(
  meta: Metadata,
  inode: Inode,
  map: ClusterMap,
  lcn: number,
  delta0: number,
  forward: number,
  nextAt: number,
): Cluster {
  const counts = (delta0 & CBLK_COUNT) !== 0;
  if (counts && !(map.advise & (MAP_ADVISE.BIG_PCLUSTER_1 | MAP_ADVISE.BIG_PCLUSTER_2))) {
    throw meta.corrupt(inode.nid, `cluster ${lcn} of the compression index counts blocks in a file of small clusters`);
  }
  return {
    lcn,
    type: LCLUSTER_TYPE.NONHEAD,
    startsAt: 2 ** map.clusterBits,
    back: counts ? 1 : delta0,
    forward,
    blocks: counts ? delta0 & ~CBLK_COUNT : 0,
    blkAddr: 0,
    partial: false,
    nextAt,
  };
}

/**
 * Compact index: a few entries of 4 bytes up to a 32-byte boundary, then (when advised) packs of 16 entries in 32 bytes,
 * then 4-byte ones again, two in a pack of 8. A pack ends with the block address that its first physical cluster follows.
 */
function compactClusterAt(meta: Metadata, inode: Inode, map: ClusterMap, lcn: number): Cluster {
  const { indexAt, clusters } = map;
  const initial = ((32 - (indexAt % 32)) / 4) & 7;
  const dense =
    map.advise & MAP_ADVISE.COMPACTED_2B && initial < clusters ? Math.floor((clusters - initial) / 16) * 16 : 0;
  let unit = 4;
  let entryAt = indexAt + lcn * 4;
  if (lcn >= initial) {
    const after = lcn - initial;
    if (after < dense) {
      unit = 2;
      entryAt = indexAt + initial * 4 + after * 2;
    } else {
      entryAt = indexAt + initial * 4 + dense * 2 + (after - dense) * 4;
    }
  }
  const count = unit === 4 ? 2 : 16;
  if (unit === 2 && map.clusterBits > 12) throw meta.unsupported(inode.nid, 'a dense index of large clusters');
  const packBytes = count * unit;
  const packAt = entryAt - (entryAt % packBytes);
  const at = meta.at(inode.nid, packAt, packBytes, `cluster ${lcn} of the compression index`);
  const { buf } = meta.bytes;
  const bits = ((packBytes - 4) * 8) / count;
  const lowBits = Math.max(map.clusterBits, 12);
  const lowMask = (1 << lowBits) - 1;
  const index = (entryAt - packAt) / unit;
  const nextAt = packAt + packBytes;

  const value = (k: number): number => {
    const bit = k * bits;
    return buf.readUInt32LE(at + (bit >> 3)) >>> (bit & 7);
  };
  const typeAt = (k: number): number => (value(k) >>> lowBits) & 3;
  const lowAt = (k: number): number => value(k) & lowMask;

  const type = typeAt(index);
  const low = lowAt(index);
  if (type === LCLUSTER_TYPE.NONHEAD) {
    let forward = 0;
    let k = index;
    while (k < count && typeAt(k) === LCLUSTER_TYPE.NONHEAD) {
      k++;
      forward++;
    }
    if (k === count) {
      // The last entry of a pack tells the way on instead of the way back.
      const last = lowAt(count - 1);
      forward = forward - 1 + (last & CBLK_COUNT ? 1 : last);
    }
    if (low & CBLK_COUNT || index + 1 !== count) return nonHead(meta, inode, map, lcn, low, forward, nextAt);
    const previous = lowAt(index - 1);
    const back = typeAt(index - 1) !== LCLUSTER_TYPE.NONHEAD ? 1 : previous & CBLK_COUNT ? 2 : previous + 1;
    return { ...nonHead(meta, inode, map, lcn, 0, forward, nextAt), back };
  }
  return {
    lcn,
    type,
    startsAt: low,
    back: 0,
    forward: 0,
    blocks: 0,
    blkAddr: buf.readUInt32LE(at + packBytes - 4) + blocksBefore(meta, inode, map, index, typeAt, lowAt),
    partial: false,
    nextAt,
  };
}

/** Blocks of the physical clusters that begin in a pack before its entry `index`. */
function blocksBefore(
  meta: Metadata,
  inode: Inode,
  map: ClusterMap,
  index: number,
  typeAt: (k: number) => number,
  lowAt: (k: number) => number,
): number {
  const big = (map.advise & MAP_ADVISE.BIG_PCLUSTER_1) !== 0;
  let blocks = big ? 0 : 1;
  for (let k = index - 1; k >= 0; k--) {
    if (typeAt(k) !== LCLUSTER_TYPE.NONHEAD) {
      blocks++;
      continue;
    }
    const low = lowAt(k);
    if (!big) {
      k -= low;
      if (k >= 0) blocks++;
    } else if (low & CBLK_COUNT) {
      k--;
      blocks += low & ~CBLK_COUNT;
    } else {
      if (low <= 1) throw meta.corrupt(inode.nid, 'the compression index counts clusters wrongly');
      k -= low - 2;
    }
  }
  return blocks;
}

/** Where header, index and inline cluster of a compressed inode end. */
export function clusterMapEnd(meta: Metadata, inode: Inode): number {
  const map = mapOf(meta, inode);
  const headerEnd = Math.ceil(inode.bodyOffset / 8) * 8 + erofs.MAP_HEADER_SIZE;
  if (map.wholeFragment || map.clusters === 0) return headerEnd;
  const last = clusterAt(meta, inode, map, map.clusters - 1);
  if (map.inlineBytes > 0) return map.inlineAt + map.inlineBytes;
  return last.nextAt;
}
