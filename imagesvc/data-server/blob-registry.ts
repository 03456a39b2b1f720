/**
 * What the servers of one mount know of their blobs, on disk, so that each server knows what its predecessor knew and
 * gives every blob the same inode number: a file `<node>-<size>-<64 hex>` for each, holding its chunk digests.
 */
import { mkdirSync, readdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, digestFromHex, hexOf } from '#base';
import { fail } from '../errors.ts';
import { FIRST_BLOB_NODE } from './blob-files-system.ts';

export interface RegisteredBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
  readonly node: number;
}

export class BlobRegistry {
  readonly #folder: string;
  readonly #blobs = new Map<Digest, RegisteredBlob>();

  constructor(folder: string) {
    this.#folder = folder;
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    for (const name of readdirSync(folder)) {
      const found = /^(\d+)-(\d+)-([0-9a-f]{64})$/.exec(name);
      if (found === null) continue;
      const blob = { node: Number(found[1]), sizeBytes: Number(found[2]), digest: digestFromHex(found[3]!) };
      this.#blobs.set(blob.digest, blob);
    }
  }

  /** In the order of their nodes. */
  get blobs(): RegisteredBlob[] {
    return [...this.#blobs.values()].sort((a, b) => a.node - b.node);
  }

  /** @throws DATA_BLOB_CONFLICT */
  add(digest: Digest, sizeBytes: number, chunkDigests: Buffer): RegisteredBlob {
    const known = this.#blobs.get(digest);
    if (known !== undefined) {
      if (known.sizeBytes !== sizeBytes || !this.chunkDigests(known).equals(chunkDigests)) {
        throw fail('DATA_BLOB_CONFLICT', { digest, known: known.sizeBytes, sizeBytes });
      }
      return known;
    }
    let node = FIRST_BLOB_NODE;
    for (const other of this.#blobs.values()) node = Math.max(node, other.node + 1);
    const blob = { digest, sizeBytes, node };
    const path = this.#path(blob);
    writeFileSync(`${path}.tmp`, chunkDigests, { mode: 0o600 });
    renameSync(`${path}.tmp`, path);
    this.#blobs.set(digest, blob);
    return blob;
  }

  chunkDigests(blob: RegisteredBlob): Buffer {
    return readFileSync(this.#path(blob));
  }

  #path({ node, sizeBytes, digest }: RegisteredBlob): string {
    return join(this.#folder, `${node}-${sizeBytes}-${hexOf(digest)}`);
  }
}
