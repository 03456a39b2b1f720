/** Durations as people type them: a number with a unit, 90s, 15m, 1h, 7d; 0 alone. */
import { fail } from '../errors.ts';

const UNITS_MS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3600_000, d: 86_400_000 };

/** In milliseconds. @throws CLI_DURATION */
export function parseDuration(option: string, text: string): number {
  const match = /^(\d+(?:\.\d+)?)(ms|s|m|h|d)$/.exec(text.trim());
  if (match !== null) return Math.round(Number(match[1]) * UNITS_MS[match[2]!]!);
  if (text.trim() === '0') return 0;
  throw fail('CLI_DURATION', { option, text });
}
