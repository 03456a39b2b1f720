/**
 * Files that nobody honest wrote: cut at every border of their structure, bits flipped, counts that no memory has room for, pipes where a
 * file should be. Each is an error of ours or a layer that reads to its end: never another exception, a hang or an exhausted memory.
 */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, openSync, readFileSync, rmSync, truncateSync, writeFileSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { DsecError } from '#base';
import { FileSource, MemorySource, readBytes } from '../byte-source.ts';
import { lowerPlaces, parseDiskConfig, readDiskConfig } from '../config/config-v1.ts';
import { createDisk, openDisk } from '../disk-folder.ts';
import { type CommitOptions, commitLayer } from '../layer/commit.ts';
import { openLayer, openLayerFile } from '../layer/layer-file.ts';
import { encodeHeader, LSMT_BLOCK, LSMT_FLAG, SECTOR } from '../lsmt/header.ts';
import { HOLE, Pieces } from '../lsmt/pieces.ts';
import type { SealedLayer } from '../lsmt/sealed-layer.ts';
import { encodeSegment, SEGMENT_BYTES } from '../lsmt/segment.ts';
import { IndexBuilder } from '../lsmt/segment-index.ts';
import { encodeZfileHeader, ZFILE_BLOCK } from '../zfile/header.ts';
import { ZfileSource } from '../zfile/zfile-source.ts';
import { randomNumbers } from './random-numbers.ts';

let root: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-hostile-'));
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

const KiB = 1024;
const GiB = 2 ** 30;

/** A layer of 40 segments, some zeroed, with bytes that compress a little. */
async function makeLayer(name: string, options: Omit<CommitOptions, 'virtualSize'>): Promise<Buffer> {
  const next = randomNumbers(3);
  const bytes = Buffer.from(Array.from({ length: 96 * KiB }, (_, at) => (at % 3 === 0 ? next() * 256 : 7)));
  const builder = new IndexBuilder();
  for (let at = 0, sector = 0, place = 0; at < 40; at++, sector += 16) {
    const isZeroed = at % 7 === 3;
    builder.add(sector, sector + 4, place, isZeroed, 0);
    if (!isZeroed) place += 4;
  }
  const path = join(root, name);
  await commitLayer(path, builder.build(), [new MemorySource('bytes', bytes)], { virtualSize: GiB, ...options });
  return readFileSync(path);
}

/** Every byte that the layer says it has. */
async function readAll(layer: SealedLayer): Promise<void> {
  const { index, source } = layer;
  const pieces = new Pieces();
  for (let at = 0; at < index.count; at++) {
    if (!index.isZeroed(at)) {
      await readBytes(source, index.moffset(at) * SECTOR, Math.min(64, index.end(at) - index.start(at)) * SECTOR);
    }
    pieces.clear();
    index.lookup(index.start(at), index.end(at) + 1, pieces);
    expect(pieces.layers[0]).not.toBe(HOLE);
  }
}

async function readsOrRefuses(bytes: Buffer): Promise<'read' | 'refused'> {
  try {
    await readAll(await openLayer(new MemorySource('layer', bytes)));
    return 'read';
  } catch (error) {
    if (!(error instanceof DsecError)) throw error;
    return 'refused';
  }
}

const KINDS: [string, Omit<CommitOptions, 'virtualSize'>][] = [
  ['plain', {}],
  ['tar', { tar: true }],
  ['lz4', { zfile: { algorithm: 'lz4' } }],
  ['zstd-tar', { zfile: { algorithm: 'zstd', blockSize: 16384 }, tar: true }],
];

