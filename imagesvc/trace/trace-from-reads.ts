/**
 * Makes a trace of what a data server recorded: reads of blobs become chunks and, through the extents of the image's merged
 * tree, files. The kernel reads a device for one file at a time and in whole blocks, and no block is part of two
 * files, so what is found is what was read. Files whose stored bytes are the same ones (hard links, identical files) go by
 * the first of their paths.
 */
import type { ByteString, Digest } from '#base';
import { CHUNK_BYTES, type Image } from '../catalog/image.ts';
import { type ImageTree, openTree } from '../reader/image-tree.ts';
import { isRegular } from '../reader/inode.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { joinRanges } from './merge-traces.ts';
import type { Trace, TracedChunk, TracedFile } from './trace.ts';

/** A read of a blob. */
export interface RecordedRead {
  readonly blob: Digest;
  readonly offset: number;
  readonly length: number;
  /** By a clock that all reads share. */
  readonly ms: number;
}

export interface RecordedReads {
  /** In order. */
  readonly reads: readonly RecordedRead[];
  /** Reads that found no room in the record. */
  readonly dropped: number;
}

interface Piece {
  readonly offset: number;
  readonly end: number;
  readonly file: FileSeen;
  readonly logical: number;
  readonly length: number;
  /** Stored as it is: a part of it is a part of the file. */
  readonly raw: boolean;
}

interface FileSeen {
  readonly path: ByteString;
  readonly sizeBytes: number;
  ms: number;
  readonly ranges: [number, number][];
}

/** @param blobs Whose reads are of interest: the image's, or its own layers'. */
export async function traceFromReads(
  store: BlobStore,
  image: Image,
  command: readonly string[],
  { reads, dropped }: RecordedReads,
  blobs: ReadonlySet<Digest> = new Set(image.layers.flatMap(({ devices }) => devices.map(({ blob }) => blob.digest))),
): Promise<Trace> {
  const ours = reads.filter(({ blob }) => blobs.has(blob));
  const startMs = reads[0]?.ms ?? 0;
  const sizes = new Map(image.layers.flatMap(({ devices }) => devices.map(({ blob }) => [blob.digest, blob.size])));
  const traced = [...new Set(ours.map(({ blob }) => blob))].map((digest) => ({
    digest,
    sizeBytes: sizes.get(digest)!,
  }));
  const number = new Map(traced.map(({ digest }, i) => [digest, i]));
  const chunks = new Map<string, TracedChunk>();
  for (const { blob, offset, length, ms } of ours) {
    const of = number.get(blob)!;
    for (let chunk = Math.floor(offset / CHUNK_BYTES); chunk * CHUNK_BYTES < offset + length; chunk++) {
      const key = `${of}/${chunk}`;
      if (!chunks.has(key)) chunks.set(key, { blob: of, chunk, ms: relative(ms, startMs) });
    }
  }
  const tree = await openTree(store, image);
  try {
    const files = filesOf(tree, ours, startMs);
    const trace = { image: image.manifestDigest, command, blobs: traced, chunks: [...chunks.values()], files };
    return dropped > 0 ? { ...trace, truncated: true } : trace;
  } finally {
    await tree.close();
  }
}

function relative(ms: number, startMs: number): number {
  return Math.max(0, Math.round((ms - startMs) * 10) / 10);
}

function filesOf(tree: ImageTree, reads: readonly RecordedRead[], startMs: number): TracedFile[] {
  if (reads.length === 0) return [];
  const pieces = piecesOf(tree, new Set(reads.map(({ blob }) => blob)));
  const seen = new Set<FileSeen>();
  for (const { blob, offset, length, ms } of reads) {
    const list = pieces.get(blob) ?? [];
    for (let i = firstEndingAfter(list, offset); i < list.length && list[i]!.offset < offset + length; i++) {
      const piece = list[i]!;
      const { file } = piece;
      if (!seen.has(file)) {
        seen.add(file);
        file.ms = relative(ms, startMs);
      }
      file.ranges.push(rangeOf(piece, offset, offset + length));
    }
  }
  return [...seen].map(({ path, sizeBytes, ms, ranges }) => ({ path, sizeBytes, ms, ranges: joinRanges(ranges) }));
}

/** Of the file, the part that a read of the blob from `from` to `to` brought. */
function rangeOf({ offset, end, logical, length, raw }: Piece, from: number, to: number): [number, number] {
  if (!raw) return [logical, length];
  const start = Math.max(0, from - offset);
  return [logical + start, Math.min(length, Math.min(end, to) - offset) - start];
}

/** Where in each blob the files lie, by offset. */
function piecesOf(tree: ImageTree, blobs: ReadonlySet<string>): Map<string, Piece[]> {
  const pieces = new Map<string, Piece[]>();
  const taken = new Set<string>();
  for (const { path, node, linkTo } of tree.walk()) {
    if (linkTo !== undefined || !isRegular(node.inode)) continue;
    const file: FileSeen = { path, sizeBytes: node.inode.sizeBytes, ms: 0, ranges: [] };
    for (const { blob, device, offset, storedLength, logical, length, encoding } of tree.extents(node)) {
      if (device === 0 || blob === undefined || !blobs.has(blob) || storedLength === 0) continue;
      const key = `${blob}/${offset}`;
      if (taken.has(key)) continue;
      taken.add(key);
      const list = pieces.get(blob) ?? [];
      list.push({ offset, end: offset + storedLength, file, logical, length, raw: encoding === 'raw' });
      pieces.set(blob, list);
    }
  }
  for (const list of pieces.values()) list.sort((a, b) => a.offset - b.offset);
  return pieces;
}

/** Index of the first piece that ends behind `offset`: pieces do not overlap. */
function firstEndingAfter(list: readonly Piece[], offset: number): number {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle]!.end <= offset) low = middle + 1;
    else high = middle;
  }
  return low;
}
