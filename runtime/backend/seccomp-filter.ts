/**
 * The system call filter as the kernel takes it: classic BPF, made from the profile that an OCI runtime gets as JSON.
 *
 * For each calling convention a binary search over ranges of call numbers: a dozen steps a call where a list has hundreds, and
 * little to look through when the kernel prepares its table of calls that are always allowed. Arguments are compared as what the
 * kernel makes of them for these calls, 32 bits: whatever is in the upper half of the register is nobody's business.
 *
 * The kernel keeps a filter three times for each sandbox (as it came, translated, compiled), so it is made small: calls with the same rules share one
 * piece of the program, rules that look at the same bits of an argument one load, and returns are jumped to.
 */

import { BackwardProgram, type Label } from './backward-program.ts';
import type { SeccompProfile, SeccompRule } from './seccomp-profile.ts';
import { type CallConvention, callNumbers } from './syscall-numbers.ts';

/** AUDIT_ARCH_*: what seccomp_data says of the convention; x32 shares x64's. */
const AUDIT: Readonly<Record<CallConvention, number>> = {
  x64: 0xc000003e,
  x32: 0xc000003e,
  x86: 0x40000003,
  arm64: 0xc00000b7,
  arm: 0x40000028,
};

const CONVENTIONS: Readonly<Record<string, CallConvention>> = {
  SCMP_ARCH_X86_64: 'x64',
  SCMP_ARCH_X86: 'x86',
  SCMP_ARCH_X32: 'x32',
  SCMP_ARCH_AARCH64: 'arm64',
  SCMP_ARCH_ARM: 'arm',
};

const ALLOW = 0x7fff0000;
const ERRNO = 0x00050000;
const KILL_PROCESS = 0x80000000;

const DATA_NUMBER = 0;
const DATA_ARCH = 4;
const DATA_ARGS = 16;

const MAX_INSTRUCTIONS = 4096;

/** struct sock_filter, one after the other. */
export function seccompFilter(profile: SeccompProfile): Buffer {
  const byAudit = new Map<number, Map<number, Decision>>();
  const otherwise = decisionOf([], profile);
  for (const arch of profile.architectures) {
    const convention = CONVENTIONS[arch];
    if (convention === undefined) throw new TypeError(`seccomp: architecture ${arch}`);
    const calls = byAudit.get(AUDIT[convention]) ?? new Map<number, Decision>();
    byAudit.set(AUDIT[convention], calls);
    for (const [name, rules] of rulesByName(profile)) {
      const number = callNumbers(convention).get(name);
      if (number !== undefined) calls.set(number, decisionOf(rules, profile));
    }
  }
  const program = new BackwardProgram();
  const leaf = leavesIn(program);
  let unknown = program.returning(KILL_PROCESS);
  for (const [audit, calls] of byAudit) {
    program.flowInto(searchFor(program, rangesOf(calls, otherwise), leaf));
    const search = program.load(DATA_NUMBER);
    unknown = program.branch('equal', audit, search, unknown);
  }
  program.load(DATA_ARCH);
  if (program.length > MAX_INSTRUCTIONS) throw new RangeError(`seccomp: ${program.length} instructions`);
  return program.encoded();
}

function rulesByName(profile: SeccompProfile): Map<string, SeccompRule[]> {
  const byName = new Map<string, SeccompRule[]>();
  for (const rule of profile.syscalls) {
    for (const name of rule.names) byName.set(name, [...(byName.get(name) ?? []), rule]);
  }
  return byName;
}

type Test = NonNullable<SeccompRule['args']>[number];

interface Rule {
  readonly result: number;
  readonly tests: readonly Test[];
}

/** What one call is answered: the first rule whose tests all fit decides, else `otherwise` does. */
interface Decision {
  readonly rules: readonly Rule[];
  readonly otherwise: number;
  /** Equal for equal ones. */
  readonly key: string;
}

function decisionOf(rules: readonly SeccompRule[], { defaultAction, defaultErrnoRet }: SeccompProfile): Decision {
  const always = rules.findIndex(({ args = [] }) => args.length === 0);
  const tested = always < 0 ? rules : rules.slice(0, always);
  const made = tested.map(({ action, errnoRet, args }) => ({ result: resultOf(action, errnoRet), tests: args ?? [] }));
  const last = rules[always];
  const otherwise = last ? resultOf(last.action, last.errnoRet) : resultOf(defaultAction, defaultErrnoRet);
  return { rules: made, otherwise, key: JSON.stringify([made, otherwise]) };
}

function resultOf(action: SeccompRule['action'], errno: number | undefined): number {
  return action === 'SCMP_ACT_ALLOW' ? ALLOW : ERRNO | (errno ?? 1);
}

