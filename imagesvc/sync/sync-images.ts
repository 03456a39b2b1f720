/**
 * `dsec sync`: a set of images from one store to another, each blob once however many of them share it, and not at all where
 * it is there already. Every byte is verified on its way. An image gets its name as soon as all its blobs are there, so
 * what is interrupted has published whole images only; asking again goes on with the blobs that are missing. An image's traces go
 * with it, and the store that it came from remembers where it is now (synced-images.ts).
 */
import { createWriteStream } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { type Digest, hexOf, inParallel, messageOf, type Progress, silent } from '#base';
import { allBlobsOf, openAnyImage, publishManifest } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { verified } from '../catalog/verified-stream.ts';
import { fail } from '../errors.ts';
import type { BlobStore, Descriptor, Staging } from '../store/blob-store.ts';
import { parseImageName } from '../store/image-name.ts';
import { copyTraces, keptTraces } from '../trace/trace-store.ts';
import { recordSynced } from './synced-images.ts';
import { type TraceCoverage, traceCoverage } from './trace-coverage.ts';

export interface SyncOptions {
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
  /** Blobs at once: 4 by default. */
  readonly parallel?: number;
  /** Also says how much of what all traces of the store name the images hold. */
  readonly coverage?: boolean;
}

export interface SyncedImages {
  readonly from: string;
  readonly to: string;
  readonly images: readonly { readonly name: string; readonly digest: Digest }[];
  /** Distinct blobs of all images, manifests included. */
  readonly blobs: number;
  readonly bytes: number;
  readonly copiedBlobs: number;
  readonly copiedBytes: number;
  /** What the images' blobs would take if none were shared. */
  readonly unsharedBytes: number;
  readonly copiedTraces: number;
  readonly coverage?: TraceCoverage;
  /** Traces that could not be read and were left out, and what could not be remembered, and why. */
  readonly notes: readonly string[];
}

/** Blobs up to this size go through memory. */
const SMALL_BYTES = 4 * 1024 * 1024;

/**
 * @param names Each `repository[:tag]`; the other store gets the same names.
 * @throws CATALOG_NOT_FOUND (before anything is copied), STORE_DIGEST_MISMATCH, and what the stores throw
 */
export async function syncImages(
  from: BlobStore,
  to: BlobStore,
  names: readonly string[],
  options: SyncOptions = {},
): Promise<SyncedImages> {
  const { progress = silent, signal, parallel = 4 } = options;
  const images: Image[] = [];
  for (const name of new Set(names.map((name) => parseImageName(name).full)))
    images.push(await openAnyImage(from, name));
  const traces = await keptTraces(from);
  const staging = await to.stage();
  try {
    // The blobs of the first image first, so that it is there early.
    const flights = new Map<Digest, Promise<void>>();
    let copiedBlobs = 0;
    let copiedBytes = 0;
    let copiedTraces = 0;
    const notes = new Set<string>();
    const noteTrace = (name: string, error: unknown) => notes.add(`trace ${name} was left out: ${messageOf(error)}`);
    const copyOnce = (blob: Descriptor, stop: AbortSignal): Promise<void> => {
      let flight = flights.get(blob.digest);
      if (flight === undefined) {
        flight = copy(from, to, blob, staging, progress, stop).then((copied) => {
          if (!copied) return;
          copiedBlobs++;
          copiedBytes += blob.size;
        });
        flights.set(blob.digest, flight);
      }
      return flight;
    };
    for (const image of images) {
      await inParallel(allBlobsOf(image), parallel, copyOnce, signal);
      if ((await to.stat(image.manifestDigest)) === undefined) {
        copiedBlobs++;
        copiedBytes += image.manifestSize;
      }
      await publishManifest(to, image.name, await from.readVerified(image.manifestDigest));
      const own = traces.filter(({ manifest }) => manifest === image.manifestDigest);
      copiedTraces += await copyTraces(from, to, image, own, noteTrace);
      await recordSynced(from, to.url, image, blobsWithManifest(image)).catch((error: unknown) =>
        notes.add(`${from.url} does not remember that ${image.name} is in ${to.url}: ${messageOf(error)}`),
      );
      progress({ task: `image ${image.name}`, phase: 'done' });
    }
    const distinct = new Map(
      images.flatMap((image) => blobsWithManifest(image).map((blob) => [blob.digest, blob.size])),
    );
    const coverage = options.coverage ? await traceCoverage(from, images, noteTrace) : undefined;
    return {
      from: from.url,
      to: to.url,
      images: images.map(({ name, manifestDigest }) => ({ name, digest: manifestDigest })),
      blobs: distinct.size,
      bytes: sum(distinct.values()),
      copiedBlobs,
      copiedBytes,
      unsharedBytes: sum(images.flatMap((image) => blobsWithManifest(image).map(({ size }) => size))),
      copiedTraces,
      coverage,
      notes: [...notes],
    };
  } finally {
    await staging.remove();
  }
}

function blobsWithManifest(image: Image): { digest: Digest; size: number }[] {
  return [...allBlobsOf(image), { digest: image.manifestDigest, size: image.manifestSize }];
}

function sum(sizes: Iterable<number>): number {
  let total = 0;
  for (const size of sizes) total += size;
  return total;
}

/** False when it was there. */
async function copy(
  from: BlobStore,
  to: BlobStore,
  blob: Descriptor,
  staging: Staging,
  progress: Progress,
  signal: AbortSignal,
): Promise<boolean> {
  const task = `blob ${blob.digest.slice(0, 19)}`;
  const totalBytes = blob.size;
  if ((await to.renew(blob.digest))?.sizeBytes === blob.size) {
    progress({ task, phase: 'exists', doneBytes: totalBytes, totalBytes });
    return false;
  }
  const mismatch = (why: string, actual: Digest | undefined) =>
    fail('STORE_DIGEST_MISMATCH', {
      digest: blob.digest,
      actual: actual ?? `none (${why})`,
      path: from.localPath(blob.digest) ?? from.url,
    });
  const bytes = verified(from.stream(blob.digest), blob, mismatch, (doneBytes) =>
    progress({ task, phase: 'copy', doneBytes, totalBytes }),
  );
  if (blob.size <= SMALL_BYTES) {
    const pieces: Buffer[] = [];
    for await (const piece of bytes) {
      signal.throwIfAborted();
      pieces.push(piece);
    }
    await to.put(Buffer.concat(pieces));
  } else {
    const path = join(staging.path, hexOf(blob.digest));
    try {
      await pipeline(bytes, createWriteStream(path), { signal });
      await to.putFile(path, blob.digest, blob.size);
    } finally {
      await rm(path, { force: true });
    }
  }
  progress({ task, phase: 'done', doneBytes: totalBytes, totalBytes });
  return true;
}
