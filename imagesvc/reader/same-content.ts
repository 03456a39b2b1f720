/**
 * Whether two regular files of equal size have equal bytes, reading as little as possible: bytes at the same place of the
 * same blob are equal, whole chunks are compared by the digests their blobs vouch for, and only the rest is read.
 */
import { CHUNK_BYTES } from '../catalog/image.ts';
import type { ImageTree, PlacedExtent } from './image-tree.ts';
import type { TreeNode } from './tree-node.ts';
import type { VerifiedBlob } from './verified-blob.ts';

const READ_BYTES = 1024 * 1024;

interface Side {
  readonly tree: ImageTree;
  readonly node: TreeNode;
}

export async function sameContent(a: Side, b: Side): Promise<boolean> {
  const sizeBytes = a.node.inode.sizeBytes;
  if (sizeBytes !== b.node.inode.sizeBytes) return false;
  const extentsA = a.tree.extents(a.node);
  const extentsB = b.tree.extents(b.node);
  let left: PlacedExtent | undefined;
  let right: PlacedExtent | undefined;
  for (let at = 0; at < sizeBytes; ) {
    while (left === undefined || left.logical + left.length <= at) left = extentsA.next().value as PlacedExtent;
    while (right === undefined || right.logical + right.length <= at) right = extentsB.next().value as PlacedExtent;
    const end = Math.min(left.logical + left.length, right.logical + right.length);
    if (!samePlace(left, right, at) && !(await sameRange(a, left, b, right, at, end))) return false;
    at = end;
  }
  return true;
}

function samePlace(a: PlacedExtent, b: PlacedExtent, at: number): boolean {
  if (a.encoding === 'hole' && b.encoding === 'hole') return true;
  if (a.blob === undefined || a.blob !== b.blob || a.encoding !== b.encoding || (a.device === 0) !== (b.device === 0)) {
    return false;
  }
  if (a.encoding === 'raw' || a.encoding === 'fragment') return a.offset + at - a.logical === b.offset + at - b.logical;
  return (
    a.encoding !== 'interlaced' &&
    a.offset === b.offset &&
    a.storedLength === b.storedLength &&
    a.logical === b.logical &&
    a.length === b.length
  );
}

async function sameRange(
  a: Side,
  left: PlacedExtent,
  b: Side,
  right: PlacedExtent,
  from: number,
  end: number,
): Promise<boolean> {
  for (let at = from; at < end; ) {
    const one = wholeChunk(a, left, at, end);
    const other = one && wholeChunk(b, right, at, end);
    if (one && other && one.bytes === other.bytes) {
      if (!one.digest.equals(other.digest)) return false;
      at += one.bytes;
      continue;
    }
    const step = Math.min(READ_BYTES, end - at);
    const bytes = await a.tree.read(a.node, at, step);
    if (!bytes.equals(await b.tree.read(b.node, at, step))) return false;
    at += step;
  }
  return true;
}

/** The chunk that begins at file byte `at`, when it belongs to the extent whole. */
function wholeChunk(side: Side, extent: PlacedExtent, at: number, end: number) {
  if (extent.encoding !== 'raw' || extent.device === 0) return undefined;
  const blob: VerifiedBlob | undefined = side.tree.layers[side.node.layer]!.blobs[extent.device - 1];
  const offset = extent.offset + at - extent.logical;
  if (blob === undefined || offset % CHUNK_BYTES !== 0) return undefined;
  const bytes = Math.min(CHUNK_BYTES, blob.sizeBytes - offset);
  return bytes > 0 && at + bytes <= end ? { digest: blob.chunkDigest(offset / CHUNK_BYTES), bytes } : undefined;
}
