/**
 * Conversion as users know it: a source in, a named image in a store out. One image, or many whose shared layers are
 * converted once. Nothing is published unless all of an image is there; what is in the store already costs no work.
 */
import { type ByteString, type Digest, digestOf, isDigest, messageOf, type Progress } from '#base';
import {
  type BuiltLayer,
  type CodecName,
  Converter,
  type ConvertStats,
  cutsWhereChainsPart,
  DEFAULT_COLLAPSE_LIMIT_BYTES,
  DEFAULT_INLINE_LIMIT_BYTES,
  type ImageSource,
  loadLibraries,
  openSource,
  type Platform,
  type SourceImage,
} from '#converter';
import { blobsOf, keepBlobs, publishImage } from '../catalog/catalog.ts';
import type { ErofsLayer, Image, ImageKind } from '../catalog/image.ts';
import { CHUNK_DIGESTS_TYPE, EROFS_TYPE, MANIFEST_TYPE, parseManifest } from '../catalog/manifest.ts';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { parseImageName } from '../store/image-name.ts';
import { CONVERSION_RECORDS, conversionKey, type ShapingOptions } from './conversion-key.ts';
import { storeSink } from './store-sink.ts';

export interface ConvertToStoreOptions {
  /** `base` by default. */
  readonly kind?: ImageKind;
  /** See ConvertOptions of the converter. */
  readonly collapse?: 'data' | 'metadata';
  readonly collapseLimitBytes?: number;
  readonly inlineLimitBytes?: number;
  readonly compress?: CodecName;
  readonly profile?: readonly ByteString[];
  readonly here?: boolean;
  /** See SourceOptions of the converter. */
  readonly platform?: Platform;
  readonly prefix?: string;
  readonly credentials?: string;
  readonly insecure?: boolean;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
}

export interface Conversion {
  readonly source: string;
  /** `repository:tag` */
  readonly name: string;
  readonly digest: Digest;
  readonly image: Image;
  /** True when the result was in the store already. */
  readonly reused: boolean;
  /** Undefined when reused. */
  readonly stats: ConvertStats | undefined;
  readonly notes: readonly string[];
}

/** @throws SOURCE_*, LAYER_*, TAR_*, STORE_*, CATALOG_* errors; then nothing was published under `name` */
export async function convertToStore(
  store: BlobStore,
  source: string,
  name: string,
  options: ConvertToStoreOptions = {},
): Promise<Conversion> {
  const [outcome] = await convertAll(store, [{ source, name }], options);
  if ('error' in outcome!) throw outcome.error;
  return outcome!;
}

export interface BatchItem {
  readonly source: string;
  readonly name: string;
}

export type BatchOutcome = Conversion | { readonly source: string; readonly name: string; readonly error: unknown };

/**
 * Converts many images. Layers and groups that several share are converted once; groups are cut where the images' layer
 * chains part. One that fails does not stop the others.
 */
export async function convertBatch(
  store: BlobStore,
  items: readonly BatchItem[],
  options: ConvertToStoreOptions = {},
  onOutcome: (outcome: BatchOutcome) => void = () => {},
): Promise<BatchOutcome[]> {
  return convertAll(store, items, options, onOutcome);
}

interface Opened extends BatchItem {
  readonly handle: ImageSource;
  readonly image: SourceImage;
  cuts: ReadonlySet<number>;
}

async function convertAll(
  store: BlobStore,
  items: readonly BatchItem[],
  options: ConvertToStoreOptions,
  onOutcome: (outcome: BatchOutcome) => void = () => {},
): Promise<BatchOutcome[]> {
  for (const { name } of items) parseImageName(name);
  const staged = store.stage();
  // While the disk is waited for.
  if (options.here === true) loadLibraries();
  const staging = await staged;
  const outcomes = new Map<BatchItem, BatchOutcome>();
  const settle = (item: BatchItem, outcome: BatchOutcome) => {
    outcomes.set(item, outcome);
    onOutcome(outcome);
  };
  const opened: Opened[] = [];
  const handles: ImageSource[] = [];
  try {
    const sink = storeSink(store, staging);
    // Layers of registries are converted by workers in any case: then one is started while the registry is asked.
    const here = options.here === true && !items.some(({ source }) => source.startsWith('docker://'));
    const converter = new Converter(sink, { ...options, here });
    try {
      converter.warm();
      for (const item of items) {
        try {
          const { platform, prefix, credentials, insecure, signal } = options;
          const handle = await openSource(item.source, {
            platform,
            prefix,
            credentials,
            insecure,
            signal,
            workDir: staging.path,
          });
          handles.push(handle);
          opened.push({ ...item, handle, image: await handle.resolve(), cuts: new Set() });
        } catch (error) {
          settle(item, { ...item, error });
        }
        options.signal?.throwIfAborted();
      }
      planCuts(opened, options);
      const todo: Opened[] = [];
      for (const item of opened) {
        const reused = await findConverted(store, item, options);
        if (reused !== undefined) {
          settle(itemOf(items, item), reused);
          continue;
        }
        converter.expect(item.image);
        todo.push(item);
      }
      for (const item of todo) {
        try {
          settle(itemOf(items, item), await convertOne(store, converter, item, options));
        } catch (error) {
          if (options.signal?.aborted) throw error;
          settle(itemOf(items, item), { source: item.source, name: item.name, error });
        }
      }
    } finally {
      await converter.close();
      await sink.recordProofs();
    }
    return items.map((item) => outcomes.get(item)!);
  } finally {
    for (const handle of handles) await handle.close();
    await staging.remove();
  }
}

