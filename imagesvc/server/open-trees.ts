/**
 * Images open for browsing: opening one reads and verifies its metadata, so the latest few stay open. They are found by the
 * digest of their manifest; a name that comes to mean another image is another tree.
 */
import type { Digest } from '#base';
import { openImage, resolveImage } from '../catalog/catalog.ts';
import { type ImageTree, openTree } from '../reader/image-tree.ts';
import type { BlobStore } from '../store/blob-store.ts';

const KEPT_OPEN = 8;

interface Entry {
  readonly tree: Promise<ImageTree>;
  users: number;
  evicted: boolean;
}

export interface BorrowedTree {
  readonly tree: ImageTree;
  readonly digest: Digest;
  /** Safe to call twice. */
  release(): void;
}

export class OpenTrees {
  readonly #store: BlobStore;
  /** The latest used last. */
  readonly #entries = new Map<Digest, Entry>();

  constructor(store: BlobStore) {
    this.#store = store;
  }

  get size(): number {
    return this.#entries.size;
  }

  /** @throws CATALOG_NOT_FOUND, and what opening throws */
  async borrow(nameOrDigest: string): Promise<BorrowedTree> {
    const { digest } = await resolveImage(this.#store, nameOrDigest);
    let entry = this.#entries.get(digest);
    if (entry === undefined) entry = { tree: this.#open(digest), users: 0, evicted: false };
    else this.#entries.delete(digest);
    this.#entries.set(digest, entry);
    entry.users++;
    this.#evict();
    try {
      const tree = await entry.tree;
      let released = false;
      return {
        tree,
        digest,
        release: () => {
          if (released) return;
          released = true;
          this.#leave(entry);
        },
      };
    } catch (error) {
      if (this.#entries.get(digest) === entry) this.#entries.delete(digest);
      throw error;
    }
  }

  async #open(digest: Digest): Promise<ImageTree> {
    return openTree(this.#store, await openImage(this.#store, digest));
  }

  #evict(): void {
    for (const [digest, entry] of this.#entries) {
      if (this.#entries.size <= KEPT_OPEN) return;
      this.#entries.delete(digest);
      entry.evicted = true;
      if (entry.users === 0) closeTree(entry);
    }
  }

  #leave(entry: Entry): void {
    entry.users--;
    if (entry.evicted && entry.users === 0) closeTree(entry);
  }

  async close(): Promise<void> {
    const trees = [...this.#entries.values()];
    this.#entries.clear();
    for (const { tree } of trees) await tree.then((open) => open.close()).catch(() => {});
  }
}

function closeTree({ tree }: Entry): void {
  tree.then((open) => open.close()).catch(() => {});
}
