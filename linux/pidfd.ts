/** A copy of a descriptor that another process holds (pidfd_getfd, Linux 5.6): how a file outlives who opened it. */
import { closeSync } from 'node:fs';
import { type NumberedCall, syscall } from './libc.ts';

const PIDFD_OPEN: NumberedCall = { name: 'pidfd_open', number: 434, args: ['int', 'uint'] };
const PIDFD_GETFD: NumberedCall = { name: 'pidfd_getfd', number: 438, args: ['int', 'int', 'uint'] };

/** Close-on-exec. @throws ESRCH, EBADF, EPERM, ENOSYS */
export function takeDescriptor(pid: number, fd: number): number {
  const process = syscall(PIDFD_OPEN, [pid, 0], `pid ${pid}`);
  try {
    return syscall(PIDFD_GETFD, [process, fd, 0], `pid ${pid} fd ${fd}`);
  } finally {
    closeSync(process);
  }
}