describe.each(KINDS)('a layer, %s', (name, options) => {
  let whole: Buffer;
  /** Where one structure ends and the next begins. */
  let borders: number[];
  beforeAll(async () => {
    whole = await makeLayer(name, options);
    expect(await readsOrRefuses(whole)).toBe('read');
    const front = options.tar === true ? 1536 : 0;
    borders = [0, 512, 1024, front, front + 512, front + LSMT_BLOCK, whole.length];
    if (options.zfile === undefined) {
      const end = options.tar === true ? whole.length - 1024 : whole.length;
      const index = Number(whole.readBigUInt64LE(end - LSMT_BLOCK + 32)) + front;
      borders.push(index, index + 16, index + 640, end - LSMT_BLOCK, end);
    } else {
      const index = Number(whole.readBigUInt64LE(front + 40)) + front;
      borders.push(index, index + 4, whole.length - ZFILE_BLOCK, whole.length - 1024 - ZFILE_BLOCK);
    }
  });

  test('cut at every border, and a byte before and after', async () => {
    // The end of a tar is not asked for: what is cut there held no layer.
    const needed = options.tar === true ? whole.length - 1024 : whole.length;
    for (const border of borders) {
      for (const size of [border - 17, border - 1, border, border + 1, border + 16]) {
        if (size < 0 || size >= needed) continue;
        expect([size, await readsOrRefuses(whole.subarray(0, size))]).toEqual([size, 'refused']);
      }
    }
  });

  test('bits flipped, near the borders and anywhere', async () => {
    const next = randomNumbers(8);
    for (let round = 0; round < 400; round++) {
      const bytes = Buffer.from(whole);
      const near = borders[Math.floor(next() * borders.length)]! + Math.floor(next() * 128) - 64;
      const at = round % 2 === 0 ? near : Math.floor(next() * bytes.length);
      if (at < 0 || at >= bytes.length) continue;
      bytes[at]! ^= 1 << Math.floor(next() * 8);
      await readsOrRefuses(bytes);
    }
  });

  test('numbers of 8 bytes that are as large as can be', async () => {
    for (const border of borders) {
      for (let at = border - 64; at < border + 160; at += 8) {
        for (const value of [2n ** 63n, 2n ** 53n, 2n ** 32n, 2n ** 64n - 1n]) {
          if (at < 0 || at + 8 > whole.length) continue;
          const bytes = Buffer.from(whole);
          bytes.writeBigUInt64LE(value, at);
          await readsOrRefuses(bytes);
        }
      }
    }
  });
});

describe('counts that a sparse file makes room for', () => {
  function sparse(name: string, sizeBytes: number, parts: [number, Buffer][]): string {
    const path = join(root, name);
    const fd = openSync(path, 'w');
    for (const [at, bytes] of parts) writeSync(fd, bytes, 0, bytes.length, at);
    truncateSync(path, sizeBytes);
    return path;
  }

  test.each([1e6, 128e6, 129e6, 1e9])('an LSMT index of %d entries', async (entries) => {
    const indexOffset = LSMT_BLOCK;
    const end = Math.ceil((indexOffset + entries * 16) / LSMT_BLOCK) * LSMT_BLOCK;
    const path = sparse(`lsmt-${entries}`, end + LSMT_BLOCK, [
      [0, encodeHeader({ flags: 7, virtualSize: GiB })],
      [end, encodeHeader({ flags: 6, virtualSize: GiB, indexOffset, indexEntries: entries })],
    ]);
    const before = process.memoryUsage().arrayBuffers;
    await expect(openLayerFile(path)).rejects.toMatchObject({ code: 'LSMT_INDEX' });
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(64 * KiB * KiB);
  });

  test.each([1e6, 20e6, 2e9])('a jump table of %d blocks', async (entries) => {
    const fields = {
      flags: 27,
      indexOffset: ZFILE_BLOCK,
      indexEntries: entries,
      originalSize: entries * 4096,
      // Of zeros, however many.
      indexCrc: 0,
      blockSize: 4096,
      algorithm: 1,
      level: 0,
      useDictionary: false,
      dictionaryBytes: 0,
      verify: true,
    };
    const end = ZFILE_BLOCK + entries * 4;
    const path = sparse(`zfile-${entries}`, end + ZFILE_BLOCK, [
      [0, encodeZfileHeader(fields)],
      [end, encodeZfileHeader({ ...fields, flags: 22 })],
    ]);
    const before = process.memoryUsage().arrayBuffers;
    const source = await FileSource.open(path);
    await expect(ZfileSource.open(source)).rejects.toMatchObject({ code: expect.stringMatching(/^ZFILE_/) });
    await source.close();
    expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(64 * KiB * KiB);
  });

  test('the index of a writable layer', async () => {
    const folder = join(root, 'long-index');
    await createDisk(folder, { sizeBytes: GiB });
    truncateSync(join(folder, 'layer-1.index'), 8 * GiB);
    await expect(openDisk(folder)).rejects.toMatchObject({ code: 'DISK_NOT_WRITABLE' });
  });
});

