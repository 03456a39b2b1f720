/**
 * Which ioctls a sandbox may make. Those of terminals, sockets and plain files yes; of the three families that file systems are administered by
 * (XFS's 'X', ext4's 'f', btrfs's 0x94) only what programs use on their own files: attributes, extents, reflinks. XFS_IOC_SWAPEXT
 * and its like change files behind the layers' and the quota's back, and FSSETXATTR takes a file out of its quota.
 *
 * A filter in OCI's form has no order among its rules, so each command is met by one rule at most: "all but these" is written
 * as bit patterns, as address ranges are written as prefixes.
 */
import { othersThan } from './seccomp-patterns.ts';
import type { SeccompRule } from './seccomp-profile.ts';

const XFS = 0x58;
const EXT4 = 0x66;
const BTRFS = 0x94;

/** As their 64- and 32-bit callers write them. */
const ALLOWED: Readonly<Record<number, readonly number[]>> = {
  // FSGETXATTR.
  [XFS]: [0x801c581f],
  // GETFLAGS, SETFLAGS, FIEMAP.
  [EXT4]: [0x80086601, 0x80046601, 0x40086602, 0x40046602, 0xc020660b],
  // FICLONE, FICLONERANGE, FIDEDUPERANGE.
  [BTRFS]: [0x40049409, 0x4020940d, 0xc0189436],
};

const COMMAND = 1;
const EPERM = 1;

export function ioctlRules(): SeccompRule[] {
  const magics = [XFS, EXT4, BTRFS];
  const allow = (args: SeccompRule['args']): SeccompRule => ({ names: ['ioctl'], action: 'SCMP_ACT_ALLOW', args });
  const refuse = (args: SeccompRule['args']): SeccompRule => ({
    names: ['ioctl'],
    action: 'SCMP_ACT_ERRNO',
    errnoRet: EPERM,
    args,
  });
  const masked = (mask: number, value: number) => [
    { index: COMMAND, value: mask, valueTwo: value, op: 'SCMP_CMP_MASKED_EQ' },
  ];
  return [
    ...othersThan(magics, 8).map(({ mask, value }) => allow(masked(mask << 8, value << 8))),
    ...magics.flatMap((magic) => ALLOWED[magic]!.map((value) => allow([{ index: COMMAND, value, op: 'SCMP_CMP_EQ' }]))),
    ...magics.flatMap((magic) =>
      othersThan(
        ALLOWED[magic]!.map((command) => command & 0xff),
        8,
      ).map(({ mask, value }) => refuse(masked(0xff00 | mask, (magic << 8) | value))),
    ),
  ];
}
