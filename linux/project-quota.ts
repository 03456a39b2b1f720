/**
 * Project quotas of ext4 and XFS: all files below a folder belong to a project, and the kernel counts and limits what a project
 * has. By file descriptor (quotactl_fd, kernel 5.14), so that no device node is needed.
 */
import { closeSync, constants, openSync } from 'node:fs';
import { type Call, call, type NumberedCall, syscall } from './libc.ts';

const IOCTL: Call = { name: 'ioctl', result: 'int', args: ['int', 'ulong', 'void*'] };
const QUOTACTL_FD: NumberedCall = { name: 'quotactl_fd', number: 443, args: ['uint', 'uint', 'uint', 'void*'] };

const FS_IOC_FSGETXATTR = 0x801c581f;
const FS_IOC_FSSETXATTR = 0x401c5820;
const XATTR_BYTES = 28;
/** New files get the project of their folder. */
const PROJECT_INHERIT = 0x200;

const PROJECT = 2;
const Q_GETQUOTA = 0x800007;
const Q_SETQUOTA = 0x800008;
const BLOCK_AND_INODE_LIMITS = 5;
const LIMIT_UNIT_BYTES = 1024;

export interface ProjectUsage {
  readonly usedBytes: number;
  readonly usedInodes: number;
  /** 0: none. */
  readonly limitBytes: number;
  readonly limitInodes: number;
}

function withFolder<T>(folder: string, work: (fd: number) => T): T {
  const fd = openSync(folder, constants.O_RDONLY | constants.O_DIRECTORY);
  try {
    return work(fd);
  } finally {
    closeSync(fd);
  }
}

/** Of a folder, and of all that is made in it from now on. @throws SyscallError */
export function setProject(folder: string, project: number): void {
  withFolder(folder, (fd) => {
    const attributes = Buffer.alloc(XATTR_BYTES);
    call(IOCTL, [fd, FS_IOC_FSGETXATTR, attributes], folder);
    attributes.writeUInt32LE((attributes.readUInt32LE(0) | PROJECT_INHERIT) >>> 0, 0);
    attributes.writeUInt32LE(project, 12);
    call(IOCTL, [fd, FS_IOC_FSSETXATTR, attributes], folder);
  });
}

/** `folder`: any on the file system. 0 takes a limit away. @throws SyscallError */
export function limitProject(folder: string, project: number, limitBytes: number, limitInodes: number): void {
  const quota = Buffer.alloc(72);
  const blocks = BigInt(Math.ceil(limitBytes / LIMIT_UNIT_BYTES));
  quota.writeBigUInt64LE(blocks, 0);
  quota.writeBigUInt64LE(BigInt(limitInodes), 24);
  quota.writeUInt32LE(BLOCK_AND_INODE_LIMITS, 64);
  withFolder(folder, (fd) => syscall(QUOTACTL_FD, [fd, command(Q_SETQUOTA), project, quota], folder));
}

/** @throws SyscallError: ESRCH where no quotas are kept */
export function projectUsage(folder: string, project: number): ProjectUsage {
  const quota = Buffer.alloc(72);
  withFolder(folder, (fd) => syscall(QUOTACTL_FD, [fd, command(Q_GETQUOTA), project, quota], folder));
  const number = (at: number) => Number(quota.readBigUInt64LE(at));
  return {
    limitBytes: number(0) * LIMIT_UNIT_BYTES,
    usedBytes: number(16),
    limitInodes: number(24),
    usedInodes: number(40),
  };
}

function command(number: number): number {
  return ((number << 8) | PROJECT) >>> 0;
}
