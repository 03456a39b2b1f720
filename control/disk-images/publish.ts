/**
 * A disk's layers as an image of kind `disk`. Sealed layers never change, so that all of this is done from their files, beside whoever
 * serves the disk: neither the disk nor its process is needed.
 *
 * A layer that the store has goes in as it is: those of the image that the disk was made of, and those that were published from here
 * before, which a small file beside the layer remembers (`layer-3.data.published`). So what is published costs what is new: it is written as
 * a ZFile in the tar that registries carry, hashed, and put.
 *
 * The order is the store's: blobs, manifest, name. Killed in between, nothing is published; the next one starts from the layers again.
 */
import { constants, createReadStream } from 'node:fs';
import { copyFile, readFile, rename, rm, stat, writeFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { type Digest, digestOf, failPoint, isDigest, type Progress, silent } from '#base';
import {
  type BlobStore,
  CHUNK_DIGESTS_TYPE,
  DISK_LAYER_TYPE,
  hashBlob,
  type Image,
  type LayerDevice,
  openStore,
  PublishedProofs,
  publishDiskImage,
  type Staging,
} from '#imagesvc';
import {
  commitLayer,
  FileSource,
  type LayerPlace,
  openLayerFile,
  PUBLISHED,
  type StoreLayer,
  unwrap,
  type ZfileOptions,
} from '#ublk-daemon';
import { copyBlob } from './copy-blob.ts';

/** Bytes that are hashed at a time. */
const READ_BYTES = 1024 * 1024;

export interface PublishDisk {
  readonly name: string;
  /** Bottom first. */
  readonly places: readonly LayerPlace[];
  /** How many of them are the image's own; the others are its base's. */
  readonly ownLayers: number;
  /** Manifest of the base image. */
  readonly base?: Digest;
  readonly sizeBytes: number;
  /** How layers that are published for the first time are compressed; undefined: not at all. */
  readonly zfile?: ZfileOptions;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
}

export interface PublishedDisk {
  readonly image: Image;
  /** Blobs that the store did not have. */
  readonly newLayers: number;
  readonly newBytes: number;
}

/** @param staging held since before the first of `places` was known to be in the store */
export async function publishDisk(store: BlobStore, staging: Staging, wish: PublishDisk): Promise<PublishedDisk> {
  const { name, places, ownLayers, base, sizeBytes } = wish;
  const publishing = new Publishing(store, staging, wish);
  const layers: LayerDevice[] = [];
  for (const place of places) {
    wish.signal?.throwIfAborted();
    layers.push(typeof place === 'string' ? await publishing.file(place) : await publishing.stored(place));
  }
  failPoint('disk-layers-published');
  const image = await publishDiskImage(store, {
    name,
    layers,
    ownLayers,
    base,
    sizeBytes,
    config: configOf(layers.map(({ blob }) => blob.digest)),
  });
  await publishing.proofs.record();
  return { image, newLayers: publishing.newLayers, newBytes: publishing.newBytes };
}

/** What a disk is for is not known: neither an architecture nor a command. */
function configOf(layers: readonly Digest[]): Buffer {
  const rootfs = { type: 'layers', diff_ids: layers };
  return Buffer.from(JSON.stringify({ architecture: 'unknown', os: 'unknown', config: {}, rootfs }));
}

class Publishing {
  readonly proofs: PublishedProofs;
  newLayers = 0;
  newBytes = 0;
  readonly #store: BlobStore;
  readonly #staging: Staging;
  readonly #wish: PublishDisk;

  constructor(store: BlobStore, staging: Staging, wish: PublishDisk) {
    this.#store = store;
    this.#staging = staging;
    this.#wish = wish;
    this.proofs = new PublishedProofs(store);
  }

  /** A layer that is a blob of this store already, or of another one. */
  async stored({ store: url, digest, size, chunkDigests }: StoreLayer): Promise<LayerDevice> {
    const layer = deviceOf({ digest, size, chunkDigests });
    if (await this.#has(layer)) return layer;
    const from = await openStore(url);
    await this.#store.put(await from.readVerified(chunkDigests));
    await copyBlob(from, this.#store, layer.blob, this.#staging, this.#wish);
    this.newLayers++;
    this.newBytes += size;
    return layer;
  }

  async file(path: string): Promise<LayerDevice> {
    const before = await readPublished(path);
    for (const facts of before) {
      const layer = deviceOf(facts);
      if (await this.#has(layer)) return layer;
    }
    const { progress = silent } = this.#wish;
    progress({ task: 'layer', phase: 'pack' });
    const out = join(this.#staging.path, `layer-${this.newLayers}.tar`);
    await this.#pack(path, out);
    const { digest, sizeBytes, chunkDigests } = await hashBlob(createReadStream(out, { highWaterMark: READ_BYTES }));
    const facts = { digest, size: sizeBytes, chunkDigests: await this.#store.put(chunkDigests) };
    progress({ task: `layer ${digest.slice(0, 19)}`, phase: 'send', totalBytes: sizeBytes });
    await this.proofs.putFile(out, digest, sizeBytes);
    await rm(out, { force: true });
    failPoint('disk-layer-put');
    await writePublished(path, [facts, ...before.filter((one) => one.digest !== digest)]);
    this.newLayers++;
    this.newBytes += sizeBytes;
    progress({ task: `layer ${digest.slice(0, 19)}`, phase: 'done', doneBytes: sizeBytes, totalBytes: sizeBytes });
    return deviceOf(facts);
  }

  /** In the tar of a registry; one that is in it already stays as it is. */
  async #pack(path: string, out: string): Promise<void> {
    const source = await FileSource.open(path);
    const isTar = await unwrap(source)
      .then((found) => found.isTar)
      .finally(() => source.close());
    if (isTar)
      return dirname(path) === this.#staging.path ? rename(path, out) : copyFile(path, out, constants.COPYFILE_FICLONE);
    const { index, trailer, source: bytes } = await openLayerFile(path);
    try {
      const { uuid, parentUuid, userTag, virtualSize } = trailer;
      const identity = { uuid, parentUuid, userTag, virtualSize };
      const { zfile, signal } = this.#wish;
      await commitLayer(out, index, [bytes], { ...identity, zfile, signal, tar: true });
    } finally {
      await bytes.close();
    }
  }

  async #has({ blob, chunkDigests }: LayerDevice): Promise<boolean> {
    for (const { digest, size } of [blob, chunkDigests]) {
      if ((await this.#store.renew(digest))?.sizeBytes !== size) return false;
    }
    return true;
  }
}

type LayerBlob = Pick<StoreLayer, 'digest' | 'size' | 'chunkDigests'>;

function deviceOf({ digest, size, chunkDigests }: LayerBlob): LayerDevice {
  const tableBytes = Math.ceil(size / (256 * 1024)) * 32;
  return {
    blob: { mediaType: DISK_LAYER_TYPE, digest, size },
    chunkDigests: { mediaType: CHUNK_DIGESTS_TYPE, digest: chunkDigests, size: tableBytes },
  };
}

/** As what a layer was published, newest first. A copy of the file, which may be written on, is another one. */
async function readPublished(path: string): Promise<LayerBlob[]> {
  try {
    const { file, blobs } = JSON.parse(await readFile(`${path}${PUBLISHED}`, 'utf8')) as {
      file?: unknown;
      blobs?: unknown;
    };
    if (file !== (await identityOf(path)) || !Array.isArray(blobs)) return [];
    return blobs.filter(
      (one: Partial<LayerBlob> | null): one is LayerBlob =>
        isDigest(one?.digest) && isDigest(one.chunkDigests) && Number.isSafeInteger(one.size),
    );
  } catch {
    return [];
  }
}

/** Where it cannot be written the layer is packed again next time. */
async function writePublished(path: string, blobs: readonly LayerBlob[]): Promise<void> {
  const target = `${path}${PUBLISHED}`;
  const fresh = `${target}.${process.pid}`;
  try {
    await writeFile(fresh, `${JSON.stringify({ file: await identityOf(path), blobs }, undefined, 1)}\n`);
    await rename(fresh, target);
  } catch {
    await rm(fresh, { force: true });
  }
}

async function identityOf(path: string): Promise<string> {
  const { dev, ino, size, mtimeNs } = await stat(path, { bigint: true });
  return digestOf(`${dev}:${ino}:${size}:${mtimeNs}`).slice(7, 39);
}
