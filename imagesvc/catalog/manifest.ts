/**
 * An image's manifest: how it is written, and how it is read and doubted. docs/store.md has the format with an example.
 *
 * It is an ordinary OCI image manifest, so that registries and their tools carry it. It holds no times and nothing of
 * the machine, and its JSON has one form: the same image has the same digest. Reading trusts nothing: what comes out of
 * `parseManifest` has been checked field by field and may be relied on afterwards.
 */
import { type Digest, digestOf, isDigest } from '#base';
import { fail } from '../errors.ts';
import type { Descriptor } from '../store/blob-store.ts';
import { CHUNK_BYTES, type ErofsLayer, type Image, type ImageKind, type LayerDevice } from './image.ts';

export const MANIFEST_TYPE = 'application/vnd.oci.image.manifest.v1+json';
export const CONFIG_TYPE = 'application/vnd.oci.image.config.v1+json';
export const EROFS_TYPE = 'application/vnd.erofs';
export const CHUNK_DIGESTS_TYPE = 'application/vnd.dsec.chunk-digests.v1';

const ROLE = 'org.erofs.role';
const ROLE_META = 'overlay-lower';
const ROLE_DEVICE = 'device';
const OF_BLOB = 'io.dsec.blob';
const KIND = 'io.dsec.kind';
const OWN_LAYERS = 'io.dsec.own-layers';
export const BASE = 'io.dsec.base';
const DISK_SIZE = 'io.dsec.disk-size';

/** Layers of a disk are what OverlayBD's own converter pushes: tars, told by annotations. */
export const DISK_LAYER_TYPE = 'application/vnd.oci.image.layer.v1.tar';
const OVERLAYBD_VERSION = 'containerd.io/snapshot/overlaybd/version';
const OVERLAYBD_DIGEST = 'containerd.io/snapshot/overlaybd/blob-digest';
const OVERLAYBD_SIZE = 'containerd.io/snapshot/overlaybd/blob-size';

const KINDS: readonly ImageKind[] = ['base', 'workspace', 'toolkit', 'disk', 'snapshot'];

/** OCI asks registries to take manifests of 4 MiB; what is larger is no manifest of ours. */
export const MAX_MANIFEST_BYTES = 4 * 1024 * 1024;
const MAX_CONFIG_BYTES = 64 * 1024 * 1024;
/** OverlayFS takes 500 lower layers; devices of an EROFS image are counted by 16 bits. */
const MAX_DEVICES = 65535;
/** As many layers as OverlayBD stacks. */
const MAX_DISK_LAYERS = 255;

export interface ManifestParts {
  readonly kind: ImageKind;
  /** Bottom first, at least one. */
  readonly layers: readonly ErofsLayer[];
  /** How many layers at the top are the image's own. All of them by default. */
  readonly ownLayers?: number;
  /** Manifest digest of the base image. */
  readonly base?: Digest;
  readonly config: Descriptor;
}

export interface DiskManifestParts {
  /** Bottom first, at least one. */
  readonly layers: readonly LayerDevice[];
  readonly ownLayers?: number;
  readonly base?: Digest;
  readonly config: Descriptor;
  /** Of the device. */
  readonly sizeBytes?: number;
}

/** The manifest's bytes. Only digests, sizes and the kind reach them: descriptors' own media types and annotations do not. */
export function buildManifest({ kind, layers, ownLayers = layers.length, base, config }: ManifestParts): Buffer {
  const listed: object[] = [];
  for (const { meta, devices } of layers) {
    listed.push(descriptor(EROFS_TYPE, meta, { [ROLE]: ROLE_META }));
    for (const { blob, chunkDigests } of devices) {
      listed.push(descriptor(EROFS_TYPE, blob, { [ROLE]: ROLE_DEVICE }));
      listed.push(descriptor(CHUNK_DIGESTS_TYPE, chunkDigests, { [OF_BLOB]: blob.digest }));
    }
  }
  return manifestBytes(config, listed, {
    [BASE]: base,
    [KIND]: kind,
    [OWN_LAYERS]: ownLayers === layers.length ? undefined : String(ownLayers),
  });
}

