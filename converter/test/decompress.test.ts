/** One suite for all engines: they accept and refuse the same streams, and agree with zlib on what comes out. */
import { spawnSync } from 'node:child_process';
import * as zlib from 'node:zlib';
import { describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { compressors } from '../erofs/codec.ts';
import { type Compression, decompress, inflateEngines } from '../layer/decompress.ts';
import type { InflateEngine } from '../layer/inflate-engine.ts';
import { AHEAD_BYTES } from '../layer/native-gunzip.ts';
import { noise } from './tar-bytes.ts';

async function* chunked(bytes: Buffer, chunkBytes: number): AsyncGenerator<Buffer> {
  for (let at = 0; at < bytes.length; at += chunkBytes) yield Buffer.from(bytes.subarray(at, at + chunkBytes));
}

async function collect(chunks: AsyncIterable<Buffer>): Promise<Buffer> {
  const parts: Buffer[] = [];
  for await (const chunk of chunks) {
    expect(chunk.length).toBeGreaterThan(0);
    parts.push(Buffer.from(chunk));
  }
  return Buffer.concat(parts);
}

function inflate(engine: InflateEngine, bytes: Buffer, chunkBytes = 1 << 20): Promise<Buffer> {
  return collect(engine.inflate(chunked(bytes, chunkBytes), { label: 'layer', signal: undefined }));
}

/** The code of the error, or `accepted`. */
async function refusal(engine: InflateEngine, bytes: Buffer, chunkBytes?: number): Promise<string> {
  try {
    await inflate(engine, bytes, chunkBytes);
    return 'accepted';
  } catch (error) {
    if (!isDsecError(error)) throw error;
    expect(error.message).toMatch(/^layer: /);
    expect(error.message).not.toMatch(/\{\w+\}/);
    return error.code;
  }
}

/** Something that compresses, with matches near and far. */
function text(sizeBytes: number, seed = 1): Buffer {
  const words = noise(4096, seed).toString('base64');
  const parts: string[] = [];
  for (let i = 0, length = 0; length < sizeBytes; i++) {
    const at = (i * i * 7919 + seed) % 5000;
    const word = words.slice(at, at + 3 + (i % 23));
    parts.push(word);
    length += word.length;
  }
  return Buffer.from(parts.join('')).subarray(0, sizeBytes);
}

const CHUNKS = [1, 7, 511, 65536];
const engines = inflateEngines();
const gzipEngines = engines.filter((engine) => engine.format === 'gzip');
const zstdEngines = engines.filter((engine) => engine.format === 'zstd');
console.log(`engines on this machine: ${engines.map((engine) => engine.name).join(', ')}`);

/** A member by hand: flags and the fields they name. */
function member(data: Buffer, flags = 0, fields: Buffer = Buffer.alloc(0)): Buffer {
  const head = Buffer.concat([Buffer.from([0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 3]), fields]);
  const check = Buffer.alloc((flags & 2) !== 0 ? 2 : 0);
  if ((flags & 2) !== 0) check.writeUInt16LE(zlib.crc32(head) & 0xffff);
  const trailer = Buffer.alloc(8);
  trailer.writeUInt32LE(zlib.crc32(data), 0);
  trailer.writeUInt32LE(data.length, 4);
  return Buffer.concat([head, check, zlib.deflateRawSync(data), trailer]);
}

describe.each(gzipEngines.map((engine) => [engine.name, engine] as const))('%s', (_, engine) => {
  it.each([0, 1, 6, 9])('inflates level %i, short and long', async (level) => {
    for (const data of [
      Buffer.alloc(0),
      Buffer.from('x'),
      text(70_000),
      noise(300_000),
      Buffer.alloc(5 << 20),
      text(9 << 20),
    ]) {
      const bytes = zlib.gzipSync(data, { level });
      expect((await inflate(engine, bytes)).equals(data)).toBe(true);
    }
  });

  it('takes other strategies, memory levels and windows', async () => {
    const data = Buffer.concat([text(200_000), noise(50_000), Buffer.alloc(100_000)]);
    for (const strategy of [
      zlib.constants.Z_HUFFMAN_ONLY,
      zlib.constants.Z_RLE,
      zlib.constants.Z_FIXED,
      zlib.constants.Z_FILTERED,
    ]) {
      for (const [memLevel, windowBits] of [
        [1, 9],
        [9, 15],
      ] as const) {
        const bytes = zlib.gzipSync(data, { strategy, memLevel, windowBits });
        expect((await inflate(engine, bytes, 5000)).equals(data)).toBe(true);
      }
    }
  });

  it('takes any chunk size', async () => {
    const data = Buffer.concat([text(40_000), noise(3000)]);
    const bytes = Buffer.concat([member(data.subarray(0, 500)), member(data.subarray(500))]);
    for (const chunk of CHUNKS) expect((await inflate(engine, bytes, chunk)).equals(data)).toBe(true);
  });

  it('takes several members, cut anywhere, empty ones too', async () => {
    const data = text(3000);
    const parts = [0, 700, 700, 2048, 3000];
    const members = parts.slice(1).map((end, i) => zlib.gzipSync(data.subarray(parts[i]!, end)));
    const bytes = Buffer.concat([...members, zlib.gzipSync('')]);
    for (let chunk = 1; chunk < bytes.length; chunk += 1 + (chunk >> 3)) {
      expect((await inflate(engine, bytes, chunk)).equals(data)).toBe(true);
    }
  });

  it('takes members larger than a block, and many small ones', async () => {
    const large = [text(5 << 20, 1), text((2 << 20) - 1, 2), text(2 << 20, 3), text((2 << 20) + 1, 4)];
    expect(
      (await inflate(engine, Buffer.concat(large.map((d) => zlib.gzipSync(d, { level: 1 }))))).equals(
        Buffer.concat(large),
      ),
    ).toBe(true);
    const small = Array.from({ length: 500 }, (_, i) => text(i, i));
    expect(
      (await inflate(engine, Buffer.concat(small.map((d) => zlib.gzipSync(d))), 333)).equals(Buffer.concat(small)),
    ).toBe(true);
  });

  it('takes every header field, cut anywhere', async () => {
    const data = text(900);
    const extra = Buffer.concat([Buffer.from([5, 0]), noise(5)]);
    const name = Buffer.from('a name\0');
    const comment = Buffer.from('a comment\0');
    const kinds: [number, Buffer][] = [
      [0x04, extra],
      [0x08, name],
      [0x10, comment],
      [0x02, Buffer.alloc(0)],
      [0x1e, Buffer.concat([extra, name, comment])],
      [0x01, Buffer.alloc(0)],
    ];
    const bytes = Buffer.concat(kinds.map(([flags, fields]) => member(data, flags, fields)));
    const wanted = Buffer.concat(kinds.map(() => data));
    for (let chunk = 1; chunk < 60; chunk++) expect((await inflate(engine, bytes, chunk)).equals(wanted)).toBe(true);
  });

  it('ignores zero bytes after the last member, and refuses all else', async () => {
    const one = zlib.gzipSync(text(5000));
    for (const chunk of [1, 100, one.length, 1 << 20]) {
      expect((await inflate(engine, Buffer.concat([one, Buffer.alloc(700)]), chunk)).equals(text(5000))).toBe(true);
      for (const garbage of [
        Buffer.from('x'),
        Buffer.from('garbage and more'),
        Buffer.concat([Buffer.alloc(9), one]),
      ]) {
        const code = await refusal(engine, Buffer.concat([one, garbage]), chunk);
        // zlib takes a single byte for the beginning of a member.
        expect(code).toMatch(/^LAYER_(TRAILING|DAMAGED|TRUNCATED)$/);
      }
    }
  });

  it('refuses a stream that ends early, wherever', async () => {
    const bytes = Buffer.concat([member(text(300), 0x1e, Buffer.from('\x01\0xn\0c\0')), zlib.gzipSync(noise(200))]);
    const first = member(text(300), 0x1e, Buffer.from('\x01\0xn\0c\0')).length;
    // Every byte of the headers and trailers, some of the data.
    for (let length = 0; length < bytes.length; length++) {
      const isNear = length < 24 || Math.abs(length - first) < 20 || bytes.length - length < 10;
      if (length === first || (!isNear && length % 7 !== 0)) continue;
      for (const chunk of [1 << 20, 13]) {
        expect(await refusal(engine, bytes.subarray(0, length), chunk), `${length} bytes`).toBe('LAYER_TRUNCATED');
      }
    }
    expect(await refusal(engine, zlib.gzipSync(noise(5 << 20)).subarray(0, 4 << 20))).toBe('LAYER_TRUNCATED');
  });

  it('refuses any flipped bit of the deflate data, checksum or length', async () => {
    const data = text(400);
    const bytes = zlib.gzipSync(data);
    for (let bit = 80; bit < bytes.length * 8; bit += 3) {
      const damaged = Buffer.from(bytes);
      damaged[bit >> 3]! ^= 1 << (bit & 7);
      expect(await refusal(engine, damaged), `bit ${bit}`).toMatch(/^LAYER_(DAMAGED|TRUNCATED|TRAILING)$/);
    }
  });

  it('refuses damaged headers', async () => {
    const good = member(text(50), 0x02);
    for (const [at, byte] of [
      [0, 0x1e],
      [1, 0],
      [2, 7],
      [3, 0xe0],
      [10, good[10]! ^ 1],
    ] as const) {
      const damaged = Buffer.from(good);
      damaged[at] = byte;
      expect(await refusal(engine, damaged)).toMatch(/^LAYER_(DAMAGED|TRUNCATED)$/);
    }
    expect(await refusal(engine, Buffer.from('this is not gzip at all'))).toBe('LAYER_DAMAGED');
  });

  it('agrees with zlib on random damage', async () => {
    const source = Buffer.concat([zlib.gzipSync(text(20_000), { level: 9 }), zlib.gzipSync(noise(3000), { level: 0 })]);
    for (let seed = 0; seed < 150; seed++) {
      const damaged = Buffer.from(source);
      const where = noise(16, seed);
      for (let i = 0; i <= seed % 3; i++) damaged[where.readUInt32LE(i * 4) % damaged.length] = where[15 - i]!;
      let wanted: Buffer | undefined;
      try {
        wanted = zlib.gunzipSync(damaged);
      } catch {}
      if (wanted === undefined) expect(await refusal(engine, damaged)).not.toBe('accepted');
      else expect((await inflate(engine, damaged)).equals(wanted)).toBe(true);
    }
  });
});

const hasZstdTool = spawnSync('zstd', ['--version']).status === 0;
const zstd = (data: Buffer, ...args: string[]) =>
  spawnSync('zstd', ['-q', '-c', ...args], { input: data, maxBuffer: 1 << 28 }).stdout;

describe.each(zstdEngines.map((engine) => [engine.name, engine] as const))('%s', (_, engine) => {
  it('inflates frames of any size and level, in any chunks', async () => {
    for (const data of [
      Buffer.alloc(0),
      Buffer.from('x'),
      text(70_000),
      noise(300_000),
      Buffer.alloc(5 << 20),
      text(5 << 20),
    ]) {
      for (const level of [1, 12])
        expect((await inflate(engine, compressors.zstd(data, level))).equals(data)).toBe(true);
    }
    const data = text(20_000);
    for (const chunk of CHUNKS)
      expect((await inflate(engine, compressors.zstd(data, 3), chunk)).equals(data)).toBe(true);
  });

  it('takes several frames and skippable ones, cut anywhere', async () => {
    const skippable = Buffer.concat([Buffer.from([0x53, 0x2a, 0x4d, 0x18, 5, 0, 0, 0]), noise(5)]);
    const data = [text(700, 1), text(0), text(3000, 2)];
    const bytes = Buffer.concat([skippable, ...data.flatMap((part) => [compressors.zstd(part, 3), skippable])]);
    for (let chunk = 1; chunk <= bytes.length; chunk += 1 + (chunk >> 2)) {
      expect((await inflate(engine, bytes, chunk)).equals(Buffer.concat(data))).toBe(true);
    }
  });

  it('refuses a stream that ends early, wherever', async () => {
    const first = compressors.zstd(text(300), 3);
    const bytes = Buffer.concat([first, compressors.zstd(noise(200), 3)]);
    for (let length = 0; length < bytes.length; length++) {
      if (length === first.length) continue;
      expect(await refusal(engine, bytes.subarray(0, length), 50), `${length} bytes`).toBe('LAYER_TRUNCATED');
    }
  });

  it('refuses what follows that is no frame, and damage', async () => {
    const good = compressors.zstd(text(9000), 3);
    expect(await refusal(engine, Buffer.concat([good, Buffer.from('garbage')]))).not.toBe('accepted');
    expect(await refusal(engine, Buffer.concat([good, Buffer.alloc(512)]))).not.toBe('accepted');
    expect(await refusal(engine, Buffer.from('this is not zstd at all'))).not.toBe('accepted');
  });

  it.skipIf(!hasZstdTool)('verifies checksums, and bounds the window', async () => {
    const data = Buffer.concat([noise(2000), text(9000)]);
    const bytes = Buffer.from(zstd(data, '--check'));
    expect((await inflate(engine, bytes)).equals(data)).toBe(true);
    bytes[bytes.length - 1]! ^= 1;
    expect(await refusal(engine, bytes)).toBe('LAYER_DAMAGED');
    const raw = Buffer.from(zstd(noise(2000), '--check'));
    raw[500]! ^= 1;
    expect(await refusal(engine, raw)).toBe('LAYER_DAMAGED');
    // A frame header that asks for a window of 2 GiB.
    expect(
      await refusal(engine, Buffer.concat([Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0, 21 << 3]), Buffer.alloc(99)])),
    ).toBe('LAYER_DAMAGED');
  });
});

