/**
 * What a sandbox changed, as an image: its writable upper becomes one EROFS layer on top of the layers that it ran on.
 * Deletions stay deletions (whiteouts, opaque directories). A mark that hides nothing of what lay below is dropped, so that
 * a packed workspace or toolkit can be laid over other bases, too.
 */
import type { Digest, Progress } from '#base';
import { type CodecName, Converter, type ConvertStats, type SourceImage } from '#converter';
import { publishImage } from '../catalog/catalog.ts';
import type { ErofsLayer, Image, ImageKind } from '../catalog/image.ts';
import { toErofsLayer } from '../convert/convert-to-store.ts';
import { storeSink } from '../convert/store-sink.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { parseImageName } from '../store/image-name.ts';
import { openLowerView } from './lower-view.ts';
import { readUpper } from './upper-reader.ts';

export interface PackDiffOptions {
  /** The OverlayFS upper directory. Nothing may write to it until `onRead`. */
  readonly upperDir: string;
  /** All of it was read. */
  readonly onRead?: () => void;
  /** What lay below it, bottom first. */
  readonly lowers: readonly ErofsLayer[];
  /** The new image's config, and the manifest of what it is based on. */
  readonly config: Descriptor;
  readonly base: Digest;
  readonly name: string;
  readonly kind?: Extract<ImageKind, 'workspace' | 'toolkit' | 'snapshot'>;
  /** More patterns to leave out; see docs/pack-diff.md. */
  readonly exclude?: readonly string[];
  /** Leave build residue out: true by default. */
  readonly policy?: boolean;
  readonly compress?: CodecName;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
}

export interface PackedDiff {
  readonly name: string;
  readonly digest: Digest;
  readonly image: Image;
  /** The one new layer. */
  readonly layer: ErofsLayer;
  readonly stats: ConvertStats;
  /** Sockets, pipes, and whatever else was left out, a line each. */
  readonly notes: readonly string[];
  /** Paths that patterns left out. */
  readonly skipped: readonly string[];
}

export async function packDiff(store: BlobStore, options: PackDiffOptions): Promise<PackedDiff> {
  parseImageName(options.name);
  const staging = await store.stage();
  try {
    let skipped: readonly string[] = [];
    const { upperDir, exclude, policy, signal } = options;
    const image: SourceImage = {
      config: Buffer.alloc(0),
      manifestDigest: undefined,
      layers: [
        {
          label: upperDir,
          digest: undefined,
          sizeBytes: undefined,
          diffId: undefined,
          compression: 'plain',
          input: {
            kind: 'entries',
            async read(handler) {
              const view = await openLowerView(store, upperDir, options.lowers);
              try {
                const summary = await readUpper(upperDir, handler, { exclude, policy, signal, lower: view.at });
                skipped = summary.skipped;
                options.onRead?.();
                return summary;
              } finally {
                await view.close();
              }
            },
          },
        },
      ],
    };
    const { compress, progress } = options;
    const sink = storeSink(store, staging);
    const converter = new Converter(sink, { compress, progress, signal });
    try {
      const { layers, stats, notes } = await converter.convert(image, { unknownBase: true });
      const layer = toErofsLayer(layers[0]!);
      const packed = await publishImage(store, {
        name: options.name,
        kind: options.kind ?? 'snapshot',
        layers: [...options.lowers, layer],
        ownLayers: 1,
        base: options.base,
        config: options.config,
      });
      return { name: packed.name, digest: packed.manifestDigest, image: packed, layer, stats, notes, skipped };
    } finally {
      await converter.close();
      await sink.recordProofs();
    }
  } finally {
    await staging.remove();
  }
}
