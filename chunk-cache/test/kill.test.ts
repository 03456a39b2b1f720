/**
 * SIGKILL at each step of fill, map update and eviction, and at random moments: whatever the map then claims is there and right (the
 * page cache outlives the process, so not one claim may be wrong), no space is lost, and every byte can be read.
 */
import { spawn } from 'node:child_process';
import { readdirSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { buildSync } from 'esbuild';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { openChunkCache } from '../cache.ts';
import { KILL_CAPACITY_BYTES, killBlobs } from './kill-blobs.ts';
import { randomFrom, temporaryFolder } from './made-up-source.ts';

const POINTS = [
  'cache-create-map-made',
  'cache-fill-before-data',
  'cache-fill-data-written',
  'cache-fill-data-synced',
  'cache-map-page-written',
  'cache-fill-claimed',
  'cache-evict-before-map',
  'cache-evict-map-synced',
  'cache-evict-between-punches',
  'cache-evict-punched',
  'cache-remove-map-gone',
];
const blobs = killBlobs();
const root = join(import.meta.dirname, '../..');
const child = join(root, `node_modules/.cache/dsec-test/chunk-cache-kill-${process.pid}.mjs`);

beforeAll(() => {
  buildSync({
    entryPoints: [join(import.meta.dirname, 'kill-child.ts')],
    outfile: child,
    bundle: true,
    platform: 'node',
    format: 'esm',
    packages: 'external',
    // `#base` and the like are ours, not packages.
    alias: Object.fromEntries(['base', 'linux'].map((name) => [`#${name}`, join(root, name, 'index.ts')])),
    logLevel: 'error',
  });
});

afterAll(() => rmSync(child, { force: true }));

/** The signal that ended the child, or its exit status. */
async function runChild(folder: string, seed: number, point: string, after: number, killMs?: number) {
  const started = spawn(process.execPath, [child, folder, String(seed), point, String(after)], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  if (killMs !== undefined) {
    await new Promise((resolve) => started.stdout.once('data', resolve));
    await delay(killMs);
    started.kill('SIGKILL');
  }
  return new Promise<string | number | null>((resolve) => {
    started.once('exit', (status, signal) => resolve(signal ?? status));
  });
}

/** Opens what the killed child left. Returns the number of chunks that were still there. */
async function inspect(folder: string): Promise<number> {
  let fetched = 0;
  const cache = await openChunkCache({
    folder,
    capacityBytes: KILL_CAPACITY_BYTES,
    minFreeBytes: 0,
    source: {
      async readRange(digest, offset, length) {
        fetched += length;
        return Buffer.from(blobs.find((blob) => blob.digest === digest)!.bytes.subarray(offset, offset + length));
      },
    },
  });
  const found = cache.stats().diskBytes;
  expect(found).toBeLessThanOrEqual(KILL_CAPACITY_BYTES);
  const names = readdirSync(join(folder, 'v1/blobs'));
  const used = names.reduce((sum, name) => sum + statSync(join(folder, 'v1/blobs', name)).blocks * 512, 0);
  expect(used).toBeLessThanOrEqual(found + names.length * 80_000);
  for (const blob of blobs) await cache.open(blob).verifyStored();
  expect(cache.stats()).toMatchObject({ badOnDisk: 0, diskBytes: found });
  // What is there is not fetched again: a blob that is complete costs nothing.
  const complete = blobs.filter((blob) => cache.open(blob).isComplete);
  for (const blob of complete) expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
  expect(fetched).toBe(0);
  for (const blob of blobs) expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
  await cache.close();
  return found;
}

describe('killed', () => {
  it.each(POINTS)('at %s', { timeout: 60_000 }, async (point) => {
    const folder = temporaryFolder();
    const found: number[] = [];
    for (const [round, after] of [3, 40].entries()) {
      expect(await runChild(folder, POINTS.indexOf(point) + 100 * round, point, after)).toBe('SIGKILL');
      found.push(await inspect(folder));
    }
    expect(Math.max(...found)).toBeGreaterThan(0);
  });

  it('at random moments, the next life going on with what the last one left', { timeout: 120_000 }, async () => {
    const folder = temporaryFolder();
    const random = randomFrom(7);
    for (let round = 0; round < 10; round++) {
      expect(await runChild(folder, round, '-', 0, random() * 250)).toBe('SIGKILL');
      if (round % 2 === 1) await inspect(folder);
    }
  });
});
