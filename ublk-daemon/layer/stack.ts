/**
 * Sealed layers on top of each other: one index, and the source of each layer. The size of the device is that of the top layer.
 *
 * A layer that says whose child it is lies on that one: where both uuids are known, anything else is refused, as is a layer that is in
 * the stack twice.
 */
import { DsecError } from '#base';
import type { ByteSource } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { NULL_UUID, SECTOR } from '../lsmt/header.ts';
import { IndexMemory } from '../lsmt/index-memory.ts';
import { clipIndex, MAX_LAYERS, mergeIndexes } from '../lsmt/merge-index.ts';
import type { SealedLayer } from '../lsmt/sealed-layer.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { openLayer, openLayerFile } from './layer-file.ts';
import type { LayerPlace, OpenStoreLayer } from './store-layer.ts';

export interface LayerStack {
  /** Bottom first. */
  readonly layers: readonly SealedLayer[];
  readonly sources: readonly ByteSource[];
  readonly index: SegmentIndex;
  readonly virtualSize: number;
  /** Of the top layer; `NULL_UUID` where it has none, or there is no layer. */
  readonly uuid: string;
  close(): Promise<void>;
}

/** @param layers bottom first, opened with their number in the stack */
export function stackLayers(layers: readonly SealedLayer[], virtualSize?: number): LayerStack {
  if (layers.length > MAX_LAYERS) throw fail('DISK_TOO_MANY_LAYERS', { count: layers.length, most: MAX_LAYERS });
  checkChain(layers);
  const top = layers.at(-1)?.trailer;
  const size = virtualSize ?? top?.virtualSize ?? 0;
  return {
    layers,
    sources: layers.map(({ source }) => source),
    index: clipIndex(mergeIndexes(layers.map(({ index }) => index)), size / SECTOR),
    virtualSize: size,
    uuid: top?.uuid ?? NULL_UUID,
    async close() {
      for (const { source } of layers) await source.close();
    },
  };
}

/**
 * @param places bottom first
 * @throws DISK_LAYER_REMOTE where a layer is in a store and nobody can open it
 */
export async function openStack(
  places: readonly LayerPlace[],
  virtualSize?: number,
  openStoreLayer?: OpenStoreLayer,
): Promise<LayerStack> {
  const layers = await openLayers(places, openStoreLayer);
  try {
    return stackLayers(layers, virtualSize);
  } catch (error) {
    for (const { source } of layers) await source.close();
    throw error;
  }
}

/** Each with its number. Nothing is open when one of them fails. */
export async function openLayers(
  places: readonly LayerPlace[],
  openStoreLayer?: OpenStoreLayer,
): Promise<SealedLayer[]> {
  if (places.length > MAX_LAYERS) throw fail('DISK_TOO_MANY_LAYERS', { count: places.length, most: MAX_LAYERS });
  const memory = new IndexMemory();
  // At once: layers of a remote store cost a few answers each.
  const opened = await Promise.allSettled(places.map((place, at) => openPlace(place, at, memory, openStoreLayer)));
  const layers = opened.flatMap((result) => (result.status === 'fulfilled' ? [result.value] : []));
  const failed = opened.find((result) => result.status === 'rejected');
  if (failed === undefined) return layers;
  for (const { source } of layers) await source.close();
  throw failed.reason;
}

async function openPlace(
  place: LayerPlace,
  at: number,
  memory: IndexMemory,
  openStoreLayer?: OpenStoreLayer,
): Promise<SealedLayer> {
  if (typeof place === 'string') return openLowerFile(place, at, memory);
  if (openStoreLayer === undefined) throw fail('DISK_LAYER_REMOTE', { layer: at + 1, digest: place.digest });
  return openLayer(await openStoreLayer(place), at, memory);
}

async function openLowerFile(path: string, at: number, memory: IndexMemory): Promise<SealedLayer> {
  try {
    return await openLayerFile(path, at, memory);
  } catch (error) {
    if (error instanceof DsecError || (error as { code?: unknown }).code !== 'ENOENT') throw error;
    throw fail('DISK_LAYER_MISSING', { layer: at + 1, path }, error);
  }
}

/** @param partial what the lowest lies on need not be there */
export function checkChain(layers: readonly SealedLayer[], { partial = false } = {}): void {
  const seen = new Map<string, string>();
  for (const [at, { name, trailer }] of layers.entries()) {
    const { uuid, parentUuid } = trailer;
    const twin = seen.get(uuid);
    if (uuid !== NULL_UUID && twin !== undefined) {
      throw fail('DISK_PARENT_CYCLE', { file: name, other: twin, uuid });
    }
    seen.set(uuid, name);
    if (parentUuid === NULL_UUID) continue;
    if (parentUuid === uuid) throw fail('DISK_PARENT_CYCLE', { file: name, other: name, uuid });
    const below = layers[at - 1];
    if (below === undefined && partial) continue;
    if (below === undefined) throw fail('DISK_PARENT_MISSING', { file: name, parent: parentUuid });
    if (below.trailer.uuid !== NULL_UUID && below.trailer.uuid !== parentUuid) {
      throw fail('DISK_PARENT_MISMATCH', {
        file: name,
        parent: parentUuid,
        below: below.name,
        actual: below.trailer.uuid,
      });
    }
  }
}
