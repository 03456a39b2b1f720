/** Options that take one of a few words. */
import { fail } from '../errors.ts';

/** @throws CLI_USAGE */
export function choice<T extends string>(option: string, value: string, words: readonly T[]): T;
export function choice<T extends string>(option: string, value: string | undefined, words: readonly T[]): T | undefined;
export function choice<T extends string>(
  option: string,
  value: string | undefined,
  words: readonly T[],
): T | undefined {
  if (value === undefined || (words as readonly string[]).includes(value)) return value as T | undefined;
  throw fail('CLI_USAGE', { problem: `${option} ${value}: it is one of ${words.join(', ')}`, program: 'dsec' });
}
