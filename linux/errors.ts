/**
 * Every error this folder makes. A failed system call is a `SyscallError`: its `code` is the errno's name, as Node's own
 * errors have it ('ENOENT'), so that one `systemCode(error)` serves both; its row tells message, hint and exit status.
 * Kept alphabetical; docs/errors.md lists the same rows.
 */
import { constants } from 'node:os';
import { DsecError, type ErrorRow, errorTable } from '#base';

export const linuxErrors = {
  LINUX_LIBC_UNAVAILABLE: {
    message: 'system calls are not available: {reason}',
    hint: 'DSec needs Linux on x64 or arm64, and the npm package koffi with its prebuilt library (npm install)',
    exit: 5,
    http: 501,
  },
  LINUX_LOCK_TIMEOUT: {
    message: '{path}: still locked by another process after {seconds} s',
    hint: 'find the holder with: fuser -v {path}',
    retryable: true,
    exit: 1,
    http: 503,
  },
  LINUX_LOOP_UNAVAILABLE: {
    message: 'no loop device for {path}: {reason}',
    hint: 'the kernel needs the loop driver (modprobe loop), and /dev must hold loop-control and the loop devices',
    exit: 5,
    http: 501,
  },
  LINUX_OPTIONS_TOO_LONG: {
    message:
      'mount options of {sizeBytes} bytes for {path}: the kernel takes {limitBytes} and would cut the rest silently',
    hint: 'use shorter paths or fewer layers, or a kernel with the new mount API (6.5 or newer for OverlayFS)',
    exit: 5,
    http: 422,
  },
  LINUX_RING_FULL: {
    message: 'the ring of {entries} submissions is full',
    exit: 1,
    http: 503,
  },
  SYSCALL_DENIED: {
    message: '{call} {path}: {text} ({errno})',
    hint: 'run as root (CAP_SYS_ADMIN); inside a container, its seccomp or AppArmor profile may forbid the call too',
    exit: 5,
    http: 403,
  },
  SYSCALL_FAILED: {
    message: '{call} {path}: {text} ({errno})',
    exit: 1,
    http: 500,
  },
  SYSCALL_NOT_FOUND: {
    message: '{call} {path}: {text} ({errno})',
    exit: 4,
    http: 404,
  },
  SYSCALL_UNSUPPORTED: {
    message: '{call} {path}: {text} ({errno})',
    hint: 'this kernel or file system does not have it; `dsec doctor` lists what is missing and what takes its place',
    exit: 5,
    http: 501,
  },
} as const satisfies Record<string, ErrorRow>;

export const fail = errorTable(linuxErrors);

/** Row of a failed system call. */
type SyscallRow = Extract<keyof typeof linuxErrors, `SYSCALL_${string}`>;

export class SyscallError extends DsecError {
  /** Number, positive. `code` is its name. */
  readonly errno: number;
  readonly syscall: string;
  readonly row: SyscallRow;

  constructor(call: string, path: string, errno: number, text: string) {
    const name = errnoName(errno);
    const row = rowOf(name);
    super(name, linuxErrors[row], { call, path, text, errno: name });
    this.name = 'SyscallError';
    this.errno = errno;
    this.syscall = call;
    this.row = row;
  }
}

/** Names that Node's own list lacks. */
const EXTRA: Readonly<Record<number, string>> = { 15: 'ENOTBLK', 117: 'EUCLEAN', 123: 'ENOMEDIUM', 126: 'ENOKEY' };

let names: Map<number, string> | undefined;

/** `ENOENT` for 2. */
export function errnoName(errno: number): string {
  if (names === undefined) {
    names = new Map(Object.entries(constants.errno).map(([name, number]) => [number, name]));
    // Aliases: Linux has one number for each pair; these are the names people know.
    names.set(constants.errno.EAGAIN, 'EAGAIN');
    names.set(constants.errno.EOPNOTSUPP, 'EOPNOTSUPP');
  }
  return names.get(errno) ?? EXTRA[errno] ?? `E${errno}`;
}

function rowOf(name: string): SyscallRow {
  switch (name) {
    case 'EPERM':
    case 'EACCES':
      return 'SYSCALL_DENIED';
    case 'ENOENT':
      return 'SYSCALL_NOT_FOUND';
    case 'ENOSYS':
    case 'ENODEV':
    case 'EOPNOTSUPP':
      return 'SYSCALL_UNSUPPORTED';
    default:
      return 'SYSCALL_FAILED';
  }
}
