/** Other sizes, fewer layers: what a disk holds stays what it was, whenever the process is killed. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { withLock } from '#linux';
import { MemorySource } from '../byte-source.ts';
import {
  createNamedDisk,
  layersInStores,
  listDisks,
  mergeDisk,
  openNamedDisk,
  removeDisk,
  restoreDisk,
} from '../disks.ts';
import { exportRaw } from '../export-disk.ts';
import { openLayerFile } from '../layer/layer-file.ts';
import { mergeLayers } from '../layer/merge-layers.ts';
import type { StoreLayer } from '../layer/store-layer.ts';
import { StackedDisk } from '../stacked-disk.ts';

const KIB = 1024;
const SIZE = 256 * KIB;
let root: string;

beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-reshape-'));
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

const open = (name: string) => openNamedDisk(name, { root });
const block = (value: number, bytes = 4 * KIB) => Buffer.alloc(bytes, value);

async function contentOf(name: string): Promise<Buffer> {
  const { disk } = await open(name);
  const bytes = await disk.read(0, disk.sizeBytes);
  await disk.close();
  return bytes;
}

describe.each(['log', 'sparse'] as const)('resize, %s', (mode) => {
  test('grows with zeros, shrinks only when asked, and what was cut off stays gone', async () => {
    await createNamedDisk('work', { sizeBytes: SIZE, mode }, root);
    const { disk, resize, snapshot } = await open('work');
    await disk.write(0, block(1));
    await disk.write(SIZE - 4 * KIB, block(2));
    await snapshot('full');
    await disk.write(SIZE - 8 * KIB, block(3));
    await resize(2 * SIZE);
    expect(disk.sizeBytes).toBe(2 * SIZE);
    await disk.write(2 * SIZE - 4 * KIB, block(4));
    await expect(resize(SIZE / 2)).rejects.toMatchObject({ code: 'DISK_SIZE' });
    await expect(resize(1000, { shrink: true })).rejects.toMatchObject({ code: 'DISK_SIZE' });
    await resize(SIZE / 2, { shrink: true });
    await expect(disk.read(SIZE / 2, 4 * KIB)).rejects.toMatchObject({ code: 'EINVAL' });
    await resize(2 * SIZE);
    const expected = Buffer.alloc(2 * SIZE);
    block(1).copy(expected);
    expect((await disk.read(0, 2 * SIZE)).equals(expected)).toBe(true);
    await disk.close();
    expect((await contentOf('work')).equals(expected)).toBe(true);
    // The snapshot keeps its size and its bytes.
    await restoreDisk('work', 'full', 'before', { root });
    const before = await contentOf('before');
    expect(before.length).toBe(SIZE);
    expect(before.subarray(SIZE - 4 * KIB).equals(block(2))).toBe(true);
    // In one layer, zeros hide too.
    await mergeDisk('work', { root, dropSnapshots: true }).catch((error) => {
      expect(error).toMatchObject({ code: 'DISK_IN_USE' });
    });
    await removeDisk('before', root);
    expect(await mergeDisk('work', { root, dropSnapshots: true })).toMatchObject({ layersAfter: 1 });
    expect((await contentOf('work')).equals(expected)).toBe(true);
  });
});

test.each([
  ['disk-sealed', SIZE],
  ['disk-config-written', SIZE],
  ['disk-config-replaced', SIZE / 2],
])('killed at %s, a shrinking has happened or it has not', async (where, sizeBytes) => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk } = await open('work');
  await disk.write(0, block(1));
  await disk.write(SIZE - 4 * KIB, block(2));
  const before = await disk.read(0, SIZE);
  await disk.close();
  const script = `import { openDisk } from '${join(import.meta.dirname, '../disk-folder.ts')}'; await (await openDisk(${JSON.stringify(join(root, 'work'))})).resize(${SIZE / 2}, { shrink: true });`;
  const child = spawnSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
    env: { ...process.env, DSEC_FAILPOINT: where },
  });
  expect(child.signal).toBe('SIGKILL');
  expect((await contentOf('work')).equals(before.subarray(0, sizeBytes))).toBe(true);
  const again = await open('work');
  await again.resize(2 * SIZE);
  const expected = Buffer.alloc(2 * SIZE);
  before.copy(expected, 0, 0, sizeBytes);
  expect((await again.disk.read(0, 2 * SIZE)).equals(expected)).toBe(true);
  await again.disk.close();
});

test.each(['removed', 'merged', 'replaced'])('a disk whose layers are %s while it is made is not made', async (how) => {
  await createNamedDisk('base', { sizeBytes: SIZE }, root);
  const base = await open('base');
  await base.disk.write(0, block(1));
  await base.snapshot();
  await base.disk.close();
  const folder = join(root, 'base');
  const path = join(folder, 'config.v1.json');
  let making: Promise<unknown> | undefined;
  await withLock(join(root, '.lock'), async () => {
    making = createNamedDisk('fork', { origin: { kind: 'config', path } }, root).catch((error) => error);
    const isMade = () =>
      readdirSync(root).some((name) => name.startsWith('.new-') && existsSync(join(root, name, 'disk/config.v1.json')));
    await vi.waitUntil(isMade, { timeout: 30_000 });
    // As whoever has the lock does it.
    if (how === 'removed') rmSync(folder, { recursive: true });
    if (how === 'merged') {
      const config = JSON.parse(readFileSync(path, 'utf8'));
      config.lowers[0].file = config.lowers[0].file.replace('layer-1', 'layer-9');
      writeFileSync(path, JSON.stringify(config));
    }
    if (how === 'replaced') {
      const layer = join(folder, 'layer-1.data');
      const bytes = readFileSync(layer);
      rmSync(layer);
      writeFileSync(layer, bytes);
    }
  });
  expect(await making).toMatchObject({ code: 'DISK_LAYER_MISSING' });
  expect(readdirSync(root).sort()).toEqual(['.lock', ...(how === 'removed' ? [] : ['base'])]);
});

test('merging keeps every snapshot, and refuses what another disk lies on', async () => {
  await createNamedDisk('base', { sizeBytes: SIZE }, root);
  const base = await open('base');
  await base.disk.write(0, block(9, 16 * KIB));
  await base.snapshot('p');
  await base.disk.close();
  await restoreDisk('base', 'p', 'work', { root });
  const { disk, snapshot, lowers } = await open('work');
  expect(lowers.length).toBe(1);
  const points = new Map<string, Buffer>();
  for (let at = 1; at <= 6; at++) {
    await disk.write(at * 2 * KIB, block(at));
    await disk.discard(20 * KIB + at * 512, 512);
    const name = at % 3 === 0 ? `point-${at}` : undefined;
    await snapshot(name);
    if (name !== undefined) points.set(name, await disk.read(0, SIZE));
  }
  await disk.write(64 * KIB, block(77));
  const last = await disk.read(0, SIZE);
  await expect(mergeDisk('work', { root })).rejects.toMatchObject({ code: 'DISK_BUSY' });
  await disk.close();
  expect(await mergeDisk('work', { root })).toEqual({ layersBefore: 7, layersAfter: 3 });
  expect((await contentOf('work')).equals(last)).toBe(true);
  for (const [name, bytes] of points) {
    await restoreDisk('work', name, name, { root });
    expect((await contentOf(name)).equals(bytes), name).toBe(true);
  }
  // The files of the layers that are gone went too.
  expect(readdirSync(join(root, 'work')).filter((name) => name.endsWith('.data'))).toHaveLength(3);
  await expect(mergeDisk('work', { root, dropSnapshots: true })).rejects.toMatchObject({ code: 'DISK_IN_USE' });
  for (const name of points.keys()) await removeDisk(name, root);
  await expect(removeDisk('base', root)).rejects.toMatchObject({ code: 'DISK_IN_USE' });
  expect(await mergeDisk('work', { root, dropSnapshots: true, whole: true })).toMatchObject({ layersAfter: 1 });
  await removeDisk('base', root);
  expect((await contentOf('work')).equals(last)).toBe(true);
  expect((await listDisks(root))[0]).toMatchObject({ snapshots: [], layers: 2 });
});

test.each(['disk-merge-written', 'disk-config-written'])('killed at %s, a merge has not happened', async (where) => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk, snapshot } = await open('work');
  for (let at = 0; at < 4; at++) {
    await disk.write(at * 6 * KIB, block(at + 1));
    await snapshot();
  }
  const before = await disk.read(0, SIZE);
  await disk.close();
  const script = `import { mergeDisk } from '${join(import.meta.dirname, '../disks.ts')}'; await mergeDisk('work', { root: ${JSON.stringify(root)} });`;
  const child = spawnSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
    env: { ...process.env, DSEC_FAILPOINT: where },
  });
  expect(child.signal).toBe('SIGKILL');
  expect((await contentOf('work')).equals(before)).toBe(true);
  expect((await listDisks(root))[0]!.layers).toBe(5);
  expect(readdirSync(join(root, 'work')).filter((name) => name.endsWith('.data'))).toHaveLength(5);
  expect(await mergeDisk('work', { root })).toEqual({ layersBefore: 4, layersAfter: 1 });
  expect((await contentOf('work')).equals(before)).toBe(true);
});

test('a merge removes nothing once others may have the disk; ended by its signal it has not happened', async () => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk, snapshot } = await open('work');
  for (let at = 0; at < 4; at++) {
    await disk.write(at * 6 * KIB, block(at + 1));
    await snapshot();
  }
  await disk.close();
  const before = readdirSync(join(root, 'work')).sort();
  const ended = new AbortController();
  ended.abort(new Error('enough'));
  await expect(mergeDisk('work', { root, signal: ended.signal })).rejects.toThrow('enough');
  expect(readdirSync(join(root, 'work')).sort()).toEqual(before);
  // The next owner makes the files of its snapshot before the configuration names them.
  const close = StackedDisk.prototype.close;
  let left: string[] = [];
  const spy = vi.spyOn(StackedDisk.prototype, 'close').mockImplementation(function (this: StackedDisk) {
    left = readdirSync(join(root, 'work')).sort();
    return close.call(this);
  });
  try {
    await mergeDisk('work', { root });
  } finally {
    spy.mockRestore();
  }
  expect(readdirSync(join(root, 'work')).sort()).toEqual(left);
  expect(left).toEqual(['config.v1.json', 'layer-5.data', 'layer-5.index', 'layer-6.data']);
});

test('one damaged disk hides no other, and no name keeps a disk from being removed', async () => {
  await createNamedDisk('a', { sizeBytes: SIZE }, root);
  await createNamedDisk('b', { sizeBytes: SIZE }, root);
  rmSync(join(root, 'a/layer-1.data'));
  expect(await listDisks(root)).toMatchObject([
    { name: 'a', problem: expect.stringContaining('layer-1.data') },
    { name: 'b', sizeBytes: SIZE },
  ]);
  await removeDisk('a', root);
  const held = await open('b');
  await held.snapshot();
  await expect(removeDisk('b', root)).rejects.toMatchObject({ code: 'DISK_BUSY' });
  await held.disk.close();
  await removeDisk('b', root);
  expect(await listDisks(root)).toEqual([]);
});

test('a raw export appears when it is whole, replaces nothing, and leaves nothing when it is ended', async () => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk } = await open('work');
  await disk.write(0, block(1, SIZE));
  const path = join(root, 'out.raw');
  const others = () => readdirSync(root).filter((name) => name.startsWith('out'));
  const read = disk.read.bind(disk);
  const ended = new AbortController();
  disk.read = async (...range) => {
    expect(existsSync(path)).toBe(false);
    return read(...range);
  };
  await exportRaw(disk, path);
  expect(readFileSync(path).equals(block(1, SIZE))).toBe(true);
  expect(others()).toEqual(['out.raw']);
  disk.read = read;
  await expect(exportRaw(disk, path)).rejects.toMatchObject({ code: 'DISK_OUTPUT_EXISTS' });
  rmSync(path);
  ended.abort(new Error('enough'));
  await expect(exportRaw(disk, path, ended.signal)).rejects.toThrow('enough');
  expect(others()).toEqual([]);
  await disk.close();
});

test('layer files of the middle of a stack become one that takes their place', async () => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk, snapshot } = await open('work');
  let lowers: readonly string[] = [];
  for (let at = 0; at < 4; at++) {
    await disk.write(at * 6 * KIB, block(at + 1));
    lowers = (await snapshot()).lowers as string[];
  }
  await disk.close();
  const out = join(root, 'merged.tar');
  const zfile = { algorithm: 'zstd', blockSize: 4096 } as const;
  const { uuid } = await mergeLayers(lowers.slice(1, 3), out, { zfile, tar: true });
  const merged = await openLayerFile(out);
  const layers = await Promise.all(lowers.map((path) => openLayerFile(path)));
  const [bottom, , middle] = layers;
  expect(merged.trailer).toMatchObject({ uuid: middle!.trailer.uuid, parentUuid: bottom!.trailer.uuid });
  expect(uuid).toBe(middle!.trailer.uuid);
  for (const { source } of [merged, ...layers]) await source.close();
  await expect(mergeLayers([lowers[2]!, lowers[1]!], join(root, 'x'), {})).rejects.toMatchObject({
    code: 'DISK_PARENT_MISMATCH',
  });
  expect(existsSync(join(root, 'x'))).toBe(false);
});

test('a disk on layers of a store: named in its configuration, opened by who can', async () => {
  await createNamedDisk('work', { sizeBytes: SIZE }, root);
  const { disk, snapshot } = await open('work');
  await disk.write(0, block(5));
  const { path } = await snapshot();
  await disk.close();
  const bytes = readFileSync(path);
  const digest = `sha256:${'a'.repeat(64)}` as const;
  const layer = { store: 's3://somewhere', digest, size: bytes.length, chunkDigests: digest } as StoreLayer;
  let opened = 0;
  const openStoreLayer = async (asked: StoreLayer) => {
    expect(asked).toEqual(layer);
    opened++;
    return new MemorySource('blob', bytes);
  };
  const origin = { kind: 'layers', lowers: [layer], image: { name: 'a:1', digest, store: 's3://somewhere' } } as const;
  await expect(createNamedDisk('fork', { origin }, root)).rejects.toMatchObject({ code: 'DISK_LAYER_REMOTE' });
  await createNamedDisk('fork', { origin, openStoreLayer }, root);
  await expect(open('fork')).rejects.toMatchObject({ code: 'DISK_LAYER_REMOTE' });
  const fork = await openNamedDisk('fork', { root, openStoreLayer });
  expect((await fork.disk.read(0, 4096)).equals(block(5))).toBe(true);
  await fork.disk.write(0, block(6));
  expect((await fork.snapshot('mine')).lowers).toEqual([layer, join(root, 'fork/layer-1.data')]);
  expect(fork.facts).toMatchObject({ baseLayers: 1, image: { name: 'a:1' } });
  await fork.disk.close();
  expect(opened).toBe(3);
  expect(await layersInStores(root)).toEqual([{ disk: 'fork', layers: [layer] }]);
  expect((await listDisks(root))[0]).toMatchObject({ name: 'fork', layers: 3, image: { name: 'a:1' } });
  expect(await mergeDisk('fork', { root, openStoreLayer, whole: true })).toEqual({ layersBefore: 2, layersAfter: 1 });
  expect(await layersInStores(root)).toEqual([]);
  expect((await contentOf('fork')).subarray(0, 4096).equals(block(6))).toBe(true);
});
