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
import { clipIndex, MAX_LAYERS, mergeIndexes } from '../lsmt/merge-index.ts';
import type { SealedLayer } from '../lsmt/sealed-layer.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { openLayerFile } from './layer-file.ts';

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

/** @param paths bottom first */
export async function openStack(paths: readonly string[], virtualSize?: number): Promise<LayerStack> {
  if (paths.length > MAX_LAYERS) throw fail('DISK_TOO_MANY_LAYERS', { count: paths.length, most: MAX_LAYERS });
  const layers: SealedLayer[] = [];
  try {
    for (const [at, path] of paths.entries()) layers.push(await openLowerFile(path, at));
    return stackLayers(layers, virtualSize);
  } catch (error) {
    for (const { source } of layers) await source.close();
    throw error;
  }
}

async function openLowerFile(path: string, at: number): Promise<SealedLayer> {
  try {
    return await openLayerFile(path, at);
  } catch (error) {
    if (error instanceof DsecError || (error as { code?: unknown }).code !== 'ENOENT') throw error;
    throw fail('DISK_LAYER_MISSING', { layer: at + 1, path }, error);
  }
}

function checkChain(layers: readonly SealedLayer[]): void {
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
