/**
 * Layers that lie on each other as one: what lower ones have that higher ones hide is left behind. The result takes the place of all of
 * them in a stack: it has the uuid of the topmost, and lies on what the lowest lay on.
 */

import { SECTOR } from '../lsmt/header.ts';
import { clipIndex, mergeIndexes } from '../lsmt/merge-index.ts';
import { type CommitOptions, type CommittedLayer, commitLayer } from './commit.ts';
import { checkChain, openLayers } from './stack.ts';
import type { LayerPlace, OpenStoreLayer } from './store-layer.ts';

export interface MergeOptions extends Pick<CommitOptions, 'zfile' | 'tar' | 'signal'> {
  readonly openStoreLayer?: OpenStoreLayer;
}

/** @param places bottom first; what the lowest of them lies on may be missing */
export async function mergeLayers(
  places: readonly LayerPlace[],
  path: string,
  { openStoreLayer, ...wrapping }: MergeOptions = {},
): Promise<CommittedLayer & { readonly uuid: string }> {
  const layers = await openLayers(places, openStoreLayer);
  try {
    checkChain(layers, { partial: true });
    const bottom = layers[0]!.trailer;
    const { uuid, virtualSize, userTag } = layers.at(-1)!.trailer;
    const index = clipIndex(mergeIndexes(layers.map((layer) => layer.index)), virtualSize / SECTOR);
    const identity = { uuid, parentUuid: bottom.parentUuid, virtualSize, userTag };
    const sources = layers.map(({ source }) => source);
    return { uuid, ...(await commitLayer(path, index, sources, { ...identity, ...wrapping })) };
  } finally {
    for (const { source } of layers) await source.close();
  }
}
