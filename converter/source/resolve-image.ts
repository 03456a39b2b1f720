/**
 * From a manifest or index to an image's config and layers: the part that layouts, archives and registries share.
 * They differ in how a blob is read; this chooses the platform, verifies what is read whole, and checks that config and
 * manifest speak of the same layers.
 */
import { type Digest, digestOf } from '#base';
import { fail } from '../errors.ts';
import type { LayerInput, Platform, SourceImage, SourceLayer } from './image-source.ts';
import {
  type ImageConfig,
  MAX_DOCUMENT_BYTES,
  type Manifest,
  parseImageConfig,
  parseManifestDocument,
  type SourceDescriptor,
} from './manifest.ts';
import { isForeign, layerCompression } from './media-types.ts';
import { formatPlatform, hostPlatform, platformScore } from './platform.ts';
import { list, quote } from './quote.ts';

/** How one kind of source reads blobs. */
export interface BlobAccess {
  /** For messages: `oci:/images/x:latest`. */
  readonly where: string;
  /** The whole blob, at most `descriptor.sizeBytes` bytes; verified by the caller. @throws SOURCE_BLOB_MISSING */
  read(descriptor: SourceDescriptor, what: 'manifest' | 'config'): Promise<Buffer>;
  /** How a layer's blob will be read. Local sources see to it that it is there with its size. @throws SOURCE_BLOB_MISSING, SOURCE_SIZE_MISMATCH */
  layerInput(descriptor: SourceDescriptor, label: string): Promise<LayerInput>;
}

/** Indexes in indexes; none that is honest goes deeper than two. */
const MAX_DEPTH = 4;

/** Reads a blob whole and verifies it. @throws SOURCE_TOO_LARGE, SOURCE_SIZE_MISMATCH, SOURCE_DIGEST_MISMATCH */
export async function readVerified(
  access: BlobAccess,
  descriptor: SourceDescriptor,
  what: 'manifest' | 'config',
): Promise<Buffer> {
  const name = `${what} ${descriptor.digest}`;
  if (descriptor.sizeBytes > MAX_DOCUMENT_BYTES) {
    throw fail('SOURCE_TOO_LARGE', {
      where: access.where,
      what: name,
      actual: descriptor.sizeBytes,
      limit: MAX_DOCUMENT_BYTES,
    });
  }
  const bytes = await access.read(descriptor, what);
  verifyBytes(access.where, name, bytes, descriptor.sizeBytes, descriptor.digest);
  return bytes;
}

export function verifyBytes(
  where: string,
  what: string,
  bytes: Buffer,
  sizeBytes: number | undefined,
  digest: Digest,
): void {
  if (sizeBytes !== undefined && bytes.length !== sizeBytes) {
    throw fail('SOURCE_SIZE_MISMATCH', { where, what, actual: bytes.length, expected: sizeBytes });
  }
  const actual = digestOf(bytes);
  if (actual !== digest) throw fail('SOURCE_DIGEST_MISMATCH', { where, what, actual, expected: digest });
}

/** The image behind one of `candidates`, which stand for one name and differ by platform. */
export async function resolveDescriptors(
  access: BlobAccess,
  candidates: readonly SourceDescriptor[],
  platform: Platform | undefined,
  depth = 0,
): Promise<SourceImage> {
  const chosen = choosePlatform(access.where, candidates, platform);
  return resolveDocument(
    access,
    await readVerified(access, chosen, 'manifest'),
    chosen.mediaType,
    chosen.digest,
    platform,
    depth,
  );
}

/** The image that a verified manifest or index stands for. */
export async function resolveDocument(
  access: BlobAccess,
  bytes: Buffer,
  mediaType: string | undefined,
  digest: Digest,
  platform: Platform | undefined,
  depth = 0,
): Promise<SourceImage> {
  const where = `${access.where}, manifest ${short(digest)}`;
  const document = parseManifestDocument(bytes, where, mediaType);
  if (document.kind === 'index') {
    if (depth >= MAX_DEPTH) {
      throw fail('SOURCE_MANIFEST_TYPE', {
        where: access.where,
        mediaType: `an index ${MAX_DEPTH} levels deep in indexes`,
        remedy: 'name the platform’s manifest by its digest',
      });
    }
    return resolveDescriptors(access, document.entries, platform, depth + 1);
  }
  return resolveManifest(access, document.manifest, digest, platform);
}

