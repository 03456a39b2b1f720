/** A node of a benchmark's own that mounts an image lazily, in this process: what `dsec mount` does. */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import {
  type BlobStore,
  blobFilesFor,
  ensureDataServer,
  type Image,
  listMounts,
  mountImage,
  stopDataServers,
  unmount,
} from '#imagesvc';

/** Counters of the chunk cache that benchmarks look at. */
export interface CacheNumbers {
  readonly interactiveReads: number;
  readonly interactiveBytes: number;
  readonly prefetchReads: number;
  readonly prefetchBytes: number;
  readonly storedBytes: number;
}

export class LazyNode {
  readonly folders: { readonly runDir: string; readonly cacheDir: string };
  readonly store: BlobStore;
  readonly #targets: string[] = [];

  constructor(folder: string, store: BlobStore) {
    this.folders = { runDir: join(folder, 'run'), cacheDir: join(folder, 'cache') };
    this.store = store;
  }

  /** @param lazy Also where the store is a folder. */
  async mount(image: Image, target: string, lazy = true): Promise<void> {
    mkdirSync(target, { recursive: true });
    const files = blobFilesFor({ store: this.store, lazy, ...this.folders });
    await mountImage({ files, image, target, ...this.folders });
    this.#targets.push(target);
  }

  /** Whether a data server is asked for any of its data. */
  async mounted(target: string): Promise<{ served: boolean }> {
    const found = (await listMounts(this.folders)).find((mounted) => mounted.target === target);
    return { served: found?.lazy?.some(({ served }) => served) ?? false };
  }

  async unmount(target: string): Promise<void> {
    await unmount(target, this.folders);
    this.#targets.splice(this.#targets.indexOf(target), 1);
  }

  async cacheNumbers(): Promise<CacheNumbers> {
    const server = await ensureDataServer(this.store.url, this.folders);
    return (await server.stats()).cache as CacheNumbers;
  }

  async stop(): Promise<void> {
    for (const target of [...this.#targets]) await unmount(target, { ...this.folders, lazy: true });
    await stopDataServers({ ...this.folders, force: true });
  }
}
