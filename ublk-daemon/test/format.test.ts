/** The formats by themselves: what we write reads back, every rule of the readers has a file that breaks it, golden bytes. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { crc32cRaw } from '#base';
import { MemorySource, readBytes } from '../byte-source.ts';
import { type CommitOptions, commitLayer } from '../layer/commit.ts';
import { dumpLayer, verifyLayer } from '../layer/inspect.ts';
import { openLayer, openLayerFile, unwrap } from '../layer/layer-file.ts';
import { openStack, stackLayers } from '../layer/stack.ts';
import { encodeHeader, LSMT_BLOCK, LSMT_FLAG, parseHeader } from '../lsmt/header.ts';
import { clipIndex, mergeIndexes } from '../lsmt/merge-index.ts';
import { HOLE, Pieces, ZEROED } from '../lsmt/pieces.ts';
import { decodeSegment, encodePadding, encodeSegment, SEGMENT_BYTES } from '../lsmt/segment.ts';
import { IndexBuilder, SegmentIndex } from '../lsmt/segment-index.ts';
import { blockCodec } from '../zfile/codec.ts';
import { encodeZfileHeader, parseZfileHeader, type ZfileHeader } from '../zfile/header.ts';
import { BLOCK_CRC_SEED, ZfileSource } from '../zfile/zfile-source.ts';
import { randomNumbers } from './random-numbers.ts';

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-overlaybd-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

type Run = readonly [start: number, end: number, kind: 'data' | 'zero'];
const MiB = 1024 * 1024;

/** A layer whose sector n holds `fill(n)`, n as 128 words. */
async function makeLayer(name: string, runs: readonly Run[], options: Partial<CommitOptions> = {}): Promise<string> {
  const builder = new IndexBuilder();
  const last = runs.at(-1)?.[1] ?? 0;
  const bytes = Buffer.alloc(last * 512);
  for (const [start, end, kind] of runs) {
    builder.add(start, end, kind === 'data' ? start : 8, kind === 'zero', 0);
    for (let sector = start; sector < end; sector++) bytes.fill(stamp(name, sector), sector * 512, (sector + 1) * 512);
  }
  const path = join(folder, name);
  await commitLayer(path, builder.build(), [new MemorySource(name, bytes)], { virtualSize: MiB, ...options });
  return path;
}

function stamp(name: string, sector: number): Buffer {
  const word = Buffer.alloc(4);
  word.writeUInt32LE(crc32cRaw(sector + 1, Buffer.from(name)));
  return word;
}

function piecesOf(index: SegmentIndex, start: number, end: number): unknown[] {
  const pieces = new Pieces();
  index.lookup(start, end, pieces);
  return Array.from({ length: pieces.count }, (_, at) => [
    pieces.starts[at],
    pieces.ends[at],
    pieces.layers[at],
    pieces.layers[at]! < 0 ? 0 : pieces.moffsets[at],
  ]);
}

test('checksums: raw CRC-32C, from 0 and from the salt of blocks', () => {
  const digits = Buffer.from('123456789');
  expect(crc32cRaw(0, digits)).toBe(0x58e3fa20);
  expect(crc32cRaw(BLOCK_CRC_SEED, digits)).toBe(0x3c9bd4e0);
  expect(~crc32cRaw(0xffffffff, digits) >>> 0).toBe(0xe3069283);
});

test('a segment: golden bytes', () => {
  const bytes = Buffer.alloc(48);
  encodeSegment(bytes, 0, 2048, 16320, 8, false);
  encodeSegment(bytes, 16, 2 ** 50 - 2 ** 20, 16383, 2 ** 55 - 2 ** 20, true);
  encodePadding(bytes, 32);
  expect(bytes.toString('hex', 0, 16)).toBe('000800000000 00ff 0800000000000000'.replaceAll(' ', ''));
  expect(bytes.toString('hex', 32)).toBe('ffffffffffff03000000000000000000');
  expect(decodeSegment(bytes, 0)).toEqual({ offset: 2048, length: 16320, moffset: 8, zeroed: false, tag: 0 });
  expect(decodeSegment(bytes, 16)).toMatchObject({ offset: 2 ** 50 - 2 ** 20, length: 16383, zeroed: true });
});

