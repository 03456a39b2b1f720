/**
 * Owners of files as another user namespace has them: mounts whose ids are shifted (mount_setattr, Linux 5.12), and work done with the
 * file system ids of that namespace's root.
 */
import { closeSync } from 'node:fs';
import { setEffective, takeEffective } from './capability.ts';
import { SyscallError } from './errors.ts';
import { type Call, call, type NumberedCall, syscall } from './libc.ts';
import { MOUNT_ATTR, openTree, setMountAttributes } from './mount.ts';

const SETFSUID: NumberedCall = { name: 'setfsuid', number: { x64: 122, arm64: 151 }, args: ['uint'] };
const SETFSGID: NumberedCall = { name: 'setfsgid', number: { x64: 123, arm64: 152 }, args: ['uint'] };
const PRCTL: Call = { name: 'prctl', result: 'int', args: ['int', 'ulong', 'ulong', 'ulong', 'ulong'] };
const PR_GET_DUMPABLE = 3;
const PR_SET_DUMPABLE = 4;
const NOBODY_ASKS = 0xffffffff;

/**
 * A detached copy of the mount at `path`, in which files have the owners that `userNamespace` (a descriptor) maps theirs to.
 * @throws a SyscallError: EINVAL where the file system cannot do it
 */
export function mappedClone(path: string, userNamespace: number): number {
  const tree = openTree(path, { clone: true });
  try {
    setMountAttributes(tree, { set: MOUNT_ATTR.IDMAP, userNamespace });
    return tree;
  } catch (error) {
    closeSync(tree);
    throw error;
  }
}

/**
 * What `work`, which must not wait, makes belongs to `id`, user and group; this thread's capabilities stay in effect. An overlay that
 * is made in it works as that user on its upper.
 */
export function withFileSystemIds<T>(id: number, work: () => T): T {
  const capabilities = takeEffective();
  const dumpable = call(PRCTL, [PR_GET_DUMPABLE, 0, 0, 0, 0]);
  const [uid, gid] = [syscall(SETFSUID, [id]), syscall(SETFSGID, [id])];
  try {
    // The call has no way to say that it refused.
    if (currentId(SETFSUID) !== id || currentId(SETFSGID) !== id)
      throw new SyscallError('setfsuid', String(id), 1, 'EPERM');
    setEffective(capabilities);
    return work();
  } finally {
    syscall(SETFSUID, [uid]);
    syscall(SETFSGID, [gid]);
    setEffective(capabilities);
    // The kernel takes whoever changes its ids for one that has secrets now.
    call(PRCTL, [PR_SET_DUMPABLE, dumpable, 0, 0, 0]);
  }
}

function currentId(spec: NumberedCall): number {
  return syscall(spec, [NOBODY_ASKS]) >>> 0;
}
