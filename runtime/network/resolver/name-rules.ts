/**
 * Which names a sandbox may ask for, by the rules of its policy: an exact rule before a wildcard ("*.pypi.org", all below pypi.org), the longest wildcard
 * before others. Decided on the asked name alone: what it leads to is its owner's to say.
 */
import type { SandboxNames } from '../opened-addresses.ts';
import { nameOf } from './dns-name.ts';

export interface NameMatch {
  readonly allowed: boolean;
  /** Its answers may lie in the deployment's own network. */
  readonly inside: boolean;
  /** What is free in it: what "*" stands for, or all of it when no rule has it. Undefined: nothing. */
  readonly free: string | undefined;
}

type Said = Pick<NameMatch, 'allowed' | 'inside'>;

export class NameRules {
  private readonly exact = new Map<string, Said>();
  private readonly below = new Map<string, Said>();
  private readonly otherwise: boolean;

  constructor(names: SandboxNames) {
    this.otherwise = names.default === 'allow';
    for (const { pattern, action, inside } of names.rules) {
      const isWild = pattern.startsWith('*.');
      const name = nameOf(isWild ? pattern.slice(2) : pattern);
      if (name === undefined) continue;
      const table = isWild ? this.below : this.exact;
      const before = table.get(name);
      // Several for one name, with ports of their own: one that denies does so for all.
      const allowed = action === 'allow' && before?.allowed !== false;
      table.set(name, { allowed, inside: allowed && (inside || before?.inside === true) });
    }
  }

  match(name: string): NameMatch {
    const exact = this.exact.get(name);
    if (exact !== undefined) return { ...exact, free: undefined };
    for (let dot = name.indexOf('.'); dot >= 0; dot = name.indexOf('.', dot + 1)) {
      const rule = this.below.get(name.slice(dot + 1));
      if (rule !== undefined) return { ...rule, free: name.slice(0, dot) };
    }
    return { allowed: this.otherwise, inside: false, free: name };
  }
}