function itemOf(items: readonly BatchItem[], opened: Opened): BatchItem {
  return items.find((item) => item.source === opened.source && item.name === opened.name)!;
}

function planCuts(opened: readonly Opened[], options: ConvertToStoreOptions): void {
  if (opened.length < 2 || options.collapse === 'metadata') return;
  const chains = opened.map(({ image }, i) =>
    image.layers.map((layer, n) => layer.diffId ?? layer.digest ?? `${i}.${n}`),
  );
  cutsWhereChainsPart(chains).forEach((cuts, i) => {
    opened[i]!.cuts = cuts;
  });
}

function shapeOf(options: ConvertToStoreOptions, cuts: ReadonlySet<number>): ShapingOptions {
  return {
    kind: options.kind ?? 'base',
    collapse: options.collapse ?? 'data',
    collapseLimitBytes: options.collapseLimitBytes ?? DEFAULT_COLLAPSE_LIMIT_BYTES,
    inlineLimitBytes: options.inlineLimitBytes ?? DEFAULT_INLINE_LIMIT_BYTES,
    compress: options.compress,
    cuts: [...cuts].sort((a, b) => a - b),
    // Without a path it lays out nothing, and is none.
    profile: options.profile?.length ? digestOf(options.profile.join('\0')) : undefined,
  };
}

async function findConverted(
  store: BlobStore,
  item: Opened,
  options: ConvertToStoreOptions,
): Promise<Conversion | undefined> {
  const key = conversionKey(item.image, shapeOf(options, item.cuts));
  if (key === undefined) return undefined;
  const record = (await store.getRecord(CONVERSION_RECORDS, key)) as { manifest?: unknown } | undefined;
  const digest = record?.manifest;
  if (!isDigest(digest)) return undefined;
  const found = await store.stat(digest);
  if (found === undefined) return undefined;
  const hold = await store.hold('publish');
  try {
    const { full } = parseImageName(item.name);
    const image = parseManifest(await store.readVerified(digest), digest, full);
    const manifest = { mediaType: MANIFEST_TYPE, digest, size: image.manifestSize };
    if (!(await keepBlobs(store, [manifest, image.config, ...blobsOf(image.layers)]))) return undefined;
    await store.setRef({ name: full, manifest });
    return { source: item.source, name: full, digest, image, reused: true, stats: undefined, notes: [] };
  } catch (error) {
    // A damaged result is as good as none.
    options.progress?.({ task: item.name, phase: 'convert again', note: messageOf(error) });
    return undefined;
  } finally {
    await hold.release();
  }
}

async function convertOne(
  store: BlobStore,
  converter: Converter,
  item: Opened,
  options: ConvertToStoreOptions,
): Promise<Conversion> {
  if (item.image.layers.length === 0) throw fail('CONVERT_NO_LAYERS', { source: item.source });
  const { layers, stats, notes } = await converter.convert(item.image, { cuts: item.cuts });
  const kind = options.kind ?? 'base';
  const image = await publishImage(store, {
    name: item.name,
    kind,
    layers: layers.map(toErofsLayer),
    config: item.image.config,
  });
  const key = conversionKey(item.image, shapeOf(options, item.cuts));
  if (key !== undefined) await store.putRecord(CONVERSION_RECORDS, key, { manifest: image.manifestDigest });
  return { source: item.source, name: image.name, digest: image.manifestDigest, image, reused: false, stats, notes };
}

export function toErofsLayer(built: BuiltLayer): ErofsLayer {
  return {
    meta: { mediaType: EROFS_TYPE, digest: built.meta.digest, size: built.meta.sizeBytes },
    devices: built.devices.map(({ blob, chunkDigests }) => ({
      blob: { mediaType: EROFS_TYPE, digest: blob.digest, size: blob.sizeBytes },
      chunkDigests: { mediaType: CHUNK_DIGESTS_TYPE, digest: chunkDigests.digest, size: chunkDigests.sizeBytes },
    })),
  };
}
