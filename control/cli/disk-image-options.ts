/** Options of commands that publish a disk as an image, and what is said of it then. */
import type { Command } from 'commander';
import { humanSize } from '#base';
import type { ZfileOptions } from '#ublk-daemon';
import type { PublishedDisk } from '../disk-images/publish.ts';
import { choice } from './choice.ts';
import { counted } from './counted.ts';
import { shortDigest } from './digest-text.ts';
import { withStore } from './store-option.ts';

export interface LayerFormatOption {
  readonly compress?: string;
  readonly blockSize?: string;
}

export function withLayerFormat(command: Command, fallback: string): Command {
  return command
    .option('--compress <algorithm>', `the layer, in a ZFile: zstd, lz4 or none (default: ${fallback})`)
    .option('--block-size <KiB>', 'of the ZFile: 4, 8, 16, 32 or 64 (default: 4, of an image 16)');
}

export function withImageName(command: Command): Command {
  return withStore(command).option(
    '--name <image>',
    'publish it in the store under this name, as an image of kind disk',
  );
}

/** Of a file as OverlayBD's tools have them; of an image: smaller, and fewer bytes for the same reads (`npm run bench -- disk-mount`). */
const FALLBACKS = { file: ['none', '4'], image: ['zstd', '16'] } as const;

/** Undefined: not compressed. */
export function layerFormat(options: LayerFormatOption, of: keyof typeof FALLBACKS): ZfileOptions | undefined {
  const [compress, size] = FALLBACKS[of];
  const algorithm = choice('--compress', options.compress ?? compress, ['zstd', 'lz4', 'none'] as const);
  const blockSize = Number(choice('--block-size', options.blockSize ?? size, ['4', '8', '16', '32', '64'])) * 1024;
  return algorithm === 'none' ? undefined : { algorithm, blockSize };
}

export function publishedText({ image, newLayers, newBytes }: PublishedDisk): string {
  const layers = image.disk?.layers.length ?? 0;
  return `${image.name}: ${shortDigest(image.manifestDigest)}, ${counted(layers, 'layer')}, ${newLayers} new (${humanSize(newBytes)})`;
}

export function publishedJson({ image, newLayers, newBytes }: PublishedDisk): object {
  return {
    name: image.name,
    digest: image.manifestDigest,
    layers: image.disk?.layers.length ?? 0,
    newLayers,
    newBytes,
  };
}
