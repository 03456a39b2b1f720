/**
 * What a store promises, whatever lies beneath (a folder, later S3 and memory).
 *
 * - Blobs are content addressed and immutable. `put*` publishes atomically: a reader sees a whole blob or none, and two
 *   writers of one digest both succeed.
 * - Refs are small objects (a manifest descriptor), replaced atomically: a reader sees the old or the new one.
 * - Records are small JSON objects that remember work done (conversion key -> result); losing one costs time, never data.
 * - Publishing order is the caller's: blobs, then manifest, then ref.
 * - Nothing is made by reading: a store that does not exist yet reads as an empty one, and the first write makes it.
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

/** Told of a ref that is there but damaged: its name, and why (STORE_REF_DAMAGED). */
export type DamagedRef = (name: string, problem: Error) => void;

/**
 * A private folder, on the same file system as the blobs where there is one, for files on their way into the store.
 * It is locked by this process: one that a dead process left behind is removed by the next command.
 */
export interface Staging {
  readonly path: string;
  /** Removes the folder and all that is still in it. Safe to call twice. */
  remove(): Promise<void>;
}

/** Keeps publishing and garbage collection apart for a moment; see `BlobStore.hold`. */
export interface Hold {
  /** Safe to call twice. */
  release(): Promise<void>;
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

  /** Like `stat`, and makes the blob as young as if it had just been put: what is about to refer to a blob that it found calls this. */
  renew(digest: Digest): Promise<{ sizeBytes: number } | undefined>;

  /**
   * Whoever makes an image holds one from before its first blob until its ref is set: garbage collection leaves alone
   * what was put or renewed since the oldest staging of a live process began.
   */
  stage(): Promise<Staging>;
  /** When the oldest staging of a live process began (ms since 1970), or undefined when there is none. */
  oldestStagingMs(): Promise<number | undefined>;
  /**
   * `publish`: many at once, for the moment between "all blobs are there" and "the ref is set". `collect`: alone, for
   * mark and sweep. Waits for its turn. @throws STORE_BUSY after half a minute
   */
  hold(purpose: 'publish' | 'collect'): Promise<Hold>;
  /** Publishes bytes, returns their digest. */
  put(bytes: Buffer): Promise<Digest>;
  /**
   * Publishes a finished file whose digest the caller has computed; the file is moved or copied and must not be used
   * afterwards. Its size is checked, its digest is the caller's word. @throws STORE_SIZE_MISMATCH
   */
  putFile(path: string, digest: Digest, sizeBytes: number): Promise<void>;
  /** Deletes a blob; none there is no error. Callers hold the rule that nothing refers to it. */
  deleteBlob(digest: Digest): Promise<void>;
  listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }>;

  /** Names are `repository` or `repository:tag` by OCI's grammar; the tag is `latest` by default. @throws STORE_NAME, STORE_REF_DAMAGED */
  getRef(name: string): Promise<Ref | undefined>;
  setRef(ref: Ref): Promise<void>;
  /** False when there was none. */
  deleteRef(name: string): Promise<boolean>;
  /**
   * Sorted by name, names with their tag. A damaged ref is not among them, but `damaged` is told of it: whoever decides
   * what is needed must not take it for one that is not there.
   */
  listRefs(damaged?: DamagedRef): Promise<Ref[]>;

  /** `kind` and `key` are path-safe: [a-z0-9.-]+. A damaged record reads as undefined. */
  getRecord(kind: string, key: string): Promise<unknown>;
  putRecord(kind: string, key: string, value: unknown): Promise<void>;
  /** Keys of that kind that begin with `prefix`, sorted. */
  listRecords(kind: string, prefix?: string): Promise<string[]>;
  /** None there is no error. */
  deleteRecord(kind: string, key: string): Promise<void>;
}
