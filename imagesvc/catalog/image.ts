/** An image as the rest of the service sees it: parsed once from its manifest, trusted afterwards. */
import type { Digest } from '#base';
import type { Descriptor } from '../store/blob-store.ts';

/**
 * `base`: converted from OCI. `workspace`, `toolkit`: an increment meant to be composed over any base.
 * `snapshot`: everything a sandbox changed. `disk`: OverlayBD block layers.
 */
export type ImageKind = 'base' | 'workspace' | 'toolkit' | 'disk' | 'snapshot';

/** One kernel mount: a metadata image and the data blobs of its device slots, in slot order. */
export interface ErofsLayer {
  /** The EROFS metadata image (superblock, inodes, directories): small, always local. */
  readonly meta: Descriptor;
  /** Slot k (1-based in EROFS) is `devices[k-1]`. None when no file of the layer has data outside the metadata. */
  readonly devices: readonly LayerDevice[];
}

export interface LayerDevice {
  readonly blob: Descriptor;
  /** A blob of concatenated 32-byte sha256 digests, one per `CHUNK_BYTES` of `blob` (the last chunk may be short). */
  readonly chunkDigests: Descriptor;
}

/** What an image of kind `disk` has in place of EROFS layers. */
export interface DiskParts {
  /** OverlayBD layers in the tar of a registry, bottom first. */
  readonly layers: readonly LayerDevice[];
  /** Of the device, where the manifest says it. */
  readonly sizeBytes: number | undefined;
}

/** Unit of lazy reading and verification. */
export const CHUNK_BYTES = 256 * 1024;

export interface Image {
  /** `repository:tag` it was opened by, or its digest. */
  readonly name: string;
  readonly manifestDigest: Digest;
  readonly manifestSize: number;
  readonly kind: ImageKind;
  /** Bottom first. None where the image is a disk. */
  readonly layers: readonly ErofsLayer[];
  /** Of a disk. */
  readonly disk?: DiskParts;
  /** How many layers at the top are the image's own; the ones below are its base's. All of them for `base`. */
  readonly ownLayers: number;
  /** Manifest digest of the base image, where it was packed on one. */
  readonly base: Digest | undefined;
  readonly config: Descriptor;
}

/** The part of an OCI image config that running an image needs. */
export interface OciConfig {
  readonly architecture?: string;
  readonly os?: string;
  readonly variant?: string;
  readonly config?: {
    readonly User?: string;
    readonly Env?: readonly string[];
    readonly Entrypoint?: readonly string[] | null;
    readonly Cmd?: readonly string[] | null;
    readonly WorkingDir?: string;
    readonly Labels?: Readonly<Record<string, string>> | null;
    readonly StopSignal?: string;
  };
  readonly rootfs?: { readonly type: string; readonly diff_ids: readonly string[] };
}
