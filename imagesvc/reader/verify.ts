/**
 * `dsec verify`: every blob of an image against its digest, every chunk against its chunk digest, and the structure of
 * every layer. All of it is looked at, whatever is wrong; the first problems are listed, all are counted.
 */
import { type Digest, hexOf, isDsecError, messageOf, type Progress, silent } from '#base';
import { createBlobSha256, createSha256 } from '#linux';
import { CHUNK_BYTES, type ErofsLayer, type Image } from '../catalog/image.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { openLayer } from './open-layer.ts';
import { ChunkCache, chunkCount } from './verified-blob.ts';
import { problemText, type StructureCounts, verifyStructure } from './verify-structure.ts';

export interface VerifyProblem {
  /** The blob it is in; undefined where it is in none: the ref is damaged. */
  readonly blob: Digest | undefined;
  readonly problem: string;
}

export interface VerifyReport extends StructureCounts {
  readonly image: string;
  readonly ok: boolean;
  readonly layers: number;
  /** Checked whole against their digests. */
  readonly blobs: number;
  readonly blobBytes: number;
  readonly chunks: number;
  /** All that were found. */
  readonly problemCount: number;
  /** The first of them. */
  readonly problems: readonly VerifyProblem[];
  /** Blobs that are there, but whose bytes are not those of their digest. */
  readonly damaged: readonly Digest[];
}

export interface VerifyOptions {
  readonly progress?: Progress;
  /** Problems listed (default 20). */
  readonly maxProblems?: number;
}

/** Fails only when the store does; what is wrong with the image is in the report. */
export async function verifyImage(store: BlobStore, image: Image, options: VerifyOptions = {}): Promise<VerifyReport> {
  const progress = options.progress ?? silent;
  const problems: VerifyProblem[] = [];
  let problemCount = 0;
  const report = (blob: Digest, problem: string) => {
    problemCount++;
    if (problems.length < (options.maxProblems ?? 20)) problems.push({ blob, problem });
  };

  const damaged: Digest[] = [];
  const checked = new Set<Digest>();
  let blobBytes = 0;
  let chunks = 0;
  const check = async (blob: Descriptor, digests?: Descriptor) => {
    if (checked.has(blob.digest)) return;
    checked.add(blob.digest);
    progress({ task: `verify ${blob.digest.slice(0, 19)}`, phase: 'read', totalBytes: blob.size });
    blobBytes += blob.size;
    if (digests !== undefined) chunks += chunkCount(blob.size);
    if (!(await checkBlob(store, blob, digests, report))) damaged.push(blob.digest);
  };
  await check({ mediaType: '', digest: image.manifestDigest, size: image.manifestSize });
  await check(image.config);
  for (const layer of image.layers) {
    await check(layer.meta);
    for (const { blob, chunkDigests } of layer.devices) {
      await check(chunkDigests);
      await check(blob, chunkDigests);
    }
  }

  for (const { blob, chunkDigests } of image.disk?.layers ?? []) {
    await check(chunkDigests);
    await check(blob, chunkDigests);
  }

  const counts: StructureCounts = { inodes: 0, directories: 0, files: 0, links: 0, extents: 0, fileBytes: 0 };
  for (const [k, layer] of image.layers.entries()) {
    progress({ task: `verify layer ${k + 1}/${image.layers.length}`, phase: 'structure' });
    const found = await checkLayer(store, layer, report);
    if (found === undefined) continue;
    for (const key of Object.keys(counts) as (keyof StructureCounts)[]) counts[key] += found[key];
  }
  return {
    image: image.name,
    ok: problemCount === 0,
    layers: image.disk?.layers.length ?? image.layers.length,
    blobs: checked.size,
    blobBytes,
    chunks,
    ...counts,
    problemCount,
    problems,
    damaged,
  };
}

type ReportBlob = (blob: Digest, problem: string) => void;

/** False for one that is damaged; of a missing one, which is reported too, there is nothing to set aside. */
async function checkBlob(
  store: BlobStore,
  blob: Descriptor,
  digests: Descriptor | undefined,
  report: ReportBlob,
): Promise<boolean> {
  let table: Buffer | undefined;
  if (digests !== undefined) {
    try {
      table = await store.readVerified(digests.digest);
    } catch (error) {
      // Reported where that blob is checked itself.
      if (!isImageProblem(error)) throw error;
    }
    const expected = chunkCount(blob.size) * 32;
    if (table !== undefined && table.length !== expected) {
      report(digests.digest, `it has ${table.length} bytes, the chunks of ${blob.digest} need ${expected}`);
      table = undefined;
    }
  }
  try {
    return await readAndCheck(store, blob, table, report);
  } catch (error) {
    if (!isImageProblem(error)) throw error;
    report(blob.digest, messageOf(error));
    return !isDsecError(error, 'STORE_BLOB_NOT_FILE');
  }
}

async function readAndCheck(
  store: BlobStore,
  blob: Descriptor,
  table: Buffer | undefined,
  report: ReportBlob,
): Promise<boolean> {
  // With its chunks in one pass where there is a table of them: see linux/sha256.ts.
  const whole = table === undefined ? createSha256() : createBlobSha256(CHUNK_BYTES);
  let sizeBytes = 0;
  for await (const piece of store.stream(blob.digest)) {
    whole.update(piece);
    sizeBytes += piece.length;
  }
  let actual: string;
  if ('finish' in whole) {
    const { hex, digests } = whole.finish();
    for (let index = 0; index * 32 < digests.length; index++) {
      const [from, to] = [index * 32, index * 32 + 32];
      if (table!.subarray(from, to).equals(digests.subarray(from, to))) continue;
      report(blob.digest, `chunk ${index} (from byte ${index * CHUNK_BYTES}) differs from its digest`);
    }
    actual = hex;
  } else actual = whole.digest().toString('hex');
  if (sizeBytes !== blob.size) report(blob.digest, `it has ${sizeBytes} bytes, expected ${blob.size}`);
  const isWhole = actual === hexOf(blob.digest);
  if (!isWhole) report(blob.digest, `its bytes have the digest sha256:${actual}`);
  return isWhole;
}

async function checkLayer(
  store: BlobStore,
  layer: ErofsLayer,
  report: ReportBlob,
): Promise<StructureCounts | undefined> {
  try {
    const open = await openLayer(store, layer, new ChunkCache());
    try {
      return verifyStructure(open.reader, open.blobs, (path, problem) =>
        report(layer.meta.digest, problemText(path, problem)),
      );
    } finally {
      await open.reader.close();
    }
  } catch (error) {
    if (!isImageProblem(error)) throw error;
    report(layer.meta.digest, messageOf(error));
    return undefined;
  }
}

/** Something wrong with the image, not with reaching its store. */
function isImageProblem(error: unknown): boolean {
  return isDsecError(error) && !error.retryable;
}
