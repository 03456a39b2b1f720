/**
 * Carries a converted image into a store: manifest first, which is checked field by field; then every blob that the
 * store lacks, several at a time, each verified while it arrives in a staging folder; then all are published, and the
 * manifest and the name after them. Wrong bytes anywhere, and nothing is published.
 *
 * An image that OverlayBD's converter pushed becomes one of ours of kind `disk`: the same layers, with digests of their chunks.
 */
import { createReadStream, createWriteStream } from 'node:fs';
import { join } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { type Digest, digestOf, hexOf, inParallel, isDsecError, silent, systemCode } from '#base';
import { fail } from '../errors.ts';
import { PublishedProofs } from '../mount/published-proofs.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { parseImageName } from '../store/image-name.ts';
import { storeError } from '../store/system-error.ts';
import { fetchTraces } from './carry-traces.ts';
import { allBlobsOf, publishDiskImage, publishManifest } from './catalog.ts';
import { hashBlob } from './chunk-table.ts';
import { DEFAULT_PARALLEL, type Depot, openDepot, parseAddress, type TransferOptions } from './depot.ts';
import type { Image, LayerDevice } from './image.ts';
import { CHUNK_DIGESTS_TYPE, overlaybdParts, parseManifest } from './manifest.ts';
import { verified } from './verified-stream.ts';

export interface Pulled {
  readonly image: Image;
  readonly source: string;
  readonly fetchedBlobs: number;
  readonly fetchedBytes: number;
  /** Blobs that the store had. */
  readonly skippedBlobs: number;
  /** Traces that the store did not have. */
  readonly fetchedTraces: number;
}

/**
 * @param source `docker://REF`, `oci:DIR[:tag]`, `oci-archive:FILE[:tag]`
 * @throws CATALOG_NOT_CONVERTED for an ordinary image (one of OverlayBD is taken), CATALOG_MANIFEST, CATALOG_PULL_MISMATCH, CATALOG_LAYOUT,
 *   CATALOG_DESTINATION, SOURCE_* of the registry, STORE_*
 */
export async function pullImage(
  store: BlobStore,
  source: string,
  name: string,
  options: TransferOptions = {},
): Promise<Pulled> {
  const { full } = parseImageName(name);
  parseAddress(source); // Before anything is made in the store.
  const staging = await store.stage();
  let depot: Depot | undefined;
  try {
    depot = await openDepot(source, { ...options, workDir: staging.path });
    return await pullFrom(store, depot, full, staging.path, options);
  } finally {
    await depot?.close();
    await staging.remove();
  }
}

/** The same from an open depot, by way of a staging folder. */
export async function pullFrom(
  store: BlobStore,
  depot: Depot,
  name: string,
  folder: string,
  options: TransferOptions,
): Promise<Pulled> {
  const { signal, parallel = DEFAULT_PARALLEL } = options;
  const manifest = await depot.manifest(signal);
  const foreign = overlaybdParts(manifest);
  const blobs = foreign === undefined ? allBlobsOf(parseManifest(manifest, digestOf(manifest), name)) : allOf(foreign);
  const fetched = new Map<Digest, { blob: Descriptor; path: string }>();
  const fetch = new Fetch(store, depot, folder, fetched, options);
  try {
    await inParallel(blobs, parallel, (blob, stop) => fetch.blob(blob, stop), signal);
  } catch (error) {
    // A broken connection says nothing against what has arrived and been verified: the next try goes on from there.
    const arrived = new PublishedProofs(store);
    if (isDsecError(error) && error.retryable) {
      await publishAll(arrived, fetched.values()).catch(() => {});
      await arrived.record();
    }
    throw error;
  }
  // Hashed while their bytes are at hand, before the store has the files.
  const tables = foreign === undefined ? [] : await tablesOf(store, foreign.layers, fetched, depot);
  const proofs = new PublishedProofs(store);
  await publishAll(proofs, fetched.values());
  const image =
    foreign === undefined
      ? await publishManifest(store, name, manifest)
      : await publishDiskImage(store, {
          name,
          config: foreign.config,
          layers: await withTables(store, foreign, tables),
        });
  await proofs.record();
  const traces = options.traces === false ? 0 : await fetchTraces(store, depot, image, options);
  return {
    image,
    source: depot.description,
    fetchedBlobs: fetched.size,
    fetchedBytes: [...fetched.values()].reduce((total, { blob }) => total + blob.size, 0),
    skippedBlobs: blobs.length - fetched.size,
    fetchedTraces: traces,
  };
}

