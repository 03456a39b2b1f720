import { expect, test } from 'vitest';
import { xxh32 } from '../erofs/xxh32.ts';

// Vectors of the xxHash specification's reference implementation.
test('xxh32 matches the reference vectors', () => {
  expect(xxh32('', 0)).toBe(0x02cc5d05);
  expect(xxh32('a', 0)).toBe(0x550d7456);
  expect(xxh32('abc', 0)).toBe(0x32d153ff);
  expect(xxh32('Nobody inspects the spammish repetition', 0)).toBe(0xe2293b2f);
});
