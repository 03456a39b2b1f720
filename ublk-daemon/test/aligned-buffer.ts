/** For reads and writes past the page cache. */
import { addressOf } from '#linux';

/** Not in Node's constants on every platform. */
export const O_DIRECT = 0o40000;

/** Around the page cache a buffer has to begin at a multiple of 512. */
export function aligned(length: number): Buffer {
  const bytes = Buffer.allocUnsafeSlow(length + 512);
  const at = (512 - (addressOf(bytes) % 512)) % 512;
  return bytes.subarray(at, at + length);
}
