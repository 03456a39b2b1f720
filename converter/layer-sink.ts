/** What the converter makes, and where it puts it. It publishes nothing by itself: the caller wires a store. */
import type { Digest } from '#base';

/** A blob that the sink has taken. */
export interface BuiltBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
}

/** One EROFS layer, ready to be named in a manifest. */
export interface BuiltLayer {
  readonly meta: BuiltBlob;
  /** In slot order. */
  readonly devices: readonly { readonly blob: BuiltBlob; readonly chunkDigests: BuiltBlob }[];
  /** Inodes in it. */
  readonly inodes: number;
}

export interface LayerSink {
  /** A private folder for spool files, on the store's own file system where it has one. The caller removes it. */
  readonly workDir: string;
  put(bytes: Buffer): Promise<Digest>;
  /** Takes over a finished file in `workDir`. */
  putFile(path: string, digest: Digest, sizeBytes: number): Promise<void>;
}
