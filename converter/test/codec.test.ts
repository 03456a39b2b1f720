import { spawnSync } from 'node:child_process';
import * as zlib from 'node:zlib';
import { describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { compressors, decompressors } from '../erofs/codec.ts';
import { noise } from './tar-bytes.ts';

const CODECS = [
  ['lz4', (b: Buffer) => compressors.lz4(b), decompressors.lz4],
  ['deflate', (b: Buffer) => compressors.deflate(b, 9), decompressors.deflate],
  ['zstd', (b: Buffer) => compressors.zstd(b, 3), decompressors.zstd],
] as const;

const SAMPLES = [
  Buffer.from('x'),
  Buffer.alloc(65536),
  Buffer.from('again and again '.repeat(4096)),
  noise(65536),
  Buffer.concat([noise(1000), Buffer.alloc(5000, 7), noise(1000), noise(1000)]),
];

describe.each(CODECS)('%s', (_, compress, decompress) => {
  it('gives back what went in', () => {
    for (const sample of SAMPLES) expect(decompress(compress(sample), sample.length).equals(sample)).toBe(true);
  });

  it('compresses what repeats, the same way each time', () => {
    const once = compress(SAMPLES[2]!);
    expect(once.length).toBeLessThan(1000);
    expect(compress(Buffer.from(SAMPLES[2]!)).equals(once)).toBe(true);
  });

  it('refuses another size, and data that is cut', () => {
    const sample = SAMPLES[4]!;
    const bytes = compress(sample);
    for (const bad of [
      () => decompress(bytes, sample.length - 1),
      () => decompress(bytes, sample.length + 1),
      () => decompress(bytes.subarray(0, bytes.length - 1), sample.length),
      () => decompress(bytes.subarray(0, 3), sample.length),
      () => decompress(Buffer.alloc(0), sample.length),
    ]) {
      expect(bad).toThrow(expect.objectContaining({ code: 'CODEC_DATA' }));
    }
  });

  it('survives damage', () => {
    const sample = SAMPLES[4]!;
    const bytes = compress(sample);
    for (let seed = 0; seed < 500; seed++) {
      const damaged = Buffer.from(bytes);
      const where = noise(8, seed);
      damaged[where.readUInt32LE(0) % damaged.length] = where[7]!;
      try {
        expect(decompress(damaged, sample.length).length).toBe(sample.length);
      } catch (error) {
        if (!isDsecError(error, 'CODEC_DATA')) throw error;
      }
    }
  });
});

it('deflate is raw, zstd a whole frame', () => {
  const sample = SAMPLES[2]!;
  expect(zlib.inflateRawSync(compressors.deflate(sample, 6)).equals(sample)).toBe(true);
  expect(compressors.zstd(sample, 3).readUInt32LE(0)).toBe(0xfd2fb528);
  const run = spawnSync('zstd', ['-dcq'], { input: compressors.zstd(sample, 19), maxBuffer: 1 << 20 });
  if (run.error === undefined) expect(run.stdout.equals(sample)).toBe(true);
});
