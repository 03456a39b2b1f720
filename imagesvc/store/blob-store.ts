/**
 * What a store promises, whatever lies beneath (a folder, later S3 and memory).
 *
 * - Blobs are content addressed and immutable. `put*` publishes atomically: a reader sees a whole blob or none, and two
 *   writers of one digest both succeed.
 * - Refs are small objects (a manifest descriptor), replaced atomically: a reader sees the old or the new one.
 * - Records are small JSON objects that remember work done (conversion key -> result); losing one costs time, never data.
 * - Publishing order is the caller's: blobs, then manifest, then ref.
 * - `read` of a missing blob fails with STORE_BLOB_MISSING (permanent). Other failures say whether they are retryable.
 */
import type { Digest } from '#base';

export interface Descriptor {
  readonly mediaType: string;
  readonly digest: Digest;
  readonly size: number;
  readonly annotations?: Readonly<Record<string, string>>;
}

/** What a name points to. */
export interface Ref {
  /** `repository:tag` */
  readonly name: string;
  readonly manifest: Descriptor;
}

/**
 * A private folder, on the same file system as the blobs where there is one, for files on their way into the store.
 * It is locked by this process: one that a dead process left behind is removed by the next command.
 */
export interface Staging {
  readonly path: string;
  /** Removes the folder and all that is still in it. Safe to call twice. */
  remove(): Promise<void>;
}

export interface BlobStore {
  /** `file:///path`, as the user would write it. */
  readonly url: string;

  /** Size in bytes, or undefined when the store does not have it. */
  stat(digest: Digest): Promise<{ sizeBytes: number } | undefined>;
  /** Exactly `length` bytes from `offset`. Not verified: whoever knows chunk digests does. @throws STORE_BLOB_MISSING, STORE_SHORT_READ */
  read(digest: Digest, offset: number, length: number): Promise<Buffer>;
  /** The whole blob, verified against its digest. For manifests, configs, metadata. @throws STORE_DIGEST_MISMATCH */
  readVerified(digest: Digest): Promise<Buffer>;
  /** The whole blob in order, not verified. */
  stream(digest: Digest): AsyncIterable<Buffer>;
  /** Path of the blob as a local file, where the store is a folder. */
  localPath(digest: Digest): string | undefined;

  stage(): Promise<Staging>;
  /** Publishes bytes, returns their digest. */
  put(bytes: Buffer): Promise<Digest>;
  /** Publishes a finished file whose digest the caller has computed; the file is moved or copied and must not be used afterwards. */
  putFile(path: string, digest: Digest, sizeBytes: number): Promise<void>;
  /** Deletes a blob. Callers hold the rule that nothing refers to it. */
  deleteBlob(digest: Digest): Promise<void>;
  listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }>;

  getRef(name: string): Promise<Ref | undefined>;
  setRef(ref: Ref): Promise<void>;
  /** False when there was none. */
  deleteRef(name: string): Promise<boolean>;
  /** Sorted by name. */
  listRefs(): Promise<Ref[]>;

  /** `kind` and `key` are path-safe: [a-z0-9.-]+. A damaged record reads as undefined. */
  getRecord(kind: string, key: string): Promise<unknown>;
  putRecord(kind: string, key: string, value: unknown): Promise<void>;
}
