/** xxHash32 (Yann Collet's specification) of a byte string: EROFS hashes xattr names with it for its name filter. */
import type { ByteString } from '#base';

const P1 = 0x9e3779b1;
const P2 = 0x85ebca77;
const P3 = 0xc2b2ae3d;
const P4 = 0x27d4eb2f;
const P5 = 0x165667b1;

const rotl = (x: number, r: number) => (x << r) | (x >>> (32 - r));
const round = (acc: number, lane: number) => Math.imul(rotl((acc + Math.imul(lane, P2)) | 0, 13), P1);

export function xxh32(text: ByteString, seed: number): number {
  const byte = (i: number) => text.charCodeAt(i);
  const word = (i: number) => byte(i) | (byte(i + 1) << 8) | (byte(i + 2) << 16) | (byte(i + 3) << 24);
  const n = text.length;
  let i = 0;
  let h: number;
  if (n >= 16) {
    let a = (seed + P1 + P2) | 0;
    let b = (seed + P2) | 0;
    let c = seed | 0;
    let d = (seed - P1) | 0;
    for (; i + 16 <= n; i += 16) {
      a = round(a, word(i));
      b = round(b, word(i + 4));
      c = round(c, word(i + 8));
      d = round(d, word(i + 12));
    }
    h = (rotl(a, 1) + rotl(b, 7) + rotl(c, 12) + rotl(d, 18)) | 0;
  } else {
    h = (seed + P5) | 0;
  }
  h = (h + n) | 0;
  for (; i + 4 <= n; i += 4) h = Math.imul(rotl((h + Math.imul(word(i), P3)) | 0, 17), P4);
  for (; i < n; i++) h = Math.imul(rotl((h + Math.imul(byte(i), P5)) | 0, 11), P1);
  h = Math.imul(h ^ (h >>> 15), P2);
  h = Math.imul(h ^ (h >>> 13), P3);
  return (h ^ (h >>> 16)) >>> 0;
}
