/** Buffers for large requests and replies, kept for the next: the page faults of fresh memory cost as much as copying. */
const KEPT_BYTES = 16 * 2 ** 20;

const freeLarge: Buffer[] = [];
let keptBytes = 0;

/** The smallest that fits and is not absurdly large, else a new one of a round size. */
export function takeLarge(length: number): Buffer {
  for (let i = freeLarge.length - 1; i >= 0; i--) {
    const bytes = freeLarge[i]!;
    if (bytes.length < length || bytes.length > length * 4) continue;
    freeLarge.splice(i, 1);
    keptBytes -= bytes.length;
    return bytes;
  }
  return Buffer.allocUnsafeSlow(Math.ceil(length / 65_536) * 65_536);
}

export function keepLarge(bytes: Buffer): void {
  if (keptBytes + bytes.length > KEPT_BYTES) return;
  keptBytes += bytes.length;
  freeLarge.push(bytes);
}
