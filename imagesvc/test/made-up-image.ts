/** Images made of noise, published as a converter does: for tests of what does not look inside. */
import { createHash } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { digestOf } from '#base';
import { publishImage } from '../catalog/catalog.ts';
import type { ErofsLayer, Image, ImageKind } from '../catalog/image.ts';
import { chunkDigestsSize } from '../catalog/manifest.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';

export function noise(text: string, sizeBytes: number): Buffer {
  return createHash('shake256', { outputLength: sizeBytes }).update(text).digest();
}

export interface MadeUp {
  readonly kind?: ImageKind;
  /** Layers are made from these texts: the same text, the same blobs. */
  readonly layers: readonly string[];
  readonly ownLayers?: number;
  readonly base?: Image;
  readonly dataBytes?: number;
}

export async function putLayer(store: BlobStore, text: string, dataBytes: number): Promise<ErofsLayer> {
  const staging = await store.stage();
  try {
    const put = async (label: string, bytes: Buffer): Promise<Descriptor> => {
      const path = join(staging.path, label);
      writeFileSync(path, bytes);
      const digest = digestOf(bytes);
      await store.putFile(path, digest, bytes.length);
      return { mediaType: '', digest, size: bytes.length };
    };
    const data = noise(`${text} data`, dataBytes);
    return {
      meta: await put('meta', noise(`${text} meta`, 8192)),
      devices: [
        {
          blob: await put('data', data),
          chunkDigests: await put('chunks', noise(`${text} chunks`, chunkDigestsSize(data.length))),
        },
      ],
    };
  } finally {
    await staging.remove();
  }
}

export async function publishMadeUp(store: BlobStore, name: string, made: MadeUp): Promise<Image> {
  const staging = await store.stage();
  try {
    const layers: ErofsLayer[] = [];
    for (const text of made.layers) layers.push(await putLayer(store, text, made.dataBytes ?? 300_000));
    const config = Buffer.from(
      JSON.stringify({
        architecture: 'amd64',
        os: 'linux',
        config: { Env: ['A=b'], Cmd: ['sh'] },
        rootfs: { type: 'layers', diff_ids: [] },
      }),
    );
    return await publishImage(store, {
      name,
      kind: made.kind ?? 'base',
      layers,
      ownLayers: made.ownLayers,
      base: made.base?.manifestDigest,
      config,
    });
  } finally {
    await staging.remove();
  }
}
