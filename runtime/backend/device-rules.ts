/**
 * Which devices a sandbox may open, whatever nodes it makes: the harmless ones of every container. As lines for a v1 devices group,
 * and as a program for a v2 group, where the kernel asks one for each open and mknod.
 */

export interface DeviceRule {
  readonly type: 'b' | 'c';
  /** Undefined: any. */
  readonly major?: number;
  readonly minor?: number;
  /** Of `r`, `w` and `m` (mknod). */
  readonly access: string;
}

export interface DeviceNode {
  readonly path: string;
  readonly major: number;
  readonly minor: number;
  readonly mode: number;
}

/** In every sandbox's /dev. */
export const DEVICE_NODES: readonly DeviceNode[] = [
  { path: '/dev/null', major: 1, minor: 3, mode: 0o666 },
  { path: '/dev/zero', major: 1, minor: 5, mode: 0o666 },
  { path: '/dev/full', major: 1, minor: 7, mode: 0o666 },
  { path: '/dev/tty', major: 5, minor: 0, mode: 0o666 },
  { path: '/dev/random', major: 1, minor: 8, mode: 0o666 },
  { path: '/dev/urandom', major: 1, minor: 9, mode: 0o666 },
];

export const DEVICE_LINKS: readonly (readonly [path: string, target: string])[] = [
  ['/dev/fd', '/proc/self/fd'],
  ['/dev/stdin', '/proc/self/fd/0'],
  ['/dev/stdout', '/proc/self/fd/1'],
  ['/dev/stderr', '/proc/self/fd/2'],
  ['/dev/core', '/proc/kcore'],
  ['/dev/ptmx', 'pts/ptmx'],
];

const TERMINALS: readonly DeviceRule[] = [
  { type: 'c', major: 5, minor: 1, access: 'rwm' },
  { type: 'c', major: 136, access: 'rwm' },
  { type: 'c', major: 5, minor: 2, access: 'rwm' },
];

/** Making any node is allowed, as tar and package managers do; opening one is what is refused. */
export const DEVICE_RULES: readonly DeviceRule[] = [
  { type: 'c', access: 'm' },
  { type: 'b', access: 'm' },
  ...DEVICE_NODES.map(({ major, minor }): DeviceRule => ({ type: 'c', major, minor, access: 'rwm' })),
  ...TERMINALS,
];

/** With devices of its own besides, which it may open. */
export function rulesWith(devices: readonly DeviceNode[] = []): readonly DeviceRule[] {
  return [
    ...DEVICE_RULES,
    ...devices.map(({ major, minor }): DeviceRule => ({ type: 'c', major, minor, access: 'rw' })),
  ];
}

/** File of the group, value; in this order. */
export function deviceLines(rules: readonly DeviceRule[] = DEVICE_RULES): (readonly [string, string])[] {
  const line = ({ type, major, minor, access }: DeviceRule) => `${type} ${major ?? '*'}:${minor ?? '*'} ${access}`;
  return [['devices.deny', 'a'], ...rules.map((rule) => ['devices.allow', line(rule)] as const)];
}

const TYPES = { b: 1, c: 2 } as const;
const ACCESS: Readonly<Record<string, number>> = { m: 1, r: 2, w: 4 };

/** Instructions for BPF_PROG_TYPE_CGROUP_DEVICE: the context is { type | access << 16, major, minor }, 1 allows. */
export function deviceProgram(rules: readonly DeviceRule[] = DEVICE_RULES): Buffer {
  const [R0, R1, TYPE, ACCESS_WANTED, MAJOR, MINOR, SCRATCH] = [0, 1, 2, 3, 4, 5, 6];
  const code: Buffer[] = [];
  const add = (op: number, to: number, from: number, offset: number, value: number) => {
    const bytes = Buffer.alloc(8);
    bytes.writeUInt8(op, 0);
    bytes.writeUInt8(to | (from << 4), 1);
    bytes.writeInt16LE(offset, 2);
    bytes.writeInt32LE(value, 4);
    code.push(bytes);
  };
  const load = (to: number, offset: number) => add(0x61, to, R1!, offset, 0);
  const and = (to: number, value: number) => add(0x57, to, 0, 0, value);
  const jumpUnless = (register: number, value: number, over: number) => add(0x55, register, 0, over, value);
  const answer = (value: number) => {
    add(0xb7, R0!, 0, 0, value);
    add(0x95, 0, 0, 0, 0);
  };
  load(TYPE!, 0);
  add(0xbf, ACCESS_WANTED!, TYPE!, 0, 0);
  and(TYPE!, 0xffff);
  add(0x77, ACCESS_WANTED!, 0, 0, 16);
  load(MAJOR!, 4);
  load(MINOR!, 8);
  for (const { type, major, minor, access } of rules) {
    const numbers = [
      ...(major === undefined ? [] : [[MAJOR!, major]]),
      ...(minor === undefined ? [] : [[MINOR!, minor]]),
    ];
    // To the next rule: over what is left of this one's tests, and its answer.
    let left = 3 + numbers.length + 2;
    jumpUnless(TYPE!, TYPES[type], left);
    add(0xbf, SCRATCH!, ACCESS_WANTED!, 0, 0);
    and(SCRATCH!, 7 & ~[...access].reduce((bits, letter) => bits | ACCESS[letter]!, 0));
    left -= 3;
    jumpUnless(SCRATCH!, 0, left);
    for (const [register, value] of numbers) jumpUnless(register!, value!, --left);
    answer(1);
  }
  answer(0);
  return Buffer.concat(code);
}
