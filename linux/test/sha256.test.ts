/** Both engines against node:crypto, on random lengths cut at random places. */
import { createHash, randomBytes, randomInt } from 'node:crypto';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import type * as Sha256Module from '../sha256.ts';

const CHUNK = 4096;

const whole = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');

function chunked(bytes: Buffer, chunkBytes: number): string {
  const digests: string[] = [];
  for (let at = 0; at < bytes.length; at += chunkBytes) digests.push(whole(bytes.subarray(at, at + chunkBytes)));
  return digests.join('');
}

/** At most so many bytes each: often none, often odd, often whole blocks. */
function pieces(bytes: Buffer, most: number): Buffer[] {
  const out: Buffer[] = [];
  for (let at = 0; at < bytes.length || out.length === 0; ) {
    const n = [0, randomInt(1, 64), 64 * randomInt(1, 9), randomInt(1, most)][randomInt(4)]!;
    out.push(bytes.subarray(at, at + n));
    at += n;
  }
  return out;
}

describe.each([
  ['native', '1'],
  ['node:crypto', '0'],
])('sha256 by %s', (_, native) => {
  let sha: typeof Sha256Module;
  beforeEach(async () => {
    vi.resetModules();
    vi.stubEnv('DSEC_NATIVE', native);
    sha = await import('../sha256.ts');
  });
  afterEach(() => vi.unstubAllEnvs());

  test('is what it is called', ({ skip }) => {
    const reason = sha.sha256Fallback();
    if (native === '0') return expect(reason).toContain('DSEC_NATIVE=0');
    if (reason !== undefined) skip(`no native sha256 here: ${reason}`);
  });

  test('known digests', () => {
    expect(sha.createSha256().digest().toString('hex')).toBe(whole(Buffer.alloc(0)));
    const abc = sha.createSha256();
    abc.update(Buffer.from('abc'));
    expect(abc.digest().toString('hex')).toBe('ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad');
    const nothing = sha.createBlobSha256(CHUNK).finish();
    expect(nothing.hex).toBe(whole(Buffer.alloc(0)));
    expect(nothing.digests).toHaveLength(0);
  });

  test('one stream: every length up to three blocks, and random ones in random pieces', () => {
    const bytes = randomBytes(1 << 17);
    const lengths = [
      ...Array.from({ length: 200 }, (_, n) => n),
      ...Array.from({ length: 60 }, () => randomInt(1 << 17)),
    ];
    for (const length of lengths) {
      const part = bytes.subarray(0, length);
      const stream = sha.createSha256();
      for (const piece of pieces(part, 10_000)) stream.update(piece);
      expect(stream.digest().toString('hex')).toBe(whole(part));
    }
  });

  test('aside, on another thread', async () => {
    for (const bytes of [randomBytes(300_000), randomBytes(77)]) {
      const stream = sha.createSha256();
      const parts = pieces(bytes, 100_000);
      for (const [i, piece] of parts.entries()) i % 3 === 0 ? stream.update(piece) : await stream.updateAside(piece);
      expect(stream.digest().toString('hex')).toBe(whole(bytes));
    }
  });

  test('two streams in one pass', () => {
    for (let round = 0; round < 60; round++) {
      const bytes = [randomBytes(randomInt(50_000)), randomBytes(randomInt(50_000))];
      const streams = [sha.createSha256(), sha.createSha256()];
      const [left, right] = bytes.map((part) => pieces(part, 9000));
      for (let i = 0; i < Math.max(left!.length, right!.length); i++) {
        const none = Buffer.alloc(0);
        sha.updatePair(streams[0]!, left![i] ?? none, streams[1]!, right![i] ?? none);
      }
      expect(streams.map((s) => s.digest().toString('hex'))).toEqual(bytes.map(whole));
    }
  });

  test('a blob, its chunks, and two other streams beside them', () => {
    for (let round = 0; round < 120; round++) {
      const chunkBytes = [64, 4096, 65_536][round % 3]!;
      const bytes = randomBytes(round % 5 === 0 ? randomInt(4) * chunkBytes : randomInt(200_000));
      const others = [randomBytes(randomInt(200_000)), randomBytes(randomInt(200_000))];
      const blob = sha.createBlobSha256(chunkBytes);
      const streams = others.map(() => sha.createSha256());
      const ours = pieces(bytes, 150_000);
      const theirs = others.map((other) => pieces(other, 150_000));
      for (let i = 0; i < Math.max(ours.length, ...theirs.map((t) => t.length)); i++) {
        const dues = streams.flatMap((stream, n) => {
          const piece = theirs[n]![i];
          return piece === undefined ? [] : [{ stream, bytes: piece }];
        });
        blob.update(ours[i] ?? Buffer.alloc(0), round % 2 === 0 ? dues : dues.reverse());
      }
      const { hex, digests } = blob.finish();
      expect(hex).toBe(whole(bytes));
      expect(Buffer.from(digests).toString('hex')).toBe(chunked(bytes, chunkBytes));
      expect(streams.map((s) => s.digest().toString('hex'))).toEqual(others.map(whole));
    }
  });

  test('goes back to a mark, more than once', () => {
    for (let round = 0; round < 40; round++) {
      const start = randomBytes(randomInt(30_000));
      const blob = sha.createBlobSha256(CHUNK);
      for (const piece of pieces(start, 20_000)) blob.update(piece);
      const mark = blob.mark();
      for (let time = 0; time < 3; time++) {
        blob.update(randomBytes(randomInt(30_000)));
        blob.restore(mark);
      }
      const rest = randomBytes(randomInt(30_000));
      blob.update(rest);
      const { hex, digests } = blob.finish();
      const all = Buffer.concat([start, rest]);
      expect(hex).toBe(whole(all));
      expect(Buffer.from(digests).toString('hex')).toBe(chunked(all, CHUNK));
    }
  });

  test('many chunks', () => {
    const bytes = randomBytes(1 << 20);
    const blob = sha.createBlobSha256(64);
    blob.update(bytes.subarray(0, 12_345));
    blob.update(bytes.subarray(12_345));
    const { hex, digests } = blob.finish();
    expect(hex).toBe(whole(bytes));
    expect(digests).toHaveLength((bytes.length / 64) * 32);
    expect(Buffer.from(digests).toString('hex')).toBe(chunked(bytes, 64));
  });
});
