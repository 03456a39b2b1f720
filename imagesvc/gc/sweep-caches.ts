/**
 * Local caches without a blob: proofs (`<cache>/proofs/<hex>-<dev>-<ino>`) and copies of metadata (`<cache>/meta/<hex>`) of
 * blobs that the store does not have any more. A node may use several stores with one cache, and this one knows of one
 * only; so what is young stays, and of proofs only those of files on this store's device are looked at. A proof or copy
 * that another store would have used costs that store's next mount the time to make it again, and nothing else.
 */
import { readdir, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { type Digest, digestFromHex, digestOf, systemCode } from '#base';
import type { BlobStore } from '../store/blob-store.ts';

export interface SweptFiles {
  readonly proofs: number;
  readonly metaCopies: number;
  readonly freedBytes: number;
}

export async function sweepCaches(
  store: BlobStore,
  cacheDir: string,
  options: { dryRun: boolean; graceMs: number; inUse: ReadonlySet<Digest>; gone: ReadonlySet<Digest> },
): Promise<SweptFiles> {
  const { dryRun, graceMs, inUse, gone } = options;
  const beforeMs = Date.now() - graceMs;
  let freedBytes = 0;

  const sweep = async (folder: string, wanted: RegExp): Promise<number> => {
    let swept = 0;
    for (const name of await namesIn(folder)) {
      const hex = wanted.exec(name)?.[1];
      if (hex === undefined) continue;
      const digest = digestFromHex(hex);
      if (inUse.has(digest)) continue;
      if (!gone.has(digest) && (await store.stat(digest)) !== undefined) continue;
      const path = join(folder, name);
      const found = await stat(path).catch(() => undefined);
      if (found === undefined || found.mtimeMs > beforeMs) continue;
      if (!dryRun) await rm(path, { force: true });
      swept++;
      freedBytes += found.size;
    }
    return swept;
  };

  const device = await deviceOf(store);
  // A store without files has no proofs.
  const proofs =
    device === undefined ? 0 : await sweep(join(cacheDir, 'proofs'), new RegExp(`^([0-9a-f]{64})-${device}-[0-9]+$`));
  const metaCopies = await sweep(join(cacheDir, 'meta'), /^([0-9a-f]{64})$/);
  return { proofs, metaCopies, freedBytes };
}

async function namesIn(folder: string): Promise<string[]> {
  try {
    return await readdir(folder);
  } catch (error) {
    if (['ENOENT', 'EACCES'].includes(systemCode(error) ?? '')) return [];
    throw error;
  }
}

/** Of the file system that the store's blobs lie on, where they are files. */
async function deviceOf(store: BlobStore): Promise<bigint | undefined> {
  const anyBlob = store.localPath(digestOf(''));
  if (anyBlob === undefined) return undefined;
  try {
    return (await stat(join(anyBlob, '..'), { bigint: true })).dev;
  } catch {
    return undefined;
  }
}
