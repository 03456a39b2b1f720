/**
 * Layers on top of each other in one file, and layers side by side: the same image, to the byte. On this machine the first
 * way is taken when the native sha256 is there and there are at most two cores; the second one without it. The first one in a worker,
 * and in this thread.
 */
import { randomBytes } from 'node:crypto';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, afterEach, expect, test, vi } from 'vitest';
import { type Digest, digestOf } from '#base';
import type { ConvertOptions } from '../convert.ts';
import type { BuiltLayer, LayerSink } from '../layer-sink.ts';
import type { SourceImage, SourceLayer } from '../source/image-source.ts';
import { tarOf } from './image-fixture.ts';

const dir = mkdtempSync(join(tmpdir(), 'dsec-stacked-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));
afterEach(() => vi.unstubAllEnvs());

type Files = Readonly<Record<string, Buffer>>;

let next = 0;
async function layerOf(files: Files, spoil = false): Promise<SourceLayer> {
  const tar = await tarOf(Object.entries(files).map(([name, content]) => ({ name, content })));
  const blob = gzipSync(tar, { level: 1 });
  const path = join(dir, `layer-${next++}.tar.gz`);
  const digest = digestOf(blob);
  if (spoil) blob[blob.length - 20]! ^= 1;
  writeFileSync(path, blob);
  return {
    label: path,
    input: { kind: 'file', path, offset: 0, sizeBytes: blob.length },
    compression: 'gzip',
    digest,
    diffId: digestOf(tar),
    sizeBytes: blob.length,
  };
}

async function imageOf(...layers: (Files | SourceLayer)[]): Promise<SourceImage> {
  const all = await Promise.all(layers.map((one) => ('input' in one ? (one as SourceLayer) : layerOf(one as Files))));
  return { layers: all } as unknown as SourceImage;
}

interface Outcome {
  readonly layers: readonly BuiltLayer[];
  readonly taken: readonly Digest[];
  readonly left: readonly string[];
}

interface Bench {
  /** What comes out, each blob checked against its digest, and what is left in the work folder. */
  convert(image: SourceImage): Promise<Outcome>;
  close(): Promise<void>;
  /** The work folder, with what it holds. */
  remove(): void;
}

/** One converter for all images: its threads take a while to start from source. */
async function benchOf(native: '0' | '1', collapseLimitBytes: number, options: ConvertOptions = {}): Promise<Bench> {
  vi.resetModules();
  vi.stubEnv('DSEC_NATIVE', native);
  const { Converter } = await import('../convert.ts');
  const workDir = mkdtempSync(join(dir, 'work-'));
  let taken: Digest[] = [];
  const sink: LayerSink = {
    workDir,
    async put(bytes) {
      taken.push(digestOf(bytes));
      return digestOf(bytes);
    },
    async putFile(path, digest, sizeBytes) {
      const bytes = readFileSync(path);
      expect([digestOf(bytes), bytes.length]).toEqual([digest, sizeBytes]);
      taken.push(digest);
      rmSync(path);
    },
  };
  const converter = new Converter(sink, { collapseLimitBytes, ...options });
  return {
    async convert(image) {
      taken = [];
      const { layers } = await converter.convert(image);
      return { layers, taken, left: readdirSync(workDir) };
    },
    close: () => converter.close(),
    remove: () => rmSync(workDir, { recursive: true }),
  };
}

const noise = (bytes: number) => randomBytes(bytes);
const big = { 'a/one': noise(3_000_000), 'a/two': noise(100_000), 'a/three': noise(5000), 'a/four': noise(10) };
const shared = noise(300_000);

const IMAGES: Readonly<Record<string, readonly Files[]>> = {
  'nothing dies': [big, { 'b/one': noise(2_500_000), 'b/two': noise(70_000) }, { c: noise(4096) }],
  'a file of the bottom layer is replaced': [big, { 'a/two': noise(90_000), d: noise(1_000_000) }],
  'a file and a folder are deleted': [big, { 'e/x': noise(500_000) }, { 'a/.wh.one': noise(0), '.wh.e': noise(0) }],
  'all of the bottom layer dies': [big, { '.wh.a': noise(0), f: noise(1_234_567) }],
  'two layers have the same file': [
    { ...big, s: shared },
    { t: shared, u: noise(9000) },
  ],
  'the lower one of two same files is deleted': [
    { ...big, s: shared },
    { t: shared, v: shared },
    { '.wh.s': noise(0) },
  ],
  'same files, up and down': [
    { p: shared, q: noise(70_000) },
    { q: shared, p: noise(66_000), r: big['a/two'] },
    { m: shared, n: big['a/two'], o: big['a/two'] },
  ],
  'a layer has no data': [big, { g: noise(0) }, { h: noise(600_000) }],
  'no layer has any': [{ i: noise(0) }, { j: noise(7) }],
  'zeros and copies': [
    { z: Buffer.alloc(1 << 20), y: shared, x: shared },
    { w: Buffer.concat([shared, Buffer.alloc(1 << 18), shared]) },
  ],
};

const MANY_BYTES = 2 ** 31;

test.each([
  ['collapsed', MANY_BYTES],
  ['cut after a while', 4_000_000],
  ['none collapsed', 0],
])(
  '%s, all ways give the same',
  async (_, collapseLimitBytes) => {
    const images = await Promise.all(Object.values(IMAGES).map((layers) => imageOf(...layers)));
    const outcomes = [];
    for (const [native, here] of [
      ['1', true],
      ['1', false],
      ['0', false],
    ] as const) {
      const bench = await benchOf(native, collapseLimitBytes, { here });
      const out: Outcome[] = [];
      for (const image of images) out.push(await bench.convert(image));
      expect(out.flatMap(({ left }) => left)).toEqual([]);
      outcomes.push(Object.fromEntries(Object.keys(IMAGES).map((name, i) => [name, out[i]])));
      await bench.close();
    }
    expect(outcomes[0]).toEqual(outcomes[2]);
    expect(outcomes[1]).toEqual(outcomes[2]);
  },
  600_000,
);

test.each([false, true])(
  'a damaged layer of a stack is told by its name, and the converter goes on (here: %s)',
  async (here) => {
    const files: Files[] = [big, { k: noise(400_000) }, { l: noise(50_000) }];
    const bench = await benchOf('1', MANY_BYTES, { here });
    for (const bad of files.keys()) {
      const layers = await Promise.all(files.map((one, i) => layerOf(one, i === bad)));
      await expect(bench.convert(await imageOf(...layers))).rejects.toThrow(layers[bad]!.label);
    }
    await bench.convert(await imageOf(...files));
    await bench.close();
  },
  300_000,
);

test.each([1, 3])(
  '%i layers in this thread end when they are asked to, and leave the folder alone',
  async (count) => {
    const layers = await Promise.all(
      Array.from({ length: count }, () => layerOf({ m: noise(24_000_000), n: noise(9000) })),
    );
    for (const afterBytes of [0, 1, 12_000_000]) {
      const ending = new AbortController();
      const reason = new Error('enough');
      const bench = await benchOf('1', MANY_BYTES, {
        here: true,
        signal: ending.signal,
        progress: ({ doneBytes = 0 }) => {
          if (doneBytes >= afterBytes) ending.abort(reason);
        },
      });
      await expect(bench.convert(await imageOf(...layers))).rejects.toBe(reason);
      await bench.close();
      bench.remove();
    }
  },
  300_000,
);
