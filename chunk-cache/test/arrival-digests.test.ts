import { createHash } from 'node:crypto';
import { describe, expect, it } from 'vitest';
import { ArrivalDigests, arrivalDigestsOf } from '../arrival-digests.ts';
import { CHUNK_BYTES, sha256Pair } from '../chunk.ts';
import { noise } from './made-up-blob.ts';

function sha256(bytes: Buffer): string {
  return createHash('sha256').update(bytes).digest('hex');
}

function wanted(bytes: Buffer): string {
  const chunks = Array.from({ length: Math.ceil(bytes.length / CHUNK_BYTES) }, (_, k) =>
    sha256(bytes.subarray(k * CHUNK_BYTES, (k + 1) * CHUNK_BYTES)),
  );
  return chunks.join('');
}

describe('digests of chunks as they come', () => {
  for (const length of [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 2.5 * CHUNK_BYTES]) {
    for (const piece of [length, 65_536, 99_991]) {
      it(`are those of the chunks: ${length} bytes in pieces of ${piece}`, () => {
        const right = noise(length, 7);
        const bytes = Buffer.alloc(length);
        const digests = new ArrivalDigests(bytes);
        for (let at = 0; at < length; at += piece) {
          expect(arrivalDigestsOf(bytes)).toBeUndefined();
          const end = Math.min(length, at + piece);
          right.copy(bytes, at, at, end);
          digests.cameTo(end);
        }
        expect(arrivalDigestsOf(bytes)?.toString('hex')).toBe(wanted(right));
        // Whoever passes on a part, or a copy, passes on bytes that nobody has hashed.
        expect(arrivalDigestsOf(bytes.subarray(0))).toBeUndefined();
        expect(arrivalDigestsOf(Buffer.from(bytes))).toBeUndefined();
      });
    }
  }

  it('are not there when the end did not come', () => {
    const bytes = Buffer.alloc(CHUNK_BYTES * 2);
    new ArrivalDigests(bytes).cameTo(bytes.length - 1);
    expect(arrivalDigestsOf(bytes)).toBeUndefined();
  });

  it('are computed two at a time for what came without', () => {
    const [a, b] = [noise(CHUNK_BYTES, 7), noise(1000, 7)];
    expect(sha256Pair(a, b).map((digest) => digest.toString('hex'))).toEqual([sha256(a), sha256(b)]);
  });
});
