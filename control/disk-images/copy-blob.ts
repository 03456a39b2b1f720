/** A blob from one store to another, verified on its way. */
import { createHash } from 'node:crypto';
import { createWriteStream } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { digestFromHex, hexOf, type Progress, silent } from '#base';
import type { BlobStore, Descriptor, Staging } from '#imagesvc';
import { fail } from '../errors.ts';

export async function copyBlob(
  from: BlobStore,
  to: BlobStore,
  { digest, size }: Descriptor,
  staging: Staging,
  { progress = silent, signal }: { progress?: Progress; signal?: AbortSignal },
): Promise<void> {
  const path = join(staging.path, hexOf(digest));
  const hash = createHash('sha256');
  let doneBytes = 0;
  async function* hashed() {
    for await (const piece of from.stream(digest)) {
      hash.update(piece);
      doneBytes += piece.length;
      progress({ task: `layer ${digest.slice(0, 19)}`, phase: 'copy', doneBytes, totalBytes: size });
      yield piece;
    }
  }
  try {
    await pipeline(Readable.from(hashed()), createWriteStream(path), { signal });
    const actual = digestFromHex(hash.digest('hex'));
    if (actual !== digest) throw fail('DISK_LAYER_WRONG', { store: from.url, digest, actual });
    await to.putFile(path, digest, size);
  } finally {
    await rm(path, { force: true });
  }
}
