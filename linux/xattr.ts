/**
 * Extended attributes, of a path itself (a symlink is not followed) or of an open file. Paths and names are byte
 * strings, values are Buffers: an attribute's value may hold any byte.
 *
 * A list that grows between asking its size and reading it is asked for again. A file system without attributes has
 * none: listing gives an empty list, not an error.
 */
import { type ByteString, bytesOf, systemCode } from '#base';
import { type Argument, type BytePath, type Call, call, cBytes } from './libc.ts';

const LISTXATTR: Call = { name: 'llistxattr', result: 'long', args: ['void*', 'void*', 'size_t'] };
const GETXATTR: Call = { name: 'lgetxattr', result: 'long', args: ['void*', 'void*', 'void*', 'size_t'] };
const SETXATTR: Call = { name: 'lsetxattr', result: 'int', args: ['void*', 'void*', 'void*', 'size_t', 'int'] };
const REMOVEXATTR: Call = { name: 'lremovexattr', result: 'int', args: ['void*', 'void*'] };
const FLISTXATTR: Call = { name: 'flistxattr', result: 'long', args: ['int', 'void*', 'size_t'] };
const FGETXATTR: Call = { name: 'fgetxattr', result: 'long', args: ['int', 'void*', 'void*', 'size_t'] };
const FSETXATTR: Call = { name: 'fsetxattr', result: 'int', args: ['int', 'void*', 'void*', 'size_t', 'int'] };

/** One buffer for all calls (they are synchronous): the largest value and the largest list Linux allows are 64 KiB. */
let scratch: Buffer | undefined;

function readInto(spec: Call, leading: Argument[], path: BytePath): Buffer {
  scratch ??= Buffer.allocUnsafe(65536);
  const size = call(spec, [...leading, scratch, scratch.length], path);
  return Buffer.from(scratch.subarray(0, size));
}

function namesIn(list: Buffer): ByteString[] {
  const names: ByteString[] = [];
  for (let start = 0; start < list.length; ) {
    const end = list.indexOf(0, start);
    const stop = end === -1 ? list.length : end;
    if (stop > start) names.push(list.toString('latin1', start, stop));
    start = stop + 1;
  }
  return names;
}

function listing(read: () => Buffer): ByteString[] {
  try {
    return namesIn(read());
  } catch (error) {
    if (systemCode(error) === 'EOPNOTSUPP') return [];
    throw error;
  }
}

function valueOrNone(read: () => Buffer): Buffer | undefined {
  try {
    return read();
  } catch (error) {
    const code = systemCode(error);
    if (code === 'ENODATA' || code === 'EOPNOTSUPP') return undefined;
    throw error;
  }
}

/** Names, in the file system's order. */
export function llistxattr(path: BytePath): ByteString[] {
  return listing(() => readInto(LISTXATTR, [cBytes(path)], path));
}

/** The value, or undefined when the path has no such attribute. */
export function lgetxattr(path: BytePath, name: ByteString): Buffer | undefined {
  return valueOrNone(() => readInto(GETXATTR, [cBytes(path), cBytes(name)], path));
}

/** `create`: fails with EEXIST when it is there; `replace`: with ENODATA when it is not. */
export function lsetxattr(path: BytePath, name: ByteString, value: Buffer, only?: 'create' | 'replace'): void {
  const flags = only === 'create' ? 1 : only === 'replace' ? 2 : 0;
  call(SETXATTR, [cBytes(path), cBytes(name), value.length === 0 ? null : value, value.length, flags], path);
}

/** False when there was none. */
export function lremovexattr(path: BytePath, name: ByteString): boolean {
  try {
    call(REMOVEXATTR, [cBytes(path), cBytes(name)], path);
    return true;
  } catch (error) {
    if (systemCode(error) === 'ENODATA') return false;
    throw error;
  }
}

/** All of them, sorted by name (bytewise), so that two readings of one file are equal. */
export function lxattrs(path: BytePath): Map<ByteString, Buffer> {
  const found = new Map<ByteString, Buffer>();
  for (const name of llistxattr(path).sort()) {
    const value = lgetxattr(path, name);
    if (value !== undefined) found.set(name, value);
  }
  return found;
}

export function flistxattr(fd: number): ByteString[] {
  return listing(() => readInto(FLISTXATTR, [fd], `fd ${fd}`));
}

export function fgetxattr(fd: number, name: ByteString): Buffer | undefined {
  return valueOrNone(() => readInto(FGETXATTR, [fd, cBytes(name)], `fd ${fd}`));
}

export function fsetxattr(fd: number, name: ByteString, value: Buffer): void {
  call(FSETXATTR, [fd, cBytes(bytesOf(name)), value.length === 0 ? null : value, value.length, 0], `fd ${fd}`);
}