test('a header: golden bytes', () => {
  const block = encodeHeader({
    flags: LSMT_FLAG.data | LSMT_FLAG.sealed,
    virtualSize: 1 << 30,
    indexOffset: 16384,
    indexEntries: 256,
    uuid: '29a6a4a1-a2f8-4a03-992b-817814fbcf65',
  });
  expect(block.length).toBe(4096);
  expect(block.toString('hex', 0, 56)).toBe(
    '4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a' + // magic
      '86010000' + // 390
      '06000000' +
      '0040000000000000' +
      '0001000000000000' +
      '0000004000000000',
  );
  expect(block.toString('latin1', 56, 93)).toBe('29A6A4A1-A2F8-4A03-992B-817814FBCF65\0');
  expect([block[132], block[133]]).toEqual([1, 1]);
  expect(block.subarray(134).every((byte) => byte === 0)).toBe(true);
  expect(parseHeader(block, 'x')).toMatchObject({ flags: 6, indexOffset: 16384, indexEntries: 256, userTag: '' });
});

describe('what is written reads back', () => {
  const runs: Run[] = [
    [0, 8, 'data'],
    [8, 16, 'zero'],
    [20, 21, 'data'],
    [100, 1000, 'data'],
    [2000, 2048, 'zero'],
  ];
  const wraps: [string, Partial<CommitOptions>][] = [
    ['plain', {}],
    ['tar', { tar: true }],
    ['lz4-4', { zfile: { algorithm: 'lz4' } }],
    ['lz4-64-tar', { zfile: { algorithm: 'lz4', blockSize: 65536 }, tar: true }],
    ['zstd-16', { zfile: { algorithm: 'zstd', blockSize: 16384 } }],
    ['zstd-4-tar', { zfile: { algorithm: 'zstd' }, tar: true }],
  ];
  test.each(wraps)('%s', async (name, options) => {
    const uuid = '00000001-0000-4000-8000-00000000000a';
    const path = await makeLayer(name, runs, { ...options, uuid, userTag: 'größe' });
    const layer = await openLayerFile(path);
    expect(layer.trailer).toMatchObject({ uuid: uuid.toUpperCase(), virtualSize: MiB, flags: 6, userTag: 'größe' });
    expect(layer.header.flags).toBe(7);
    expect(layer.index.count + layer.paddingEntries).toBe(256);
    expect(piecesOf(layer.index, 0, 2048)).toEqual([
      [0, 8, 0, 8],
      [8, 16, ZEROED, 0],
      [16, 20, HOLE, 0],
      [20, 21, 0, 16],
      [21, 100, HOLE, 0],
      [100, 1000, 0, 17],
      [1000, 2000, HOLE, 0],
      [2000, 2048, ZEROED, 0],
    ]);
    expect(await readBytes(layer.source, 17 * 512, 512)).toEqual(Buffer.alloc(512, stamp(name, 100)));
    await layer.source.close();
    expect(await verifyLayer(path)).toMatchObject({
      tar: options.tar ?? false,
      zfile: options.zfile !== undefined,
      checksummed: options.zfile !== undefined,
      segments: 5,
      kind: 'sealed',
    });
    expect(
      (await dumpLayer(path)).lsmt!.segments.map(({ offset, length, zeroed }) => [offset, length, zeroed]),
    ).toEqual([
      [0, 8, false],
      [8, 8, true],
      [20, 1, false],
      [100, 900, false],
      [2000, 48, true],
    ]);
  });

  test('an empty layer has no entries, also none of padding; 256 need none', async () => {
    expect((await dumpLayer(await makeLayer('empty', []))).lsmt).toMatchObject({ entries: 0, paddingEntries: 0 });
    const many = Array.from({ length: 256 }, (_, at): Run => [at * 4, at * 4 + 1, 'data']);
    expect((await dumpLayer(await makeLayer('256', many))).lsmt).toMatchObject({ entries: 256, paddingEntries: 0 });
    const more = [...many, [1024, 1025, 'data'] as Run];
    expect((await dumpLayer(await makeLayer('257', more))).lsmt).toMatchObject({ entries: 512, paddingEntries: 255 });
  });

  test('long runs are cut to what an entry can say, and neighbours are joined', async () => {
    const builder = new IndexBuilder();
    builder.add(0, 40_000, 0, true, 0);
    builder.add(50_000, 50_004, 0, false, 0);
    builder.add(50_004, 50_008, 100, false, 0);
    const path = join(folder, 'long');
    await commitLayer(path, builder.build(), [new MemorySource('bytes', Buffer.alloc(MiB, 7))], {
      virtualSize: 64 * MiB,
    });
    const { lsmt } = await dumpLayer(path);
    expect(lsmt!.segments.map(({ offset, length }) => [offset, length])).toEqual([
      [0, 16383],
      [16383, 16383],
      [32766, 7234],
      [50_000, 8],
    ]);
  });

  test('blocks of 64 KiB that do not compress are refused: nobody could read them', async () => {
    const noise = Buffer.alloc(256 * 512);
    const next = randomNumbers(1);
    for (let at = 0; at < noise.length; at++) noise[at] = next() * 256;
    const builder = new IndexBuilder();
    builder.add(0, 256, 0, false, 0);
    const write = (blockSize: number) =>
      commitLayer(join(folder, 'noise'), builder.build(), [new MemorySource('noise', noise)], {
        virtualSize: MiB,
        zfile: { algorithm: 'lz4', blockSize },
      });
    await expect(write(65536)).rejects.toMatchObject({ code: 'ZFILE_INCOMPRESSIBLE' });
    await write(32768);
    const layer = await openLayerFile(join(folder, 'noise'));
    expect((await readBytes(layer.source, 4096, noise.length)).equals(noise)).toBe(true);
    await layer.source.close();
  });
});

