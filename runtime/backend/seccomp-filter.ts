/**
 * The system call filter as the kernel takes it: classic BPF, made from the profile that an OCI runtime gets as JSON.
 *
 * For each calling convention a binary search over ranges of call numbers: a dozen steps a call where a list has hundreds, and
 * little to look through when the kernel prepares its table of calls that are always allowed. Arguments are compared as what the
 * kernel makes of them for these calls, 32 bits: whatever is in the upper half of the register is nobody's business.
 */

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

type Instruction = readonly [code: number, jumpTrue: number, jumpFalse: number, k: number];

const LOAD = 0x20;
const AND = 0x54;
const JUMP = 0x05;
const JUMP_EQUAL = 0x15;
const JUMP_GREATER = 0x25;
const JUMP_GREATER_EQUAL = 0x35;
const RETURN = 0x06;

const ALLOW = 0x7fff0000;
const ERRNO = 0x00050000;
const KILL_PROCESS = 0x80000000;

const DATA_NUMBER = 0;
const DATA_ARCH = 4;
const DATA_ARGS = 16;

const MAX_INSTRUCTIONS = 4096;

/** struct sock_filter, one after the other. */
export function seccompFilter(profile: SeccompProfile): Buffer {
  const byAudit = new Map<number, Map<number, readonly Instruction[]>>();
  const otherwise = [returns(profile.defaultAction, profile.defaultErrnoRet)];
  for (const arch of profile.architectures) {
    const convention = CONVENTIONS[arch];
    if (convention === undefined) throw new TypeError(`seccomp: architecture ${arch}`);
    const calls = byAudit.get(AUDIT[convention]) ?? new Map<number, readonly Instruction[]>();
    byAudit.set(AUDIT[convention], calls);
    for (const [name, rules] of rulesByName(profile)) {
      const number = callNumbers(convention).get(name);
      if (number !== undefined) calls.set(number, decision(rules, otherwise));
    }
  }
  const program: Instruction[] = [[LOAD, 0, 0, DATA_ARCH]];
  for (const [audit, calls] of byAudit) {
    const search = searchFor(rangesOf(calls, otherwise));
    program.push([JUMP_EQUAL, 1, 0, audit], [JUMP, 0, 0, search.length + 1], [LOAD, 0, 0, DATA_NUMBER], ...search);
  }
  program.push([RETURN, 0, 0, KILL_PROCESS]);
  if (program.length > MAX_INSTRUCTIONS) throw new RangeError(`seccomp: ${program.length} instructions`);
  return encode(program);
}

function rulesByName(profile: SeccompProfile): Map<string, SeccompRule[]> {
  const byName = new Map<string, SeccompRule[]>();
  for (const rule of profile.syscalls) {
    for (const name of rule.names) byName.set(name, [...(byName.get(name) ?? []), rule]);
  }
  return byName;
}

function returns(action: SeccompRule['action'], errno: number | undefined): Instruction {
  return [RETURN, 0, 0, action === 'SCMP_ACT_ALLOW' ? ALLOW : ERRNO | (errno ?? 1)];
}

/** The first rule whose arguments all fit decides. */
function decision(rules: readonly SeccompRule[], otherwise: readonly Instruction[]): readonly Instruction[] {
  const steps: Instruction[] = [];
  for (const rule of rules) {
    const result = returns(rule.action, rule.errnoRet);
    const tests = rule.args ?? [];
    if (tests.length === 0) return [...steps, result];
    let fits: Instruction[] = [result];
    // From the last one: each jumps over what is behind it when it does not fit.
    for (const arg of [...tests].reverse()) fits = test(arg, fits.length).concat(fits);
    steps.push(...fits);
  }
  return [...steps, ...otherwise];
}

function test(arg: NonNullable<SeccompRule['args']>[number], skip: number): Instruction[] {
  const load: Instruction = [LOAD, 0, 0, DATA_ARGS + 8 * arg.index];
  switch (arg.op) {
    case 'SCMP_CMP_EQ':
      return [load, [JUMP_EQUAL, 0, skip, arg.value]];
    case 'SCMP_CMP_NE':
      return [load, [JUMP_EQUAL, skip, 0, arg.value]];
    case 'SCMP_CMP_GT':
      return [load, [JUMP_GREATER, 0, skip, arg.value]];
    case 'SCMP_CMP_LT':
      return [load, [JUMP_GREATER_EQUAL, skip, 0, arg.value]];
    case 'SCMP_CMP_MASKED_EQ':
      return [load, [AND, 0, 0, arg.value], [JUMP_EQUAL, 0, skip, arg.valueTwo ?? 0]];
    default:
      throw new TypeError(`seccomp: comparison ${arg.op}`);
  }
}

interface Range {
  readonly from: number;
  readonly steps: readonly Instruction[];
}

/** From 0 to the last number there can be, without a gap; neighbours differ. */
function rangesOf(calls: ReadonlyMap<number, readonly Instruction[]>, otherwise: readonly Instruction[]): Range[] {
  const ranges: Range[] = [];
  const add = (from: number, steps: readonly Instruction[]) => {
    const last = ranges.at(-1);
    if (last?.from === from) ranges.pop();
    if (String(ranges.at(-1)?.steps) !== String(steps)) ranges.push({ from, steps });
  };
  add(0, otherwise);
  for (const [number, steps] of [...calls].sort(([a], [b]) => a - b)) {
    add(number, steps);
    add(number + 1, otherwise);
  }
  return ranges;
}

/** The number is in the accumulator; each leaf returns. */
function searchFor(ranges: readonly Range[]): Instruction[] {
  if (ranges.length === 1) return [...ranges[0]!.steps];
  const middle = ranges.length >> 1;
  const [low, high] = [searchFor(ranges.slice(0, middle)), searchFor(ranges.slice(middle))];
  const { from } = ranges[middle]!;
  // A conditional jump reaches 255 instructions.
  const jump: Instruction[] =
    low.length <= 255
      ? [[JUMP_GREATER_EQUAL, low.length, 0, from]]
      : [
          [JUMP_GREATER_EQUAL, 0, 1, from],
          [JUMP, 0, 0, low.length],
        ];
  return [...jump, ...low, ...high];
}

function encode(program: readonly Instruction[]): Buffer {
  const bytes = Buffer.alloc(program.length * 8);
  program.forEach(([code, jumpTrue, jumpFalse, k], i) => {
    bytes.writeUInt16LE(code, i * 8);
    bytes.writeUInt8(jumpTrue, i * 8 + 2);
    bytes.writeUInt8(jumpFalse, i * 8 + 3);
    bytes.writeUInt32LE(k >>> 0, i * 8 + 4);
  });
  return bytes;
}
