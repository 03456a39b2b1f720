/**
 * The one door to the C library. koffi costs 20 ms to load, so it is loaded by the first call, not by the import; each
 * function is bound once. A call that fails throws a SyscallError; one that a signal interrupted is made again.
 *
 * Calls without a libc wrapper everywhere (the mount API, mknodat) go through `syscall` by number: the numbers from 424
 * upwards are the same on every architecture.
 */
import { createRequire } from 'node:module';
import { type ByteString, bytesOf, display, fromText, messageOf } from '#base';
import { fail, SyscallError } from './errors.ts';

/** What may be passed to C. Buffers are pointers to their bytes, null is NULL. */
export type Argument = number | bigint | Buffer | null;

interface Native {
  (...args: Argument[]): number;
  async(...args: [...Argument[], (error: unknown, value: number) => void]): void;
}

interface Koffi {
  load(path: string | null): { func(name: string, result: string, args: readonly string[]): Native };
  errno(): number;
  address(value: Buffer): bigint;
  view(address: bigint, lengthBytes: number): ArrayBuffer;
}

interface Library {
  readonly koffi: Koffi;
  readonly handle: ReturnType<Koffi['load']>;
  readonly bound: Map<string, Native>;
}

let library: Library | undefined;

function open(): Library {
  if (library !== undefined) return library;
  if (process.platform !== 'linux') {
    throw fail('LINUX_LIBC_UNAVAILABLE', { reason: `this is ${process.platform}, not Linux` });
  }
  try {
    const koffi = createRequire(import.meta.url)('koffi') as Koffi;
    // The program itself: its libc, glibc or musl, under whatever name.
    library = { koffi, handle: koffi.load(null), bound: new Map() };
    return library;
  } catch (error) {
    throw fail('LINUX_LIBC_UNAVAILABLE', { reason: messageOf(error) }, error);
  }
}

const EINTR = 4;

function boundOf(key: string, name: string, result: string, types: readonly string[]): Native {
  const { handle, bound } = open();
  let native = bound.get(key);
  if (native === undefined) {
    native = handle.func(name, result, types);
    bound.set(key, native);
  }
  return native;
}

function invoke(key: string, name: string, result: string, types: readonly string[], args: Argument[]): number {
  return boundOf(key, name, result, types)(...args);
}

/** A libc function. */
export interface Call {
  readonly name: string;
  /** `int` or `long`: -1 is a failure, errno tells which. */
  readonly result: 'int' | 'long';
  readonly args: readonly string[];
}

/** Calls; -1 throws. `path` is for the message. */
export function call(spec: Call, args: Argument[], path: BytePath = ''): number {
  for (;;) {
    const value = invoke(`${spec.name}(${spec.args})`, spec.name, spec.result, spec.args, args);
    if (value !== -1) return value;
    const errno = open().koffi.errno();
    if (errno !== EINTR) throw syscallError(spec.name, errno, path);
  }
}

/** The same in a thread of the pool, for what may wait: what it returned, -1 too. */
export function callInPool(spec: Call, args: Argument[]): Promise<number> {
  const native = boundOf(`${spec.name}(${spec.args})`, spec.name, spec.result, spec.args);
  return new Promise((resolve, reject) => {
    native.async(...args, (error, value) => (error ? reject(error) : resolve(value)));
  });
}

/** A function bound once, for paths where each call counts: the caller looks at the result and asks for errno. */
export interface Bound {
  readonly call: Native;
  /** Of the call before, on this thread. */
  errno(): number;
}

export function bind(spec: {
  readonly name: string;
  readonly result: string;
  readonly args: readonly string[];
}): Bound {
  const { handle, koffi } = open();
  return { call: handle.func(spec.name, spec.result, spec.args), errno: () => koffi.errno() };
}

/** Where a Buffer's bytes are. */
export function address(buffer: Buffer): bigint {
  return open().koffi.address(buffer);
}

/** Memory at an address as an ArrayBuffer: it does not own it. */
export function viewOf(at: number, lengthBytes: number): ArrayBuffer {
  return open().koffi.view(BigInt(at), lengthBytes);
}

/** A call by number, for those libc has no function for. */
export interface NumberedCall {
  readonly name: string;
  readonly number: number | Readonly<Record<string, number>>;
  readonly args: readonly string[];
}

export function syscall(spec: NumberedCall, args: Argument[], path: BytePath = ''): number {
  const number = typeof spec.number === 'number' ? spec.number : spec.number[process.arch];
  if (number === undefined) {
    throw fail('LINUX_LIBC_UNAVAILABLE', { reason: `the number of ${spec.name} is not known on ${process.arch}` });
  }
  for (;;) {
    const value = invoke(`syscall:${spec.name}`, 'syscall', 'long', ['long', ...spec.args], [number, ...args]);
    if (value !== -1) return value;
    const errno = open().koffi.errno();
    if (errno !== EINTR) throw syscallError(spec.name, errno, path);
  }
}

export function syscallError(name: string, errno: number, path: BytePath): SyscallError {
  const text = errorText(errno);
  return new SyscallError(name, display(typeof path === 'string' ? path : path.toString('latin1')), errno, text);
}

function errorText(errno: number): string {
  return invoke('strerror', 'strerror', 'str', ['int'], [errno]) as unknown as string;
}

/** A path of an image's tree: a byte string, or the bytes themselves. */
export type BytePath = ByteString | Buffer;

/** NUL-terminated, from bytes. @throws a SyscallError with EINVAL when a NUL byte would cut it short */
export function cBytes(value: BytePath): Buffer {
  const bytes = typeof value === 'string' ? bytesOf(value) : value;
  if (bytes.includes(0)) throw syscallError('open', 22, value);
  return Buffer.concat([bytes, Buffer.alloc(1)]);
}

/** NUL-terminated, from text (UTF-8), as Node's fs takes paths; stand-ins of base's `textOf` are the bytes they stand for. */
export function cText(value: string): Buffer {
  return cBytes(fromText(value));
}