describe('damaged LSMT files are refused', () => {
  const entries: [number, number, number, boolean][] = [
    [0, 4, 8, false],
    [4, 4, 12, true],
    [16, 8, 12, false],
  ];
  function file(
    change: (parts: { entries: typeof entries; virtualSize: number; indexEntries: number }) => void = () => {},
  ) {
    const parts = {
      entries: entries.map((entry) => [...entry] as (typeof entries)[0]),
      virtualSize: 65536,
      indexEntries: 3,
    };
    change(parts);
    const index = Buffer.alloc(512);
    parts.entries.forEach(([offset, length, moffset, zeroed], at) => {
      encodeSegment(index, at * SEGMENT_BYTES, offset, length, moffset, zeroed);
    });
    const { virtualSize, indexEntries } = parts;
    return Buffer.concat([
      encodeHeader({ flags: 3, virtualSize }),
      Buffer.alloc(12 * 512, 1),
      index,
      encodeHeader({ flags: 6, virtualSize, indexOffset: 20 * 512, indexEntries }),
    ]);
  }
  const open = (bytes: Buffer) => openLayer(new MemorySource('layer', bytes));

  test('as it is, it reads', async () => {
    expect((await open(file())).index.count).toBe(3);
  });

  test.each<[string, Parameters<typeof file>[0], RegExp]>([
    ['overlapping segments', (parts) => (parts.entries[1]![1] = 13), /out of order or overlapping/],
    ['segments out of order', (parts) => parts.entries.reverse(), /out of order/],
    ['a segment of length 0', (parts) => (parts.entries[1]![1] = 0), /length is 0/],
    ['sectors outside the device', (parts) => (parts.virtualSize = 20 * 512), /outside the device/],
    ['bytes in the header', (parts) => (parts.entries[0]![2] = 7), /outside the data/],
    ['bytes in the index', (parts) => (parts.entries[2]![2] = 13), /outside the data/],
    ['more entries than fit', (parts) => (parts.indexEntries = 33), /do not fit/],
    ['absurdly many entries', (parts) => (parts.indexEntries = 2 ** 40), /at most/],
  ])('%s', async (_, change, message) => {
    await expect(open(file(change))).rejects.toMatchObject({
      code: 'LSMT_INDEX',
      message: expect.stringMatching(message),
    });
  });

  test('cut off anywhere', async () => {
    const whole = file();
    for (let size = 0; size < whole.length; size += 511) {
      await expect(open(whole.subarray(0, size))).rejects.toMatchObject({
        code: expect.stringMatching(/^(LSMT_|DISK_NOT_A_LAYER)/),
      });
    }
  });

  test('a header that is not one', async () => {
    for (const [at, value] of [
      [24, 1],
      [28, 0xff],
      [132, 9],
      [8, 0],
    ] as const) {
      const bytes = file();
      bytes[bytes.length - LSMT_BLOCK + at] = value;
      await expect(open(bytes)).rejects.toMatchObject({ code: expect.stringMatching(/^LSMT_(HEADER|NOT_SEALED)/) });
    }
    const index = encodeHeader({ flags: 1, virtualSize: 4096 });
    await expect(open(Buffer.concat([index, index]))).rejects.toMatchObject({ code: 'LSMT_NOT_SEALED' });
  });

  test('random damage never does worse than an error', async () => {
    const next = randomNumbers(5);
    const whole = file();
    for (let round = 0; round < 500; round++) {
      const bytes = Buffer.from(whole);
      for (let i = 0; i < 3; i++) bytes[Math.floor(next() * bytes.length)] = next() * 256;
      await open(bytes).then(
        ({ index }) => piecesOf(index, 0, 128),
        (error) => expect(error.code).toMatch(/^(LSMT_|DISK_|ZFILE_)/),
      );
    }
  });
});

