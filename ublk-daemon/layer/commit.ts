/**
 * Writes what an index holds as one sealed layer: of one writable layer (`commit`), or of a whole stack (`merge`). Bytes that are no
 * longer referred to are left behind. Optionally in a ZFile, and in the tar of a registry.
 *
 * The file appears under its name when it is whole and on the disk, not before.
 */
import { type FileHandle, open, rename, rm } from 'node:fs/promises';
import { dirname } from 'node:path';
import { syncFolder } from '#linux';
import { type ByteSource, readBytes } from '../byte-source.ts';
import { SECTOR } from '../lsmt/header.ts';
import { type LayerIdentity, SealedWriter } from '../lsmt/sealed-writer.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { type ZfileOptions, ZfileWriter } from '../zfile/zfile-writer.ts';
import { FileSink, writeAll } from './byte-sink.ts';
import { TAR_PAYLOAD_OFFSET, tarEnd, tarFront } from './tar-blob.ts';

export interface CommitOptions extends LayerIdentity {
  readonly zfile?: ZfileOptions;
  readonly tar?: boolean;
  /** Ends it; nothing of the file stays. */
  readonly signal?: AbortSignal;
}

export interface CommittedLayer {
  readonly path: string;
  readonly sizeBytes: number;
  readonly segments: number;
}

const COPY_BYTES = 1024 * 1024;

/** @param sources by the layer numbers of `index` */
export async function commitLayer(
  path: string,
  index: SegmentIndex,
  sources: readonly ByteSource[],
  options: CommitOptions,
): Promise<CommittedLayer> {
  const partPath = `${path}.part-${process.pid}`;
  const file = await open(partPath, 'wx+');
  try {
    const facts = await writeInto(file, index, sources, options);
    await file.sync();
    await file.close();
    await rename(partPath, path);
    await syncFolder(dirname(path));
    return { path, ...facts };
  } catch (error) {
    await file.close().catch(() => {});
    await rm(partPath, { force: true });
    throw error;
  }
}

async function writeInto(
  file: FileHandle,
  index: SegmentIndex,
  sources: readonly ByteSource[],
  { zfile, tar = false, signal, ...identity }: CommitOptions,
): Promise<{ sizeBytes: number; segments: number }> {
  const start = tar ? TAR_PAYLOAD_OFFSET : 0;
  const out = new FileSink(file, start);
  const packed = zfile === undefined ? undefined : await ZfileWriter.begin(out, zfile);
  const writer = await SealedWriter.begin(packed ?? out, identity);
  for (let at = 0; at < index.count; at++) {
    const from = index.start(at);
    const sectors = index.end(at) - from;
    if (index.isZeroed(at)) {
      writer.zeroes(from, sectors);
      continue;
    }
    const source = sources[index.layer(at)]!;
    for (let done = 0; done < sectors; done += COPY_BYTES / SECTOR) {
      const count = Math.min(COPY_BYTES / SECTOR, sectors - done);
      signal?.throwIfAborted();
      const bytes = await readBytes(source, (index.moffset(at) + done) * SECTOR, count * SECTOR);
      await writer.data(from + done, bytes);
    }
  }
  await writer.finish();
  if (packed !== undefined) await writeAll(file, await packed.finish(), start);
  let sizeBytes = start + out.written;
  if (tar) {
    await writeAll(file, tarFront(out.written), 0);
    const end = tarEnd(out.written);
    await writeAll(file, end, sizeBytes);
    sizeBytes += end.length;
  }
  return { sizeBytes, segments: writer.segments };
}
