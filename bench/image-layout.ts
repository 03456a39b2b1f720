/** An OCI image layout around layers that are there already: links to their files, a config, a manifest, an index. */
import { linkSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, digestOf, hexOf } from '#base';
import { hostPlatform, mediaTypes } from '#converter';

const LAYER = 'application/vnd.oci.image.layer.v1.tar';

export interface LayoutLayer {
  readonly path: string;
  readonly digest: Digest;
  readonly diffId: Digest;
  readonly sizeBytes: number;
  readonly compressed: boolean;
}

/** Answers `FOLDER:TAG`, to be put behind `oci:`. Layers bottom first, on the same file system. */
export function writeLayout(
  folder: string,
  tag: string,
  layers: readonly LayoutLayer[],
  cmd: readonly string[] = ['/bin/sh'],
): string {
  const blobs = join(folder, 'blobs/sha256');
  mkdirSync(blobs, { recursive: true });
  const put = (value: unknown, mediaType: string) => {
    const bytes = Buffer.from(JSON.stringify(value));
    const digest = digestOf(bytes);
    writeFileSync(join(blobs, hexOf(digest)), bytes);
    return { mediaType, digest, size: bytes.length };
  };
  const { os, architecture } = hostPlatform();
  const config = put(
    {
      os,
      architecture,
      config: { Env: ['PATH=/usr/local/bin:/usr/bin:/bin'], Cmd: cmd },
      rootfs: { type: 'layers', diff_ids: layers.map((layer) => layer.diffId) },
    },
    mediaTypes.OCI_CONFIG,
  );
  const described = layers.map(({ path, digest, sizeBytes, compressed }) => {
    linkSync(path, join(blobs, hexOf(digest)));
    return { mediaType: compressed ? `${LAYER}+gzip` : LAYER, digest, size: sizeBytes };
  });
  const manifest = put(
    { schemaVersion: 2, mediaType: mediaTypes.OCI_MANIFEST, config, layers: described },
    mediaTypes.OCI_MANIFEST,
  );
  const name = { 'org.opencontainers.image.ref.name': tag };
  writeFileSync(join(folder, 'oci-layout'), '{"imageLayoutVersion":"1.0.0"}');
  writeFileSync(
    join(folder, 'index.json'),
    JSON.stringify({ schemaVersion: 2, manifests: [{ ...manifest, annotations: name }] }),
  );
  return `${folder}:${tag}`;
}
