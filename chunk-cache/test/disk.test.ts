/** The local disk: one owner, damage, eviction, pins, a full disk, other threads. */
import { execFileSync, spawn } from 'node:child_process';
import {
  closeSync,
  ftruncateSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import { describe, expect, it } from 'vitest';
import { umount } from '#linux';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { MAP_HEADER_BYTES } from '../chunk-map.ts';
import { ChunkView } from '../chunk-view.ts';
import { MadeUpSource, makeBlob, ROOMY, randomFrom, temporaryFolder } from './made-up-source.ts';

const MIB = 2 ** 20;

const blobFiles = (folder: string) =>
  readdirSync(join(folder, 'v1/blobs')).map((name) => join(folder, 'v1/blobs', name));
const dataFile = (folder: string) => blobFiles(folder).find((path) => path.endsWith('.data'))!;
const mapFile = (folder: string) => blobFiles(folder).find((path) => path.endsWith('.map'))!;
const allocated = (path: string) => statSync(path).blocks * 512;

describe('owner', () => {
  it('refuses a second owner by the pid of the first, also in this process', async () => {
    const blob = makeBlob(CHUNK_BYTES);
    const folder = temporaryFolder();
    const options = { folder, source: new MadeUpSource(blob), ...ROOMY };
    const cache = await openChunkCache(options);
    await expect(openChunkCache(options)).rejects.toMatchObject({ code: 'CACHE_BUSY', params: { pid: process.pid } });
    const code = `
      import { openChunkCache } from ${JSON.stringify(new URL('../cache.ts', import.meta.url).href)};
      try { await openChunkCache({ folder: ${JSON.stringify(folder)}, source: undefined }); console.log('opened'); }
      catch (error) { console.log(error.code, error.message); }`;
    const child = spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', code], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let said = '';
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      said += text;
    });
    await new Promise((resolve) => child.once('close', resolve));
    expect(said).toContain('CACHE_BUSY');
    expect(said).toContain(String(process.pid));
    await cache.close();
    await (await openChunkCache(options)).close();
  });

  it('refuses facts that do not fit, and keeps two tables of one blob apart', async () => {
    const blob = makeBlob(3 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const short = { ...blob, chunkDigests: blob.chunkDigests.subarray(32) };
    expect(() => cache.open(short)).toThrow(expect.objectContaining({ code: 'CACHE_FACTS' }));
    const forged = { ...blob, chunkDigests: Buffer.from(blob.chunkDigests).fill(7, 32, 64) };
    await expect(cache.open(forged).read(0, 3 * CHUNK_BYTES)).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH' });
    expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    expect(cache.open(blob)).toBe(cache.open({ ...blob }));
    expect(cache.open(blob)).not.toBe(cache.open(forged));
    await cache.close();
  });
});

