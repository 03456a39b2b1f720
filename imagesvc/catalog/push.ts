/**
 * Carries a converted image out of a store: every blob that is not there yet, several at a time, then the manifest. Each
 * blob is verified while it is sent, so that a damaged store does not spread.
 */
import { type Digest, digestOf, hexOf, inParallel, silent } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { sendTraces } from './carry-traces.ts';
import { allBlobsOf, openAnyImage } from './catalog.ts';
import { DEFAULT_PARALLEL, type Depot, openDepot, type TransferOptions } from './depot.ts';
import { MANIFEST_TYPE } from './manifest.ts';
import { verified } from './verified-stream.ts';

export interface Pushed {
  readonly destination: string;
  readonly digest: Digest;
  readonly sentBlobs: number;
  readonly sentBytes: number;
  /** Blobs that were there, or that the registry took from another of its repositories. */
  readonly skippedBlobs: number;
  /** Traces of the image that are there now too. */
  readonly traces: number;
}

/** Repositories that blobs were pushed to are remembered by registry and digest: the next push can have them mounted. */
const PUSHED = 'pushed';
/** An image without a tag could not be told from the others of a layout. */
const DEFAULT_TAG = 'latest';

function recordKey(registry: string, digest: Digest): string {
  return `${hexOf(digestOf(registry)).slice(0, 16)}-${hexOf(digest)}`;
}

/**
 * @param destination `docker://REF`, `oci:DIR[:tag]`, `oci-archive:FILE[:tag]`
 * @throws CATALOG_NOT_FOUND, CATALOG_DESTINATION, CATALOG_LAYOUT, STORE_DIGEST_MISMATCH, SOURCE_* of the registry
 */
export async function pushImage(
  store: BlobStore,
  name: string,
  destination: string,
  options: TransferOptions = {},
): Promise<Pushed> {
  const image = await openAnyImage(store, name);
  const manifest = await store.readVerified(image.manifestDigest);
  const depot = await openDepot(destination, {
    ...options,
    workDir: '', // Only reading an archive needs one.
    defaultTag: DEFAULT_TAG,
    lastPushedTo: (registry, digest) => lastPushedTo(store, registry, digest),
  });
  const { progress = silent, signal, parallel = DEFAULT_PARALLEL } = options;
  let sentBlobs = 0;
  let sentBytes = 0;
  let skippedBlobs = 0;
  const send = async (blob: Descriptor, stop: AbortSignal): Promise<void> => {
    const task = `push ${blob.digest.slice(0, 19)}`;
    const totalBytes = blob.size;
    if (await depot.has(blob, stop)) {
      skippedBlobs++;
      progress({ task, phase: 'exists', doneBytes: totalBytes, totalBytes });
    } else {
      const mismatch = (why: string, actual: Digest | undefined) =>
        fail('STORE_DIGEST_MISMATCH', {
          digest: blob.digest,
          actual: actual ?? `none (${why})`,
          path: store.localPath(blob.digest) ?? store.url,
        });
      const open = () =>
        verified(store.stream(blob.digest), blob, mismatch, (doneBytes) =>
          progress({ task, phase: 'send', doneBytes, totalBytes }),
        );
      await depot.put(blob, open, stop);
      sentBlobs++;
      sentBytes += totalBytes;
      progress({ task, phase: 'done', doneBytes: totalBytes, totalBytes });
    }
    await remember(store, depot, blob.digest);
  };
  try {
    await inParallel(allBlobsOf(image), parallel, send, signal);
    const traces = options.traces === false ? 0 : await sendTraces(store, depot, image, options);
    await depot.putManifest(manifest, image.manifestDigest, MANIFEST_TYPE, signal);
    return { destination: depot.description, digest: image.manifestDigest, sentBlobs, sentBytes, skippedBlobs, traces };
  } finally {
    await depot.close();
  }
}

async function lastPushedTo(store: BlobStore, registry: string, digest: Digest): Promise<string | undefined> {
  const record = (await store.getRecord(PUSHED, recordKey(registry, digest))) as
    | { repository?: unknown }
    | null
    | undefined;
  return typeof record?.repository === 'string' ? record.repository : undefined;
}

async function remember(store: BlobStore, depot: Depot, digest: Digest): Promise<void> {
  const { registry, repository } = depot;
  if (registry === undefined) return;
  // A store that cannot be written is still one to push from.
  await store.putRecord(PUSHED, recordKey(registry, digest), { registry, repository }).catch(() => {});
}
