/**
 * Which layers images have, for placement: nodes that have them at hand are preferred. And whether all of them were brought to the store of the nodes that
 * take what the others have no room for (`dsec sync`). Names may mean something else any moment, so what they meant is believed for a few seconds;
 * a burst of creates of one image reads it once.
 */
import type { Digest } from '#base';
import { type BlobStore, openDiskImage, openImage, wasSynced } from '#imagesvc';
import type { SandboxBackend } from '#runtime';
import { layerKey } from '../placement/layer-key.ts';

const BELIEVED_MS = 2000;
const DISTRUSTED_MS = 60_000;
const MOST = 4096;

export interface FoundImages {
  /** Their keys. */
  readonly layers: readonly string[];
  /** All of them are in the other store too. */
  readonly synced: boolean;
  /** Of what each name meant. */
  readonly manifests: readonly Digest[];
}

interface Known {
  readonly found: Promise<FoundImages>;
  readonly readAt: number;
  /** Again: meanwhile it holds. */
  reading: boolean;
}

export class ImageLayers {
  private readonly known = new Map<string, Known>();
  /** That were said to be in the other store, and were not. */
  private readonly missing = new Map<Digest, number>();
  private readonly store: BlobStore;
  private readonly otherUrl: string | undefined;

  /** `otherUrl`: the store of the nodes that take what the others have no room for, where there are such. */
  constructor(store: BlobStore, otherUrl?: string) {
    this.store = store;
    this.otherUrl = otherUrl;
  }

  /**
   * A full machine's image is a disk, of which no node has layers at hand.
   * @throws CATALOG_NOT_FOUND and what else `openImage` or `openDiskImage` throws: nothing need be reserved for what is not there
   */
  async of(images: readonly string[], backend: SandboxBackend = 'container'): Promise<FoundImages> {
    if (images.length === 1) return this.one(images[0]!, backend);
    const all = await Promise.all(images.map((image) => this.one(image, backend)));
    return {
      layers: [...new Set(all.flatMap(({ layers }) => layers))],
      synced: all.every(({ synced }) => synced),
      manifests: all.flatMap(({ manifests }) => manifests),
    };
  }

  /** Whoever should have them in the other store has not: it is asked again in a minute. */
  distrust(manifests: readonly Digest[]): void {
    if (this.missing.size > MOST) this.missing.clear();
    for (const manifest of manifests) this.missing.set(manifest, Date.now() + DISTRUSTED_MS);
    this.known.clear();
  }

  private one(image: string, backend: SandboxBackend): Promise<FoundImages> {
    const key = backend === 'vm' ? `disk ${image}` : image;
    const known = this.known.get(key);
    const age = known === undefined ? Number.POSITIVE_INFINITY : Date.now() - known.readAt;
    // Of one that many ask for nobody waits while it is read again.
    if (known !== undefined && age <= 2 * BELIEVED_MS) {
      if (age > BELIEVED_MS && !known.reading) this.renew(key, known, image, backend);
      return known.found;
    }
    const entry: Known = { found: this.look(image, backend), readAt: Date.now(), reading: false };
    entry.found.catch(() => {
      if (this.known.get(key) === entry) this.known.delete(key);
    });
    if (this.known.size >= MOST) this.known.clear();
    this.known.set(key, entry);
    return entry.found;
  }

  private renew(key: string, known: Known, image: string, backend: SandboxBackend): void {
    known.reading = true;
    const found = this.look(image, backend);
    const isStill = () => this.known.get(key) === known;
    found.then(
      () => isStill() && this.known.set(key, { found, readAt: Date.now(), reading: false }),
      () => isStill() && this.known.delete(key),
    );
  }

  private async look(image: string, backend: SandboxBackend): Promise<FoundImages> {
    const isDisk = backend === 'vm';
    const { layers, manifestDigest } = await (isDisk ? openDiskImage : openImage)(this.store, image);
    const synced = await this.isSynced(manifestDigest);
    return {
      layers: isDisk ? [] : layers.map(({ meta }) => layerKey(meta.digest)),
      synced,
      manifests: [manifestDigest],
    };
  }

  private async isSynced(manifest: Digest): Promise<boolean> {
    if (this.otherUrl === undefined) return false;
    const until = this.missing.get(manifest);
    if (until !== undefined && until > Date.now()) return false;
    this.missing.delete(manifest);
    // Without the record it is as if nothing had been brought there.
    return wasSynced(this.store, this.otherUrl, manifest).catch(() => false);
  }
}
