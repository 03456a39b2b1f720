/**
 * Stores that sandboxes are made from, opened once. What an image is, manifest and config, is read once too: blobs are named by their
 * digest, and never change. What a name means is asked each time.
 */
import { type BlobStore, openStore } from '#imagesvc';

const STORES = 32;
const BLOBS = 512;
/** Larger ones are rare, and read again. */
const BLOB_BYTES = 64 << 10;

const stores = new Map<string, Promise<BlobStore>>();

export function knownStore(url: string): Promise<BlobStore> {
  const known = stores.get(url);
  if (known !== undefined) return known;
  const opening = openStore(url).then(remembering);
  opening.catch(() => stores.delete(url));
  keep(stores, url, opening, STORES);
  return opening;
}

function remembering(store: BlobStore): BlobStore {
  const blobs = new Map<string, Buffer>();
  const read = store.readVerified.bind(store);
  return Object.assign(store, {
    async readVerified(digest: Parameters<typeof read>[0]) {
      const bytes = blobs.get(digest) ?? (await read(digest));
      if (bytes.length <= BLOB_BYTES) keep(blobs, digest, bytes, BLOBS);
      return bytes;
    },
  });
}

/** The oldest goes for it. */
function keep<K, V>(map: Map<K, V>, key: K, value: V, most: number): void {
  map.set(key, value);
  for (const old of map.keys()) {
    if (map.size <= most) return;
    map.delete(old);
  }
}
