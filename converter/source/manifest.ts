/** Image manifests, indexes and configs, parsed and validated; what is here is true of the bytes, no more. */
import type { Digest } from '#base';
import { fail } from '../errors.ts';
import type { Platform } from './image-source.ts';
import { JsonFields } from './json-fields.ts';
import { DOCKER_CONFIG, DOCKER_MANIFEST, manifestKind, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST } from './media-types.ts';
import { quote } from './quote.ts';

/** Manifests, indexes and configs beyond this are refused. Registries have the same bound. */
export const MAX_DOCUMENT_BYTES = 4 * 1024 * 1024;

/** OverlayFS and every builder stop far below. */
const MAX_LAYERS = 4096;

/** What points to a blob. */
export interface SourceDescriptor {
  readonly mediaType: string;
  readonly digest: Digest;
  readonly sizeBytes: number;
  readonly annotations: ReadonlyMap<string, string>;
  readonly platform: Platform | undefined;
  /** Where a foreign layer may be fetched. */
  readonly urls: readonly string[];
}

export interface Manifest {
  readonly config: SourceDescriptor;
  readonly layers: readonly SourceDescriptor[];
}

export type ManifestDocument =
  | { readonly kind: 'manifest'; readonly manifest: Manifest }
  | { readonly kind: 'index'; readonly entries: readonly SourceDescriptor[] };

/**
 * The document in `bytes`. Its own `mediaType` decides, then what was said of it from outside (a descriptor, a
 * Content-Type), then its fields.
 * @throws SOURCE_JSON, SOURCE_FIELD, SOURCE_SCHEMA1, SOURCE_MANIFEST_TYPE, SOURCE_CONFIG_TYPE
 */
export function parseManifestDocument(bytes: Buffer, where: string, outerType: string | undefined): ManifestDocument {
  const root = JsonFields.parse(bytes, where);
  const mediaType = documentType(root, outerType);
  const kind = manifestKind(mediaType);
  if (kind === 'schema1') throw fail('SOURCE_SCHEMA1', { where });
  if (kind === 'unknown') {
    throw fail('SOURCE_MANIFEST_TYPE', {
      where,
      mediaType: quote(mediaType),
      remedy:
        'the reference must name a container image (OCI or Docker schema 2 manifest, OCI index or Docker manifest list)',
    });
  }
  if (root.get('schemaVersion').size() !== 2) throw root.get('schemaVersion').problem('must be 2');
  if (kind === 'index') {
    // A document that is both at once reads differently to different tools.
    if (root.get('layers').present || root.get('config').present) {
      throw root
        .get('manifests')
        .problem('stands beside the fields of a manifest: the document is both index and manifest');
    }
    return { kind, entries: root.get('manifests').array().map(parseDescriptor) };
  }
  if (root.get('manifests').present) {
    throw root.get('manifests').problem('stands in an image manifest: the document is both index and manifest');
  }
  const config = parseDescriptor(root.get('config'));
  if (config.mediaType !== OCI_CONFIG && config.mediaType !== DOCKER_CONFIG) {
    throw fail('SOURCE_CONFIG_TYPE', { where, mediaType: quote(config.mediaType) });
  }
  return { kind, manifest: { config, layers: root.get('layers').array(MAX_LAYERS).map(parseDescriptor) } };
}

/** The media type of a manifest document: see parseManifestDocument. */
export function documentType(root: JsonFields, outerType: string | undefined): string {
  if (root.get('schemaVersion').value === 1 || root.get('fsLayers').present) {
    return 'application/vnd.docker.distribution.manifest.v1+json';
  }
  const own = root.get('mediaType').optionalString();
  if (own !== undefined && own !== '') return own;
  if (outerType !== undefined && manifestKind(outerType) !== 'unknown') return outerType;
  if (root.get('manifests').present) return OCI_INDEX;
  if (root.get('layers').present)
    return root.get('config').get('mediaType').value === DOCKER_CONFIG ? DOCKER_MANIFEST : OCI_MANIFEST;
  return outerType ?? '(none)';
}

export function parseDescriptor(field: JsonFields): SourceDescriptor {
  const urls = field.get('urls');
  return {
    mediaType: field.get('mediaType').string(),
    digest: field.get('digest').digest(),
    sizeBytes: field.get('size').size(),
    annotations: field.get('annotations').strings(),
    platform: parsePlatformField(field.get('platform')),
    urls: urls.present ? urls.array().map((url) => url.string()) : [],
  };
}

function parsePlatformField(field: JsonFields): Platform | undefined {
  if (!field.present) return undefined;
  const os = field.get('os').string();
  const architecture = field.get('architecture').string();
  const variant = field.get('variant').optionalString();
  return variant === undefined || variant === '' ? { os, architecture } : { os, architecture, variant };
}

export interface ImageConfig {
  readonly platform: Platform;
  readonly diffIds: readonly Digest[];
}

/** The fields of an image config that say what its layers are. @throws SOURCE_JSON, SOURCE_FIELD */
export function parseImageConfig(bytes: Buffer, where: string): ImageConfig {
  const root = JsonFields.parse(bytes, where);
  const os = root.get('os').string();
  const architecture = root.get('architecture').string();
  const variant = root.get('variant').optionalString();
  const rootfs = root.get('rootfs');
  const type = rootfs.get('type');
  if (type.string() !== 'layers') throw type.problem(`${quote(type.string())} is not "layers"`);
  const ids = rootfs.get('diff_ids');
  return {
    platform: variant === undefined || variant === '' ? { os, architecture } : { os, architecture, variant },
    // A missing or null list is what Go writes for an image without layers.
    diffIds: ids.present ? ids.array(MAX_LAYERS).map((id) => id.digest()) : [],
  };
}

/** A config for sources that have none. Only what the platform says: same input, same bytes, on any machine. */
export function minimalConfig(platform: Platform): Buffer {
  const variant = platform.variant === undefined ? {} : { variant: platform.variant };
  return Buffer.from(
    JSON.stringify({
      architecture: platform.architecture,
      ...variant,
      os: platform.os,
      config: {},
      rootfs: { type: 'layers', diff_ids: [] },
    }),
  );
}
