/** The native inflater against zlib: rings that wrap, streams cut anywhere, damaged ones, and blocks that no compressor would write. */
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import * as zlib from 'node:zlib';
import { describe, expect, test } from 'vitest';
import { Gunzip, type GunzipPause, gunzipFallback } from '../gunzip.ts';

const RING = 64 << 10;
const WINDOW = 32 << 10;
const GUARD = 4096;

/** Random, but the same in each run. */
function dice(seed: number): (below: number) => number {
  let state = (seed * 2654435761 + 1) >>> 0;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

/** Literals and matches of all lengths and distances. */
function sample(sizeBytes: number, seed: number): Buffer {
  const roll = dice(seed);
  const out = Buffer.alloc(sizeBytes);
  for (let at = 0; at < sizeBytes; ) {
    const length = Math.min(sizeBytes - at, 1 + roll([3, 20, 400][roll(3)]!));
    const distance = 1 + roll(Math.min(at, [1, 9, 300, 40_000][roll(4)]!) || 1);
    if (at === 0 || roll(3) === 0) for (let i = 0; i < length; i++) out[at + i] = roll(roll(2) === 0 ? 256 : 8);
    else for (let i = 0; i < length; i++) out[at + i] = out[at + i - distance]!;
    at += length;
  }
  return out;
}

interface Outcome {
  readonly made: Buffer;
  readonly end: GunzipPause | 'complete' | 'cut';
}

/** Inflates with the smallest rings, in pieces of random size; nothing may be written beside them. */
async function inflate(bytes: Buffer, seed: number): Promise<Outcome> {
  const roll = dice(seed);
  const memory = Buffer.alloc(WINDOW + RING + GUARD, 0xa5);
  const stream = new Gunzip({ out: memory.subarray(0, WINDOW + RING), input: Buffer.alloc(RING) });
  const parts: Buffer[] = [];
  let fed = 0;
  const take = (mostBytes: number) => {
    const part = stream.output(mostBytes);
    parts.push(Buffer.from(part));
    stream.take(part.length);
  };
  for (;;) {
    const space = stream.space();
    const n = Math.min(space.length, bytes.length - fed, 1 + roll([2, 300, RING][roll(3)]!));
    stream.put(bytes.copy(space, 0, fed, fed + n));
    fed += n;
    const end = await stream.run();
    if (end === 'room') take(1 + roll(RING));
    else if (roll(2) === 0) take(RING);
    if (end !== 'room' && (typeof end === 'object' || (fed === bytes.length && stream.unreadBytes === 0))) {
      while (stream.waitingBytes > 0) take(RING);
      expect(memory.subarray(WINDOW + RING).every((byte) => byte === 0xa5)).toBe(true);
      return {
        made: Buffer.concat(parts),
        end: typeof end === 'object' ? end : stream.isComplete ? 'complete' : 'cut',
      };
    }
  }
}

/** The same from a file, which the runs read themselves; `shown`: what was read is looked at, late. */
async function inflateFile(bytes: Buffer, seed: number, shown: boolean): Promise<Outcome & { readonly seen: Buffer }> {
  const roll = dice(seed);
  const folder = mkdtempSync(join(tmpdir(), 'dsec-gunzip-'));
  const path = join(folder, 'stream');
  writeFileSync(path, Buffer.concat([Buffer.alloc(seed), bytes, Buffer.alloc(5)]));
  const fd = openSync(path, 'r');
  try {
    const stream = new Gunzip({ out: Buffer.alloc(WINDOW + RING), input: Buffer.alloc(RING) });
    stream.readFrom({ fd, path, offset: seed, sizeBytes: bytes.length }, shown);
    const parts: Buffer[] = [];
    const looks: Buffer[] = [];
    for (let isOver = false; !isOver; ) {
      const end = await stream.run();
      isOver = end !== 'room';
      for (let some = isOver ? 100 : 1 + roll(2); some > 0; some--) {
        const part = stream.output(isOver ? RING : 1 + roll(RING));
        parts.push(Buffer.from(part));
        stream.take(part.length);
        const look = shown ? stream.unseen(isOver ? RING : 1 + roll(RING)) : Buffer.alloc(0);
        looks.push(Buffer.from(look));
        stream.seen(look.length);
      }
      if (isOver) {
        const made = Buffer.concat(parts);
        return {
          made,
          end: typeof end === 'object' ? end : stream.isComplete ? 'complete' : 'cut',
          seen: Buffer.concat(looks),
        };
      }
    }
    throw new Error('it has no end');
  } finally {
    closeSync(fd);
    rmSync(folder, { recursive: true });
  }
}

/** Writes bits as deflate has them: codes from their highest bit, all else from the lowest. */
class Bits {
  readonly #bits: number[] = [];

  number(value: number, count: number): this {
    for (let i = 0; i < count; i++) this.#bits.push((value >> i) & 1);
    return this;
  }

  code(value: number, count: number): this {
    for (let i = count - 1; i >= 0; i--) this.#bits.push((value >> i) & 1);
    return this;
  }

  /** A dynamic block's head, its code lengths written one by one with a precode of 4 bits for 0..15. */
  lengths(literals: readonly number[], distances: readonly number[]): this {
    this.number(1, 1).number(2, 2);
    this.number(literals.length - 257, 5)
      .number(distances.length - 1, 5)
      .number(15, 4);
    for (const symbol of [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15])
      this.number(symbol < 16 ? 4 : 0, 3);
    for (const length of [...literals, ...distances]) this.code(length, 4);
    return this;
  }

  /** As a gzip member with this content. */
  member(content = Buffer.alloc(0)): Buffer {
    const data = Buffer.alloc(Math.ceil(this.#bits.length / 8));
    this.#bits.forEach((bit, i) => {
      data[i >> 3]! |= bit << (i & 7);
    });
    const trailer = Buffer.alloc(8);
    trailer.writeUInt32LE(zlib.crc32(content), 0);
    trailer.writeUInt32LE(content.length, 4);
    return Buffer.concat([Buffer.from([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3]), data, trailer]);
  }
}

/** Lengths of `count` symbols, those named and 0 else. */
function lengthsOf(count: number, named: Readonly<Record<number, number>>): number[] {
  return Array.from({ length: count }, (_, i) => named[i] ?? 0);
}

const agreed = (bytes: Buffer): Buffer | undefined => {
  try {
    return zlib.gunzipSync(bytes);
  } catch {
    return undefined;
  }
};

describe.skipIf(gunzipFallback() !== undefined)('the native inflater', () => {
  test.each([
    ['stored', { level: 0 }],
    ['fixed codes', { level: 6, strategy: zlib.constants.Z_FIXED }],
    ['no matches', { level: 6, strategy: zlib.constants.Z_HUFFMAN_ONLY }],
    ['runs', { level: 6, strategy: zlib.constants.Z_RLE }],
    ['fast', { level: 1 }],
    ['best, small blocks', { level: 9, memLevel: 1 }],
  ])('gives back what was compressed: %s', async (_, options) => {
    for (let seed = 0; seed < 12; seed++) {
      const data = sample([0, 1, 300, 65_535, 200_000, 700_000][seed % 6]!, seed);
      const { made, end } = await inflate(zlib.gzipSync(data, options), seed);
      expect(end).toBe('complete');
      expect(made.equals(data)).toBe(true);
    }
  });

  test('codes of all fifteen bits', async () => {
    // Each symbol as often as the two before it together: the deepest code there is.
    const parts: Buffer[] = [];
    for (let symbol = 0, [a, b] = [1, 1]; symbol < 24; symbol++, [a, b] = [b, a + b]) {
      parts.push(Buffer.alloc(a, symbol * 10));
    }
    const roll = dice(7);
    const data = Buffer.concat(parts);
    for (let i = data.length - 1; i > 0; i--) {
      const j = roll(i + 1);
      [data[i], data[j]] = [data[j]!, data[i]!];
    }
    const bytes = zlib.gzipSync(data, { strategy: zlib.constants.Z_HUFFMAN_ONLY });
    const { made, end } = await inflate(bytes, 1);
    expect(end).toBe('complete');
    expect(made.equals(data)).toBe(true);
  });

  test('members one after the other, empty ones and zeros behind', async () => {
    const data = sample(100_000, 3);
    const bytes = Buffer.concat([
      zlib.gzipSync(data),
      zlib.gzipSync(''),
      zlib.gzipSync(data.subarray(7)),
      Buffer.alloc(70_000),
    ]);
    const { made, end } = await inflate(bytes, 2);
    expect(end).toBe('complete');
    expect(made.equals(Buffer.concat([data, data.subarray(7)]))).toBe(true);
    expect((await inflate(Buffer.concat([bytes, Buffer.from([1])]), 2)).end).toMatchObject({ kind: 'trailing' });
    expect((await inflate(Buffer.concat([zlib.gzipSync('a'), Buffer.from('x')]), 2)).end).toMatchObject({
      kind: 'trailing',
    });
    expect((await inflate(Buffer.from('no gzip'), 2)).end).toMatchObject({ kind: 'damaged' });
  });

  test('a match does not reach into the member before', async () => {
    // 'a', then a match at distance 2.
    const bits = new Bits()
      .number(1, 1)
      .number(1, 2)
      .code(0x30 + 97, 8)
      .code(1, 7)
      .code(1, 5)
      .code(0, 7);
    const behind = Buffer.concat([zlib.gzipSync('before'), bits.member(Buffer.from('aaaa'))]);
    expect((await inflate(behind, 1)).end).toMatchObject({ problem: expect.stringMatching('reaches before') });
  });

  test.each<readonly [string, Bits]>([
    ['block type 3', new Bits().number(1, 1).number(3, 2)],
    [
      'a stored length that does not match',
      new Bits().number(1, 1).number(0, 2).number(0, 5).number(7, 16).number(7, 16),
    ],
    ['287 literal codes', new Bits().number(1, 1).number(2, 2).number(30, 5).number(0, 5).number(0, 4)],
    ['31 distance codes', new Bits().number(1, 1).number(2, 2).number(0, 5).number(30, 5).number(0, 4)],
    ['no precode', new Bits().number(1, 1).number(2, 2).number(0, 14).number(0, 12).number(0, 64)],
    ['too many short codes', new Bits().lengths(lengthsOf(257, { 0: 1, 1: 1, 256: 1 }), [0])],
    ['too few codes', new Bits().lengths(lengthsOf(257, { 0: 2, 256: 2 }), [0])],
    ['no end of block', new Bits().lengths(lengthsOf(257, { 0: 1, 1: 1 }), [0])],
    ['an incomplete distance code', new Bits().lengths(lengthsOf(257, { 0: 1, 256: 1 }), [2, 2])],
    [
      'the unused half of a code of one',
      new Bits()
        .lengths(lengthsOf(258, { 256: 1, 257: 1 }), [1])
        .code(1, 1)
        .code(1, 1),
    ],
    [
      'a distance with no distance code',
      new Bits()
        .lengths(lengthsOf(258, { 256: 1, 257: 1 }), [0])
        .code(1, 1)
        .code(0, 1),
    ],
    ['length symbol 286', new Bits().number(1, 1).number(1, 2).code(0x30, 8).code(0xc6, 8).code(0, 5)],
    ['distance symbol 30', new Bits().number(1, 1).number(1, 2).code(0x30, 8).code(1, 7).code(30, 5)],
    ['a match before anything', new Bits().number(1, 1).number(1, 2).code(1, 7).code(0, 5)],
  ])('refuses %s', async (_, bits) => {
    const bytes = Buffer.concat([bits.member(), Buffer.alloc(64, 0x55)]);
    expect(agreed(bytes)).toBeUndefined();
    expect((await inflate(bytes, 1)).end).toMatchObject({ kind: 'damaged' });
  });

  test.each<readonly [string, Bits, string]>([
    ['one literal code, no distances', new Bits().lengths(lengthsOf(257, { 256: 1 }), [0]).code(0, 1), ''],
    [
      'one distance code',
      new Bits()
        .lengths(lengthsOf(258, { 97: 2, 98: 2, 256: 2, 257: 2 }), [1])
        .code(0, 2)
        .code(3, 2)
        .code(0, 1)
        .code(2, 2),
      'aaaa',
    ],
  ])('takes %s', async (_, bits, content) => {
    const bytes = bits.member(Buffer.from(content));
    expect(agreed(bytes)?.toString()).toBe(content);
    const { made, end } = await inflate(bytes, 1);
    expect([end, made.toString()]).toEqual(['complete', content]);
  });

  test('wherever a stream is cut, it is cut', async () => {
    const data = sample(900, 5);
    for (const options of [{ level: 9 }, { level: 0 }, { strategy: zlib.constants.Z_FIXED }]) {
      const bytes = zlib.gzipSync(data, options);
      for (let length = 0; length < bytes.length; length += 1 + (length % 3)) {
        const { made, end } = await inflate(bytes.subarray(0, length), length);
        expect(end).toBe('cut');
        expect(data.subarray(0, made.length).equals(made)).toBe(true);
      }
    }
  });

  test('agrees with zlib on damaged streams', async () => {
    const rounds = Number(process.env.FUZZ_ROUNDS ?? 400);
    for (let seed = 0; seed < rounds; seed++) {
      const roll = dice(seed);
      const data = sample(1 + roll(6000), seed);
      const options = { level: roll(10), memLevel: 1 + roll(9), strategy: roll(5) };
      const bytes = zlib.gzipSync(data, options);
      for (let i = 0; i <= roll(3); i++) bytes[10 + roll(bytes.length - 10)]! ^= 1 << roll(8);
      const wanted = agreed(bytes);
      const { made, end } = await inflate(bytes, seed);
      // zlib takes whatever follows a member and is no header for the end.
      if (wanted !== undefined && typeof end !== 'object') expect(made.equals(wanted)).toBe(true);
      expect(end === 'complete').toBe(wanted !== undefined);
    }
  });

  test('random bytes as deflate data end somehow, and nowhere else', async () => {
    for (let seed = 0; seed < 300; seed++) {
      const roll = dice(seed + 1000);
      const noise = Buffer.from(Array.from({ length: 3000 }, () => roll(256)));
      noise[0] = (noise[0]! & ~7) | [5, 3, 4][seed % 3]!;
      const bytes = Buffer.concat([zlib.gzipSync('').subarray(0, 10), noise]);
      const { end } = await inflate(bytes, seed);
      expect(end === 'complete').toBe(agreed(bytes) !== undefined);
    }
  });

  test('a part of a file, looked at or not', async () => {
    for (const [seed, level] of [1, 6, 9, 0, 4, 2].entries()) {
      const content = Buffer.concat([sample(300_000, seed), Buffer.alloc(200_000), sample(100_000 * seed, seed + 9)]);
      const bytes = Buffer.concat([zlib.gzipSync(content, { level }), zlib.gzipSync('more')]);
      const { made, end, seen } = await inflateFile(bytes, seed, seed % 2 === 0);
      expect(end).toBe('complete');
      expect(made.equals(Buffer.concat([content, Buffer.from('more')]))).toBe(true);
      if (seed % 2 === 0) expect(seen.equals(bytes)).toBe(true);
    }
    const cut = zlib.gzipSync(sample(200_000, 3)).subarray(0, -1000);
    expect((await inflateFile(cut, 3, true)).end).toBe('cut');
  });

  test('a file that ends early or cannot be read', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-gunzip-'));
    const path = join(folder, 'stream');
    const bytes = zlib.gzipSync(sample(100_000, 5));
    writeFileSync(path, bytes);
    for (const [name, ends] of [
      [path, 'input'],
      [folder, 'unreadable'],
    ] as const) {
      const fd = openSync(name, 'r');
      const stream = new Gunzip({ out: Buffer.alloc(WINDOW + (1 << 20)), input: Buffer.alloc(RING) });
      stream.readFrom({ fd, path: name, offset: 0, sizeBytes: bytes.length + 10 }, false);
      const end = await stream.run();
      closeSync(fd);
      expect(typeof end === 'object' ? end.kind : end).toBe(ends);
      expect(stream.readBytes).toBe(ends === 'input' ? bytes.length : 0);
      if (typeof end === 'object' && end.kind === 'unreadable') expect(end.error.message).toContain(folder);
    }
    rmSync(folder, { recursive: true });
  });

  test('one run at a time', async () => {
    const stream = new Gunzip({ out: Buffer.alloc(WINDOW + RING), input: Buffer.alloc(RING) });
    const running = stream.run();
    expect(() => stream.run()).toThrow('under way');
    expect(await running).toBe('input');
    expect(() => new Gunzip({ out: Buffer.alloc(WINDOW + RING + 1), input: Buffer.alloc(RING) })).toThrow('rings');
  });
});
