/**
 * bpf(2): maps, programs, links and their names in a bpf file system. Programs are byte code that the caller has assembled; no library and
 * no compiler is needed. Descriptors are the caller's to close.
 */

import { systemCode } from '#base';
import { callInPool, type NumberedCall, syscall, syscallError } from './libc.ts';
import { addressOf } from './memory.ts';

const BPF: NumberedCall = { name: 'bpf', number: { x64: 321, arm64: 280 }, args: ['int', 'void*', 'uint'] };
const SYSCALL = { name: 'syscall', result: 'long', args: ['long', 'int', 'void*', 'uint'] } as const;

const COMMAND = {
  mapCreate: 0,
  lookup: 1,
  update: 2,
  delete: 3,
  nextKey: 4,
  programLoad: 5,
  pin: 6,
  objectGet: 7,
  mapById: 14,
  infoByFd: 15,
  updateBatch: 26,
  linkCreate: 28,
} as const;

export const BPF_MAP = { hash: 1, lruHash: 9, lpmTrie: 11, hashOfMaps: 13, ringBuffer: 27 } as const;
export const BPF_PROGRAM = { schedulerClass: 3, cgroupSocketAddress: 18 } as const;
export const BPF_ATTACH = { inet4Connect: 10, inet6Connect: 11, udp4Send: 14, udp6Send: 15 } as const;
/** Memory as it is needed, not all at once. */
export const BPF_NO_PREALLOC = 1;

const ATTRIBUTE_BYTES = 144;
const LOG_BYTES = 1 << 20;

type Field = readonly [offset: number, value: number | bigint | Buffer];

/** A number is four bytes, a bigint eight, a buffer its address. */
function attributes(fields: readonly Field[]): Buffer {
  const bytes = Buffer.alloc(ATTRIBUTE_BYTES);
  for (const [offset, value] of fields) {
    if (typeof value === 'number') bytes.writeUInt32LE(value >>> 0, offset);
    else bytes.writeBigUInt64LE(typeof value === 'bigint' ? value : BigInt(addressOf(value)), offset);
  }
  return bytes;
}

/** Buffers that attributes point to: not to be collected before the call is over. */
const held = new Set<unknown>();

function bpf(command: keyof typeof COMMAND, fields: readonly Field[], what: string): number {
  held.add(fields);
  try {
    return syscall(BPF, [COMMAND[command], attributes(fields), ATTRIBUTE_BYTES], `${command} ${what}`);
  } finally {
    held.delete(fields);
  }
}

function nameField(offset: number, name: string): Field[] {
  const bytes = Buffer.alloc(16);
  bytes.write(name.slice(0, 15), 'latin1');
  return [0, 4, 8, 12].map((at) => [offset + at, bytes.readUInt32LE(at)] as const);
}

export interface MapSpec {
  readonly name: string;
  readonly type: (typeof BPF_MAP)[keyof typeof BPF_MAP];
  readonly keyBytes: number;
  readonly valueBytes: number;
  readonly entries: number;
  readonly flags?: number;
  /** Of a map of maps: one like those in it. */
  readonly inner?: number;
}

/** @throws SyscallError */
export function createMap({ name, type, keyBytes, valueBytes, entries, flags = 0, inner = 0 }: MapSpec): number {
  const sizes: Field[] = [
    [0, type],
    [4, keyBytes],
    [8, valueBytes],
    [12, entries],
    [16, flags],
    [20, inner],
  ];
  return bpf('mapCreate', [...sizes, ...nameField(28, name)], name);
}

export function updateMap(map: number, key: Buffer, value: Buffer): void {
  bpf(
    'update',
    [
      [0, map],
      [8, key],
      [16, value],
    ],
    'map',
  );
}

/** For a map of maps, where the kernel waits until no processor uses what was there. @throws SyscallError */
export async function updateMapInPool(map: number, key: Buffer, value: Buffer): Promise<void> {
  await inPool('update', [
    [0, map],
    [8, key],
    [16, value],
  ]);
}

/** The same. What is not there is no error. */
export async function deleteFromMapInPool(map: number, key: Buffer): Promise<void> {
  await inPool(
    'delete',
    [
      [0, map],
      [8, key],
    ],
    true,
  );
}

