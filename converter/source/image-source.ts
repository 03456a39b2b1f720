/**
 * Where an image comes from. A source names one image, already resolved to one platform: its config and its layers,
 * bottom first. It moves bytes; verifying digests, inflating and parsing are the converter's.
 */
import type { ByteString, Digest } from '#base';
import type { EntryHandler } from '../layer/entry.ts';

export interface ImageSource {
  /** As the user wrote it, without credentials: for messages. */
  readonly description: string;
  /**
   * Reads what is needed to know the image: index, manifest, config (each verified by its digest).
   * @throws SOURCE_* errors that name the reference and what is wrong with it.
   */
  resolve(): Promise<SourceImage>;
  /** Ends connections, removes temporary files. Safe to call twice. */
  close(): Promise<void>;
}

export interface SourceImage {
  /** The image config's bytes, as found; a minimal one for `tar:` and `dir:`. */
  readonly config: Buffer;
  /** Digest of the manifest that was chosen, where the source has one. */
  readonly manifestDigest: Digest | undefined;
  readonly layers: readonly SourceLayer[];
}

export interface SourceLayer {
  /** For messages: "layer 2/5 sha256:0123456789ab". */
  readonly label: string;
  /** Digest of the blob as it is stored. Undefined where the source gives none (docker-archive, tar:, dir:). */
  readonly digest: Digest | undefined;
  /** Size of the blob as it is stored, where known. */
  readonly sizeBytes: number | undefined;
  /** Digest of the uncompressed tar, from the config. */
  readonly diffId: Digest | undefined;
  /** By media type; `detect`: look at the first bytes. */
  readonly compression: 'gzip' | 'zstd' | 'plain' | 'detect';
  readonly input: LayerInput;
  /** Its tree is placed below this folder: components with a slash between them. Only of a file or a folder. */
  readonly prefix?: ByteString;
}

export type LayerInput =
  /** A blob in a local file, or in a part of one (a member of an archive). Read directly by a worker. */
  | { readonly kind: 'file'; readonly path: string; readonly offset: number; readonly sizeBytes: number }
  /** A blob that arrives over the network. Each call of `open` starts it from the beginning. */
  | { readonly kind: 'stream'; open(signal: AbortSignal): AsyncIterable<Buffer> }
  /** A folder of this machine. */
  | { readonly kind: 'folder'; readonly path: string }
  /** Entries that the caller tells by itself, in this thread: a writable upper, read under its own rules. */
  | { readonly kind: 'entries'; read(handler: EntryHandler): Promise<{ readonly notes: readonly string[] }> };

/** `linux/amd64`, `linux/arm64/v8`. */
export interface Platform {
  readonly os: string;
  readonly architecture: string;
  readonly variant?: string;
}

export interface SourceOptions {
  /** `os/arch[/variant]`; this machine's by default. */
  readonly platform?: Platform;
  /** Absolute path of the folder that the tree of `dir:` or `tar:` is placed at, in place of the root. */
  readonly prefix?: string;
  /** `user:password`, in place of ~/.docker/config.json. */
  readonly credentials?: string;
  /** Plain HTTP, and TLS certificates unverified. */
  readonly insecure?: boolean;
  /** For temporary files; removed by `close`. */
  readonly workDir?: string;
  readonly signal?: AbortSignal;
}
