/**
 * What images a store has: finding one, publishing one, listing, looking into one, removing one.
 *
 * Publishing is the place where an image begins to exist: all its blobs are there first, then its manifest, then its
 * name. Between looking at the blobs and setting the name, garbage collection is kept out.
 */
import { type Digest, digestOf, hexOf, inParallel, isDigest, isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { isImageName, parseImageName } from '../store/image-name.ts';
import { listTraces, type TraceRow } from '../trace/trace-store.ts';
import { type Collected, collectGarbage } from './collect-garbage.ts';
import { readConfig } from './config.ts';
import type { DiskParts, ErofsLayer, Image, ImageKind, LayerDevice, OciConfig } from './image.ts';
import {
  buildDiskManifest,
  buildManifest,
  CONFIG_TYPE,
  type DiskManifestParts,
  MANIFEST_TYPE,
  MAX_MANIFEST_BYTES,
  parseManifest,
} from './manifest.ts';

/** Each is a few round trips to the store. */
const RENEWED_AT_ONCE = 8;

/**
 * The image that `nameOrDigest` means: `repository`, `repository:tag`, `sha256:<64 hex>`, or the first six or more hex
 * digits of its digest, with or without `sha256:`. A name goes before a digest's digits. One of files: disks are refused.
 * @throws CATALOG_NOT_FOUND, CATALOG_AMBIGUOUS, CATALOG_IS_DISK, STORE_NAME, and what `parseManifest` throws
 */
export async function openImage(store: BlobStore, nameOrDigest: string): Promise<Image> {
  const image = await openAnyImage(store, nameOrDigest);
  if (image.disk !== undefined) throw fail('CATALOG_IS_DISK', { name: image.name });
  return image;
}

/** For whoever carries blobs and looks into none of them: disks too. */
export async function openAnyImage(store: BlobStore, nameOrDigest: string): Promise<Image> {
  const { digest, name } = await resolveImage(store, nameOrDigest);
  return readManifest(store, digest, name);
}

/** @throws CATALOG_NOT_DISK, and what `openAnyImage` throws */
export async function openDiskImage(store: BlobStore, nameOrDigest: string): Promise<Image & { disk: DiskParts }> {
  const image = await openAnyImage(store, nameOrDigest);
  const { disk } = image;
  if (disk === undefined) throw fail('CATALOG_NOT_DISK', { name: image.name, kind: image.kind });
  return { ...image, disk };
}

/** What `nameOrDigest` means, without reading the manifest of a name or a full digest. */
export async function resolveImage(store: BlobStore, nameOrDigest: string): Promise<{ digest: Digest; name: string }> {
  if (isDigest(nameOrDigest)) {
    if (!(await store.stat(nameOrDigest))) throw fail('CATALOG_NOT_FOUND', { name: nameOrDigest, store: store.url });
    return { digest: nameOrDigest, name: nameOrDigest };
  }
  // Fewer digits are not taken for a digest.
  const prefix = /^(?:sha256:)?([0-9a-f]{6,64})$/.exec(nameOrDigest)?.[1];
  if (prefix === undefined || isImageName(nameOrDigest)) {
    const ref = await store.getRef(nameOrDigest);
    if (ref) return { digest: ref.manifest.digest, name: ref.name };
  }
  const found = prefix === undefined ? [] : await byPrefix(store, prefix);
  if (found.length > 1) {
    throw fail('CATALOG_AMBIGUOUS', { name: nameOrDigest, candidates: found.slice(0, 5).join(', ') });
  }
  const digest = found[0];
  if (digest === undefined) throw fail('CATALOG_NOT_FOUND', { name: nameOrDigest, store: store.url });
  return { digest, name: digest };
}

/** Images that names point to come first; only when none fits, the store is searched for manifests. */
async function byPrefix(store: BlobStore, prefix: string): Promise<Digest[]> {
  const fits = (digest: Digest) => hexOf(digest).startsWith(prefix);
  const named = new Set((await store.listRefs()).map((ref) => ref.manifest.digest).filter(fits));
  if (named.size > 0) return [...named].sort();
  const found: Digest[] = [];
  for await (const { digest, sizeBytes } of store.listBlobs()) {
    if (!fits(digest) || sizeBytes > MAX_MANIFEST_BYTES) continue;
    const isManifest = await readManifest(store, digest).then(
      () => true,
      () => false,
    );
    if (isManifest) found.push(digest);
  }
  return found.sort();
}

async function readManifest(store: BlobStore, digest: Digest, name: string = digest): Promise<Image> {
  const found = await store.stat(digest);
  // A data blob named by its digest must not be read whole only to say that it is no manifest.
  if (found && found.sizeBytes > MAX_MANIFEST_BYTES) {
    throw fail('CATALOG_MANIFEST', {
      digest,
      where: 'size',
      why: `${found.sizeBytes} bytes, more than ${MAX_MANIFEST_BYTES}`,
    });
  }
  return parseManifest(await store.readVerified(digest), digest, name);
}

export interface NewImage {
  readonly name: string;
  readonly kind: ImageKind;
  /** Bottom first; all their blobs are in the store. */
  readonly layers: readonly ErofsLayer[];
  /** How many at the top are the image's own; all by default. */
  readonly ownLayers?: number;
  /** Manifest digest of the base image. */
  readonly base?: Digest;
  /** The OCI config: its bytes, or what is in the store already. */
  readonly config: Buffer | Descriptor;
}

/**
 * Publishes an image under a name, which it takes from whatever had it. The caller holds a staging folder from before
 * its first blob until this returns (see BlobStore.stage).
 * @throws CATALOG_BLOB_GONE (retryable) when a layer's blob is not there, or not of that size: then nothing was published
 */
export async function publishImage(store: BlobStore, image: NewImage): Promise<Image> {
  const { kind, layers, ownLayers, base } = image;
  parseImageName(image.name);
  const config = Buffer.isBuffer(image.config)
    ? { mediaType: CONFIG_TYPE, digest: await store.put(image.config), size: image.config.length }
    : image.config;
  return publishManifest(store, image.name, buildManifest({ kind, layers, ownLayers, base, config }));
}

export interface NewDiskImage extends Omit<DiskManifestParts, 'config'> {
  readonly name: string;
  /** The OCI config: its bytes, or what is in the store already. */
  readonly config: Buffer | Descriptor;
}

/** The same of a disk. @throws CATALOG_BLOB_GONE */
export async function publishDiskImage(store: BlobStore, { name, ...image }: NewDiskImage): Promise<Image> {
  parseImageName(name);
  const config = Buffer.isBuffer(image.config)
    ? { mediaType: CONFIG_TYPE, digest: await store.put(image.config), size: image.config.length }
    : image.config;
  return publishManifest(store, name, buildDiskManifest({ ...image, config }));
}

/** Publishes a manifest whose blobs are in the store, byte for byte. */
export async function publishManifest(store: BlobStore, name: string, bytes: Buffer): Promise<Image> {
  const { full } = parseImageName(name);
  const digest = digestOf(bytes);
  const image = parseManifest(bytes, digest, full);
  const hold = await store.hold('publish');
  try {
    await renewAll(store, full, allBlobsOf(image));
    await store.put(bytes);
    await store.setRef({ name: full, manifest: { mediaType: MANIFEST_TYPE, digest, size: bytes.length } });
    return image;
  } finally {
    await hold.release();
  }
}

export interface TaggedImage {
  /** In full. */
  readonly name: string;
  readonly digest: Digest;
  /** What the name meant before, where that was another image. */
  readonly replaced: Digest | undefined;
}

/** Gives the image that `nameOrDigest` means a further name, which it takes from whatever had it. @throws CATALOG_NOT_FOUND, CATALOG_BLOB_GONE, STORE_NAME */
export async function tagImage(store: BlobStore, nameOrDigest: string, name: string): Promise<TaggedImage> {
  const { full } = parseImageName(name);
  const { manifestDigest: digest } = await openAnyImage(store, nameOrDigest);
  // A damaged ref is written anew.
  const before = await store.getRef(full).catch((error) => {
    if (!isDsecError(error, 'STORE_REF_DAMAGED')) throw error;
  });
  await publishManifest(store, full, await store.readVerified(digest));
  const old = before?.manifest.digest;
  return { name: full, digest, replaced: old === digest ? undefined : old };
}

/** The config and every blob of the layers, each once. Not the manifest. */
export function allBlobsOf(image: Image): Descriptor[] {
  const blobs = [image.config, ...blobsOf(image.layers), ...devicesOf(image).flatMap(partsOf)];
  return [...new Map(blobs.map((blob) => [blob.digest, blob])).values()];
}

/** What holds data, with its chunk digests: of all layers, or of the disk. */
function devicesOf(image: Image): readonly LayerDevice[] {
  return image.disk?.layers ?? image.layers.flatMap((layer) => layer.devices);
}

function partsOf({ blob, chunkDigests }: LayerDevice): Descriptor[] {
  return [blob, chunkDigests];
}

/** Every blob of these layers, each once. */
export function blobsOf(layers: readonly ErofsLayer[]): Descriptor[] {
  const blobs = new Map<Digest, Descriptor>();
  for (const { meta, devices } of layers) {
    blobs.set(meta.digest, meta);
    for (const { blob, chunkDigests } of devices) {
      blobs.set(blob.digest, blob);
      blobs.set(chunkDigests.digest, chunkDigests);
    }
  }
  return [...blobs.values()];
}

/**
 * Whether all these blobs are in the store, whole; if so they are as young as new ones, and garbage collection leaves
 * them to the caller, who holds a staging folder. For whoever finds its result in the store already.
 */
export async function keepBlobs(store: BlobStore, blobs: readonly Descriptor[]): Promise<boolean> {
  for (const { digest, size } of blobs) {
    if ((await store.renew(digest))?.sizeBytes !== size) return false;
  }
  return true;
}

async function renewAll(store: BlobStore, name: string, blobs: readonly Descriptor[]): Promise<void> {
  await inParallel(blobs, RENEWED_AT_ONCE, async ({ digest, size }) => {
    const found = await store.renew(digest);
    if (found?.sizeBytes === size) return;
    const what = found ? `it has ${found.sizeBytes} bytes instead of ${size}` : 'it is missing';
    throw fail('CATALOG_BLOB_GONE', { name, digest, store: store.url, found: what });
  });
}

export interface ImageRow {
  readonly name: string;
  /** Undefined when the ref is damaged; then `problem` says so. */
  readonly digest: Digest | undefined;
  /** Undefined when the manifest cannot be read; then `problem` says why. */
  readonly kind: ImageKind | undefined;
  readonly layers: number;
  readonly metaBytes: number;
  readonly dataBytes: number;
  /** Everything: metadata, data, chunk digests, config and manifest, each blob once. */
  readonly sizeBytes: number;
  readonly problem?: string;
}

/** Sorted by name. An image that cannot be read is listed with its problem: one bad manifest hides no other image. */
export async function listImages(store: BlobStore): Promise<ImageRow[]> {
  const rows: ImageRow[] = [];
  const nothing = { kind: undefined, layers: 0, metaBytes: 0, dataBytes: 0, sizeBytes: 0 };
  const refs = await store.listRefs((name, problem) => {
    rows.push({ name, digest: undefined, ...nothing, problem: messageOf(problem) });
  });
  for (const { name, manifest } of refs) {
    try {
      const image = await readManifest(store, manifest.digest, name);
      rows.push({ name, digest: manifest.digest, kind: image.kind, layers: layersOf(image), ...sizesOf(image) });
    } catch (error) {
      if (!isDsecError(error)) throw error;
      rows.push({ name, digest: manifest.digest, ...nothing, problem: messageOf(error) });
    }
  }
  return rows.sort((a, b) => (a.name < b.name ? -1 : 1));
}

function layersOf({ disk, layers }: Image): number {
  return (disk ?? { layers }).layers.length;
}

export interface ImageSizes {
  readonly metaBytes: number;
  readonly dataBytes: number;
  readonly sizeBytes: number;
}

/** Each blob counts once, however many layers refer to it. */
export function sizesOf(image: Image): ImageSizes {
  const sum = (blobs: readonly Descriptor[]) =>
    [...new Map(blobs.map((blob) => [blob.digest, blob.size])).values()].reduce((total, size) => total + size, 0);
  return {
    metaBytes: sum(image.layers.map((layer) => layer.meta)),
    dataBytes: sum(devicesOf(image).map(({ blob }) => blob)),
    sizeBytes: sum(allBlobsOf(image)) + image.manifestSize,
  };
}

export interface InspectedImage extends ImageSizes {
  readonly name: string;
  readonly digest: Digest;
  readonly kind: ImageKind;
  readonly base: Digest | undefined;
  readonly ownLayers: number;
  /** Bottom first. */
  readonly layers: readonly InspectedLayer[];
  readonly disk?: InspectedDisk;
  readonly config: OciConfig;
  /** Kept traces of its starts, by name. */
  readonly traces: readonly TraceRow[];
  /** The manifest, as it is stored. */
  readonly manifest: unknown;
}

export interface InspectedLayer {
  readonly meta: { readonly digest: Digest; readonly sizeBytes: number };
  readonly devices: readonly { readonly digest: Digest; readonly sizeBytes: number; readonly chunkDigests: Digest }[];
  /** False for a layer of the base image. */
  readonly own: boolean;
  /** Names of other images that have the same layer. */
  readonly sharedWith: readonly string[];
}

export interface InspectedDisk {
  readonly sizeBytes: number | undefined;
  /** Bottom first. */
  readonly layers: readonly {
    readonly digest: Digest;
    readonly sizeBytes: number;
    readonly chunkDigests: Digest;
    readonly own: boolean;
    readonly sharedWith: readonly string[];
  }[];
}

export async function inspectImage(store: BlobStore, nameOrDigest: string): Promise<InspectedImage> {
  const image = await openAnyImage(store, nameOrDigest);
  const sharers = await layerSharers(store, image.name);
  const isOwn = (k: number) => k >= layersOf(image) - image.ownLayers;
  const layers = image.layers.map(({ meta, devices }, k) => ({
    meta: { digest: meta.digest, sizeBytes: meta.size },
    devices: devices.map(({ blob, chunkDigests }) => ({
      digest: blob.digest,
      sizeBytes: blob.size,
      chunkDigests: chunkDigests.digest,
    })),
    own: isOwn(k),
    sharedWith: sharers.get(meta.digest) ?? [],
  }));
  const disk = image.disk && {
    sizeBytes: image.disk.sizeBytes,
    layers: image.disk.layers.map(({ blob, chunkDigests }, k) => ({
      digest: blob.digest,
      sizeBytes: blob.size,
      chunkDigests: chunkDigests.digest,
      own: isOwn(k),
      sharedWith: sharers.get(blob.digest) ?? [],
    })),
  };
  return {
    name: image.name,
    digest: image.manifestDigest,
    kind: image.kind,
    base: image.base,
    ownLayers: image.ownLayers,
    ...sizesOf(image),
    layers,
    ...(disk === undefined ? {} : { disk }),
    config: await readConfig(store, image),
    traces: await listTraces(store, image.manifestDigest),
    manifest: JSON.parse((await store.readVerified(image.manifestDigest)).toString('utf8')),
  };
}

/** What tells a layer (its metadata image, or the blob of a disk's) -> names of the images, other than `except`, that have it. */
async function layerSharers(store: BlobStore, except: string): Promise<Map<Digest, string[]>> {
  const sharers = new Map<Digest, string[]>();
  for (const { name, manifest } of await store.listRefs()) {
    if (name === except) continue;
    const image = await readManifest(store, manifest.digest, name).catch(() => undefined);
    const layers = [
      ...(image?.layers ?? []).map(({ meta }) => meta.digest),
      ...(image?.disk?.layers ?? []).map(({ blob }) => blob.digest),
    ];
    for (const digest of new Set(layers)) {
      sharers.set(digest, [...(sharers.get(digest) ?? []), name]);
    }
  }
  return sharers;
}

export interface RemovedImage extends Collected {
  readonly name: string;
  /** Undefined when the ref was damaged. */
  readonly digest: Digest | undefined;
  /** Why blobs that nothing may need any more were left for a later garbage collection. */
  readonly problem?: string;
}

/**
 * Takes an image's name away, and deletes those of its blobs that no other image needs (and that no process at work may
 * need: see collectGarbage). Removing by digest is refused: only names are removed.
 * @throws CATALOG_NOT_FOUND, CATALOG_NOT_NAME
 */
export async function removeImage(
  store: BlobStore,
  name: string,
  options: { dryRun?: boolean; graceMs?: number; inUse?: ReadonlySet<Digest> } = {},
): Promise<RemovedImage> {
  if (isDigest(name)) throw await notName(store, name, name);
  if (!isImageName(name)) {
    const image = await resolveImage(store, name).catch(() => undefined);
    if (image !== undefined) throw await notName(store, name, image.digest);
  }
  const { full } = parseImageName(name);
  const { dryRun = false, graceMs = 0, inUse } = options;
  let damage: unknown;
  const ref = await store.getRef(full).catch((error) => {
    if (!isDsecError(error, 'STORE_REF_DAMAGED')) throw error;
    damage = error;
    return undefined;
  });
  const digest = ref?.manifest.digest;
  const found = dryRun ? ref !== undefined || damage !== undefined : await store.deleteRef(full);
  if (!found) {
    const image = await resolveImage(store, name).catch(() => undefined);
    throw image === undefined
      ? fail('CATALOG_NOT_FOUND', { name, store: store.url })
      : await notName(store, name, image.digest);
  }
  try {
    // What it needed, no one can tell; the next garbage collection takes what no other name needs.
    if (digest === undefined) throw damage ?? fail('STORE_REF_DAMAGED', { name: full, path: store.url });
    const collected = await collectGarbage(store, { dryRun, graceMs, onlyOf: digest, without: full, inUse });
    return { name: full, digest, ...collected };
  } catch (error) {
    // The name is gone, which is what was asked for; the blobs are no more than wasted space.
    if (!isDsecError(error)) throw error;
    return { name: full, digest, deleted: [], freedBytes: 0, kept: 0, traces: 0, problem: messageOf(error) };
  }
}

async function notName(store: BlobStore, name: string, digest: Digest): Promise<Error> {
  const names = (await store.listRefs()).filter((ref) => ref.manifest.digest === digest).map((ref) => ref.name);
  return fail('CATALOG_NOT_NAME', { name, names: names.join(', ') || 'none' });
}