async function inPool(command: 'update' | 'delete', fields: readonly Field[], missingIsFine = false): Promise<void> {
  const number = (BPF.number as Readonly<Record<string, number>>)[process.arch];
  const bytes = attributes(fields);
  const used = [fields, bytes];
  held.add(used);
  const done = await callInPool(SYSCALL, [number ?? -1, COMMAND[command], bytes, ATTRIBUTE_BYTES]);
  held.delete(used);
  // errno is the pool thread's: asked once more from here, the kernel says it again.
  if (done === -1 && !missingIsFine) bpf(command, fields, 'map');
}

export function updateMapBatch(map: number, keys: Buffer, values: Buffer, count: number): void {
  bpf(
    'updateBatch',
    [
      [16, keys],
      [24, values],
      [32, count],
      [36, map],
    ],
    'map',
  );
}

/** What is not there is no error. */
export function deleteFromMap(map: number, key: Buffer): void {
  orUndefined(() =>
    bpf(
      'delete',
      [
        [0, map],
        [8, key],
      ],
      'map',
    ),
  );
}

export function lookUp(map: number, key: Buffer, valueBytes: number): Buffer | undefined {
  const value = Buffer.alloc(valueBytes);
  return orUndefined(() =>
    bpf(
      'lookup',
      [
        [0, map],
        [8, key],
        [16, value],
      ],
      'map',
    ),
  ) === undefined
    ? undefined
    : value;
}

export function* mapKeys(map: number, keyBytes: number): Generator<Buffer> {
  let key: Buffer | undefined;
  for (;;) {
    const next = Buffer.alloc(keyBytes);
    const before: Field = key === undefined ? [8, 0n] : [8, key];
    if (orUndefined(() => bpf('nextKey', [[0, map], before, [16, next]], 'map')) === undefined) return;
    key = next;
    yield Buffer.from(next);
  }
}

/** A map of a map of maps: its value is a number, not a descriptor. Undefined when it has gone. */
export function openMapById(id: number): number | undefined {
  return orUndefined(() => bpf('mapById', [[0, id]], `map ${id}`));
}

/** @throws SyscallError; its message has the end of the verifier's log */
export function loadProgram(spec: {
  readonly name: string;
  readonly type: (typeof BPF_PROGRAM)[keyof typeof BPF_PROGRAM];
  readonly code: Buffer;
  readonly attach?: number;
}): number {
  const license = Buffer.from('GPL\0');
  const fields: Field[] = [
    [0, spec.type],
    [4, spec.code.length / 8],
    [8, spec.code],
    [16, license],
    ...nameField(48, spec.name),
    [68, spec.attach ?? 0],
  ];
  try {
    return bpf('programLoad', fields, spec.name);
  } catch (error) {
    const log = Buffer.alloc(LOG_BYTES);
    try {
      return bpf('programLoad', [...fields, [24, 1], [28, LOG_BYTES], [32, log]], spec.name);
    } catch (again) {
      const text = log
        .toString('latin1', 0, Math.max(0, log.indexOf(0)))
        .trimEnd()
        .slice(-2000);
      if (text === '') throw again;
      throw syscallError('bpf', (error as { errno?: number }).errno ?? 22, `programLoad ${spec.name}: ${text}`);
    }
  }
}

/** It is attached as long as the descriptor, or a name of it, is there. */
export function createLink(program: number, target: number, attach: number): number {
  return bpf(
    'linkCreate',
    [
      [0, program],
      [4, target],
      [8, attach],
    ],
    'program',
  );
}

export function pinObject(fd: number, path: string): void {
  const name = Buffer.from(`${path}\0`);
  bpf(
    'pin',
    [
      [0, name],
      [8, fd],
    ],
    path,
  );
}

export function pinnedObject(path: string): number | undefined {
  const name = Buffer.from(`${path}\0`);
  return orUndefined(() => bpf('objectGet', [[0, name]], path));
}

function orUndefined(work: () => number): number | undefined {
  try {
    return work();
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
    throw error;
  }
}
