/**
 * CRC-32C (Castagnoli) as EROFS and OverlayBD store it: the raw register, with no inversion on entry or exit.
 *
 * State in, state out, so that it runs over pieces. The common CRC-32C of other formats is `~crc32cRaw(~0, data)`.
 */

/** Slicing by eight: table k holds the effect of a byte k positions before the end of an 8-byte step. */
const TABLES: Uint32Array[] = makeTables();

function makeTables(): Uint32Array[] {
  const first = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    let crc = i;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
    first[i] = crc >>> 0;
  }
  const tables = [first];
  for (let k = 1; k < 8; k++) {
    const previous = tables[k - 1]!;
    const table = new Uint32Array(256);
    for (let i = 0; i < 256; i++) table[i] = (previous[i]! >>> 8) ^ first[previous[i]! & 0xff]!;
    tables.push(table);
  }
  return tables;
}

/** The register after `data[start..end)`, begun from `state`. Unsigned 32 bits. */
export function crc32cRaw(state: number, data: Uint8Array, start = 0, end = data.length): number {
  const [t0, t1, t2, t3, t4, t5, t6, t7] = TABLES as [
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
  ];
  let crc = state | 0;
  let at = start;
  for (const whole = end - 7; at < whole; at += 8) {
    crc ^= data[at]! | (data[at + 1]! << 8) | (data[at + 2]! << 16) | (data[at + 3]! << 24);
    crc =
      t7[crc & 0xff]! ^
      t6[(crc >>> 8) & 0xff]! ^
      t5[(crc >>> 16) & 0xff]! ^
      t4[crc >>> 24]! ^
      t3[data[at + 4]!]! ^
      t2[data[at + 5]!]! ^
      t1[data[at + 6]!]! ^
      t0[data[at + 7]!]!;
  }
  for (; at < end; at++) crc = (crc >>> 8) ^ t0[(crc ^ data[at]!) & 0xff]!;
  return crc >>> 0;
}