/** The same of a disk. */
export function buildDiskManifest(parts: DiskManifestParts): Buffer {
  const { layers, ownLayers = layers.length, base, config, sizeBytes } = parts;
  const listed = layers.flatMap(({ blob, chunkDigests }) => [
    descriptor(DISK_LAYER_TYPE, blob, {
      [OVERLAYBD_VERSION]: '0.1.0',
      [OVERLAYBD_DIGEST]: blob.digest,
      [OVERLAYBD_SIZE]: String(blob.size),
    }),
    descriptor(CHUNK_DIGESTS_TYPE, chunkDigests, { [OF_BLOB]: blob.digest }),
  ]);
  return manifestBytes(config, listed, {
    [BASE]: base,
    [DISK_SIZE]: sizeBytes === undefined ? undefined : String(sizeBytes),
    [KIND]: 'disk',
    [OWN_LAYERS]: ownLayers === layers.length ? undefined : String(ownLayers),
  });
}

/** Annotations without a value are left out. */
function manifestBytes(config: Descriptor, layers: object[], annotations: Record<string, string | undefined>): Buffer {
  const bytes = Buffer.from(
    JSON.stringify({
      schemaVersion: 2,
      mediaType: MANIFEST_TYPE,
      config: descriptor(CONFIG_TYPE, config),
      layers,
      annotations,
    }),
  );
  // What we would not read, we do not write.
  parseManifest(bytes, digestOf(bytes));
  return bytes;
}

function descriptor(mediaType: string, { digest, size }: Descriptor, annotations?: Record<string, string>): object {
  return annotations ? { mediaType, digest, size, annotations } : { mediaType, digest, size };
}

/** How many bytes of chunk digests a blob of this size has. */
export function chunkDigestsSize(blobSizeBytes: number): number {
  return Math.ceil(blobSizeBytes / CHUNK_BYTES) * 32;
}

/**
 * The image in a manifest's bytes, named by `name` or else by its digest. The bytes are the caller's to verify.
 * @throws CATALOG_MANIFEST, which names the field; CATALOG_NOT_CONVERTED for an ordinary image or an index of images
 */
export function parseManifest(bytes: Buffer, digest: Digest, name: string = digest): Image {
  const reader = new ManifestReader(digest);
  const manifest = reader.json(bytes);
  if (!isDisk(manifest)) refuseOrdinary(manifest, digest);
  if (manifest.schemaVersion !== 2) throw reader.wrong('schemaVersion', 'must be 2');
  if (manifest.mediaType !== undefined && manifest.mediaType !== MANIFEST_TYPE) {
    throw reader.wrong('mediaType', `must be ${MANIFEST_TYPE}`);
  }
  const annotations = reader.annotations(manifest.annotations, 'annotations');
  const kind = KINDS.find((known) => known === annotations[KIND]);
  if (kind === undefined) throw reader.wrong(`annotation ${KIND}`, `must be one of ${KINDS.join(', ')}`);
  const config = reader.descriptor(manifest.config, 'config');
  if (config.mediaType !== CONFIG_TYPE) throw reader.wrong('config.mediaType', `must be ${CONFIG_TYPE}`);
  if (config.size > MAX_CONFIG_BYTES) throw reader.wrong('config.size', `must be at most ${MAX_CONFIG_BYTES}`);
  const disk =
    kind === 'disk'
      ? { layers: reader.diskLayers(manifest.layers), sizeBytes: reader.diskSize(annotations[DISK_SIZE]) }
      : undefined;
  const layers = disk === undefined ? reader.layers(manifest.layers) : [];
  const base = annotations[BASE];
  if (base !== undefined && !isDigest(base)) throw reader.wrong(`annotation ${BASE}`, 'must be a sha256 digest');
  return {
    name,
    manifestDigest: digest,
    manifestSize: bytes.length,
    kind,
    layers,
    ...(disk === undefined ? {} : { disk }),
    ownLayers: reader.ownLayers(annotations[OWN_LAYERS], (disk ?? { layers }).layers.length),
    base,
    config,
  };
}

/** What OverlayBD's own converter has pushed: config and layers, bottom first. Undefined for any other manifest. */
export function overlaybdParts(bytes: Buffer): { config: Descriptor; layers: Descriptor[] } | undefined {
  const reader = new ManifestReader(digestOf(bytes));
  const { config, layers, annotations } = reader.json(bytes);
  if (!Array.isArray(layers) || layers.length === 0 || (isFields(annotations) && annotations[KIND] !== undefined)) {
    return undefined;
  }
  if (!layers.every(isOverlaybdLayer)) return undefined;
  const listed = layers.map((layer, i) => reader.descriptor(layer, `layers[${i}]`));
  for (const [i, { digest, annotations = {} }] of listed.entries()) {
    if (annotations[OVERLAYBD_DIGEST] !== digest)
      throw reader.wrong(`layers[${i}], annotation ${OVERLAYBD_DIGEST}`, `must be ${digest}`);
  }
  return { config: reader.descriptor(config, 'config'), layers: listed };
}

