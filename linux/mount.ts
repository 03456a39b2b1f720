/**
 * Mounting by system call, never through mount(8): it slips loop devices in, and its option strings are cut at a page.
 *
 * New mounts are made detached (`fsopen` ... `fsmount` gives a descriptor of a mount nobody sees yet) and attached in one
 * step: whoever looks sees the whole mount or none. `mount(2)` stays for kernels that lack a parameter there; it refuses
 * option strings that the kernel would cut. Paths are text, as Node's fs takes them. All need CAP_SYS_ADMIN.
 */
import { closeSync, readSync } from 'node:fs';
import { fail, SyscallError } from './errors.ts';
import { type Call, call, callInPool, cText, type NumberedCall, syscall } from './libc.ts';

const MOUNT: Call = { name: 'mount', result: 'int', args: ['void*', 'void*', 'void*', 'ulong', 'void*'] };
const UMOUNT2: Call = { name: 'umount2', result: 'int', args: ['void*', 'int'] };
const FSOPEN: NumberedCall = { name: 'fsopen', number: 430, args: ['void*', 'uint'] };
const FSCONFIG: NumberedCall = { name: 'fsconfig', number: 431, args: ['int', 'uint', 'void*', 'void*', 'int'] };
const FSMOUNT: NumberedCall = { name: 'fsmount', number: 432, args: ['int', 'uint', 'uint'] };
const OPEN_TREE: NumberedCall = { name: 'open_tree', number: 428, args: ['int', 'void*', 'uint'] };
const MOVE_MOUNT: NumberedCall = { name: 'move_mount', number: 429, args: ['int', 'void*', 'int', 'void*', 'uint'] };
const MOUNT_SETATTR: NumberedCall = {
  name: 'mount_setattr',
  number: 442,
  args: ['int', 'void*', 'uint', 'void*', 'size_t'],
};

const AT_FDCWD = -100;
const AT_EMPTY_PATH = 0x1000;
const AT_RECURSIVE = 0x8000;
const O_CLOEXEC = 0o2000000;

/** Flags of mount(2). */
export const MS = {
  RDONLY: 1,
  NOSUID: 2,
  NODEV: 4,
  NOEXEC: 8,
  REMOUNT: 32,
  BIND: 4096,
  MOVE: 8192,
  REC: 16384,
  UNBINDABLE: 1 << 17,
  PRIVATE: 1 << 18,
  SLAVE: 1 << 19,
  SHARED: 1 << 20,
} as const;

/** Attributes of one mount (fsmount, mount_setattr). */
export const MOUNT_ATTR = { RDONLY: 1, NOSUID: 2, NODEV: 4, NOEXEC: 8, IDMAP: 0x100000 } as const;

/** The kernel takes one page of options, its NUL included, and cuts what is longer without a word. */
const OPTIONS_LIMIT_BYTES = 4095;

/** mount(2). @throws LINUX_OPTIONS_TOO_LONG instead of having the options cut */
export function mount(source: string, target: string, type: string | null, flags: number, options?: string): void {
  const data = options === undefined ? null : cText(options);
  if (data !== null && data.length > OPTIONS_LIMIT_BYTES) {
    throw fail('LINUX_OPTIONS_TOO_LONG', {
      path: target,
      sizeBytes: data.length - 1,
      limitBytes: OPTIONS_LIMIT_BYTES - 1,
    });
  }
  call(MOUNT, [cText(source), cText(target), type === null ? null : cText(type), flags, data], target);
}

const MNT_DETACH = 2;
const MNT_EXPIRE = 4;
const UMOUNT_NOFOLLOW = 8;

/**
 * Unmounts what is on top at `target`, never following a symlink. `lazy`: now out of sight, gone when its last user is.
 * `expire`: only when nothing has used it since the last such call; else EAGAIN (unused now, marked) or EBUSY.
 */
export function umount(target: string, options: { lazy?: boolean; expire?: boolean } = {}): void {
  const how = options.lazy ? MNT_DETACH : options.expire ? MNT_EXPIRE : 0;
  call(UMOUNT2, [cText(target), UMOUNT_NOFOLLOW | how], target);
}

/** The same, waiting in a thread of the pool: the kernel asks all processors before it is done. @throws a SyscallError */
export async function umountInPool(target: string, { lazy = false }: { readonly lazy?: boolean } = {}): Promise<void> {
  const done = await callInPool(UMOUNT2, [cText(target), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)]);
  // errno is that thread's: asked again here it says why.
  if (done !== 0) umount(target, { lazy });
}

/** What happens at `target` stays in this mount namespace, and the other way round. */
export function makePrivate(target: string, options: { recursive?: boolean } = {}): void {
  mount('none', target, null, MS.PRIVATE | (options.recursive ? MS.REC : 0));
}

// -- a file system context: fsopen ... fsmount ---------------------------------------------------------------------

/** The context's descriptor; close it with `closeSync`. Close-on-exec. */
export function fsopen(type: string): number {
  return syscall(FSOPEN, [cText(type), 1], type);
}

const SET_FLAG = 0;
const SET_STRING = 1;
const SET_FD = 5;
const CMD_CREATE = 6;

/** Longest value `fsconfigString` can carry, in bytes. */
export const FSCONFIG_STRING_LIMIT_BYTES = 255;

