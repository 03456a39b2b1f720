/** CRC-32C against known values, the bitwise definition, and the checksum of an image that mkfs.erofs made. */
import { execFileSync, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { crc32cRaw, superblockChecksum } from '../erofs/crc32c.ts';
import { decodeDevice, encodeDevice, SB, SUPER_OFFSET } from '../erofs/layout.ts';

function bitwise(state: number, bytes: Uint8Array): number {
  let crc = state;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
  }
  return crc >>> 0;
}

test('the raw register, from zero, salted and from all ones', () => {
  const digits = Buffer.from('123456789');
  expect(crc32cRaw(0, digits)).toBe(0x58e3fa20);
  expect(crc32cRaw(100007, digits)).toBe(0x3c9bd4e0);
  expect(~crc32cRaw(0xffffffff, digits) >>> 0).toBe(0xe3069283);
});

test('any length, any start, in any pieces', () => {
  const bytes = Buffer.from(Array.from({ length: 100 }, (_, k) => (k * 37 + 11) & 0xff));
  for (let length = 0; length <= 40; length++) {
    for (let start = 0; start < 9; start++) {
      const expected = bitwise(0x12345678, bytes.subarray(start, start + length));
      expect(crc32cRaw(0x12345678, bytes, start, start + length)).toBe(expected);
      const cut = start + (length >> 1);
      expect(crc32cRaw(crc32cRaw(0x12345678, bytes, start, cut), bytes, cut, start + length)).toBe(expected);
    }
  }
});

test.skipIf(spawnSync('mkfs.erofs', ['--help']).error !== undefined)('the superblock checksum of mkfs.erofs', () => {
  const place = mkdtempSync(join(tmpdir(), 'dsec-crc-'));
  try {
    mkdirSync(join(place, 'folder'));
    execFileSync('mkfs.erofs', [join(place, 'image'), join(place, 'folder')], { stdio: 'ignore' });
    const image = readFileSync(join(place, 'image'));
    expect(superblockChecksum(image, 4096)).toBe(image.readUInt32LE(SUPER_OFFSET + SB.checksum));
  } finally {
    rmSync(place, { recursive: true });
  }
});

test('device numbers as the kernel packs them', () => {
  expect(encodeDevice(5, 300)).toBe(0x10052c);
  for (const [major, minor] of [
    [0, 0],
    [1, 3],
    [259, 70_000],
    [4095, 1_048_575],
  ] as const) {
    expect(decodeDevice(encodeDevice(major, minor))).toEqual({ major, minor });
  }
});
