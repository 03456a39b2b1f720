/**
 * `dsec stats`: what of an image's data was ever read on this node. The chunk cache notes for each chunk who made it come and
 * whether a reader has read of it; the running data server is asked, and where none runs, or does not show a blob, the cache's
 * map on disk is read, which says the same some seconds later.
 *
 * A chunk is the smallest thing that is known: a file counts as read as far as it lies in chunks that were read of.
 * What is evicted stays counted, until all of a blob has gone from the cache.
 */
import type { ByteString, Digest } from '#base';
import { hexOf, systemCode } from '#base';
import { chunkFacts, FETCHED_INTERACTIVE, FETCHED_PREFETCH, readStoredChunks } from '#chunk-cache';
import { CHUNK_BYTES, type Image, type LayerDevice } from '../catalog/image.ts';
import { chunksFolder, dataServerId } from '../data-server/data-folders.ts';
import { type DataServer, findDataServer } from '../data-server/data-server.ts';
import { fail } from '../errors.ts';
import { type NodeFolders, nodeFolders } from '../mount/node-folders.ts';
import { type ImageTree, openTree } from '../reader/image-tree.ts';
import { isRegular } from '../reader/inode.ts';
import type { BlobStore } from '../store/blob-store.ts';

/** `read`: of a chunk that a reader read of. `prefetched`: that came without a reader. `cold`: that never came. */
export interface HeatBytes {
  readonly sizeBytes: number;
  readonly readBytes: number;
  readonly prefetchedBytes: number;
  readonly coldBytes: number;
}

export const COLD_CHUNK = 0;
export const PREFETCHED_CHUNK = 1;
export const READ_CHUNK = 2;

export interface BlobHeat extends HeatBytes {
  readonly digest: Digest;
  /** From 1, the bottom one. */
  readonly layer: number;
  /** Who told: the running data server, the cache on disk, or nobody: nothing of the blob was ever here. */
  readonly from: 'server' | 'disk' | 'nothing';
  /** COLD_CHUNK, PREFETCHED_CHUNK, READ_CHUNK of each chunk. */
  readonly chunks: Uint8Array;
}

export interface DirectoryHeat extends HeatBytes {
  readonly path: ByteString;
}

export interface ImageStats extends HeatBytes {
  readonly name: string;
  readonly digest: Digest;
  readonly from: BlobHeat['from'];
  readonly blobs: readonly BlobHeat[];
  /** The root first, the others sorted; those without data are left out. Bytes that several files share count for the first. */
  readonly directories: readonly DirectoryHeat[];
}

export interface StatsOptions extends Partial<NodeFolders> {
  /** How far down directories are told apart: 1 by default. */
  readonly depth?: number;
}

/** @throws STATS_DENIED, and what reading the image throws */
export async function imageStats(store: BlobStore, image: Image, options: StatsOptions = {}): Promise<ImageStats> {
  const { cacheDir } = nodeFolders(options);
  const folder = chunksFolder(cacheDir, dataServerId(store.url));
  const server = await findDataServer(store.url, options);
  const blobs: BlobHeat[] = [];
  const seen = new Set<Digest>();
  for (const [i, { devices }] of image.layers.entries()) {
    for (const device of devices) {
      if (seen.has(device.blob.digest)) continue;
      seen.add(device.blob.digest);
      blobs.push(await heatOf(device, i + 1, server, folder));
    }
  }
  const tree = await openTree(store, image);
  try {
    const directories = directoriesOf(tree, blobs, options.depth ?? 1);
    const told = blobs.map(({ from }) => from);
    const from = told.includes('server') ? 'server' : told.includes('disk') ? 'disk' : 'nothing';
    return { name: image.name, digest: image.manifestDigest, from, ...sumOf(blobs), blobs, directories };
  } finally {
    await tree.close();
  }
}

