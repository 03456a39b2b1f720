/** CRC-32C in JavaScript beside what Node has in C: how much a native one would be worth. */
import { createHash } from 'node:crypto';
import { crc32 } from 'node:zlib';
import { crc32cRaw } from '#converter';
import { measure, type Speed } from './measure.ts';

export function checksums(): Promise<Speed[]> {
  const bytes = Buffer.alloc(1 << 20, 'checksummed ');
  return measure('checksums of 1 MiB', [
    { name: 'crc32cRaw', bytes: bytes.length, run: () => crc32cRaw(0xffffffff, bytes) },
    { name: 'zlib.crc32', bytes: bytes.length, run: () => crc32(bytes) },
    { name: 'sha256', bytes: bytes.length, run: () => createHash('sha256').update(bytes).digest() },
  ]);
}
