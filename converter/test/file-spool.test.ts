import { createHash, randomBytes } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { codecFor } from '../layer/cluster-codec.ts';
import { FileSpool } from '../layer/file-spool.ts';
import type { FileData } from '../layer/spool-format.ts';

const KIB = 1024;
let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'dsec-spool-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

class Bench {
  readonly spool: FileSpool;
  readonly settled: number[] = [];
  #records: FileData[] = [];
  constructor(options: { tailLimitBytes?: number; codec?: 'lz4' | 'deflate' | 'zstd' } = {}) {
    this.spool = new FileSpool(join(dir, 'data'), join(dir, 'tails'), {
      tailLimitBytes: options.tailLimitBytes ?? 2048,
      codec: options.codec === undefined ? undefined : codecFor(options.codec),
      onSettled: (bytes) => this.settled.push(bytes),
    });
  }

  /** Pieces: bytes, or the length of a hole. */
  add(...pieces: (Buffer | number)[]): FileData | undefined {
    this.spool.begin(pieces.reduce<number>((n, p) => n + (typeof p === 'number' ? p : p.length), 0));
    for (const piece of pieces) typeof piece === 'number' ? this.spool.hole(piece) : this.spool.write(piece);
    const data = this.spool.end(0, this.#records.length);
    if (data !== undefined && data.id === this.#records.length) this.#records.push(data);
    return data;
  }

  finish() {
    const sizes = this.spool.finish();
    this.spool.close();
    return sizes;
  }

  read(data: FileData, codec?: 'lz4' | 'deflate' | 'zstd'): Buffer {
    const spool = readFileSync(join(dir, 'data'));
    const tails = readFileSync(join(dir, 'tails'));
    const out = Buffer.alloc(data.sizeBytes);
    if (data.form === 'flat') {
      spool.copy(out, 0, data.startBlock * 4096, (data.startBlock + data.blocks) * 4096);
      tails.copy(out, data.sizeBytes - data.tailBytes, data.tailOffset, data.tailOffset + data.tailBytes);
    } else if (data.form === 'chunks') {
      data.map!.forEach((block, i) => {
        const unit = 2 ** data.unitBits;
        if (block >= 0)
          spool.copy(out, i * unit, (data.startBlock + block) * 4096, (data.startBlock + block) * 4096 + unit);
      });
    } else {
      let block = data.startBlock;
      data.map!.forEach((cluster, i) => {
        const bytes = spool.subarray(block * 4096, (block + (cluster & 0xff)) * 4096);
        const size = Math.min(65536, data.sizeBytes - i * 65536);
        ((cluster & 0x100) !== 0 ? bytes : codecFor(codec!).decompress(bytes, size)).copy(out, i * 65536);
        block += cluster & 0xff;
      });
    }
    return out;
  }
}

const noise = (n: number) => randomBytes(n);
const text = (n: number) => Buffer.from('the quick brown fox '.repeat(n / 20 + 1)).subarray(0, n);

describe('plain files', () => {
  test('sizes around blocks and units come back', () => {
    const bench = new Bench();
    const files = [1, 2047, 2048, 2049, 4095, 4096, 4097, 6144, 65535, 65536, 65537, 300_000, 5_000_000].map((n) =>
      noise(n),
    );
    const records = files.map((bytes) => bench.add(bytes)!);
    bench.finish();
    for (const [i, bytes] of files.entries())
      expect(bench.read(records[i]!).equals(bytes), `file of ${bytes.length}`).toBe(true);
    expect(records.map((r) => r.tailBytes)).toEqual([1, 2047, 2048, 0, 0, 0, 1, 2048, 0, 0, 1, 992, 0]);
  });

  test('an empty file has no data', () => {
    const bench = new Bench();
    expect(bench.add(Buffer.alloc(0))).toBeUndefined();
    expect(bench.finish()).toEqual({ dataBytes: 0, tailBytes: 0 });
  });

  test('written in pieces of any size, the spool is the same', () => {
    const bytes = noise(400_000);
    const whole = new Bench();
    whole.add(bytes);
    whole.finish();
    const expected = readFileSync(join(dir, 'data'));
    const pieces = new Bench();
    const parts: Buffer[] = [];
    for (let at = 0; at < bytes.length; at += 7919) parts.push(bytes.subarray(at, at + 7919));
    pieces.add(...parts);
    pieces.finish();
    expect(readFileSync(join(dir, 'data')).equals(expected)).toBe(true);
  });
});

describe('identical files', () => {
  test('are stored once, their tails too', () => {
    const bench = new Bench();
    const bytes = noise(10_000);
    const first = bench.add(bytes)!;
    const other = bench.add(noise(10_000))!;
    expect(bench.add(Buffer.from(bytes))).toBe(first);
    const after = bench.add(noise(5000))!;
    const { dataBytes, tailBytes } = bench.finish();
    expect(dataBytes).toBe((2 + 2 + 1) * 4096);
    expect(tailBytes).toBe(1808 + 1808 + 904);
    expect(bench.read(first).equals(bytes)).toBe(true);
    expect(after.startBlock).toBe(other.startBlock + 2);
  });

  test('the last file of a layer, too: the spool ends before it', () => {
    const bench = new Bench();
    const bytes = noise(5000);
    bench.add(bytes);
    bench.add(bytes);
    const { dataBytes } = bench.finish();
    expect(readFileSync(join(dir, 'data')).length).toBe(dataBytes);
  });

  test('the same length and checksum is not enough', () => {
    const bench = new Bench();
    // Two 8-byte strings with the same CRC-32, padded alike.
    const a = Buffer.concat([Buffer.from('plumless'), Buffer.alloc(8192, 1)]);
    const b = Buffer.concat([Buffer.from('buckeroo'), Buffer.alloc(8192, 1)]);
    const one = bench.add(a)!;
    const two = bench.add(b)!;
    bench.finish();
    expect(one.crc32).toBe(two.crc32);
    expect(two).not.toBe(one);
    expect(bench.read(two).equals(b)).toBe(true);
  });
});

describe('holes', () => {
  test('runs of zeros and announced holes take no space', () => {
    const bench = new Bench();
    const head = noise(65536);
    const tail = noise(65536);
    const zeros = bench.add(head, Buffer.alloc(1 << 20), tail)!;
    const sparse = bench.add(head, 1 << 20, tail)!;
    expect(sparse).toBe(zeros);
    expect(bench.finish().dataBytes).toBe(2 * 65536);
    expect(bench.read(zeros).equals(Buffer.concat([head, Buffer.alloc(1 << 20), tail]))).toBe(true);
  });

  test('a hole that ends inside a unit', () => {
    const bench = new Bench();
    const bytes = [noise(1000), 500_000, noise(3000), 70_001, noise(1)] as const;
    const data = bench.add(...bytes)!;
    bench.finish();
    expect(
      bench.read(data).equals(Buffer.concat(bytes.map((p) => (typeof p === 'number' ? Buffer.alloc(p) : p)))),
    ).toBe(true);
  });

  test('only zeros, of any length, store nothing', () => {
    const bench = new Bench();
    const records = [4096, 65536, 262_145, 1 << 20].map((n) => bench.add(Buffer.alloc(n))!);
    expect(bench.finish().dataBytes).toBe(0);
    for (const data of records) expect(bench.read(data).equals(Buffer.alloc(data.sizeBytes))).toBe(true);
  });

  test('a huge sparse file has a map of moderate size', () => {
    const bench = new Bench();
    const data = bench.add(noise(4096), 2 ** 38, noise(4096))!;
    expect(bench.finish().dataBytes).toBeLessThan(3 << 20);
    expect(data.map!.length).toBeLessThanOrEqual(2 ** 19);
  });
});

describe.each(['lz4', 'deflate', 'zstd'] as const)('%s', (codec) => {
  test('compressible, incompressible and mixed files come back', () => {
    const bench = new Bench({ codec });
    const files = [
      text(100),
      text(5000),
      text(70_000),
      noise(200_000),
      Buffer.concat([text(65536), noise(65536), text(65536), text(10)]),
      Buffer.alloc(300_000),
    ];
    const records = files.map((bytes) => bench.add(bytes)!);
    const { dataBytes } = bench.finish();
    for (const [i, bytes] of files.entries())
      expect(bench.read(records[i]!, codec).equals(bytes), `file ${i}`).toBe(true);
    expect(records.map((r) => r.form)).toEqual(['flat', 'clusters', 'clusters', 'flat', 'clusters', 'clusters']);
    expect(dataBytes).toBeLessThan(400 * KIB);
  });

  test('a file that turns out to be sparse falls back to chunks', () => {
    const bench = new Bench({ codec });
    const head = Buffer.concat([text(65536), noise(65536), text(100)]);
    const data = bench.add(head, 8 << 20, text(70_000))!;
    const next = bench.add(text(66_000))!;
    bench.finish();
    expect(data.form).toBe('chunks');
    expect(bench.read(data).equals(Buffer.concat([head, Buffer.alloc(8 << 20), text(70_000)]))).toBe(true);
    expect(bench.read(next, codec).equals(text(66_000))).toBe(true);
  });
});

test('what is called settled does not change any more, whatever is taken back', () => {
  // Copies larger than a buffer are in the file already when they are taken back out.
  const files = Array.from({ length: 9 }, (_, i) => noise(5_000_000 + i));
  const all = files.flatMap((bytes, i) => [bytes, files[Math.max(0, i - 1)]!, noise(3000)]);
  const hash = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');
  const bench = new Bench();
  const seen: { length: number; hash: string }[] = [];
  for (const bytes of all) {
    bench.add(bytes);
    const length = bench.settled.at(-1) ?? 0;
    seen.push({ length, hash: hash(readFileSync(join(dir, 'data')).subarray(0, length)) });
  }
  bench.finish();
  const data = readFileSync(join(dir, 'data'));
  expect(seen).toEqual(seen.map(({ length }) => ({ length, hash: hash(data.subarray(0, length)) })));
  expect(seen.at(-1)!.length).toBeGreaterThan(30_000_000);
  expect(data.length).toBe(9 * Math.ceil(5_000_000 / 4096) * 4096 + 9 * 4096);
});

test('a full disk is an error', () => {
  const spool = new FileSpool('/dev/full', join(dir, 'tails'), { tailLimitBytes: 0, codec: undefined });
  spool.begin(8 << 20);
  expect(() => spool.write(noise(8 << 20))).toThrow(expect.objectContaining({ code: 'ENOSPC' }));
  spool.close();
});