export function fsconfigString(fsFd: number, key: string, value: string): void {
  syscall(FSCONFIG, [fsFd, SET_STRING, cText(key), cText(value), 0], `${key}=${value}`);
}

export function fsconfigFlag(fsFd: number, key: string): void {
  syscall(FSCONFIG, [fsFd, SET_FLAG, cText(key), null, 0], key);
}

export function fsconfigFd(fsFd: number, key: string, fd: number): void {
  syscall(FSCONFIG, [fsFd, SET_FD, cText(key), null, fd], `${key}=fd ${fd}`);
}

/** Makes the file system; the step at which most refusals come. */
export function fsconfigCreate(fsFd: number): void {
  syscall(FSCONFIG, [fsFd, CMD_CREATE, null, null, 0], 'create');
}

/** A detached mount of the context's file system: its descriptor. `attributes`: MOUNT_ATTR bits. */
export function fsmount(fsFd: number, attributes = 0): number {
  return syscall(FSMOUNT, [fsFd, 1, attributes], '');
}

/** What the kernel wrote into the context about its refusals, oldest first: "e overlay: ...". Reading empties it. */
export function contextMessages(fsFd: number): string[] {
  const messages: string[] = [];
  const buffer = Buffer.alloc(4096);
  for (let i = 0; i < 16; i++) {
    try {
      const size = readSync(fsFd, buffer, 0, buffer.length, null);
      if (size === 0) break;
      messages.push(buffer.toString('utf8', 0, size).trim());
    } catch {
      break; // ENODATA: no more
    }
  }
  return messages;
}

/** A parameter: `[key]` is a flag. */
export type MountParameter = readonly [key: string] | readonly [key: string, value: string];

/** A new mount that is not in the tree yet. Close `fd` when it is attached, or to drop it. */
export interface DetachedMount {
  readonly fd: number;
}

/**
 * A file system of `type` with `parameters`, mounted nowhere yet.
 * @throws the SyscallError; its `cause` holds the kernel's own messages where it gave any
 */
export function createMount(type: string, parameters: Iterable<MountParameter>, attributes = 0): DetachedMount {
  const context = fsopen(type);
  try {
    for (const [key, value] of parameters) {
      if (value === undefined) fsconfigFlag(context, key);
      else fsconfigString(context, key, value);
    }
    fsconfigCreate(context);
    return { fd: fsmount(context, attributes) };
  } catch (error) {
    if (error instanceof SyscallError) {
      const messages = contextMessages(context);
      if (messages.length > 0) error.cause ??= new Error(messages.join('; '));
    }
    throw error;
  } finally {
    closeSync(context);
  }
}

// -- moving and copying mounts ----------------------------------------------------------------------------------------

/** open_tree(2): the mount at `path` as a descriptor; `clone`: a detached copy of it (a bind mount in the making). */
export function openTree(path: string, options: { clone?: boolean; recursive?: boolean } = {}): number {
  const flags = O_CLOEXEC | (options.clone ? 1 : 0) | (options.clone && options.recursive ? AT_RECURSIVE : 0);
  return syscall(OPEN_TREE, [AT_FDCWD, cText(path), flags], path);
}

/** Attaches a detached mount at `target`, on top of what is there. */
export function moveMount(fd: number, target: string): void {
  const F_EMPTY_PATH = 4;
  syscall(MOVE_MOUNT, [fd, cText(''), AT_FDCWD, cText(target), F_EMPTY_PATH], target);
}

/** Changes attributes of the mount behind `fd`. Kernel 5.12. */
export function setMountAttributes(
  fd: number,
  change: { set?: number; clear?: number; propagation?: number; userNamespace?: number; recursive?: boolean },
): void {
  const attributes = Buffer.alloc(32);
  attributes.writeBigUInt64LE(BigInt(change.set ?? 0), 0);
  attributes.writeBigUInt64LE(BigInt(change.clear ?? 0), 8);
  attributes.writeBigUInt64LE(BigInt(change.propagation ?? 0), 16);
  attributes.writeBigUInt64LE(BigInt(change.userNamespace ?? 0), 24);
  const flags = AT_EMPTY_PATH | (change.recursive ? AT_RECURSIVE : 0);
  syscall(MOUNT_SETATTR, [fd, cText(''), flags, attributes, attributes.length], `fd ${fd}`);
}

/** A detached bind mount of `source`. */
export function createBind(source: string, options: { recursive?: boolean; readOnly?: boolean } = {}): DetachedMount {
  const fd = openTree(source, { clone: true, recursive: options.recursive });
  try {
    if (options.readOnly) setMountAttributes(fd, { set: MOUNT_ATTR.RDONLY, recursive: options.recursive });
    return { fd };
  } catch (error) {
    closeSync(fd);
    throw error;
  }
}

/** Shows a detached mount at `target` and closes its descriptor. Closed as well when attaching fails: the mount is gone then. */
export function attachMount(detached: DetachedMount, target: string): void {
  try {
    moveMount(detached.fd, target);
  } finally {
    closeSync(detached.fd);
  }
}

/** Shows the folder or file `source` at `target` too. */
export function bindMount(
  source: string,
  target: string,
  options: { recursive?: boolean; readOnly?: boolean } = {},
): void {
  attachMount(createBind(source, options), target);
}
