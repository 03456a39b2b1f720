/**
 * Which EROFS layers a sandbox sees, in which order: the base's, then what the workspace adds to its base, then what each
 * toolkit adds, toolkits topmost in the order given. An image's own layers are its last `ownLayers`; the ones below them
 * are those of the base it was packed on, which the sandbox's base takes the place of. A toolkit that was converted from
 * a plain image owns all of its layers.
 *
 * A layer that comes twice is kept where it came first. OverlayFS refuses one layer in two places; strictly, the upper
 * occurrence alone would look like both. But a layer that two images share is their common origin: what the base did on
 * top of it (a user added to /etc/passwd, a file deleted) must not be undone because a toolkit started from the same
 * distribution. So the shared layer counts as already there, and the toolkit adds what it has beyond it.
 */
import type { ErofsLayer, Image } from '#imagesvc';
import { fail } from '../errors.ts';

export interface Composition {
  readonly base: Image;
  readonly workspace?: Image;
  readonly toolkits?: readonly Image[];
}

/** What OverlayFS takes as lower layers. */
export const LAYER_LIMIT = 500;

/** Bottom first. @throws RUNTIME_LAYER_LIMIT */
export function composeLayers(composition: Composition): ErofsLayer[] {
  const { base, workspace, toolkits = [] } = composition;
  const byKey = new Map<string, ErofsLayer>();
  const add = (layers: readonly ErofsLayer[]) => {
    for (const layer of layers) {
      const key = keyOf(layer);
      if (!byKey.has(key)) byKey.set(key, layer);
    }
  };
  add(base.layers);
  for (const image of workspace === undefined ? toolkits : [workspace, ...toolkits]) add(ownLayers(image));
  if (byKey.size > LAYER_LIMIT) throw fail('RUNTIME_LAYER_LIMIT', { layers: byKey.size, limit: LAYER_LIMIT });
  return [...byKey.values()];
}

/** `slice(-0)` would be everything. */
function ownLayers(image: Image): readonly ErofsLayer[] {
  return image.layers.slice(image.layers.length - image.ownLayers);
}

/** The metadata image names its data blobs in its device slots, so its digest is the layer's identity. */
function keyOf(layer: ErofsLayer): string {
  return layer.meta.digest;
}