/** Where a decision is made; those with tests once for all calls that have the same. */
function leavesIn(program: BackwardProgram): (decision: Decision) => Label {
  const placed = new Map<string, Label>();
  return ({ rules, otherwise, key }) => {
    if (rules.length === 0) return program.returning(otherwise);
    const label = placed.get(key) ?? testsOf(program, rules, otherwise);
    placed.set(key, label);
    return label;
  };
}

function testsOf(program: BackwardProgram, rules: readonly Rule[], otherwise: number): Label {
  let next = program.returning(otherwise);
  for (const group of alike(rules).reverse()) {
    const [{ tests }] = group;
    if (tests.length === 1) {
      for (const { result, tests: own } of [...group].reverse()) {
        next = compare(program, own[0]!, program.returning(result), next);
      }
      next = loadFor(program, tests[0]!);
    } else {
      let fits = program.returning(group[0].result);
      const missed = next;
      for (const test of [...tests].reverse()) {
        compare(program, test, fits, missed);
        fits = loadFor(program, test);
      }
      next = fits;
    }
  }
  return next;
}

/** Rules of one test that look at the same bits, together; one is drawn forward only over such as answer the same or fit nothing that it fits. */
function alike(rules: readonly Rule[]): [Rule, ...Rule[]][] {
  const groups: [Rule, ...Rule[]][] = [];
  for (const rule of rules) {
    const at = groups.findLastIndex(([first]) => looksAtTheSame(first, rule));
    const between = at < 0 ? [] : groups.slice(at + 1).flat();
    if (at >= 0 && between.every((other) => other.result === rule.result || areApart(other, rule))) {
      groups[at]!.push(rule);
    } else groups.push([rule]);
  }
  return groups;
}

function looksAtTheSame(one: Rule, other: Rule): boolean {
  const [a, b] = [one.tests[0]!, other.tests[0]!];
  return one.tests.length === 1 && other.tests.length === 1 && a.index === b.index && maskOf(a) === maskOf(b);
}

function areApart(one: Rule, other: Rule): boolean {
  const [a, b] = [patternOf(one), patternOf(other)];
  if (a === undefined || b === undefined || a.index !== b.index) return false;
  return ((a.value ^ b.value) & a.mask & b.mask) !== 0;
}

function patternOf({
  tests,
}: Rule): { readonly index: number; readonly mask: number; readonly value: number } | undefined {
  const [test] = tests;
  if (tests.length !== 1 || test === undefined) return undefined;
  const { index, op, value, valueTwo = 0 } = test;
  if (op === 'SCMP_CMP_EQ') return { index, mask: EVERY_BIT, value };
  return op === 'SCMP_CMP_MASKED_EQ' ? { index, mask: value, value: valueTwo } : undefined;
}

const EVERY_BIT = 0xffffffff;

function maskOf({ op, value }: Test): number {
  return op === 'SCMP_CMP_MASKED_EQ' ? value : EVERY_BIT;
}

function loadFor(program: BackwardProgram, test: Test): Label {
  if (maskOf(test) !== EVERY_BIT) program.and(maskOf(test));
  return program.load(DATA_ARGS + 8 * test.index);
}

/** Of what `loadFor` has loaded. */
function compare(program: BackwardProgram, { op, value, valueTwo = 0 }: Test, fits: Label, missed: Label): Label {
  switch (op) {
    case 'SCMP_CMP_EQ':
      return program.branch('equal', value, fits, missed);
    case 'SCMP_CMP_NE':
      return program.branch('equal', value, missed, fits);
    case 'SCMP_CMP_GT':
      return program.branch('greater', value, fits, missed);
    case 'SCMP_CMP_LT':
      return program.branch('greater or equal', value, missed, fits);
    case 'SCMP_CMP_MASKED_EQ':
      return program.branch('equal', valueTwo, fits, missed);
    default:
      throw new TypeError(`seccomp: comparison ${op}`);
  }
}

interface Range {
  readonly from: number;
  readonly decision: Decision;
}

/** From 0 to the last number there can be, without a gap; neighbours differ. */
function rangesOf(calls: ReadonlyMap<number, Decision>, otherwise: Decision): Range[] {
  const ranges: Range[] = [];
  const add = (from: number, decision: Decision) => {
    const last = ranges.at(-1);
    if (last?.from === from) ranges.pop();
    if (ranges.at(-1)?.decision.key !== decision.key) ranges.push({ from, decision });
  };
  add(0, otherwise);
  for (const [number, decision] of [...calls].sort(([a], [b]) => a - b)) {
    add(number, decision);
    add(number + 1, otherwise);
  }
  return ranges;
}

/** The number is in the accumulator. */
function searchFor(program: BackwardProgram, ranges: readonly Range[], leaf: (decision: Decision) => Label): Label {
  if (ranges.length === 1) return leaf(ranges[0]!.decision);
  const middle = ranges.length >> 1;
  const high = searchFor(program, ranges.slice(middle), leaf);
  const low = searchFor(program, ranges.slice(0, middle), leaf);
  return program.branch('greater or equal', ranges[middle]!.from, high, low);
}