test('a long index that is at hand keeps nobody else waiting', async () => {
  const count = 300_000;
  const identity = { virtualSize: 2 * count * SECTOR, uuid: '11111111-1111-1111-1111-111111111111' };
  const entries = Buffer.alloc(Math.ceil((count * SEGMENT_BYTES) / SECTOR) * SECTOR);
  for (let at = 0; at < count; at++) encodeSegment(entries, at * SEGMENT_BYTES, at * 2, 1, LSMT_BLOCK / SECTOR, true);
  const facts = { ...identity, indexOffset: LSMT_BLOCK, indexEntries: count };
  const sealed = LSMT_FLAG.data | LSMT_FLAG.sealed;
  const header = encodeHeader({ ...identity, flags: sealed | LSMT_FLAG.header });
  const bytes = Buffer.concat([header, entries, encodeHeader({ ...facts, flags: sealed })]);
  let turns = 0;
  const others = setInterval(() => {
    turns++;
  });
  const { index } = await openLayer(new MemorySource('long', bytes));
  clearInterval(others);
  expect([index.count, turns > 0]).toEqual([count, true]);
});

describe('config.v1.json', () => {
  test('random damage', () => {
    const next = randomNumbers(4);
    const text = JSON.stringify({
      repoBlobUrl: 'https://registry.example/v2/x/blobs',
      lowers: [{ file: '/a/b' }, { dir: 'c', digest: `sha256:${'0'.repeat(64)}`, size: 4096 }],
      upper: { data: 'layer-1.data', index: 'layer-1.index' },
      resultFile: '',
      dsec: { snapshots: [{ name: 'x', layers: 1, uuid: 'y', createdAt: 'z' }] },
    });
    const odd = ['\0', '"', '{', ']', '1e999', 'null', '\\u0000', '-1', 'true', '[]'];
    let parsed = 0;
    for (let round = 0; round < 3000; round++) {
      let damaged = text;
      for (let i = 0; i <= round % 3; i++) {
        const at = Math.floor(next() * damaged.length);
        const cut = Math.floor(next() * 4);
        damaged = damaged.slice(0, at) + (odd[Math.floor(next() * odd.length * 2)] ?? '') + damaged.slice(at + cut);
      }
      try {
        lowerPlaces(parseDiskConfig(damaged, 'c'), '/f', () => false);
        parsed++;
      } catch (error) {
        expect(error).toBeInstanceOf(DsecError);
      }
    }
    expect(parsed).toBeLessThan(3000);
  });

  test('nested without end, endless, with a zero byte in a name, and no file at all', async () => {
    const nested = `{"lowers":${'['.repeat(1e6)}${']'.repeat(1e6)}}`;
    expect(() => parseDiskConfig(nested, 'c')).toThrow(DsecError);
    expect(() => parseDiskConfig('{"lowers":[{"file":"a\\u0000b"}]}', 'c')).toThrow(DsecError);
    expect(() => parseDiskConfig('{"upper":{"data":"a\\u0000b"}}', 'c')).toThrow(DsecError);
    const path = join(root, 'endless.json');
    writeFileSync(path, '{');
    truncateSync(path, 64 * GiB);
    await expect(readDiskConfig(path)).rejects.toMatchObject({ code: 'DISK_CONFIG' });
    await expect(readDiskConfig(root)).rejects.toMatchObject({ code: 'DISK_CONFIG' });
  });
});

test('a pipe where a layer, an upper or the configuration should be does not wait for its other end', async () => {
  const fifo = join(root, 'fifo');
  expect(spawnSync('mkfifo', [fifo]).status).toBe(0);
  await expect(openLayerFile(fifo)).rejects.toMatchObject({ code: 'DISK_NOT_A_FILE' });
  await expect(readDiskConfig(fifo)).rejects.toMatchObject({ code: 'DISK_CONFIG' });
  const folder = join(root, 'fifo-upper');
  await createDisk(folder, { sizeBytes: GiB });
  for (const name of ['layer-1.index', 'layer-1.data']) {
    rmSync(join(folder, name));
    expect(spawnSync('mkfifo', [join(folder, name)]).status).toBe(0);
    await expect(openDisk(folder)).rejects.toBeInstanceOf(DsecError);
  }
});
