/**
 * When a conversion need not be done again: its result depends on the image's config and layers, on the options that
 * shape the bytes, and on the converter itself. Those make a key; a record in the store leads from it to the manifest.
 */
import { digestOf, hexOf } from '#base';
import { CONVERTER_VERSION, type SourceImage } from '#converter';
import type { ImageKind } from '../catalog/image.ts';

export const CONVERSION_RECORDS = 'conversion';

export interface ShapingOptions {
  readonly kind: ImageKind;
  readonly collapse: 'data' | 'metadata';
  readonly collapseLimitBytes: number;
  readonly inlineLimitBytes: number;
  readonly compress: string | undefined;
  readonly cuts: readonly number[];
  /** What makes a profile another one; undefined without. */
  readonly profile: string | undefined;
}

/** The key, or undefined when the source names no digests (folders, plain tars): those are read every time. */
export function conversionKey(image: SourceImage, options: ShapingOptions): string | undefined {
  const layers = image.layers.map((layer) => layer.diffId ?? layer.digest);
  if (layers.length === 0 || layers.some((id) => id === undefined)) return undefined;
  const prefixes = image.layers.map((layer) => layer.prefix).filter((prefix) => prefix !== undefined);
  const facts = [CONVERTER_VERSION, digestOf(image.config), layers, options.kind, options.collapse];
  const shape = [options.collapseLimitBytes, options.inlineLimitBytes, options.compress ?? '', options.cuts];
  const profile = options.profile === undefined ? [] : [{ profile: options.profile }];
  return hexOf(digestOf(JSON.stringify([...facts, ...shape, ...prefixes, ...profile])));
}
