/** The compiled filter, run by an interpreter of classic BPF, against what the profile says. */
import { existsSync, readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { seccompFilter } from '../backend/seccomp-filter.ts';
import { forLibseccomp } from '../backend/seccomp-patterns.ts';
import { defaultSeccompProfile, type SeccompRule } from '../backend/seccomp-profile.ts';
import { type CallConvention, callNumbers, isKnownCall } from '../backend/syscall-numbers.ts';
import { zygoteFilters } from '../fncall/zygote-filters.ts';

const ALLOW = 0x7fff0000;
const errno = (number: number) => 0x50000 | number;
const AUDIT = { x64: 0xc000003e, x32: 0xc000003e, x86: 0x40000003, arm64: 0xc00000b7, arm: 0x40000028 } as const;

function decide(filter: Buffer, arch: number, number: number, arg0 = 0n, arg1 = 0n): number {
  const data = Buffer.alloc(64);
  data.writeUInt32LE(number >>> 0, 0);
  data.writeUInt32LE(arch, 4);
  data.writeBigUInt64LE(arg0, 16);
  data.writeBigUInt64LE(arg1, 24);
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

const INTERESTING: Readonly<Record<string, readonly number[]>> = {
  socket: [0, 1, 2, 8, 16, 37, 38, 39, 40, 41, 63, 64, 0x20000],
  clone: [0, 0x1200011, 0x10000000, 0x7e020080, 0xffffffff],
  personality: [0, 8, 0x20000, 0x20008, 0xffffffff, 0x40000],
};
const IOCTLS = [
  ...[
    0x5401, 0x5413, 0x80045430, 0x541b, 0x8912, 0x80086601, 0x40086602, 0xc020660b, 0x40049409, 0xc0189436, 0x801c581f,
  ],
  // SWAPEXT, FSSETXATTR, MOVE_EXT, SHUTDOWN, snapshots, and the first with bits set that no kernel looks at.
  ...[0xc0c0586d, 0x401c5820, 0xc028660f, 0x8004587d, 0x50009401, 0xffff586d],
];

function pairsFor(name: string | undefined): (readonly [number, number])[] {
  if (name === 'ioctl') return IOCTLS.map((command) => [5, command]);
  const first = (name === undefined ? undefined : INTERESTING[name]) ?? [0, 1, 2, 0xffffffff];
  return first.flatMap((arg0) => [0, 1, 2, 0xffffffff].map((arg1) => [arg0, arg1] as const));
}

/** As the profile reads: the first rule with the name whose arguments fit. */
function expected(rules: readonly SeccompRule[], name: string, arg0: number, arg1 = 0): number {
  for (const rule of rules) {
    if (!rule.names.includes(name)) continue;
    const fits = (rule.args ?? []).every(({ index, op, value, valueTwo = 0 }) => {
      const arg = [arg0, arg1][index]!;
      if (op === 'SCMP_CMP_NE') return arg !== value;
      if (op === 'SCMP_CMP_EQ') return arg === value;
      return (arg & value) >>> 0 === valueTwo;
    });
    if (fits) return rule.action === 'SCMP_ACT_ALLOW' ? ALLOW : errno(rule.errnoRet!);
  }
  return errno(38);
}

describe.each([
  ['x64', 'command', ['x64', 'x86', 'x32']],
  ['x64', 'agent', ['x64', 'x86', 'x32']],
  ['arm64', 'agent', ['arm64', 'arm']],
] as const)(
  'the compiled filter of %s with the %s as first process',
  (arch, firstProcess, conventions: readonly CallConvention[]) => {
    const profile = defaultSeccompProfile(firstProcess, arch);
    const filter = seccompFilter(profile);

    it.each(conventions)('decides every %s call as the profile does', (convention) => {
      const names = new Map([...callNumbers(convention)].map(([name, number]) => [number, name]));
      const base = convention === 'x32' ? 0x40000000 : 0;
      const wrong: unknown[] = [];
      for (let number = base; number < base + 700; number++) {
        const name = names.get(number);
        for (const [arg0, arg1] of pairsFor(name)) {
          const want = name === undefined ? errno(38) : expected(profile.syscalls, name, arg0, arg1);
          const got = decide(filter, AUDIT[convention], number, BigInt(arg0), BigInt(arg1));
          if (got !== want) wrong.push([number, name, arg0, arg1, got.toString(16), want.toString(16)]);
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
      expect(decide(filter, AUDIT[conventions[0]!], socket, 2n | (1n << 32n))).toBe(ALLOW);
      const clone = callNumbers(conventions[0]!).get('clone')!;
      expect(decide(filter, AUDIT[conventions[0]!], clone, (5n << 32n) | 0x10000000n)).toBe(errno(38));
    });
  },
);

describe.each([
  ['x64', ['x64', 'x86', 'x32']],
  ['arm64', ['arm64', 'arm']],
] as const)('the two parts of %s for an interpreter that stays and its forks', (arch, conventions) => {
  const profile = defaultSeccompProfile('command', arch);
  const whole = seccompFilter(profile);
  const { wholeButSetns, setns } = zygoteFilters(profile);

  it.each(conventions)('are together what the whole one is: %s', (convention) => {
    const names = new Map([...callNumbers(convention)].map(([name, number]) => [number, name]));
    const base = convention === 'x32' ? 0x40000000 : 0;
    const wrong: unknown[] = [];
    for (const number of [...Array.from({ length: 700 }, (_, i) => base + i), 0x3fffffff, 0xffffffff]) {
      for (const [arg0, arg1] of pairsFor(names.get(number))) {
        const ask = (filter: Buffer) => decide(filter, AUDIT[convention], number, BigInt(arg0), BigInt(arg1));
        // The kernel takes the answer of the lowest action, and of two like ones that of the filter that came last.
        const [one, other] = [ask(setns), ask(wholeButSetns)];
        if ((one === ALLOW ? other : one) !== ask(whole)) wrong.push([number, arg0, arg1]);
      }
    }
    expect(wrong).toEqual([]);
    const entering = callNumbers(convention).get('setns')!;
    expect([whole, setns, wholeButSetns].map((filter) => decide(filter, AUDIT[convention], entering))).toEqual([
      errno(1),
      errno(1),
      ALLOW,
    ]);
  });

  it('are short where each fork takes them up', () => {
    expect(setns.length / 8).toBeLessThan(20);
    expect(decide(setns, 0x14, 1)).toBe(0x80000000);
  });
});

it('refuses what goes behind the back of a file system, and allows what programs do with their own files', () => {
  const filter = seccompFilter(defaultSeccompProfile());
  const ioctl = (command: number) => decide(filter, AUDIT.x64, 16, 5n, BigInt(command));
  for (const command of IOCTLS.slice(0, 11)) expect(ioctl(command)).toBe(ALLOW);
  for (const command of IOCTLS.slice(11)) expect(ioctl(command)).toBe(errno(1));
});

it('lets no 32-bit program make a socket of a family that nobody sees', () => {
  const filter = seccompFilter(defaultSeccompProfile());
  expect(decide(filter, AUDIT.x86, 102, 1n)).toBe(errno(97));
  expect(decide(filter, AUDIT.x86, 102, 3n)).toBe(ALLOW);
});

it('fits any number for libseccomp as it does for us, whatever its upper half', () => {
  const profile = defaultSeccompProfile('agent');
  const translated = forLibseccomp(profile);
  expect(translated.syscalls.some(({ args }) => args?.some(({ op }) => op === 'SCMP_CMP_NE'))).toBe(false);
  for (const name of ['prlimit64', 'setpriority', 'ioprio_set', 'socket', 'sched_setaffinity']) {
    for (const [arg0, arg1] of [0, 1, 2, 7, 0x80000000, 0xfffffffe].flatMap((a) =>
      [0, 1, 5].map((b) => [a, b] as const),
    ))
      expect([name, arg0, arg1, expected(translated.syscalls, name, arg0, arg1)]).toEqual([
        name,
        arg0,
        arg1,
        expected(profile.syscalls, name, arg0, arg1),
      ]);
  }
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
    const named = new Set(defaultSeccompProfile('command', 'x64').syscalls.flatMap(({ names }) => names));
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