async function resolveManifest(
  access: BlobAccess,
  manifest: Manifest,
  digest: Digest,
  platform: Platform | undefined,
): Promise<SourceImage> {
  const { where } = access;
  // The layers' types first: they need no reading.
  const total = manifest.layers.length;
  const labels = manifest.layers.map((layer, i) => layerLabel(i, total, layer.digest));
  const compressions = manifest.layers.map((layer, i) => compressionOf(where, labels[i]!, layer.mediaType));
  const bytes = await readVerified(access, manifest.config, 'config');
  const config = parseImageConfig(bytes, `${where}, config ${short(manifest.config.digest)}`);
  checkConfig(where, config, total, platform);

  const layers: SourceLayer[] = [];
  for (const [i, layer] of manifest.layers.entries()) {
    layers.push({
      label: labels[i]!,
      digest: layer.digest,
      sizeBytes: layer.sizeBytes,
      diffId: config.diffIds[i],
      compression: compressions[i]!,
      input: await access.layerInput(layer, labels[i]!),
    });
  }
  return { config: bytes, manifestDigest: digest, layers };
}

/** @throws SOURCE_DIFF_IDS, SOURCE_PLATFORM when a platform was asked for and the image is for another one */
export function checkConfig(where: string, config: ImageConfig, layers: number, platform: Platform | undefined): void {
  if (config.diffIds.length !== layers) {
    throw fail('SOURCE_DIFF_IDS', { where, layers, diffIds: config.diffIds.length });
  }
  if (platform !== undefined && platformScore(platform, config.platform) === 0) {
    throw fail('SOURCE_PLATFORM', {
      where,
      platform: formatPlatform(platform),
      platforms: quote(formatPlatform(config.platform)),
    });
  }
}

export function layerLabel(index: number, total: number, name: Digest | string): string {
  return `layer ${index + 1}/${total} ${short(name)}`;
}

/** `sha256:0123456789ab` of a digest, anything else as it is. */
function short(name: string): string {
  return /^sha256:[0-9a-f]{64}$/.test(name) ? name.slice(0, 19) : name;
}

/** How a missing foreign layer is explained; empty for others. */
export function foreignNote(descriptor: SourceDescriptor): string {
  return isForeign(descriptor.mediaType) ? ' (a foreign layer, kept only by its vendor’s server)' : '';
}

function compressionOf(where: string, label: string, mediaType: string): SourceLayer['compression'] {
  const compression = layerCompression(mediaType);
  if (compression !== undefined) return compression;
  const remedy = mediaType.includes('encrypted')
    ? 'decrypt the image first: skopeo copy --decryption-key KEY SOURCE oci:DIR'
    : mediaType.includes('erofs')
      ? 'this image is converted already: use dsec pull'
      : 'only tar layers (plain, gzip, zstd) make an image’s file system';
  throw fail('SOURCE_LAYER_TYPE', { where, label, mediaType: quote(mediaType), remedy });
}

function choosePlatform(
  where: string,
  candidates: readonly SourceDescriptor[],
  platform: Platform | undefined,
): SourceDescriptor {
  const wanted = platform ?? hostPlatform();
  let best: SourceDescriptor | undefined;
  let bestScore = 0;
  // Builders keep attestations beside the images, as manifests for `unknown/unknown`.
  const images = candidates.filter((entry) => entry.platform?.os !== 'unknown');
  for (const entry of images) {
    if (entry.platform === undefined) continue;
    const score = platformScore(wanted, entry.platform);
    if (score > bestScore) {
      best = entry;
      bestScore = score;
    }
  }
  if (best !== undefined) return best;
  // An entry that names no platform is taken only where it is the one thing there is; its config is checked later.
  const unnamed = images.filter((entry) => entry.platform === undefined);
  if (unnamed.length === 1 && images.length === 1) return unnamed[0]!;
  const names = images.map((entry) =>
    entry.platform ? quote(formatPlatform(entry.platform)) : `${entry.digest} (no platform)`,
  );
  throw fail('SOURCE_PLATFORM', {
    where,
    platform: formatPlatform(wanted),
    platforms: list([...new Set(names)].map((name) => name.replace(/^"|"$/g, ''))),
  });
}
