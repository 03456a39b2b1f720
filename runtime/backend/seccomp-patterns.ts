/**
 * Numbers as bit patterns, for filters in OCI's form: their rules have no order, so no two that differ may fit the same call, and they
 * compare 64 bits where the kernel looks at the lower 32 of an int. A comparison with "not equal" or "greater" would let a number through
 * whose upper half is set; a pattern looks at the lower half alone.
 */
import type { SeccompProfile, SeccompRule } from './seccomp-profile.ts';

export interface Pattern {
  readonly mask: number;
  readonly value: number;
}

/** Patterns that each number of so many bits fits once, but those in `values`, as address ranges are written as prefixes. */
export function othersThan(values: readonly number[], bits: number): Pattern[] {
  const all = 2 ** bits - 1;
  const found: Pattern[] = [];
  const visit = (value: number, known: number) => {
    const mask = (all << (bits - known)) & all;
    if (!values.some((one) => (one & mask) === value)) found.push({ mask, value });
    else if (known < bits) {
      visit(value, known + 1);
      visit(value | (1 << (bits - known - 1)), known + 1);
    }
  };
  visit(0, 0);
  return found;
}

/**
 * The same profile for libseccomp. A number that is not `value` differs from it in some bit. And without 32-bit x86, whose programs are ended
 * then: libseccomp takes each rule about `socket` as one about socketcall too, and would let it pass whatever the family.
 */
export function forLibseccomp(profile: SeccompProfile): SeccompProfile {
  return {
    ...profile,
    architectures: profile.architectures.filter((name) => name !== 'SCMP_ARCH_X86'),
    syscalls: profile.syscalls.filter(({ names }) => !names.includes('socketcall')).flatMap(withoutNotEqual),
  };
}

function withoutNotEqual(rule: SeccompRule): SeccompRule[] {
  const arg = rule.args?.find(({ op }) => op === 'SCMP_CMP_NE');
  if (arg === undefined) return [rule];
  const others = rule.args!.filter((one) => one !== arg);
  return Array.from({ length: 32 }, (_, bit) => {
    const mask = 2 ** bit;
    const differs = { index: arg.index, op: 'SCMP_CMP_MASKED_EQ', value: mask, valueTwo: (~arg.value & mask) >>> 0 };
    return { ...rule, args: [...others, differs] };
  });
}
