/** Times for people, and from them. */
import { fail } from '../errors.ts';
import { parseDuration } from './duration.ts';

/** `2026-01-31 12:00`, UTC; `-` for none. */
export function timeText(ms: number | undefined): string {
  return ms === undefined ? '-' : new Date(ms).toISOString().slice(0, 16).replace('T', ' ');
}

/** A time to come: so long from now, 30d. @throws CLI_DURATION */
export function timeToCome(option: string, text: string | undefined): number | undefined {
  if (text === undefined) return undefined;
  const duration = parseDuration(option, text);
  if (duration <= 0) throw fail('CLI_DURATION', { option, text });
  return Date.now() + duration;
}
