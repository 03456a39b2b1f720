/** What a policy says of a name: the rules of its most specific pattern that matches. `*.example.org` is not example.org itself. */
import type { NameRule } from './policy.ts';

export interface NameDecision {
  /** Undefined: no rule speaks of it. */
  readonly action: 'allow' | 'deny' | undefined;
  /** Those that allow it. */
  readonly rules: readonly NameRule[];
}

/** @param name Lower case, without the last dot. */
export function decideName(names: readonly NameRule[], name: string): NameDecision {
  const patterns = [name];
  for (let dot = name.indexOf('.'); dot >= 0; dot = name.indexOf('.', dot + 1)) patterns.push(`*${name.slice(dot)}`);
  for (const pattern of patterns) {
    const rules = names.filter((rule) => rule.pattern === pattern);
    if (rules.length === 0) continue;
    return rules.some(({ action }) => action === 'deny') ? { action: 'deny', rules: [] } : { action: 'allow', rules };
  }
  return { action: undefined, rules: [] };
}
