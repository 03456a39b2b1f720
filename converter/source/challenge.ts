/** The WWW-Authenticate header: several challenges in one line, parameters quoted or not, commas inside quotes. */

export interface Challenge {
  /** Lower case: `basic`, `bearer`. */
  readonly scheme: string;
  /** Names in lower case. */
  readonly params: ReadonlyMap<string, string>;
}

const TOKEN = /[!#$%&'*+.^_`|~0-9A-Za-z-]+/y;
const TOKEN68 = /[A-Za-z0-9._~+/-]+=*[ \t]*(?=,|$)/y;
const QUOTED = /"((?:[^"\\]|\\.)*)"/y;

/** What can be read; a damaged rest is left out. */
export function parseChallenges(header: string): Challenge[] {
  const challenges: { scheme: string; params: Map<string, string> }[] = [];
  let at = 0;
  const match = (pattern: RegExp): RegExpExecArray | undefined => {
    pattern.lastIndex = at;
    const found = pattern.exec(header) ?? undefined;
    if (found) at = pattern.lastIndex;
    return found;
  };
  const skip = (pattern: RegExp) => void match(pattern);
  for (;;) {
    skip(/[\s,]*/y);
    const token = match(TOKEN)?.[0];
    if (token === undefined) break;
    const current = challenges.at(-1);
    if (match(/[ \t]*=[ \t]*/y) && current !== undefined) {
      const quoted = match(QUOTED);
      const value = quoted ? quoted[1]!.replace(/\\(.)/g, '$1') : match(TOKEN_VALUE)?.[0];
      if (value === undefined) break;
      if (!current.params.has(token.toLowerCase())) current.params.set(token.toLowerCase(), value);
      continue;
    }
    challenges.push({ scheme: token.toLowerCase(), params: new Map() });
    skip(/[ \t]*/y);
    // `Negotiate dG9rZW4=`: a token of its own instead of parameters. Never the name of the next scheme, which a comma precedes.
    skip(TOKEN68);
  }
  return challenges;
}

/** Wider than a token: servers leave quotes away around addresses. */
const TOKEN_VALUE = /[^\s",]+/y;
