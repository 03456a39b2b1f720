/**
 * Which layers images have, for placement: nodes that have them at hand are preferred. Names may mean something else any moment, so what they
 * meant is believed for a second or two; a burst of creates of one image reads it once.
 */
import { type BlobStore, openDiskImage, openImage } from '#imagesvc';
import type { SandboxBackend } from '#runtime';

const BELIEVED_MS = 2000;
const MOST = 4096;

export class ImageLayers {
  private readonly known = new Map<string, { readonly layers: Promise<readonly string[]>; readonly until: number }>();
  private readonly store: BlobStore;

  constructor(store: BlobStore) {
    this.store = store;
  }

  /**
   * A full machine's image is a disk, of which no node has layers at hand.
   * @throws CATALOG_NOT_FOUND and what else `openImage` or `openDiskImage` throws: nothing need be reserved for what is not there
   */
  async of(images: readonly string[], backend: SandboxBackend = 'container'): Promise<readonly string[]> {
    if (backend === 'vm') {
      await openDiskImage(this.store, images[0]!);
      return [];
    }
    if (images.length === 1) return this.one(images[0]!);
    return [...new Set((await Promise.all(images.map((image) => this.one(image)))).flat())];
  }

  private one(image: string): Promise<readonly string[]> {
    const now = Date.now();
    const known = this.known.get(image);
    if (known !== undefined && known.until > now) return known.layers;
    const layers = openImage(this.store, image).then((opened) => opened.layers.map(({ meta }) => meta.digest));
    layers.catch(() => this.known.delete(image));
    if (this.known.size >= MOST) this.known.clear();
    this.known.set(image, { layers, until: now + BELIEVED_MS });
    return layers;
  }
}