describe('damaged ZFiles are refused', () => {
  const codec = blockCodec('lz4');
  function zfile(
    change: (
      fields: { -readonly [K in keyof ZfileHeader]: ZfileHeader[K] },
      parts: { blocks: Buffer[]; table: number[] },
    ) => void = () => {},
  ) {
    const blocks = [Buffer.alloc(4096, 1), Buffer.alloc(4096, 2), Buffer.alloc(100, 3)].map((plain) => {
      const data = codec.compress(plain);
      const crc = Buffer.alloc(4);
      crc.writeUInt32LE(crc32cRaw(BLOCK_CRC_SEED, data));
      return Buffer.concat([data, crc]);
    });
    const table = blocks.map(({ length }) => length);
    const fields = {
      flags: 27,
      digest: 0,
      indexOffset: 512 + table.reduce((a, b) => a + b),
      indexEntries: 3,
      originalSize: 8292,
      indexCrc: 0,
      blockSize: 4096,
      algorithm: 1,
      level: 0,
      useDictionary: false,
      dictionaryBytes: 0,
      verify: true,
    };
    change(fields, { blocks, table });
    const index = Buffer.alloc(table.length * 4);
    table.forEach((length, at) => {
      index.writeUInt32LE(length, at * 4);
    });
    fields.indexCrc ||= crc32cRaw(0, index);
    return Buffer.concat([encodeZfileHeader(fields), ...blocks, index, encodeZfileHeader({ ...fields, flags: 22 })]);
  }
  const read = async (bytes: Buffer) => {
    const source = await ZfileSource.open(new MemorySource('zfile', bytes));
    return readBytes(source, 0, source.sizeBytes);
  };

  test('as it is, it reads; from any place', async () => {
    const plain = Buffer.concat([Buffer.alloc(4096, 1), Buffer.alloc(4096, 2), Buffer.alloc(100, 3)]);
    expect(await read(zfile())).toEqual(plain);
    const source = await ZfileSource.open(new MemorySource('zfile', zfile()));
    expect(await readBytes(source, 4000, 4250)).toEqual(plain.subarray(4000, 8250));
    expect(await readBytes(source, 0, 0)).toEqual(Buffer.alloc(0));
  });

  test.each<[string, string, Parameters<typeof zfile>[0]]>([
    ['a dictionary', 'ZFILE_UNSUPPORTED', (fields) => (fields.useDictionary = true)],
    ['the size of a dictionary', 'ZFILE_UNSUPPORTED', (fields) => (fields.dictionaryBytes = 16)],
    ['minilzo', 'ZFILE_UNSUPPORTED', (fields) => (fields.algorithm = 0)],
    ['another algorithm', 'ZFILE_UNSUPPORTED', (fields) => (fields.algorithm = 9)],
    ['a packed index', 'ZFILE_UNSUPPORTED', (fields) => (fields.flags |= 32)],
    ['a block size of 0', 'ZFILE_HEADER', (fields) => (fields.blockSize = 0)],
    ['an odd block size', 'ZFILE_HEADER', (fields) => (fields.blockSize = 5000)],
    ['too few blocks', 'ZFILE_HEADER', (fields) => (fields.originalSize = 20_000)],
    ['an index elsewhere', 'ZFILE_TRUNCATED', (fields) => (fields.indexOffset += 4)],
    ['the CRC of the index', 'ZFILE_CHECKSUM', (fields) => (fields.indexCrc = 5)],
    ['lengths that do not add up', 'ZFILE_TRUNCATED', (_, { table }) => (table[1]! += 1)],
    ['a block without data', 'ZFILE_BLOCK', (_, { table }) => (table[1] = 4)],
    ['a block too large', 'ZFILE_BLOCK', (_, { table }) => (table[0] = 0xffffffff)],
    ['a flipped bit in a block', 'ZFILE_CHECKSUM', (_, { blocks }) => (blocks[1]![2]! ^= 1)],
    ['a flipped bit in a block CRC', 'ZFILE_CHECKSUM', (_, { blocks }) => (blocks[2]![blocks[2]!.length - 1]! ^= 1)],
    ['a block of another size', 'ZFILE_BLOCK', (fields) => (fields.originalSize -= 1)],
  ])('%s', async (_, code, change) => {
    await expect(read(zfile(change))).rejects.toMatchObject({ code });
  });

  test('cut off anywhere', async () => {
    const whole = zfile();
    for (let size = 512; size < whole.length; size += 7) {
      await expect(read(whole.subarray(0, size))).rejects.toMatchObject({ code: expect.stringMatching(/^(ZFILE_)/) });
    }
  });

  test('a damaged header or trailer', async () => {
    for (const at of [30, 100, 500]) {
      for (const end of [false, true]) {
        const bytes = zfile();
        bytes[end ? bytes.length - 512 + at : at]! ^= 1;
        await expect(read(bytes)).rejects.toMatchObject({ code: 'ZFILE_CHECKSUM' });
      }
    }
  });

  test('without checksums it reads too', async () => {
    const plain = zfile((fields, { blocks, table }) => {
      fields.flags &= ~16;
      fields.verify = false;
      blocks.forEach((block, at) => {
        blocks[at] = block.subarray(0, -4);
        table[at]! -= 4;
      });
      fields.indexOffset -= 12;
    });
    expect((await read(plain)).length).toBe(8292);
  });

  test('a header: golden bytes', () => {
    const block = encodeZfileHeader({
      flags: 27,
      indexOffset: 724,
      indexEntries: 2,
      originalSize: 8192,
      indexCrc: 0xc1f9186e,
      blockSize: 4096,
      algorithm: 1,
      level: 0,
      useDictionary: false,
      dictionaryBytes: 0,
      verify: true,
    });
    // As `overlaybd-commit -z` wrote it for an empty layer of 1 GiB.
    expect(block.readUInt32LE(28)).toBe(0x34ed10f6);
    expect(parseZfileHeader(block, 'x')).toMatchObject({ indexEntries: 2, verify: true });
  });
});