async function heatOf(
  { blob, chunkDigests }: LayerDevice,
  layer: number,
  server: DataServer | undefined,
  folder: string,
): Promise<BlobHeat> {
  const { digest, size: sizeBytes } = blob;
  let from: BlobHeat['from'] = 'server';
  let bytes = await server?.chunks(digest);
  if (bytes === undefined) {
    from = 'disk';
    try {
      // The map's name has the hash of the chunk digests, which is the digest of the blob that holds them.
      bytes = readStoredChunks(folder, { digest, sizeBytes, tableHash: hexOf(chunkDigests.digest) });
    } catch (error) {
      if (systemCode(error) !== 'EACCES') throw error;
      throw fail('STATS_DENIED', { folder }, error);
    }
  }
  const chunks = new Uint8Array(Math.ceil(sizeBytes / CHUNK_BYTES));
  const heat = { read: 0, prefetched: 0, cold: 0 };
  for (let i = 0; i < chunks.length; i++) {
    const { present, touched, fetched } = chunkFacts(bytes?.[i] ?? 0);
    const length = Math.min(CHUNK_BYTES, sizeBytes - i * CHUNK_BYTES);
    if (touched || fetched === FETCHED_INTERACTIVE) {
      chunks[i] = READ_CHUNK;
      heat.read += length;
    } else if (present || fetched === FETCHED_PREFETCH) {
      chunks[i] = PREFETCHED_CHUNK;
      heat.prefetched += length;
    } else heat.cold += length;
  }
  return {
    digest,
    layer,
    from: bytes === undefined ? 'nothing' : from,
    sizeBytes,
    readBytes: heat.read,
    prefetchedBytes: heat.prefetched,
    coldBytes: heat.cold,
    chunks,
  };
}

function sumOf(parts: readonly HeatBytes[]): HeatBytes {
  const sum = (of: (part: HeatBytes) => number) => parts.reduce((total, part) => total + of(part), 0);
  return {
    sizeBytes: sum((part) => part.sizeBytes),
    readBytes: sum((part) => part.readBytes),
    prefetchedBytes: sum((part) => part.prefetchedBytes),
    coldBytes: sum((part) => part.coldBytes),
  };
}

function directoriesOf(tree: ImageTree, blobs: readonly BlobHeat[], depth: number): DirectoryHeat[] {
  const byDigest = new Map<string, BlobHeat>(blobs.map((blob) => [blob.digest, blob]));
  const totals = new Map<ByteString, { bytes: [cold: number, prefetched: number, read: number] }>();
  const taken = new Set<string>();
  for (const { path, node, linkTo } of tree.walk()) {
    if (linkTo !== undefined || !isRegular(node.inode)) continue;
    for (const { blob, device, offset, storedLength } of tree.extents(node)) {
      const of = blob === undefined || device === 0 ? undefined : byDigest.get(blob);
      if (of === undefined || storedLength === 0) continue;
      const key = `${blob}/${offset}`;
      if (taken.has(key)) continue;
      taken.add(key);
      const bytes = heatOfRange(of, offset, storedLength);
      for (const directory of ancestors(path, depth)) {
        const total = totals.get(directory) ?? { bytes: [0, 0, 0] };
        for (const heat of [COLD_CHUNK, PREFETCHED_CHUNK, READ_CHUNK]) total.bytes[heat]! += bytes[heat]!;
        totals.set(directory, total);
      }
    }
  }
  return [...totals]
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([path, { bytes }]) => ({
      path,
      sizeBytes: bytes[COLD_CHUNK] + bytes[PREFETCHED_CHUNK] + bytes[READ_CHUNK],
      readBytes: bytes[READ_CHUNK],
      prefetchedBytes: bytes[PREFETCHED_CHUNK],
      coldBytes: bytes[COLD_CHUNK],
    }));
}

function heatOfRange({ chunks }: BlobHeat, offset: number, length: number): number[] {
  const bytes = [0, 0, 0];
  for (let at = offset; at < offset + length; ) {
    const chunk = Math.floor(at / CHUNK_BYTES);
    const end = Math.min(offset + length, (chunk + 1) * CHUNK_BYTES);
    bytes[chunks[chunk] ?? COLD_CHUNK]! += end - at;
    at = end;
  }
  return bytes;
}

/** `/`, `/usr`, `/usr/bin` of a file, down to `depth` names. */
function ancestors(path: ByteString, depth: number): ByteString[] {
  const names = path.split('/').slice(1, -1);
  const found: ByteString[] = ['/'];
  for (let i = 1; i <= Math.min(depth, names.length); i++) found.push(`/${names.slice(0, i).join('/')}`);
  return found;
}
