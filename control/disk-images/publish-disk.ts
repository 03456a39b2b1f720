/** `--name`: what a disk of this node is, as an image of a store: at one of its points, or what was changed packed into one layer. */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { isDigest, type Progress } from '#base';
import { type BlobStore, parseImageName } from '#imagesvc';
import {
  diskFacts,
  diskFolder,
  type LayerPlace,
  lowerPlaces,
  type OpenStoreLayer,
  openLayer,
  openLayerFile,
  readConfig,
  type ZfileOptions,
} from '#ublk-daemon';
import { type PublishedDisk, publishDisk } from './publish.ts';

export interface PublishOptions {
  readonly name: string;
  readonly zfile?: ZfileOptions;
  readonly openStoreLayer: OpenStoreLayer;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
}

/**
 * The first sealed layers of a disk, which may be in use.
 * @param seal says how many, and may make them: not called where the store takes nothing, or not this name
 */
export async function publishPoint(
  store: BlobStore,
  disk: string,
  seal: () => Promise<number>,
  options: PublishOptions,
): Promise<PublishedDisk> {
  parseImageName(options.name);
  const staging = await store.stage();
  try {
    const { places, ...below } = await layersBelow(disk, await seal());
    const sizeBytes = await sizeOf(places.at(-1)!, options.openStoreLayer);
    return await publishDisk(store, staging, { ...options, ...below, places, sizeBytes });
  } finally {
    await staging.remove();
  }
}

/**
 * The first `layers` sealed layers of a disk, and one that `pack` writes on top of them: in the tar of a registry.
 * @param pack gets the path; the folder is on the store's file system where it has one
 */
export async function publishPacked(
  store: BlobStore,
  disk: string,
  layers: number,
  pack: (path: string) => Promise<unknown>,
  options: PublishOptions,
): Promise<PublishedDisk> {
  parseImageName(options.name);
  const staging = await store.stage();
  try {
    const { places, base, ownLayers } = await layersBelow(disk, layers);
    const path = join(staging.path, 'packed.tar');
    await pack(path);
    const sizeBytes = await sizeOf(path, options.openStoreLayer);
    const all = [...places, path];
    return await publishDisk(store, staging, { ...options, base, ownLayers: ownLayers + 1, places: all, sizeBytes });
  } finally {
    await staging.remove();
  }
}

async function layersBelow(disk: string, layers: number) {
  const folder = diskFolder(disk);
  const config = await readConfig(folder);
  const { image, baseLayers } = diskFacts(config);
  // All of an image's layers, or the image is no base.
  const base = image !== undefined && layers >= baseLayers && isDigest(image.digest) ? image.digest : undefined;
  const places = lowerPlaces({ ...config, lowers: config.lowers.slice(0, layers) }, folder, existsSync);
  return { places, base, ownLayers: base === undefined ? layers : layers - baseLayers };
}

async function sizeOf(place: LayerPlace, openStoreLayer: OpenStoreLayer): Promise<number> {
  const layer = typeof place === 'string' ? await openLayerFile(place) : await openLayer(await openStoreLayer(place));
  await layer.source.close();
  return layer.trailer.virtualSize;
}
