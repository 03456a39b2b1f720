/** `dsec cat`: a file's verified bytes, links followed inside the image. */
import type { ByteString } from '#base';
import type { ImageTree } from './image-tree.ts';

/** @throws TREE_NOT_FOUND, TREE_NOT_A_FILE, TREE_LINK_LOOP, STORE_CHUNK_MISMATCH, EROFS_CORRUPT */
export async function* cat(
  tree: ImageTree,
  path: ByteString,
  range: { offset?: number; length?: number } = {},
): AsyncGenerator<Buffer> {
  const node = tree.lookup(path, true);
  const offset = range.offset ?? 0;
  yield* tree.stream(node, offset, range.length ?? Math.max(0, node.inode.sizeBytes - offset));
}