type OverlaybdParts = NonNullable<ReturnType<typeof overlaybdParts>>;

/** Each blob once. */
function allOf({ config, layers }: OverlaybdParts): Descriptor[] {
  return [...new Map([config, ...layers].map((blob) => [blob.digest, blob])).values()];
}

/** What OverlayBD's converter does not push: digests of the chunks of each layer. */
async function tablesOf(
  store: BlobStore,
  layers: readonly Descriptor[],
  fetched: ReadonlyMap<Digest, { path: string }>,
  depot: Depot,
): Promise<Buffer[]> {
  const tables: Buffer[] = [];
  for (const { digest } of layers) {
    const path = fetched.get(digest)?.path;
    const hashed = await hashBlob(path === undefined ? store.stream(digest) : createReadStream(path));
    if (hashed.digest !== digest) {
      const why = `its bytes have digest ${hashed.digest}`;
      throw fail('CATALOG_PULL_MISMATCH', { source: depot.description, digest, why });
    }
    tables.push(hashed.chunkDigests);
  }
  return tables;
}

async function withTables(
  store: BlobStore,
  { layers }: OverlaybdParts,
  tables: readonly Buffer[],
): Promise<LayerDevice[]> {
  const devices: LayerDevice[] = [];
  for (const [at, table] of tables.entries()) {
    const chunkDigests = { mediaType: CHUNK_DIGESTS_TYPE, digest: await store.put(table), size: table.length };
    devices.push({ blob: layers[at]!, chunkDigests });
  }
  return devices;
}

async function publishAll(to: PublishedProofs, files: Iterable<{ blob: Descriptor; path: string }>): Promise<void> {
  for (const { blob, path } of files) await to.putFile(path, blob.digest, blob.size);
}

class Fetch {
  readonly #store: BlobStore;
  readonly #depot: Depot;
  readonly #folder: string;
  readonly #fetched: Map<Digest, { blob: Descriptor; path: string }>;
  readonly #options: TransferOptions;

  constructor(
    store: BlobStore,
    depot: Depot,
    folder: string,
    fetched: Map<Digest, { blob: Descriptor; path: string }>,
    options: TransferOptions,
  ) {
    this.#store = store;
    this.#depot = depot;
    this.#folder = folder;
    this.#fetched = fetched;
    this.#options = options;
  }

  async blob(blob: Descriptor, signal: AbortSignal): Promise<void> {
    const { progress = silent } = this.#options;
    const task = `pull ${blob.digest.slice(0, 19)}`;
    const totalBytes = blob.size;
    if ((await this.#store.renew(blob.digest))?.sizeBytes === totalBytes) {
      progress({ task, phase: 'exists', doneBytes: totalBytes, totalBytes });
      return;
    }
    const mismatch = (why: string) =>
      fail('CATALOG_PULL_MISMATCH', { source: this.#depot.description, digest: blob.digest, why });
    const path = join(this.#folder, hexOf(blob.digest));
    const stream = verified(this.#depot.open(blob, signal), blob, mismatch, (doneBytes) =>
      progress({ task, phase: 'fetch', doneBytes, totalBytes }),
    );
    try {
      await pipeline(stream, createWriteStream(path, { flags: 'wx' }), { signal });
    } catch (error) {
      if (isDsecError(error, 'SOURCE_SIZE_MISMATCH')) throw mismatch(error.message);
      // What failed locally while it was written.
      if (systemCode(error)?.startsWith('E') && !signal.aborted) throw storeError(error, this.#store.url, path);
      throw error;
    }
    this.#fetched.set(blob.digest, { blob, path });
    progress({ task, phase: 'done', doneBytes: totalBytes, totalBytes });
  }
}
