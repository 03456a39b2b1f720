/** Media types of images, OCI's and Docker's, and what each says about the bytes. */
import type { SourceLayer } from './image-source.ts';

export const OCI_MANIFEST = 'application/vnd.oci.image.manifest.v1+json';
export const OCI_INDEX = 'application/vnd.oci.image.index.v1+json';
export const OCI_CONFIG = 'application/vnd.oci.image.config.v1+json';
export const DOCKER_MANIFEST = 'application/vnd.docker.distribution.manifest.v2+json';
export const DOCKER_LIST = 'application/vnd.docker.distribution.manifest.list.v2+json';
export const DOCKER_CONFIG = 'application/vnd.docker.container.image.v1+json';

/** What a registry is asked for. Schema 1 is left out: a registry that can convert then does not. */
export const ACCEPTED_MANIFESTS = [OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST] as const;

export type ManifestKind = 'manifest' | 'index' | 'schema1' | 'unknown';

export function manifestKind(mediaType: string): ManifestKind {
  switch (mediaType) {
    case OCI_MANIFEST:
    case DOCKER_MANIFEST:
      return 'manifest';
    case OCI_INDEX:
    case DOCKER_LIST:
      return 'index';
    case 'application/vnd.docker.distribution.manifest.v1+json':
    case 'application/vnd.docker.distribution.manifest.v1+prettyjws':
      return 'schema1';
    default:
      return 'unknown';
  }
}

const LAYERS: Record<string, SourceLayer['compression']> = {};
for (const base of [
  'application/vnd.oci.image.layer.v1.tar',
  'application/vnd.oci.image.layer.nondistributable.v1.tar',
]) {
  LAYERS[base] = 'plain';
  LAYERS[`${base}+gzip`] = 'gzip';
  LAYERS[`${base}+zstd`] = 'zstd';
}
for (const base of [
  'application/vnd.docker.image.rootfs.diff.tar',
  'application/vnd.docker.image.rootfs.foreign.diff.tar',
]) {
  LAYERS[base] = 'plain';
  LAYERS[`${base}.gzip`] = 'gzip';
  LAYERS[`${base}.zstd`] = 'zstd';
}

/** How a layer of this type is compressed, or undefined when it is no tar layer. */
export function layerCompression(mediaType: string): SourceLayer['compression'] | undefined {
  return Object.hasOwn(LAYERS, mediaType) ? LAYERS[mediaType] : undefined;
}

/** Layers whose blob may be absent from layouts and registries because another server offers it. */
export function isForeign(mediaType: string): boolean {
  return mediaType.includes('.foreign.') || mediaType.includes('.nondistributable.');
}