describe('damage', () => {
  it.each([
    ['a byte of data', (f: string) => damageAt(dataFile(f), 3 * CHUNK_BYTES + 17), 1],
    ['data cut short', (f: string) => truncateSync(dataFile(f), 5 * CHUNK_BYTES), 8],
    ['data grown', (f: string) => truncateSync(dataFile(f), 50 * CHUNK_BYTES), 8],
    ['data gone', (f: string) => rmSync(dataFile(f)), 8],
    ['map gone', (f: string) => rmSync(mapFile(f)), 8],
    ['map cut short', (f: string) => truncateSync(mapFile(f), MAP_HEADER_BYTES + 3), 8],
    ['map empty', (f: string) => truncateSync(mapFile(f), 0), 8],
    ['map of noise', (f: string) => writeFileSync(mapFile(f), Buffer.alloc(MAP_HEADER_BYTES + 8, 0xa5)), 8],
    ['header of the map', (f: string) => damageAt(mapFile(f), 20), 8],
    ['a claim lost', (f: string) => pokeAt(mapFile(f), MAP_HEADER_BYTES + 2, 0), 1],
    ['a claim of bits unknown', (f: string) => pokeAt(mapFile(f), MAP_HEADER_BYTES + 2, 0xff), 1],
    ['data zeroed', (f: string) => writeFileSync(dataFile(f), Buffer.alloc(8 * CHUNK_BYTES)), 8],
    ['other files', (f: string) => strangers(f), 0],
  ] as const)('%s', async (_, damage, refetched) => {
    const blob = makeBlob(8 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    const folder = temporaryFolder();
    for (const [life, expected] of [8, refetched, 0].entries()) {
      const cache = await openChunkCache({ folder, source, ...ROOMY });
      source.asked.length = 0;
      // Chunk by chunk and backwards, so that nothing is read ahead.
      for (let i = 7; i >= 0; i--) {
        const bytes = await cache.open(blob).read(i * CHUNK_BYTES, CHUNK_BYTES);
        expect(bytes.equals(blob.bytes.subarray(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES))).toBe(true);
      }
      await cache.close();
      expect(source.chunkCounts(blob.digest).size).toBe(expected);
      if (life === 0) damage(folder);
    }
  });

  it('of random bytes, anywhere, again and again', async () => {
    const random = randomFrom(99);
    const blobs = [makeBlob(20 * CHUNK_BYTES + 5, 1), makeBlob(7 * CHUNK_BYTES, 2)];
    const source = new MadeUpSource(...blobs);
    const folder = temporaryFolder();
    let dropped = 0;
    for (let life = 0; life < 25; life++) {
      const cache = await openChunkCache({ folder, source, ...ROOMY });
      for (const blob of blobs) {
        const cached = cache.open(blob);
        if (life % 3 === 0) await cached.verifyStored();
        expect((await cached.read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
      }
      dropped += cache.stats().badOnDisk;
      await cache.close();
      const files = blobFiles(folder);
      for (let i = 0; i < 3; i++) {
        const path = files[Math.floor(random() * files.length)]!;
        const { size } = statSync(path);
        const at = Math.floor(random() * size);
        if (random() < 0.1) truncateSync(path, at);
        else damageAt(path, at);
      }
    }
    expect(dropped).toBeGreaterThan(10);
  });

  it('under a running cache: files that vanish cost a fetch', async () => {
    const blob = makeBlob(8 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    const folder = temporaryFolder();
    const first = await openChunkCache({ folder, source, ...ROOMY });
    await first.open(blob).read(0, blob.sizeBytes);
    await first.close();
    const cache = await openChunkCache({ folder, source, ...ROOMY });
    for (const path of blobFiles(folder)) rmSync(path);
    expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    await cache.close();
    const last = await openChunkCache({ folder, source, ...ROOMY });
    source.asked.length = 0;
    expect((await last.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    expect(source.asked).toHaveLength(0);
    await last.close();
  });
});

function damageAt(path: string, at: number): void {
  const bytes = readFileSync(path);
  bytes[at]! ^= 0x40;
  pokeAt(path, at, bytes[at]!);
}

function pokeAt(path: string, at: number, byte: number): void {
  const fd = openSync(path, 'r+');
  writeSync(fd, Buffer.of(byte), 0, 1, at);
  closeSync(fd);
}

function strangers(folder: string): void {
  writeFileSync(join(folder, 'v1/blobs/note.txt'), 'hello');
  writeFileSync(join(folder, 'v1/blobs/x.map'), 'hello');
  writeFileSync(join(folder, 'v1/blobs/y.data'), 'hello');
  mkdirSync(join(folder, 'v1/blobs/z.map.new'));
}

describe('eviction', () => {
  it('holds the capacity, gives the space back, and keeps pinned blobs', async () => {
    const [pinned, other] = [makeBlob(4 * MIB, 1), makeBlob(40 * MIB, 2)];
    const source = new MadeUpSource(pinned, other);
    const folder = temporaryFolder();
    const options = { folder, source, capacityBytes: 10 * MIB, ...ROOMY };
    let cache = await openChunkCache(options);
    cache.pin(pinned.digest);
    await cache.open(pinned).read(0, pinned.sizeBytes);
    for (let i = 0; i < 160; i++) {
      await cache.open(other).read(i * CHUNK_BYTES, CHUNK_BYTES);
      expect(cache.stats().diskBytes).toBeLessThanOrEqual(10 * MIB);
    }
    await cache.flush();
    const { evictedChunks, diskBytes } = cache.stats();
    expect(evictedChunks).toBeGreaterThan(100);
    expect(cache.open(pinned).isComplete).toBe(true);
    const used = blobFiles(folder).reduce((sum, path) => sum + allocated(path), 0);
    expect(used).toBeLessThanOrEqual(diskBytes + MIB);
    await cache.close();

    // The pin outlives its owner.
    cache = await openChunkCache(options);
    expect(cache.pinned()).toEqual([pinned.digest]);
    await expect(cache.remove(pinned.digest)).rejects.toMatchObject({ code: 'CACHE_PINNED' });
    source.asked.length = 0;
    for (let i = 0; i < 160; i += 2) await cache.open(other).read(i * CHUNK_BYTES, 10);
    await cache.open(pinned).read(0, pinned.sizeBytes);
    expect(source.chunkCounts(pinned.digest).size).toBe(0);
    cache.unpin(pinned.digest);
    expect(cache.pinned()).toEqual([]);
    await cache.remove(pinned.digest);
    expect(cache.list().map(({ digest }) => digest)).toEqual([other.digest]);
    await cache.close();
  });

  it('makes no hole in a blob that is pinned while it is being evicted', async () => {
    const [whole, other] = [makeBlob(4 * MIB, 1), makeBlob(30 * MIB, 2)];
    const options = { folder: temporaryFolder(), source: new MadeUpSource(whole, other), ...ROOMY };
    const cache = await openChunkCache({ ...options, capacityBytes: 6 * MIB, memoryBytes: CHUNK_BYTES });
    let given = 0;
    for (let round = 0; round < 15; round++) {
      const cached = cache.open(whole);
      await cached.read(0, whole.sizeBytes);
      await cache.flush();
      // Eviction is at work while the path is asked for.
      const pushing = cache.open(other).prefetch([{ offset: ((round * 3) % 26) * MIB, length: 4 * MIB }]);
      for (let i = 0; i < round; i++) await new Promise((resolve) => setImmediate(resolve));
      cache.pin(whole.digest);
      const path = cached.localPath;
      await pushing;
      await cache.flush();
      if (path !== undefined) {
        given++;
        expect(readFileSync(path).equals(whole.bytes)).toBe(true);
      }
      cache.unpin(whole.digest);
    }
    expect(given).toBeGreaterThan(0);
    expect(cache.stats().evictedChunks).toBeGreaterThan(0);
    await cache.close();
  });

  it('does not grow over a capacity of pinned blobs, and reads go on', async () => {
    const blob = makeBlob(8 * MIB);
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, capacityBytes: 2 * MIB, ...ROOMY });
    cache.pin(blob.digest);
    for (let i = 31; i >= 0; i--) {
      const bytes = await cache.open(blob).read(i * CHUNK_BYTES, CHUNK_BYTES);
      expect(bytes.equals(blob.bytes.subarray(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES))).toBe(true);
    }
    await cache.flush();
    expect(cache.stats().diskBytes).toBe(2 * MIB);
    expect(cache.stats().diskProblem).toBe('capacity');
    await cache.close();
  });

  it('gives back what a killed owner left unclaimed', async () => {
    const blob = makeBlob(8 * MIB);
    const folder = temporaryFolder();
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder, source, ...ROOMY });
    await cache.open(blob).read(0, blob.sizeBytes);
    await cache.close();
    for (let i = 0; i < 20; i++) pokeAt(mapFile(folder), MAP_HEADER_BYTES + i, 0);
    expect(allocated(dataFile(folder))).toBeGreaterThanOrEqual(8 * MIB);
    const again = await openChunkCache({ folder, source, ...ROOMY });
    expect(allocated(dataFile(folder))).toBeLessThanOrEqual(12 * CHUNK_BYTES + 65_536);
    expect((await again.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    await again.close();
  });
});

describe.skipIf(process.getuid?.() !== 0)('a full disk (root)', () => {
  it.each([
    ['tmpfs', 2 * MIB],
    ['ext4', 2 * MIB],
    ['ext4', 0],
  ] as const)('%s with %i bytes left: reads go on, caching comes back with the space', async (kind, leftBytes) => {
    const root = temporaryFolder();
    const mount = join(root, 'mount');
    mkdirSync(mount);
    if (kind === 'tmpfs') {
      execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', mount]);
    } else {
      const image = join(root, 'image');
      const fd = openSync(image, 'w');
      ftruncateSync(fd, 24 * MIB);
      closeSync(fd);
      execFileSync('mkfs.ext4', ['-q', '-m0', image]);
      execFileSync('mount', ['-o', 'loop', image, mount]);
    }
    try {
      const blob = makeBlob(24 * MIB);
      const source = new MadeUpSource(blob);
      const folder = join(mount, 'cache');
      const cache = await openChunkCache({ folder, source, diskRetryMs: 1, memoryBytes: 2 * MIB, ...ROOMY });
      const cached = cache.open(blob);
      const readAll = async () => {
        for (let i = 0; i < blob.sizeBytes; i += MIB) {
          const bytes = await cached.read(i, MIB);
          expect(bytes.equals(blob.bytes.subarray(i, i + MIB))).toBe(true);
          await cache.flush();
        }
      };
      // In the middle of reading, something else fills the disk.
      await cached.read(0, 10);
      const ballast = join(mount, 'ballast');
      fillDisk(ballast, leftBytes);
      await readAll();
      const full = cache.stats();
      expect(full.bypassedBytes).toBeGreaterThan(0);
      expect(full.diskBytes).toBeLessThan(4 * MIB);
      if (leftBytes === 0) expect(full.diskProblem).toBeDefined();
      rmSync(ballast);
      await new Promise((resolve) => setTimeout(resolve, 5));
      await readAll();
      expect(cache.stats().diskBytes).toBeGreaterThan(10 * MIB);
      await readAll();
      await cache.close();
      // And what is there is right.
      const again = await openChunkCache({ folder, source, ...ROOMY });
      const before = again.stats().diskBytes;
      await again.open(blob).verifyStored();
      expect([again.stats().badOnDisk, again.stats().diskBytes]).toEqual([0, before]);
      await again.close();
    } finally {
      umount(mount, { lazy: true });
    }
  });

  it('an error of the disk that no free space foretold', async () => {
    const mount = join(temporaryFolder(), 'mount');
    mkdirSync(mount);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=32m,nr_inodes=24', 'tmpfs', mount]);
    try {
      const blob = makeBlob(4 * MIB);
      const source = new MadeUpSource(blob);
      const cache = await openChunkCache({ folder: join(mount, 'cache'), source, diskRetryMs: 1, ...ROOMY });
      const taken: string[] = [];
      try {
        for (let i = 0; i < 100; i++) {
          writeFileSync(join(mount, `inode${i}`), '');
          taken.push(join(mount, `inode${i}`));
        }
      } catch {
        // No inode is left.
      }
      const cached = cache.open(blob);
      expect((await cached.read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
      await cache.flush();
      expect(cache.stats()).toMatchObject({ diskProblem: 'ENOSPC', diskBytes: 0, bypassedBytes: blob.sizeBytes });
      // The memory level holds it now.
      expect(cached.readNow(0, blob.sizeBytes)?.equals(blob.bytes)).toBe(true);
      for (const path of taken) rmSync(path);
      cached.release();
      await new Promise((resolve) => setTimeout(resolve, 5));
      expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
      await cache.flush();
      expect(cache.stats()).toMatchObject({ diskProblem: undefined, diskBytes: blob.sizeBytes });
      await cache.close();
    } finally {
      umount(mount, { lazy: true });
    }
  });

  it('evicts when others need the space', async () => {
    const mount = join(temporaryFolder(), 'mount');
    mkdirSync(mount);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=32m', 'tmpfs', mount]);
    try {
      const blob = makeBlob(20 * MIB);
      const source = new MadeUpSource(blob);
      const cache = await openChunkCache({ folder: join(mount, 'cache'), source, minFreeBytes: 8 * MIB });
      await cache.open(blob).prefetch([{ offset: 0, length: blob.sizeBytes }]);
      await cache.flush();
      expect(cache.stats().diskBytes).toBe(20 * MIB);
      writeFileSync(join(mount, 'other'), Buffer.alloc(10 * MIB, 1));
      await cache.tidy();
      expect(cache.stats().diskBytes).toBeLessThanOrEqual(14 * MIB);
      expect((await cache.open(blob).read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
      await cache.close();
    } finally {
      umount(mount, { lazy: true });
    }
  });
});

describe('another thread', () => {
  it('answers hits from the file, and sees chunks come and go', async () => {
    const blob = makeBlob(6 * CHUNK_BYTES + 99);
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    const view = new ChunkView(structuredClone(cached.view()));
    expect(view.readNow(0, 10)).toBeUndefined();
    await cached.read(0, 2 * CHUNK_BYTES);
    await cache.flush();
    expect(view.readNow(10, 2 * CHUNK_BYTES - 10)?.equals(blob.bytes.subarray(10, 2 * CHUNK_BYTES))).toBe(true);
    expect(view.readNow(10, 2 * CHUNK_BYTES)).toBeUndefined();
    await cached.read(0, blob.sizeBytes);
    await cache.flush();
    const rest = blob.bytes.subarray(6 * CHUNK_BYTES);
    expect(view.readNow(6 * CHUNK_BYTES, 5000)?.equals(rest)).toBe(true);
    expect(view.readNow(blob.sizeBytes, 10)).toHaveLength(0);
    await cache.remove(blob.digest);
    expect(view.readNow(0, 10)).toBeUndefined();
    await cached.read(0, CHUNK_BYTES);
    await cache.flush();
    // A new file.
    expect(view.readNow(0, 10)?.equals(blob.bytes.subarray(0, 10))).toBe(true);
    view.close();
    await cache.close();
  });

  it('never gets a wrong byte while chunks are evicted and come again', { timeout: 60_000 }, async () => {
    const blob = makeBlob(4 * MIB);
    const source = new MadeUpSource(blob);
    const options = { folder: temporaryFolder(), source, capacityBytes: MIB, memoryBytes: CHUNK_BYTES, ...ROOMY };
    const cache = await openChunkCache(options);
    const cached = cache.open(blob);
    const stop = new Int32Array(new SharedArrayBuffer(4));
    const bytes = new Uint8Array(new SharedArrayBuffer(blob.sizeBytes));
    bytes.set(blob.bytes);
    const reader = new Worker(new URL('./view-reader.mjs', import.meta.url), {
      execArgv: [],
      workerData: { handle: cached.view(), bytes, stop },
    });
    const result = new Promise<{ hits: number; wrong: number }>((resolve, reject) => {
      reader.once('message', resolve);
      reader.once('error', reject);
    });
    const random = randomFrom(5);
    const until = performance.now() + 2500;
    while (performance.now() < until) {
      for (let i = 0; i < 20; i++) {
        const at = Math.floor(random() * 16) * CHUNK_BYTES;
        const piece = await cached.read(at, 4096);
        if (!piece.equals(blob.bytes.subarray(at, at + 4096))) expect.fail(`wrong bytes at ${at}`);
      }
      await cache.flush();
    }
    Atomics.store(stop, 0, 1);
    const { hits, wrong } = await result;
    await reader.terminate();
    expect(wrong).toBe(0);
    expect(hits).toBeGreaterThan(100);
    expect(cache.stats().evictedChunks).toBeGreaterThan(50);
    await cache.close();
  });
});

function fillDisk(path: string, leftBytes: number): void {
  const fd = openSync(path, 'w');
  for (const size of [MIB, 65_536, 4096]) {
    try {
      for (;;) if (writeSync(fd, Buffer.alloc(size, 1)) < size) break;
    } catch {
      // Full, for pieces of this size.
    }
  }
  if (leftBytes > 0) ftruncateSync(fd, Math.max(0, statSync(path).size - leftBytes));
  closeSync(fd);
}
