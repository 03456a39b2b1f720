/**
 * The codecs of --compress over 64 KiB clusters of real files, level by level: speed, and how small it gets in whole blocks, as
 * EROFS stores it. The measurement behind the levels in converter/layer/cluster-codec.ts.
 */
import { readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { codec } from '#converter';
import { round } from '../benchmark.ts';
import { projectRoot } from '../dsec-command.ts';
import { measure, type Speed } from './measure.ts';

const CLUSTER = 64 << 10;
const BLOCK = 4096;
const CLUSTERS = 192;
const DEFLATE_LEVELS = [1, 3, 4, 6, 9];
const ZSTD_LEVELS = [1, 3, 6, 9, 12];

export interface CodecSpeed extends Speed {
  /** Of the stored size to the plain one. */
  readonly size: number;
}

export async function clusterCodecs(): Promise<CodecSpeed[]> {
  const clusters = someClusters();
  const { compressors, decompressors } = codec;
  const ways = [
    { name: 'lz4', compress: compressors.lz4, decompress: decompressors.lz4 },
    ...DEFLATE_LEVELS.map((level) => ({
      name: `deflate ${level}`,
      compress: (bytes: Buffer) => compressors.deflate(bytes, level),
      decompress: decompressors.deflate,
    })),
    ...ZSTD_LEVELS.map((level) => ({
      name: `zstd ${level}`,
      compress: (bytes: Buffer) => compressors.zstd(bytes, level),
      decompress: decompressors.zstd,
    })),
  ];
  const bytes = clusters.length * CLUSTER;
  const sizes = new Map<string, number>();
  const cases = ways.flatMap(({ name, compress, decompress }) => {
    const packed = clusters.map((cluster) => compress(cluster));
    const blocks = packed.reduce((sum, one) => sum + Math.min(CLUSTER, Math.ceil(one.length / BLOCK) * BLOCK), 0);
    sizes.set(name, round(blocks / bytes));
    return [
      { name, bytes, run: () => clusters.forEach((cluster) => void compress(cluster)) },
      { name: `${name}, back`, bytes, run: () => packed.forEach((one) => void decompress(one, CLUSTER)) },
    ];
  });
  const speeds = await measure(`codecs over ${clusters.length} clusters of 64 KiB`, cases);
  const out = speeds.map((speed) => ({ ...speed, size: sizes.get(speed.name.replace(', back', ''))! }));
  for (const { name, size } of out)
    if (!name.endsWith('back')) console.log(`  ${name.padEnd(28)} ${(size * 100).toFixed(1)} % of the size`);
  return out;
}

/** A third programs, a third libraries, a third JavaScript. */
function someClusters(): Buffer[] {
  const out: Buffer[] = [];
  for (const folder of [
    '/usr/bin',
    '/usr/lib/x86_64-linux-gnu',
    join(projectRoot(), 'node_modules/typescript/lib'),
    join(projectRoot(), 'node_modules/undici/lib/dispatcher'),
  ]) {
    out.push(...clustersOf(folder, Math.ceil(CLUSTERS / 3)));
    if (out.length >= CLUSTERS) break;
  }
  return out.slice(0, CLUSTERS);
}

function clustersOf(folder: string, most: number): Buffer[] {
  const out: Buffer[] = [];
  let names: string[];
  try {
    names = readdirSync(folder).sort();
  } catch {
    return out;
  }
  for (const name of names) {
    const path = join(folder, name);
    const stat = statSync(path, { throwIfNoEntry: false });
    if (!stat?.isFile() || stat.size < CLUSTER) continue;
    const bytes = readFileSync(path);
    // A few from each file: one large program must not stand for all.
    for (let at = 0; at + CLUSTER <= bytes.length && at < 4 * CLUSTER && out.length < most; at += CLUSTER) {
      out.push(Buffer.from(bytes.subarray(at, at + CLUSTER)));
    }
    if (out.length >= most) break;
  }
  return out;
}
