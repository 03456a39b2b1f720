/** `--profile`: the files of a trace come first in the data blob, in its order; the image is the same but for where data lies. */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { allBlobsOf, openImage } from '../catalog/catalog.ts';
import { type ConvertToStoreOptions, convertBatch, convertToStore } from '../convert/convert-to-store.ts';
import { diffTrees } from '../reader/diff-trees.ts';
import { openTree } from '../reader/image-tree.ts';
import { isRegular } from '../reader/inode.ts';
import { verifyImage } from '../reader/verify.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { writeSmallLayout } from './small-layout.ts';

let root: string;
let source: string;
let plain: BlobStore;

beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-profile-'));
  mkdirSync(join(root, 'layout'));
  source = `oci:${writeSmallLayout(join(root, 'layout'), 3)}`;
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

/** Paths of files with data on a device, with where that begins: `blob offset`. */
async function placed(store: BlobStore, name: string): Promise<Map<string, { blob: string; offset: number }>> {
  const tree = await openTree(store, await openImage(store, name));
  const found = new Map<string, { blob: string; offset: number }>();
  try {
    for (const { path, node } of tree.walk()) {
      if (!isRegular(node.inode)) continue;
      for (const { device, blob, offset } of tree.extents(node)) {
        if (device === 0 || blob === undefined || found.has(path)) continue;
        found.set(path, { blob, offset });
      }
    }
    return found;
  } finally {
    await tree.close();
  }
}

async function differences(a: [BlobStore, string], b: [BlobStore, string]): Promise<number> {
  const before = await openTree(a[0], await openImage(...a));
  const after = await openTree(b[0], await openImage(...b));
  try {
    let count = 0;
    for await (const _ of diffTrees(before, after)) count++;
    return count;
  } finally {
    await before.close();
    await after.close();
  }
}

const SHAPES: [string, ConvertToStoreOptions][] = [
  ['one blob', {}],
  ['a layer each', { collapseLimitBytes: 0 }],
  ['metadata collapsed', { collapse: 'metadata' }],
  ['lz4', { compress: 'lz4' }],
];

describe.each(SHAPES)('%s', (shape, options) => {
  it('has the traced files first, in order, and is the same image otherwise', async () => {
    const folder = join(root, shape.replaceAll(' ', '-'));
    plain = await openStore(`file://${folder}/plain`);
    await convertToStore(plain, source, 'small:1', options);
    const before = await placed(plain, 'small:1');
    // Last things first, and names that are nothing.
    const paths = [...before.keys()];
    const profile = ['/no/such', paths.at(-1)!, paths[3]!, '/data', paths.at(-2)!, paths[0]!, paths[3]!];
    const store = await openStore(`file://${folder}/laid`);
    const laid = await convertToStore(store, source, 'small:1', { ...options, profile });
    const after = await placed(store, 'small:1');
    expect([...after.keys()]).toEqual(paths);
    // Each blob begins with those of its own, in the order of the profile.
    const wanted = [...new Set(profile.filter((path) => after.has(path)))];
    for (const blob of new Set([...after.values()].map((place) => place.blob))) {
      const first = wanted.filter((path) => after.get(path)!.blob === blob).map((path) => after.get(path)!.offset);
      const named = new Set(first);
      const others = [...after.values()].filter((place) => place.blob === blob && !named.has(place.offset));
      expect(first).toEqual([...first].sort((a, b) => a - b));
      if (first.length === 0) continue;
      expect(first[0]).toBe(0);
      if (others.length > 0) expect(Math.min(...others.map(({ offset }) => offset))).toBeGreaterThan(first.at(-1)!);
    }
    expect(await differences([plain, 'small:1'], [store, 'small:1'])).toBe(0);
    expect((await verifyImage(store, await openImage(store, 'small:1'))).problems).toEqual([]);
    expect(laid.digest).not.toBe((await openImage(plain, 'small:1')).manifestDigest);
  }, 120_000);
});

it('gives the same bytes each time, and is not taken for what was converted without, nor the other way round', async () => {
  const store = await openStore(`file://${root}/cache`);
  const profile = ['/data/layer-1/noise-1', '/data/layer-0/noise-2'];
  const convert = (name: string, more: ConvertToStoreOptions) => convertToStore(store, source, name, more);
  const without = await convert('a:1', {});
  const withIt = await convert('b:1', { profile });
  expect([without.reused, withIt.reused]).toEqual([false, false]);
  expect(withIt.digest).not.toBe(without.digest);
  expect(await convert('c:1', { profile })).toMatchObject({ reused: true, digest: withIt.digest });
  expect(await convert('d:1', {})).toMatchObject({ reused: true, digest: without.digest });
  expect((await convert('e:1', { profile: [...profile].reverse() })).reused).toBe(false);
  // Nothing to lay out is no profile.
  expect(await convert('f:1', { profile: [] })).toMatchObject({ reused: true, digest: without.digest });
  const elsewhere = await openStore(`file://${root}/cache2`);
  expect((await convertToStore(elsewhere, source, 'b:1', { profile })).digest).toBe(withIt.digest);
  const blobs = allBlobsOf(await openImage(store, 'b:1'));
  for (const { digest } of blobs) await elsewhere.readVerified(digest);
}, 120_000);

it('holds for every line of a batch', async () => {
  const profile = ['/data/layer-1/noise-1'];
  const store = await openStore(`file://${root}/batch`);
  const items = [
    { source, name: 'a:1' },
    { source, name: 'b:1' },
  ];
  const outcomes = await convertBatch(store, items, { profile });
  expect(outcomes.map((outcome) => 'error' in outcome)).toEqual([false, false]);
  for (const name of ['a:1', 'b:1']) expect((await placed(store, name)).get(profile[0]!)!.offset).toBe(0);
}, 120_000);
