/**
 * An image as environments have them: a shell, then layers of packages, each a folder of files from a few hundred bytes to a
 * megabyte; about two thirds of its size when compressed. The same arguments give the same bytes; images of other numbers have
 * nothing in common but the shell.
 */
import { createCipheriv, createHash } from 'node:crypto';
import {
  createReadStream,
  createWriteStream,
  existsSync,
  mkdirSync,
  readFileSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { Transform } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { createGzip } from 'node:zlib';
import { digestFromHex } from '#base';
import { TarFile } from './generated-tar.ts';
import { type LayoutLayer, writeLayout } from './image-layout.ts';
import { busyboxLayer } from './small-image.ts';

const MIB = 2 ** 20;
const APPLETS = ['sh', 'cat', 'echo', 'head', 'ls', 'sha256sum', 'sleep', 'true'];
/** Of the files of a package, again and again in another order: 1.4 MiB for these ten. */
const FILE_BYTES = [700, 2_300, 5_000, 9_000, 17_000, 40_000, 75_000, 130_000, 260_000, 900_000];
const FILES = 20;
const LAYERS = 3;
const BLOCK = 4096;
/** Of each block. */
const NOISE_BYTES = 2560;

export const PACKAGE_BYTES = FILE_BYTES.reduce((sum, bytes) => sum + bytes, 0) * (FILES / FILE_BYTES.length);

export interface PackageImage {
  /** `FOLDER:TAG`, to be put behind `oci:`. */
  readonly layout: string;
  /** Absolute paths of its folders, all of PACKAGE_BYTES. */
  readonly packages: readonly string[];
  readonly dataBytes: number;
}

/** What `writePackageImage` with the same arguments has written there. */
export function packageImageIn(folder: string, number: number, sizeBytes: number): PackageImage {
  const count = LAYERS * Math.max(1, Math.round(sizeBytes / PACKAGE_BYTES / LAYERS));
  const packages = Array.from({ length: count }, (_, i) => `/opt/package-${String(i).padStart(3, '0')}`);
  return { layout: `${join(folder, 'layout')}:${number}`, packages, dataBytes: count * PACKAGE_BYTES };
}

/** The layer that all images share, in a folder of its own; made once. */
export async function shellLayer(folder: string): Promise<LayoutLayer> {
  const record = join(folder, 'layer.json');
  if (existsSync(record)) return JSON.parse(readFileSync(record, 'utf8')) as LayoutLayer;
  mkdirSync(folder, { recursive: true });
  const layer = await busyboxLayer(folder, APPLETS);
  writeFileSync(record, JSON.stringify(layer));
  return layer;
}

/** @param sizeBytes Of its files, about. @param shell On the same file system. */
export async function writePackageImage(
  folder: string,
  number: number,
  sizeBytes: number,
  shell: LayoutLayer,
): Promise<PackageImage> {
  const image = packageImageIn(folder, number, sizeBytes);
  mkdirSync(folder, { recursive: true });
  const layers: LayoutLayer[] = [shell];
  const each = image.packages.length / LAYERS;
  for (let i = 0; i < LAYERS; i++) {
    const tar = join(folder, `layer-${i}.tar`);
    const plain = writePackages(tar, `image ${number}`, image.packages.slice(i * each, (i + 1) * each));
    layers.push(await compressed(plain));
  }
  writeLayout(join(folder, 'layout'), String(number), layers);
  return image;
}

/** A layer of such packages alone, as tar.gz beside `path`: what a workspace or a toolkit consists of. */
export function packageLayer(path: string, seed: string, packages: readonly string[]): Promise<LayoutLayer> {
  return compressed(writePackages(path, seed, packages));
}

/** Some of its packages, apart from each other, with at least this part of its bytes: what a command would use of it. */
export function somePackages(image: PackageImage, part: number, seed: number): string[] {
  const count = Math.max(1, Math.ceil(image.packages.length * part));
  const step = image.packages.length / count;
  return Array.from({ length: count }, (_, i) => {
    const within = ((seed * 7919 + i * 104_729) % 1000) / 1000;
    return image.packages[Math.floor((i + within) * step)]!;
  });
}

function writePackages(path: string, seed: string, packages: readonly string[]): LayoutLayer {
  const out = new TarFile(path);
  const key = createHash('sha256').update(seed).digest().subarray(0, 16);
  const noise = createCipheriv('aes-128-ctr', key, createHash('md5').update(packages[0]!).digest());
  const zeros = Buffer.alloc(MIB);
  const text = Buffer.from('def function_of_a_module(argument, other): return argument + other\n'.repeat(64));
  out.member('opt', 'dir', 0);
  for (const [p, folder] of packages.entries()) {
    out.member(folder.slice(1), 'dir', 0);
    for (let i = 0; i < FILES; i++) {
      const size = FILE_BYTES[(i * 3 + p) % FILE_BYTES.length]!;
      out.member(`${folder.slice(1)}/module-${String(i).padStart(2, '0')}`, 'file', size);
      const bytes = noise.update(zeros.subarray(0, size));
      for (let at = NOISE_BYTES; at < size; at += BLOCK) text.copy(bytes, at, 0, BLOCK - NOISE_BYTES);
      out.write(bytes);
      out.pad(size);
    }
  }
  return out.close();
}

async function compressed(plain: LayoutLayer): Promise<LayoutLayer> {
  const path = `${plain.path}.gz`;
  const hash = createHash('sha256');
  const hashed = new Transform({
    transform(bytes: Buffer, _encoding, done) {
      hash.update(bytes);
      done(null, bytes);
    },
  });
  await pipeline(
    createReadStream(plain.path),
    createGzip({ level: 6, chunkSize: 256 * 1024 }),
    hashed,
    createWriteStream(path),
  );
  const digest = digestFromHex(hash.digest('hex'));
  return { path, digest, diffId: plain.diffId, sizeBytes: statSync(path).size, compressed: true };
}
