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
  #records: FileData[] = [];
  constructor(options: { tailLimitBytes?: number; codec?: 'lz4' | 'deflate' | 'zstd' } = {}) {
    this.spool = new FileSpool(join(dir, 'data'), join(dir, 'tails'), {
      tailLimitBytes: options.tailLimitBytes ?? 2048,
      codec: options.codec === undefined ? undefined : codecFor(options.codec),
      becomesBlob: true,
    });
  }

  /** Pieces: bytes, or the length of a hole. */
  add(...pieces: (Buffer | number)[]): FileData | undefined {
    this.begin(pieces.reduce<number>((n, p) => n + (typeof p === 'number' ? p : p.length), 0));
    for (const piece of pieces) typeof piece === 'number' ? this.spool.hole(piece) : this.spool.write(piece);
    return this.end();
  }

  begin(sizeBytes: number): void {
    this.spool.begin(sizeBytes);
  }

  end(): FileData | undefined {
    const data = this.spool.end(0, this.#records.length);
    if (data !== undefined && data.id === this.#records.length) this.#records.push(data);
    return data;
  }

  async finish() {
    const { digests, ...sizes } = await this.spool.finish();
    await this.spool.close();
    return { ...sizes, digests: digests! };
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
  test('sizes around blocks and units come back', async () => {
    const bench = new Bench();
    const files = [1, 2047, 2048, 2049, 4095, 4096, 4097, 6144, 65535, 65536, 65537, 300_000, 5_000_000].map((n) =>
      noise(n),
    );
    const records = files.map((bytes) => bench.add(bytes)!);
    await bench.finish();
    for (const [i, bytes] of files.entries())
      expect(bench.read(records[i]!).equals(bytes), `file of ${bytes.length}`).toBe(true);
    expect(records.map((r) => r.tailBytes)).toEqual([1, 2047, 2048, 0, 0, 0, 1, 2048, 0, 0, 1, 992, 0]);
  });

  test('an empty file has no data', async () => {
    const bench = new Bench();
    expect(bench.add(Buffer.alloc(0))).toBeUndefined();
    expect(await bench.finish()).toMatchObject({ dataBytes: 0, tailBytes: 0 });
  });

  test('written in pieces of any size, the spool is the same', async () => {
    const bytes = noise(400_000);
    const whole = new Bench();
    whole.add(bytes);
    await whole.finish();
    const expected = readFileSync(join(dir, 'data'));
    const pieces = new Bench();
    const parts: Buffer[] = [];
    for (let at = 0; at < bytes.length; at += 7919) parts.push(bytes.subarray(at, at + 7919));
    pieces.add(...parts);
    await pieces.finish();
    expect(readFileSync(join(dir, 'data')).equals(expected)).toBe(true);
  });
});

describe('identical files', () => {
  test('are stored once, their tails too', async () => {
    const bench = new Bench();
    const bytes = noise(10_000);
    const first = bench.add(bytes)!;
    const other = bench.add(noise(10_000))!;
    expect(bench.add(Buffer.from(bytes))).toBe(first);
    const after = bench.add(noise(5000))!;
    const { dataBytes, tailBytes } = await bench.finish();
    expect(dataBytes).toBe((2 + 2 + 1) * 4096);
    expect(tailBytes).toBe(1808 + 1808 + 904);
    expect(bench.read(first).equals(bytes)).toBe(true);
    expect(after.startBlock).toBe(other.startBlock + 2);
  });

  test('the last file of a layer, too: the spool ends before it', async () => {
    const bench = new Bench();
    const bytes = noise(5000);
    bench.add(bytes);
    bench.add(bytes);
    const { dataBytes } = await bench.finish();
    expect(readFileSync(join(dir, 'data')).length).toBe(dataBytes);
  });

  test('the same length and checksum is not enough', async () => {
    const bench = new Bench();
    // Two 8-byte strings with the same CRC-32, padded alike.
    const a = Buffer.concat([Buffer.from('plumless'), Buffer.alloc(8192, 1)]);
    const b = Buffer.concat([Buffer.from('buckeroo'), Buffer.alloc(8192, 1)]);
    const one = bench.add(a)!;
    const two = bench.add(b)!;
    await bench.finish();
    expect(one.crc32).toBe(two.crc32);
    expect(two).not.toBe(one);
    expect(bench.read(two).equals(b)).toBe(true);
  });
});

describe('holes', () => {
  test('runs of zeros and announced holes take no space', async () => {
    const bench = new Bench();
    const head = noise(65536);
    const tail = noise(65536);
    const zeros = bench.add(head, Buffer.alloc(1 << 20), tail)!;
    const sparse = bench.add(head, 1 << 20, tail)!;
    expect(sparse).toBe(zeros);
    expect((await bench.finish()).dataBytes).toBe(2 * 65536);
    expect(bench.read(zeros).equals(Buffer.concat([head, Buffer.alloc(1 << 20), tail]))).toBe(true);
  });

  test('a hole that ends inside a unit', async () => {
    const bench = new Bench();
    const bytes = [noise(1000), 500_000, noise(3000), 70_001, noise(1)] as const;
    const data = bench.add(...bytes)!;
    await bench.finish();
    expect(
      bench.read(data).equals(Buffer.concat(bytes.map((p) => (typeof p === 'number' ? Buffer.alloc(p) : p)))),
    ).toBe(true);
  });

  test('only zeros, of any length, store nothing', async () => {
    const bench = new Bench();
    const records = [4096, 65536, 262_145, 1 << 20].map((n) => bench.add(Buffer.alloc(n))!);
    expect((await bench.finish()).dataBytes).toBe(0);
    for (const data of records) expect(bench.read(data).equals(Buffer.alloc(data.sizeBytes))).toBe(true);
  });

  test('a huge sparse file has a map of moderate size', async () => {
    const bench = new Bench();
    const data = bench.add(noise(4096), 2 ** 38, noise(4096))!;
    expect((await bench.finish()).dataBytes).toBeLessThan(3 << 20);
    expect(data.map!.length).toBeLessThanOrEqual(2 ** 19);
  });
});

describe.each(['lz4', 'deflate', 'zstd'] as const)('%s', (codec) => {
  test('compressible, incompressible and mixed files come back', async () => {
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
    const { dataBytes } = await bench.finish();
    for (const [i, bytes] of files.entries())
      expect(bench.read(records[i]!, codec).equals(bytes), `file ${i}`).toBe(true);
    expect(records.map((r) => r.form)).toEqual(['flat', 'clusters', 'clusters', 'flat', 'clusters', 'clusters']);
    expect(dataBytes).toBeLessThan(400 * KIB);
  });

  test('a file that turns out to be sparse falls back to chunks', async () => {
    const bench = new Bench({ codec });
    const head = Buffer.concat([text(65536), noise(65536), text(100)]);
    const data = bench.add(head, 8 << 20, text(70_000))!;
    const next = bench.add(text(66_000))!;
    await bench.finish();
    expect(data.form).toBe('chunks');
    expect(bench.read(data).equals(Buffer.concat([head, Buffer.alloc(8 << 20), text(70_000)]))).toBe(true);
    expect(bench.read(next, codec).equals(text(66_000))).toBe(true);
  });
});

test.each(['all at once', 'with the disk keeping up'])(
  'the digests are those of the spool, whatever is taken back, %s',
  async (how) => {
    // Copies larger than a buffer are hashed and in the file already when they are taken back out.
    const files = Array.from({ length: 9 }, (_, i) => noise(5_000_000 + i));
    const all = files.flatMap((bytes, i) => [bytes, files[Math.max(0, i - 1)]!, noise(3000)]);
    const hash = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');
    const bench = new Bench();
    for (const bytes of all) {
      bench.begin(bytes.length);
      for (let at = 0; at < bytes.length; at += 1 << 20) {
        bench.spool.write(bytes.subarray(at, at + (1 << 20)));
        if (how !== 'all at once') await bench.spool.catchUp();
      }
      bench.end();
    }
    const { digests } = await bench.finish();
    const data = readFileSync(join(dir, 'data'));
    expect(data.length).toBe(9 * Math.ceil(5_000_000 / 4096) * 4096 + 9 * 4096);
    expect(digests.hex).toBe(hash(data));
    const chunks = Array.from({ length: Math.ceil(data.length / 262_144) }, (_, i) =>
      hash(data.subarray(i * 262_144, (i + 1) * 262_144)),
    );
    expect(Buffer.from(digests.digests).toString('hex')).toBe(chunks.join(''));
  },
);

test('a full disk is an error', async () => {
  const options = { tailLimitBytes: 0, codec: undefined, becomesBlob: true };
  const spool = new FileSpool('/dev/full', join(dir, 'tails'), options);
  spool.begin(8 << 20);
  spool.write(noise(8 << 20));
  await expect(spool.finish()).rejects.toMatchObject({ code: 'ENOSPC' });
  await spool.close();
});
