/**
 * Patterns that leave paths out, after gitignore: a pattern with a slash is anchored at the root, one without matches a
 * name at any depth, a slash at the end means directories only. `*` and `?` stay within a name, `**` crosses names.
 *
 * Matching works on byte strings, name by name, and backtracks only to the last star: linear in practice, quadratic at
 * worst, whatever the pattern. There is no negation: what a pattern leaves out stays out.
 */
import { type ByteString, fromText } from '#base';
import { fail } from '../errors.ts';

export interface ExcludePattern {
  /** As it was written. */
  readonly text: string;
  matches(path: ByteString, isDirectory: boolean): boolean;
}

export function parseExcludePattern(text: string): ExcludePattern {
  let body = fromText(text.trim());
  if (body === '' || body === '/' || body.includes('\0'))
    throw fail('PACK_PATTERN', { pattern: text, reason: 'it is empty' });
  if (body.startsWith('!')) throw fail('PACK_PATTERN', { pattern: text, reason: 'negation (!) is not supported' });
  const directoryOnly = body.endsWith('/');
  if (directoryOnly) body = body.slice(0, -1);
  const anchored = body.includes('/');
  const wanted = body.split('/').filter((part) => part !== '' && part !== '.');
  if (wanted.length === 0 || wanted.includes('..')) {
    throw fail('PACK_PATTERN', { pattern: text, reason: 'it names no path inside the image' });
  }
  const parts = (anchored ? wanted : ['**', ...wanted]).map(parsePart);
  return {
    text,
    matches: (path, isDirectory) => (isDirectory || !directoryOnly) && matchPath(parts, path.split('/')),
  };
}

/** One name of a pattern: `**`, a plain name, or one with wildcards. */
type Part = '**' | { readonly name: string } | { readonly tokens: readonly string[] };

function parsePart(text: string): Part {
  if (text === '**') return '**';
  return /[*?[\\]/.test(text) ? { tokens: tokensOf(text) } : { name: text };
}

/** `**` in front or between names stands for any number of names; at the end for at least one. */
function matchPath(pattern: readonly Part[], names: readonly string[]): boolean {
  return matchWithStar(
    pattern.length,
    names.length,
    (p) => pattern[p] === '**',
    (p, n) => {
      const part = pattern[p] as Exclude<Part, '**'>;
      return 'name' in part ? part.name === names[n] : matchName(part.tokens, names[n]!);
    },
    pattern[pattern.length - 1] === '**',
  );
}

function matchName(tokens: readonly string[], name: string): boolean {
  const letters = charactersOf(name);
  return matchWithStar(
    tokens.length,
    letters.length,
    (p) => tokens[p] === '*',
    (p, n) => {
      const token = tokens[p]!;
      if (token === '?') return true;
      if (token.length > 1 && token[0] === '[') return inClass(token, letters[n]!);
      return (token.length === 2 && token[0] === '\\' ? token[1] : token) === letters[n];
    },
    false,
  );
}

/** The usual greedy match: on a mismatch the last star takes one more. */
function matchWithStar(
  patternLength: number,
  length: number,
  isStar: (p: number) => boolean,
  equal: (p: number, n: number) => boolean,
  lastStarTakesOne: boolean,
): boolean {
  let p = 0;
  let n = 0;
  let starAt = -1;
  let starTook = 0;
  while (n < length) {
    if (p < patternLength && isStar(p)) {
      if (p === patternLength - 1) return true;
      starAt = p++;
      starTook = n;
    } else if (p < patternLength && equal(p, n)) {
      p++;
      n++;
    } else if (starAt >= 0) {
      p = starAt + 1;
      n = ++starTook;
    } else {
      return false;
    }
  }
  while (p < patternLength && isStar(p)) {
    if (p === patternLength - 1 && lastStarTakesOne) return false;
    p++;
  }
  return p === patternLength;
}

/** `*`, `?`, `[...]`, `\x`, or one UTF-8 character (as byte string). */
function tokensOf(pattern: string): string[] {
  const tokens: string[] = [];
  for (let i = 0; i < pattern.length; ) {
    const c = pattern[i]!;
    if (c === '\\' && i + 1 < pattern.length) {
      tokens.push(pattern.slice(i, i + 2));
      i += 2;
    } else if (c === '[' && pattern.indexOf(']', i + 2) > 0) {
      const end = pattern.indexOf(']', i + 2);
      tokens.push(pattern.slice(i, end + 1));
      i = end + 1;
    } else if (c === '*') {
      if (tokens[tokens.length - 1] !== '*') tokens.push(c);
      i++;
    } else {
      const size = characterSize(pattern, i);
      tokens.push(pattern.slice(i, i + size));
      i += size;
    }
  }
  return tokens;
}

function charactersOf(name: string): string[] {
  const out: string[] = [];
  for (let i = 0; i < name.length; ) {
    const size = characterSize(name, i);
    out.push(name.slice(i, i + size));
    i += size;
  }
  return out;
}

function characterSize(bytes: string, at: number): number {
  const lead = bytes.charCodeAt(at);
  const size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  for (let i = 1; i < size; i++) {
    const next = bytes.charCodeAt(at + i);
    if (!(next >= 0x80 && next < 0xc0)) return 1;
  }
  return size;
}

function inClass(token: string, letter: string): boolean {
  let body = token.slice(1, -1);
  const negated = body[0] === '!' || body[0] === '^';
  if (negated) body = body.slice(1);
  const members = charactersOf(body);
  let found = false;
  for (let i = 0; i < members.length; i++) {
    if (members[i + 1] === '-' && i + 2 < members.length) {
      found ||= letter >= members[i]! && letter <= members[i + 2]!;
      i += 2;
    } else {
      found ||= letter === members[i];
    }
  }
  return found !== negated;
}