describe('tars', () => {
  test('what holds no layer is refused', async () => {
    const path = await makeLayer('in-tar', [[0, 8, 'data']], { tar: true });
    const whole = readFileSync(path);
    for (const size of [512, 1024, 1536, 5000]) {
      await expect(unwrap(new MemorySource('tar', whole.subarray(0, size)))).rejects.toMatchObject({
        code: 'DISK_TAR',
      });
    }
    const bytes = Buffer.from(whole);
    bytes.write('99 size=1\n', 512, 'latin1');
    await expect(unwrap(new MemorySource('tar', bytes))).rejects.toMatchObject({ code: 'DISK_TAR' });
  });

  test('anything else is no layer', async () => {
    const path = join(folder, 'raw');
    writeFileSync(path, Buffer.alloc(10_000));
    await expect(openLayerFile(path)).rejects.toMatchObject({ code: 'DISK_NOT_A_LAYER' });
    await expect(dumpLayer(path)).rejects.toMatchObject({ code: 'DISK_NOT_A_LAYER' });
    await expect(openLayerFile(folder)).rejects.toMatchObject({ code: 'DISK_NOT_A_FILE' });
  });
});

describe('stacks', () => {
  const A = '0000000A-0000-4000-8000-00000000000A';
  const B = '0000000B-0000-4000-8000-00000000000B';
  const C = '0000000C-0000-4000-8000-00000000000C';

  test('who lies on what', async () => {
    const bottom = await makeLayer('bottom', [[0, 8, 'data']], { uuid: A });
    const child = await makeLayer('child', [[4, 8, 'data']], { uuid: B, parentUuid: A });
    const grandchild = await makeLayer('grandchild', [[6, 7, 'zero']], { uuid: C, parentUuid: B });
    const stack = await openStack([bottom, child, grandchild]);
    expect(piecesOf(stack.index, 0, 10)).toEqual([
      [0, 4, 0, 8],
      [4, 6, 1, 8],
      [6, 7, ZEROED, 0],
      [7, 8, 1, 11],
      [8, 10, HOLE, 0],
    ]);
    expect(stack.uuid).toBe(C);
    await stack.close();
    await expect(openStack([child])).rejects.toMatchObject({ code: 'DISK_PARENT_MISSING' });
    await expect(openStack([bottom, grandchild])).rejects.toMatchObject({ code: 'DISK_PARENT_MISMATCH' });
    await expect(openStack([bottom, child, bottom])).rejects.toMatchObject({ code: 'DISK_PARENT_CYCLE' });
    const own = await makeLayer('own', [], { uuid: A, parentUuid: A });
    await expect(openStack([own])).rejects.toMatchObject({ code: 'DISK_PARENT_CYCLE' });
    await expect(openStack([bottom, join(folder, 'nothing')])).rejects.toMatchObject({ code: 'DISK_LAYER_MISSING' });
    await expect(openStack(Array(256).fill(bottom))).rejects.toMatchObject({ code: 'DISK_TOO_MANY_LAYERS' });
    expect(() => stackLayers([])).not.toThrow();
  });

  test('255 random layers read as they would one by one', () => {
    const next = randomNumbers(9);
    const sectors = 3000;
    const model = new Int32Array(sectors).fill(HOLE);
    const places = new Int32Array(sectors);
    const indexes = Array.from({ length: 255 }, (_, layer) => {
      const builder = new IndexBuilder();
      for (let at = Math.floor(next() * 100); at < sectors; ) {
        const end = Math.min(sectors, at + 1 + Math.floor(next() * 20));
        const zeroed = next() < 0.2;
        const moffset = 8 + Math.floor(next() * 1e9);
        builder.add(at, end, moffset, zeroed, layer);
        for (let sector = at; sector < end; sector++) {
          model[sector] = zeroed ? ZEROED : layer;
          places[sector] = moffset + sector - at;
        }
        at = end + Math.floor(next() * (200 + layer * 20));
      }
      return builder.build();
    });
    const merged = mergeIndexes(indexes);
    const clipped = clipIndex(merged, 2500);
    const pieces = new Pieces();
    // An `expect` for each sector is a second of processor time.
    const wrong: number[] = [];
    for (let round = 0; round < 2000; round++) {
      const start = Math.floor(next() * sectors);
      const end = Math.min(sectors, start + 1 + Math.floor(next() * 60));
      pieces.clear();
      merged.lookup(start, end, pieces);
      let position = start;
      for (let at = 0; at < pieces.count; at++) {
        if (pieces.starts[at] !== position) wrong.push(position);
        for (; position < pieces.ends[at]!; position++) {
          const place = pieces.moffsets[at]! + position - pieces.starts[at]!;
          const right = pieces.layers[at] === model[position] && (model[position]! < 0 || place === places[position]);
          if (!right) wrong.push(position);
        }
      }
      if (position !== end) wrong.push(end);
    }
    expect(wrong).toEqual([]);
    expect(clipped.touches(2500, 3000, true)).toBe(false);
    expect(SegmentIndex.empty.find(5)).toBe(0);
    expect(merged.find(1e15)).toBe(merged.count);
  });
});
