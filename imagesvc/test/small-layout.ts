/** A small image of several gzip layers, made by tar from folders: enough work that a conversion can be killed in every phase. */
import { execFileSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { arch } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { digestOf, hexOf } from '#base';
import { someBytes } from './store-conformance.ts';

const GOARCH: Readonly<Record<string, string>> = { x64: 'amd64', ia32: '386' };
const BUSYBOX = '/bin/busybox';

/** Writes it into `folder`; answers `FOLDER:TAG`. With busybox, where there is one, its containers can run. */
export function writeSmallLayout(folder: string, layerCount: number): string {
  const tars = Array.from({ length: layerCount }, (_, i) => tarOfTree(folder, (tree) => fill(tree, i)));
  return writeTarLayout(folder, tars);
}

/** What tar makes of a folder that `fill` fills, with `options` of its own; the folder is made in `folder` and removed again. */
export function tarOfTree(folder: string, fill: (tree: string) => void, options: readonly string[] = []): Buffer {
  mkdirSync(folder, { recursive: true });
  const tree = join(folder, 'tree');
  mkdirSync(tree);
  fill(tree);
  const tar = execFileSync('tar', ['-cf', '-', '--sort=name', '--mtime=@1700000000', ...options, '-C', tree, '.'], {
    maxBuffer: 1 << 28,
  });
  rmSync(tree, { recursive: true });
  return tar;
}

/** An OCI layout of gzip layers, these tars, bottom first; answers `FOLDER:TAG`. */
export function writeTarLayout(folder: string, tars: readonly Buffer[]): string {
  const blobs = join(folder, 'blobs/sha256');
  mkdirSync(blobs, { recursive: true });
  const put = (bytes: Buffer, mediaType: string) => {
    const digest = digestOf(bytes);
    writeFileSync(join(blobs, hexOf(digest)), bytes);
    return { mediaType, digest, size: bytes.length };
  };
  const json = (value: unknown, mediaType: string) => put(Buffer.from(JSON.stringify(value)), mediaType);
  const layers = tars.map((tar) => put(gzipSync(tar, { level: 1 }), 'application/vnd.oci.image.layer.v1.tar+gzip'));
  const config = json(
    {
      os: 'linux',
      architecture: GOARCH[arch()] ?? arch(),
      config: { Env: ['PATH=/bin'], Cmd: ['sh'] },
      rootfs: { type: 'layers', diff_ids: tars.map((tar) => digestOf(tar)) },
    },
    'application/vnd.oci.image.config.v1+json',
  );
  const mediaType = 'application/vnd.oci.image.manifest.v1+json';
  const manifest = json({ schemaVersion: 2, mediaType, config, layers }, mediaType);
  const annotations = { 'org.opencontainers.image.ref.name': 'small' };
  writeFileSync(join(folder, 'oci-layout'), '{"imageLayoutVersion":"1.0.0"}');
  writeFileSync(
    join(folder, 'index.json'),
    JSON.stringify({ schemaVersion: 2, manifests: [{ ...manifest, annotations }] }),
  );
  return `${folder}:small`;
}

function fill(tree: string, layer: number): void {
  for (const path of ['bin', 'data', 'dev', 'proc', 'sys', 'etc', 'tmp']) mkdirSync(join(tree, path));
  if (layer === 0 && existsSync(BUSYBOX)) {
    copyFileSync(BUSYBOX, join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cp', 'rm', 'ln', 'mkdir', 'chmod']) symlinkSync('busybox', join(tree, 'bin', name));
  }
  const folder = join(tree, `data/layer-${layer}`);
  mkdirSync(folder);
  for (let i = 0; i < 300; i++) writeFileSync(join(folder, `text-${i}`), `file ${i} of layer ${layer}\n`.repeat(i));
  for (let i = 0; i < 4; i++) writeFileSync(join(folder, `noise-${i}`), someBytes(300_000, `${layer}.${i}`));
  if (layer === 0) return;
  mkdirSync(join(tree, `data/layer-${layer - 1}`));
  writeFileSync(join(tree, `data/layer-${layer - 1}/.wh.text-1`), '');
}
