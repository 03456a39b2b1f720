/** The compiled filter, run by an interpreter of classic BPF, against what the profile says. */
import { existsSync, readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { seccompFilter } from '../backend/seccomp-filter.ts';
import { defaultSeccompProfile, type SeccompRule } from '../backend/seccomp-profile.ts';
import { type CallConvention, callNumbers, isKnownCall } from '../backend/syscall-numbers.ts';

const ALLOW = 0x7fff0000;
const errno = (number: number) => 0x50000 | number;
const AUDIT = { x64: 0xc000003e, x32: 0xc000003e, x86: 0x40000003, arm64: 0xc00000b7, arm: 0x40000028 } as const;

function decide(filter: Buffer, arch: number, number: number, arg0 = 0n): number {
  const data = Buffer.alloc(64);
  data.writeUInt32LE(number >>> 0, 0);
  data.writeUInt32LE(arch, 4);
  data.writeBigUInt64LE(arg0, 16);
  let accumulator = 0;
  for (let at = 0; at < filter.length / 8; at++) {
    const [code, jt, jf, k] = [
      filter.readUInt16LE(at * 8),
      filter.readUInt8(at * 8 + 2),
      filter.readUInt8(at * 8 + 3),
      filter.readUInt32LE(at * 8 + 4),
    ];
    if (code === 0x20) accumulator = data.readUInt32LE(k);
    else if (code === 0x54) accumulator = (accumulator & k) >>> 0;
    else if (code === 0x05) at += k;
    else if (code === 0x15) at += accumulator === k ? jt : jf;
    else if (code === 0x25) at += accumulator > k ? jt : jf;
    else if (code === 0x35) at += accumulator >= k ? jt : jf;
    else if (code === 0x06) return k;
    else throw new Error(`code ${code}`);
  }
  throw new Error('it ran past its end');
}

/** As the profile reads: the first rule with the name whose arguments fit. */
function expected(rules: readonly SeccompRule[], name: string, arg0: number): number {
  for (const rule of rules) {
    if (!rule.names.includes(name)) continue;
    const fits = (rule.args ?? []).every(({ op, value, valueTwo = 0 }) => {
      if (op === 'SCMP_CMP_LT') return arg0 < value;
      if (op === 'SCMP_CMP_GT') return arg0 > value;
      if (op === 'SCMP_CMP_EQ') return arg0 === value;
      return (arg0 & value) >>> 0 === valueTwo;
    });
    if (fits) return rule.action === 'SCMP_ACT_ALLOW' ? ALLOW : errno(rule.errnoRet!);
  }
  return errno(38);
}

describe.each([
  ['x64', ['x64', 'x86', 'x32']],
  ['arm64', ['arm64', 'arm']],
] as const)('the compiled filter of %s', (arch, conventions: readonly CallConvention[]) => {
  const profile = defaultSeccompProfile(arch);
  const filter = seccompFilter(profile);

  it.each(conventions)('decides every %s call as the profile does', (convention) => {
    const names = new Map([...callNumbers(convention)].map(([name, number]) => [number, name]));
    const base = convention === 'x32' ? 0x40000000 : 0;
    const wrong: unknown[] = [];
    for (let number = base; number < base + 700; number++) {
      const name = names.get(number);
      for (const arg0 of name === 'socket' || name === 'clone' || name === 'personality'
        ? [0, 1, 2, 8, 16, 37, 38, 39, 40, 41, 0x20000, 0x20008, 0x1200011, 0x10000000, 0x7e020080, 0xffffffff]
        : [0, 0xffffffff]) {
        const want = name === undefined ? errno(38) : expected(profile.syscalls, name, arg0);
        const got = decide(filter, AUDIT[convention], number, BigInt(arg0));
        if (got !== want) wrong.push([number, name, arg0, got.toString(16), want.toString(16)]);
      }
    }
    expect(wrong).toEqual([]);
    expect(names.size).toBeGreaterThan(250);
  });

  it('kills what calls by another convention', () => {
    expect(decide(filter, 0x14, 1)).toBe(0x80000000);
  });

  it('refuses what no kernel has', () => {
    for (const number of [800, 0x3fffffff, 0x50000000, 0xffffffff]) {
      expect(decide(filter, AUDIT[conventions[0]!], number)).toBe(errno(38));
    }
  });

  it('is not fooled by the upper half of an argument', () => {
    const socket = callNumbers(conventions[0]!).get('socket')!;
    for (const family of [38n, 40n]) {
      expect(decide(filter, AUDIT[conventions[0]!], socket, family | (1n << 32n))).toBe(errno(97));
    }
    const clone = callNumbers(conventions[0]!).get('clone')!;
    expect(decide(filter, AUDIT[conventions[0]!], clone, (5n << 32n) | 0x10000000n)).toBe(errno(38));
  });
});

it('has a number for every call that the profile names', () => {
  const names = defaultSeccompProfile().syscalls.flatMap((rule) => rule.names);
  expect(names.filter((name) => !isKnownCall(name))).toEqual([]);
});

describe.skipIf(process.arch !== 'x64')('beside the headers of the kernel', () => {
  it.each([
    ['x64', 'unistd_64.h', 0],
    ['x86', 'unistd_32.h', 0],
    ['x32', 'unistd_x32.h', 0x40000000],
  ] as const)('has the number of every %s call that the profile names', (convention, file, base) => {
    const path = `/usr/include/x86_64-linux-gnu/asm/${file}`;
    if (!existsSync(path)) return console.log(`skipped: no ${path} (apt-get install linux-libc-dev)`);
    const named = new Set(defaultSeccompProfile('x64').syscalls.flatMap(({ names }) => names));
    const ours = callNumbers(convention);
    const defined = readFileSync(path, 'utf8').matchAll(
      /^#define __NR_(\w+)\s+\(?(?:__X32_SYSCALL_BIT \+ )?(\d+)\)?$/gm,
    );
    const known = [...defined].filter(([, name]) => named.has(name!));
    expect(known.length).toBeGreaterThan(250);
    expect(known.filter(([, name, number]) => ours.get(name!) !== Number(number) + base).map(([line]) => line)).toEqual(
      [],
    );
  });
});
