import { expect, test } from 'vitest';
import { clusterIndexBytes, encodeClusterIndex } from '../erofs/cluster-index.ts';

const BLOCK = 4096;

/** The kernel's way through a compact index (fs/erofs/zmap.c): type and physical block of logical cluster `lcn`. */
function lookUp(
  index: Buffer,
  startByte: number,
  sizeBytes: number,
  lcn: number,
): { type: number; value: number; block: number } {
  const total = Math.ceil(sizeBytes / BLOCK);
  let initial = ((32 - (startByte % 32)) / 4) % 8;
  let short = 0;
  if (initial < total) short = total - initial - ((total - initial) % 16);
  initial = Math.min(initial, total);
  let base = 0;
  let n = lcn;
  let [count, bytes] = [2, 8];
  if (n >= initial) {
    base += initial * 4;
    n -= initial;
    if (n < short) [count, bytes] = [16, 32];
    else {
      base += short * 2;
      n -= short;
    }
  }
  const pack = base + Math.floor(n / count) * bytes;
  const bits = ((bytes - 4) * 8) / count;
  const at = (i: number) => {
    let value = 0;
    for (let b = 0; b < bits; b++) {
      const bit = pack * 8 + i * bits + b;
      value |= ((index[bit >> 3]! >> (bit % 8)) & 1) << b;
    }
    return { type: (value >> 12) & 3, lo: value & 0xfff };
  };
  const me = at(n % count);
  let i = n % count;
  let blocks = 0;
  while (i > 0) {
    const { type, lo } = at(--i);
    if (type === 2) {
      if ((lo & 0x800) !== 0) {
        i--;
        blocks += lo & 0x7ff;
      } else {
        i -= lo - 2;
      }
    } else blocks++;
  }
  return { type: me.type, value: me.lo, block: index.readUInt32LE(pack + bytes - 4) + blocks };
}

// Blocks per 64 KiB cluster, bit 8: plain. The last cluster is short.
const MAP = Int32Array.from([5, 16 | 0x100, 1, 15, 9, 16 | 0x100, 3, 7, 2, 12, 4, 2]);
const SIZE = 11 * 65536 + 3 * BLOCK + 100;

test.each([8, 16, 24, 32, 40])('every head is found at its block, index at %i', (startByte) => {
  const index = encodeClusterIndex(MAP, 1000, { startByte, sizeBytes: SIZE });
  expect(index.length).toBe(clusterIndexBytes({ startByte, sizeBytes: SIZE }));
  let block = 1000;
  const total = Math.ceil(SIZE / BLOCK);
  MAP.forEach((cluster, c) => {
    for (let l = c * 16; l < Math.min(total, c * 16 + 16); l++) {
      const found = lookUp(index, startByte, SIZE, l);
      if ((cluster & 0x100) !== 0) {
        expect([l, found.type, found.block]).toEqual([l, 0, block++]);
      } else if (l === c * 16) {
        expect([l, found.type, found.value, found.block]).toEqual([l, 1, 0, block]);
      } else {
        expect([l, found.type]).toEqual([l, 2]);
        if (l === c * 16 + 1) expect(found.value).toBe(0x800 | cluster);
      }
    }
    if ((cluster & 0x100) === 0) block += cluster;
  });
});

test('two bytes an entry for all but a few', () => {
  const entries = 100 * 16;
  const bytes = clusterIndexBytes({ startByte: 32, sizeBytes: entries * BLOCK });
  expect(bytes).toBe(entries * 2);
});
