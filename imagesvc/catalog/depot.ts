/**
 * Where a converted image can be carried to and from: a repository of a registry, an OCI image layout in a folder, or
 * one in a tar file. A depot holds one image at a time, the one that its address names.
 */
import type { Digest, Progress } from '#base';
import { fail } from '../errors.ts';
import type { Descriptor } from '../store/blob-store.ts';

export interface Depot {
  /** For messages, without credentials. */
  readonly description: string;
  /** Where it is a registry's. */
  readonly registry?: string;
  readonly repository?: string;
  /** The manifest's bytes; verified where the address or an index names its digest. */
  manifest(signal?: AbortSignal): Promise<Buffer>;
  /** The blob in order, not verified. */
  open(blob: Descriptor, signal: AbortSignal): AsyncIterable<Buffer>;
  /** Whether the blob is there, or could be brought there without sending it. */
  has(blob: Descriptor, signal: AbortSignal): Promise<boolean>;
  /** `open` may be called again, and fails when the bytes are not the blob's. */
  put(blob: Descriptor, open: () => AsyncIterable<Buffer>, signal: AbortSignal): Promise<void>;
  /** Publishes the image; all its blobs are there. */
  putManifest(bytes: Buffer, digest: Digest, mediaType: string, signal?: AbortSignal): Promise<void>;
  /** Manifests of traces of the image (trace/trace-artifact.ts), not checked. */
  traces(image: Digest, signal: AbortSignal): Promise<Buffer[]>;
  /** To be called before `putManifest`; the blobs that it names are there. */
  putTraces(bytes: Buffer, revision: number, image: Digest, signal: AbortSignal): Promise<void>;
  /** Safe to call twice. */
  close(): Promise<void>;
}

export interface TransferOptions {
  /** `user:password` for a registry. */
  readonly credentials?: string;
  /** Plain HTTP, and TLS certificates unverified. */
  readonly insecure?: boolean;
  /** Blobs at once; 4. */
  readonly parallel?: number;
  /** Repositories of the same registry that may have blobs already. */
  readonly mountFrom?: readonly string[];
  /** False: the image alone. */
  readonly traces?: boolean;
  /** Told of traces that are not carried, for people. */
  readonly onTraceProblem?: (text: string) => void;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
}

export const DEFAULT_PARALLEL = 4;

export interface DepotOptions extends TransferOptions {
  /** For unpacking an archive. */
  readonly workDir: string;
  /** Where the address names none: what is sent gets a tag, what is fetched is found without one. */
  readonly defaultTag?: string;
  /** A repository of the registry that may have this blob, remembered from an earlier push. */
  readonly lastPushedTo?: (registry: string, digest: Digest) => Promise<string | undefined>;
}

/** @throws CATALOG_DESTINATION, SOURCE_REFERENCE, SOURCE_CREDENTIALS */
export async function openDepot(text: string, options: DepotOptions): Promise<Depot> {
  const address = parseAddress(text);
  // What speaks to registries is large, and is loaded only for them.
  switch (address.kind) {
    case 'docker': {
      const { RegistryDepot } = await import('./registry-depot.ts');
      return new RegistryDepot(address.reference, options);
    }
    case 'oci': {
      const { LayoutDepot } = await import('./layout-depot.ts');
      return new LayoutDepot(address.path, address.tag ?? options.defaultTag);
    }
    case 'oci-archive': {
      const { ArchiveDepot } = await import('./archive-depot.ts');
      return new ArchiveDepot(address.path, address.tag ?? options.defaultTag, options.workDir);
    }
  }
}

export type Address =
  | { readonly kind: 'docker'; readonly reference: string }
  | { readonly kind: 'oci'; readonly path: string; readonly tag: string | undefined }
  | { readonly kind: 'oci-archive'; readonly path: string; readonly tag: string | undefined };

/** `docker://REF`, `oci:DIR[:tag]`, `oci-archive:FILE[:tag]`; as in skopeo, a path ends at the first colon. @throws CATALOG_DESTINATION */
export function parseAddress(text: string): Address {
  const wrong = (why: string) => fail('CATALOG_DESTINATION', { destination: text, why });
  if (text.startsWith('docker://')) return { kind: 'docker', reference: text.slice('docker://'.length) };
  const parts = /^(oci|oci-archive):([^:]*)(?::(.*))?$/s.exec(text);
  if (!parts) {
    // It may hold a password: say only what it begins with.
    throw fail('CATALOG_DESTINATION', {
      destination: `${text.slice(0, 12)}...`,
      why: 'it begins with none of docker://, oci: and oci-archive:',
    });
  }
  const [, kind, path, tag] = parts as unknown as [string, 'oci' | 'oci-archive', string, string | undefined];
  if (path === '' || text.includes('\0')) throw wrong('the path is missing');
  if (tag === '') throw wrong('nothing follows the last colon');
  return { kind, path, tag };
}