describe.each(engines.map((engine) => [engine.name, engine] as const))('%s as a stream', (_, engine) => {
  const data = text(12 << 20);
  const bytes = engine.format === 'gzip' ? zlib.gzipSync(data, { level: 1 }) : compressors.zstd(data, 1);

  it('yields large chunks, each good until the next is asked for', async () => {
    let at = 0;
    let chunks = 0;
    for await (const chunk of engine.inflate(chunked(bytes, 65536), { label: 'layer', signal: undefined })) {
      await new Promise((resolve) => setTimeout(resolve, 5));
      expect(chunk.equals(data.subarray(at, at + chunk.length))).toBe(true);
      at += chunk.length;
      chunks++;
    }
    expect(at).toBe(data.length);
    expect(chunks).toBeLessThan(data.length / (128 << 10));
  });

  it('ends the source when the consumer stops, and may be stopped at once', async () => {
    for (const stopAfter of [1, 2, 3]) {
      let ended = false;
      const source = async function* () {
        try {
          for (;;) yield* chunked(bytes, 100_000);
        } finally {
          ended = true;
        }
      };
      let seen = 0;
      for await (const chunk of engine.inflate(source(), { label: 'layer', signal: undefined })) {
        expect(chunk.length).toBeGreaterThan(0);
        if (++seen === stopAfter) break;
      }
      await new Promise((resolve) => setImmediate(resolve));
      await new Promise((resolve) => setTimeout(resolve, 20));
      expect(ended).toBe(true);
    }
  });

  it('lets a consumer stop while the source hangs', async () => {
    const plain = noise(9 << 20);
    const packed = engine.format === 'gzip' ? zlib.gzipSync(plain, { level: 1 }) : compressors.zstd(plain, 1);
    const source = async function* () {
      yield* chunked(packed.subarray(0, 6 << 20), 1 << 20);
      await new Promise(() => {});
    };
    for await (const chunk of engine.inflate(source(), { label: 'layer', signal: undefined })) {
      expect(chunk.length).toBeGreaterThan(0);
      break;
    }
  });

  it("passes on the source's error and the signal's reason", async () => {
    const source = async function* () {
      yield bytes.subarray(0, 300_000);
      throw new Error('the network went away');
    };
    const run = collect(engine.inflate(source(), { label: 'layer', signal: undefined }));
    await expect(run).rejects.toThrow('the network went away');
    const controller = new AbortController();
    const hanging = async function* () {
      yield bytes.subarray(0, 300_000);
      await new Promise(() => {});
    };
    const aborted = collect(engine.inflate(hanging(), { label: 'layer', signal: controller.signal }));
    setTimeout(() => controller.abort(new Error('enough')), 20);
    await expect(aborted).rejects.toThrow('enough');
  });

  it('takes no more of the source than it needs for a while', async () => {
    const piece = noise(65536, 1);
    let given = 0;
    const source = async function* () {
      for (;;) {
        given += piece.length;
        yield piece;
      }
    };
    const wrapped = engine.format === 'gzip' ? storedGzip(source()) : rawZstd(source());
    const stream = engine.inflate(wrapped, { label: 'layer', signal: undefined });
    await stream.next();
    await new Promise((resolve) => setTimeout(resolve, 100));
    // The others hold less than the native one.
    expect(given).toBeLessThan(AHEAD_BYTES + (4 << 20));
    await stream.return(undefined);
  });
});