type Fields = Record<string, unknown>;

function isFields(value: unknown): value is Fields {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function isOverlaybdLayer(layer: unknown): boolean {
  return isFields(layer) && isFields(layer.annotations) && typeof layer.annotations[OVERLAYBD_DIGEST] === 'string';
}

function isDisk({ annotations }: Fields): boolean {
  return isFields(annotations) && annotations[KIND] === 'disk';
}

const INDEX_TYPES = [
  'application/vnd.oci.image.index.v1+json',
  'application/vnd.docker.distribution.manifest.list.v2+json',
];
const ORDINARY_LAYER = /^application\/vnd\.(oci\.image\.layer|docker\.image\.rootfs)\./;

/** An image that is fine, only not ours, deserves a better word than "wrong field". */
function refuseOrdinary(manifest: Fields, digest: Digest): void {
  const ordinary = (why: string) => fail('CATALOG_NOT_CONVERTED', { digest, why });
  if (INDEX_TYPES.includes(String(manifest.mediaType)) || Array.isArray(manifest.manifests)) {
    throw ordinary('it is an index of images for several platforms');
  }
  if (manifest.schemaVersion === 1) throw ordinary('it is in the old schema 1');
  const listed: unknown[] = Array.isArray(manifest.layers) ? manifest.layers : [];
  if (listed.length > 0 && listed.every(isOverlaybdLayer)) {
    throw ordinary('it is one of OverlayBD, which `dsec pull` makes a disk image of');
  }
  for (const layer of listed) {
    const mediaType = isFields(layer) ? layer.mediaType : undefined;
    if (typeof mediaType === 'string' && ORDINARY_LAYER.test(mediaType)) {
      throw ordinary(`its layers are ${mediaType}, not EROFS`);
    }
  }
  if (manifest.mediaType === 'application/vnd.docker.distribution.manifest.v2+json') {
    throw ordinary("it is in Docker's format");
  }
}

/** Reads one manifest's fields; every error names the manifest and the field. */
class ManifestReader {
  readonly #digest: Digest;
  readonly #sizes = new Map<Digest, number>();

  constructor(digest: Digest) {
    this.#digest = digest;
  }

  wrong(where: string, why: string): Error {
    return fail('CATALOG_MANIFEST', { digest: this.#digest, where, why });
  }

  json(bytes: Buffer): Fields {
    if (bytes.length > MAX_MANIFEST_BYTES)
      throw this.wrong('size', `${bytes.length} bytes, more than ${MAX_MANIFEST_BYTES}`);
    let value: unknown;
    try {
      value = JSON.parse(bytes.toString('utf8'));
    } catch {
      throw this.wrong('content', 'is not JSON');
    }
    if (!isFields(value)) throw this.wrong('content', 'is not a JSON object');
    return value;
  }

  annotations(value: unknown, where: string): Record<string, string> {
    if (value === undefined) return {};
    if (!isFields(value)) throw this.wrong(where, 'must be an object');
    for (const [key, text] of Object.entries(value)) {
      if (typeof text !== 'string') throw this.wrong(`${where}["${key}"]`, 'must be a string');
    }
    return value as Record<string, string>;
  }

  descriptor(value: unknown, where: string): Descriptor {
    if (!isFields(value)) throw this.wrong(where, 'must be a descriptor');
    const { mediaType, digest, size } = value;
    if (typeof mediaType !== 'string') throw this.wrong(`${where}.mediaType`, 'must be a string');
    if (!isDigest(digest)) throw this.wrong(`${where}.digest`, 'must be sha256 and 64 lowercase hex digits');
    if (typeof size !== 'number' || !Number.isSafeInteger(size) || size < 0) {
      throw this.wrong(`${where}.size`, 'must be a number of bytes');
    }
    // Blobs are looked up by digest: two sizes for one would leave one of them unchecked.
    const known = this.#sizes.get(digest) ?? size;
    if (known !== size) throw this.wrong(`${where}.size`, `${size}, but elsewhere ${digest} has ${known} bytes`);
    this.#sizes.set(digest, size);
    const annotations = this.annotations(value.annotations, `${where}.annotations`);
    return Object.keys(annotations).length === 0
      ? { mediaType, digest, size }
      : { mediaType, digest, size, annotations };
  }

  layers(value: unknown): ErofsLayer[] {
    if (!Array.isArray(value)) throw this.wrong('layers', 'must be a list');
    const layers: { meta: Descriptor; devices: LayerDevice[] }[] = [];
    for (let i = 0; i < value.length; i++) {
      const where = `layers[${i}]`;
      const listed = this.descriptor(value[i], where);
      const role = this.#roleOf(listed, where);
      if (role === ROLE_META) {
        if (listed.size === 0) throw this.wrong(`${where}.size`, 'an EROFS image is not empty');
        layers.push({ meta: listed, devices: [] });
        continue;
      }
      const layer = layers.at(-1);
      if (layer === undefined) throw this.wrong(where, 'a device comes before any metadata image');
      if (layer.devices.length === MAX_DEVICES)
        throw this.wrong(where, `more than ${MAX_DEVICES} devices of one layer`);
      i++;
      layer.devices.push({ blob: listed, chunkDigests: this.#chunkDigests(value[i], `layers[${i}]`, listed) });
    }
    if (layers.length === 0) throw this.wrong('layers', 'there is none');
    return layers;
  }

  diskLayers(value: unknown): LayerDevice[] {
    if (!Array.isArray(value) || value.length === 0) throw this.wrong('layers', 'must be a list, and not empty');
    if (value.length > 2 * MAX_DISK_LAYERS) throw this.wrong('layers', `more than ${MAX_DISK_LAYERS} layers of a disk`);
    const layers: LayerDevice[] = [];
    for (let i = 0; i < value.length; i += 2) {
      const where = `layers[${i}]`;
      const blob = this.descriptor(value[i], where);
      if (blob.mediaType !== DISK_LAYER_TYPE) throw this.wrong(`${where}.mediaType`, `must be ${DISK_LAYER_TYPE}`);
      if (blob.annotations?.[OVERLAYBD_DIGEST] !== blob.digest) {
        throw this.wrong(`${where}, annotation ${OVERLAYBD_DIGEST}`, `must be ${blob.digest}`);
      }
      if (blob.size === 0) throw this.wrong(`${where}.size`, 'a layer is not empty');
      layers.push({ blob, chunkDigests: this.#chunkDigests(value[i + 1], `layers[${i + 1}]`, blob) });
    }
    return layers;
  }

  diskSize(text: string | undefined): number | undefined {
    if (text === undefined) return undefined;
    const size = /^(0|[1-9]\d{0,15})$/.test(text) ? Number(text) : Number.NaN;
    if (!Number.isSafeInteger(size) || size % 512 !== 0) {
      throw this.wrong(`annotation ${DISK_SIZE}`, 'must be a number of bytes, in whole sectors');
    }
    return size;
  }

  #roleOf({ mediaType, annotations = {} }: Descriptor, where: string): string {
    if (mediaType === CHUNK_DIGESTS_TYPE) throw this.wrong(where, 'chunk digests without their device before them');
    if (mediaType !== EROFS_TYPE) throw this.wrong(`${where}.mediaType`, `"${mediaType}" is unknown`);
    const role = annotations[ROLE];
    if (role !== ROLE_META && role !== ROLE_DEVICE) {
      const what = role === undefined ? 'is missing' : `"${role}" is unknown`;
      throw this.wrong(`${where}, annotation ${ROLE}`, `${what}; it must be ${ROLE_META} or ${ROLE_DEVICE}`);
    }
    return role;
  }

  #chunkDigests(value: unknown, where: string, blob: Descriptor): Descriptor {
    if (value === undefined) throw this.wrong(where, `the chunk digests of device ${blob.digest} are missing`);
    const listed = this.descriptor(value, where);
    if (listed.mediaType !== CHUNK_DIGESTS_TYPE) {
      throw this.wrong(`${where}.mediaType`, `must be ${CHUNK_DIGESTS_TYPE}, for device ${blob.digest} before it`);
    }
    if (listed.annotations?.[OF_BLOB] !== blob.digest) {
      throw this.wrong(`${where}, annotation ${OF_BLOB}`, `must be ${blob.digest}, the device before it`);
    }
    const expected = chunkDigestsSize(blob.size);
    if (listed.size !== expected) {
      throw this.wrong(
        `${where}.size`,
        `must be ${expected}: 32 bytes for each ${CHUNK_BYTES} of the device's ${blob.size}`,
      );
    }
    return listed;
  }

  ownLayers(text: string | undefined, layers: number): number {
    if (text === undefined) return layers;
    const count = /^(0|[1-9]\d{0,8})$/.test(text) ? Number(text) : Number.NaN;
    if (!(count <= layers)) throw this.wrong(`annotation ${OWN_LAYERS}`, `must be a number from 0 to ${layers}`);
    return count;
  }
}
