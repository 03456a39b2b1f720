/**
 * The files of a lazy mount: metadata images are fetched whole into the cache, verified; data blobs are files of the data
 * server's mount, which fetches what is read; one that is whole in the cache already is used directly as a file.
 */
import { createHash, randomUUID } from 'node:crypto';
import { createWriteStream, mkdirSync, renameSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { type Digest, digestFromHex, hexOf } from '#base';
import type { Image, LayerDevice } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import { type BlobFiles, storeBlobFiles } from '../mount/blob-files.ts';
import { recordProof } from '../mount/blob-proof.ts';
import { nodeFolders } from '../mount/node-folders.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { TracePrefetch } from '../trace/trace-prefetch.ts';
import { type DataServer, type DataServerOptions, ensureDataServer } from './data-server.ts';

/** A metadata image whose bytes are wrong is fetched this often. */
const META_TRIES = 3;

export type LazyOptions = DataServerOptions & {
  readonly store: BlobStore;
  /** Images whose traces are fetched ahead. */
  readonly prefetch?: readonly Image[];
  /** Told of a trace that is of no use, for people. */
  readonly onTraceProblem?: (text: string) => void;
};

/**
 * Files for mountImage: of the store itself when it is a folder and `lazy` was not asked for, else lazy ones.
 */
export function blobFilesFor(options: LazyOptions & { readonly lazy?: boolean }): BlobFiles {
  return options.lazy === true || !isLocal(options.store) ? lazyBlobFiles(options) : storeBlobFiles(options.store);
}

function isLocal(store: BlobStore): boolean {
  return store.localPath(digestFromHex('0'.repeat(64))) !== undefined;
}

/** The data server is started by the first blob that needs one. */
export function lazyBlobFiles(options: LazyOptions): BlobFiles {
  const { store } = options;
  const { cacheDir } = nodeFolders(options);
  /** Blobs that are whole in the cache. */
  const whole = new Set<Digest>();
  const ahead = new TracePrefetch(store, options.prefetch ?? [], options.onTraceProblem);
  let server: Promise<DataServer> | undefined;
  const started = () => {
    server ??= ensureDataServer(store.url, options);
    return server;
  };
  return {
    async fileFor(blob, device) {
      if (device === undefined) return fetchMeta(store, blob, cacheDir);
      // Beside the rest, so that it costs no time; of no interest where the blob is whole in the cache.
      const found = store.stat(blob.digest);
      found.catch(() => {});
      const [data, digests] = await Promise.all([started(), chunkDigestsOf(store, device)]);
      const added = await data.add(blob.digest, blob.size, digests);
      if (added.localPath !== undefined) {
        whole.add(blob.digest);
        return added.localPath;
      }
      whole.delete(blob.digest);
      ahead.begin(data, blob.digest);
      checkFound(store, blob, await found);
      return join(data.mountPoint, hexOf(blob.digest));
    },
    // Every chunk was verified when it came into the cache; the cache's own file is held to its map.
    verifiedOnRead: () => true,
    handedOver: () => ahead.handedOver(),
    async lazyLayer(layer) {
      if (layer.devices.length === 0) return undefined;
      const blobs = layer.devices.map(({ blob }) => blob.digest);
      return {
        layer: layer.meta.digest,
        server: (await started()).id,
        served: blobs.some((digest) => !whole.has(digest)),
        blobs,
      };
    },
  };
}

/** What is not there, or cannot be the blob, is told by the mount and not by the first read. @throws MOUNT_BLOB_MISSING, MOUNT_DIGEST_MISMATCH */
function checkFound(store: BlobStore, { digest, size }: Descriptor, found: { sizeBytes: number } | undefined): void {
  if (found === undefined)
    throw fail('MOUNT_BLOB_MISSING', { path: store.url, digest, reason: 'the store has no such blob' });
  if (found.sizeBytes === size) return;
  throw fail('MOUNT_DIGEST_MISMATCH', {
    path: store.url,
    digest,
    found: `${found.sizeBytes} bytes in place of ${size}`,
  });
}

/** @throws STORE_CHUNK_TABLE */
async function chunkDigestsOf(store: BlobStore, { blob, chunkDigests }: LayerDevice): Promise<Buffer> {
  const digests = await store.readVerified(chunkDigests.digest);
  const expected = Math.ceil(blob.size / (256 * 1024)) * 32;
  if (digests.length !== expected) {
    throw fail('STORE_CHUNK_TABLE', {
      blob: blob.digest,
      table: chunkDigests.digest,
      actual: digests.length,
      expected,
    });
  }
  return digests;
}

/** `<cache>/meta/<hex>`, fetched when it is not there. What is there is proved before it is mounted. @throws MOUNT_DIGEST_MISMATCH */
async function fetchMeta(store: BlobStore, meta: Descriptor, cacheDir: string): Promise<string> {
  const folder = join(cacheDir, 'meta');
  const path = join(folder, hexOf(meta.digest));
  if (statSync(path, { throwIfNoEntry: false })?.size === meta.size) return path;
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const fresh = join(folder, `.${hexOf(meta.digest)}.${randomUUID()}`);
  try {
    for (let tries = 1; ; tries++) {
      const found = await download(store, meta.digest, fresh);
      if (found === meta.digest) break;
      // Perhaps only damaged on its way.
      if (tries === META_TRIES) {
        throw fail('MOUNT_DIGEST_MISMATCH', { path: store.url, digest: meta.digest, found: `digest ${found}` });
      }
    }
    renameSync(fresh, path);
  } finally {
    rmSync(fresh, { force: true });
  }
  await recordProof(path, meta.digest, cacheDir);
  return path;
}

/** Answers the digest of what came. */
async function download(store: BlobStore, digest: Digest, path: string): Promise<Digest> {
  const hash = createHash('sha256');
  const hashed = async function* () {
    for await (const piece of store.stream(digest)) {
      hash.update(piece);
      yield piece;
    }
  };
  await pipeline(Readable.from(hashed()), createWriteStream(path, { mode: 0o644 }));
  return digestFromHex(hash.digest('hex'));
}