/** An endless member of stored blocks. */
async function* storedGzip(source: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  yield Buffer.from([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3]);
  for await (const chunk of source) {
    for (let at = 0; at < chunk.length; at += 32768) {
      const part = chunk.subarray(at, at + 32768);
      const head = Buffer.from([0, 0, 0, 0, 0]);
      head.writeUInt16LE(part.length, 1);
      head.writeUInt16LE(part.length ^ 0xffff, 3);
      yield Buffer.concat([head, part]);
    }
  }
}

/** An endless frame of raw blocks. */
async function* rawZstd(source: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  yield Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3]);
  for await (const chunk of source) {
    const head = Buffer.alloc(3);
    head.writeUIntLE(chunk.length << 3, 0, 3);
    yield Buffer.concat([head, chunk]);
  }
}

describe('decompress', () => {
  const data = text(100_000);
  const forms: [Compression, Buffer][] = [
    ['gzip', zlib.gzipSync(data)],
    ['zstd', compressors.zstd(data, 3)],
    ['plain', data],
  ];

  it.each(forms)('inflates %s, named or detected', async (compression, bytes) => {
    for (const chunk of [1, 3, 1000, 1 << 20]) {
      if (chunk === 1 && compression === 'plain') continue;
      expect((await collect(decompress(chunked(bytes, chunk), compression))).equals(data)).toBe(true);
      expect((await collect(decompress(chunked(bytes, chunk), 'detect'))).equals(data)).toBe(true);
    }
  });

  it('detects short and empty sources as plain, skippable frames as zstd', async () => {
    expect((await collect(decompress(chunked(Buffer.alloc(0), 9), 'detect'))).length).toBe(0);
    expect((await collect(decompress(chunked(Buffer.from('ab'), 1), 'detect'))).toString()).toBe('ab');
    const skippable = Buffer.concat([Buffer.from([0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 9]), compressors.zstd(data, 3)]);
    expect((await collect(decompress(chunked(skippable, 100), 'detect'))).equals(data)).toBe(true);
  });

  it('names the layer in errors', async () => {
    const run = collect(decompress(chunked(zlib.gzipSync(data).subarray(0, 999), 100), 'gzip', { label: 'layer 2/5' }));
    await expect(run).rejects.toThrow(/^layer 2\/5: the gzip stream ends early/);
  });
});
