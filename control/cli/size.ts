/** Sizes as people type them: bytes, or a number with a unit. KiB, MiB, GiB, TiB and K, M, G, T are binary, kB, MB, GB, TB decimal. */
import { fail } from '../errors.ts';

const UNITS: Readonly<Record<string, number>> = {
  '': 1,
  b: 1,
  k: 2 ** 10,
  m: 2 ** 20,
  g: 2 ** 30,
  t: 2 ** 40,
  kib: 2 ** 10,
  mib: 2 ** 20,
  gib: 2 ** 30,
  tib: 2 ** 40,
  kb: 1e3,
  mb: 1e6,
  gb: 1e9,
  tb: 1e12,
};

/** @throws CLI_SIZE */
export function parseSize(option: string, text: string): number {
  const match = /^(\d+(?:\.\d+)?)\s*([a-z]*)$/i.exec(text.trim());
  const unit = match === null ? undefined : UNITS[match[2]!.toLowerCase()];
  const sizeBytes = match === null || unit === undefined ? Number.NaN : Math.round(Number(match[1]) * unit);
  if (!Number.isSafeInteger(sizeBytes)) throw fail('CLI_SIZE', { option, text });
  return sizeBytes;
}
