/**
 * What a ublk driver may have, bit by bit as the kernel's include/uapi/linux/ublk_cmd.h has it, since when, and what becomes of it here. Only
 * what is marked `needed` is: the rest is used where it is there. The driver is asked (GET_FEATURES), its version is not looked at.
 */
export const FEATURE = {
  USER_RECOVERY: 1 << 3,
  USER_RECOVERY_REISSUE: 1 << 4,
  UNPRIVILEGED: 1 << 5,
  CMD_IOCTL_ENCODE: 1 << 6,
  USER_COPY: 1 << 7,
  UPDATE_SIZE: 1 << 10,
} as const;

export interface UblkFeature {
  readonly name: string;
  /** Linux version. */
  readonly since: string;
  readonly use: 'needed' | 'used' | 'unused';
  /** What it does here, or why nothing uses it. */
  readonly why: string;
}

/** By bit. */
export const UBLK_FEATURES: readonly UblkFeature[] = [
  {
    name: 'zero copy',
    since: '6.15',
    use: 'unused',
    why: 'a command more for each request, and root alone; automatic buffers do it better',
  },
  { name: 'completion in task', since: '6.0', use: 'unused', why: 'every driver since 6.5 works that way' },
  { name: 'get data', since: '6.0', use: 'unused', why: 'a turn more for each write, to save memory we map anyway' },
  { name: 'user recovery', since: '6.1', use: 'needed', why: 'a device outlives its server' },
  { name: 'reissue', since: '6.1', use: 'needed', why: 'what was at work when the server died is done by the next' },
  { name: 'unprivileged', since: '6.3', use: 'used', why: 'devices of users that are not root' },
  { name: 'ioctl encoding', since: '6.4', use: 'needed', why: 'the only numbers for commands that newer kernels take' },
  {
    name: 'user copy',
    since: '6.5',
    use: 'used',
    why: 'raw files: one copy a request, straight from or to the file’s pages',
  },
  { name: 'zoned', since: '6.6', use: 'unused', why: 'disks have no zones' },
  {
    name: 'recovery with failed I/O',
    since: '6.13',
    use: 'unused',
    why: 'requests wait for the next server instead of failing',
  },
  {
    name: 'update size',
    since: '6.16',
    use: 'used',
    why: 'an attached disk grows; without it when it is attached again',
  },
  {
    name: 'automatic buffers',
    since: '6.16',
    use: 'unused',
    why: 'saves a copy for disks that are one raw file alone',
  },
  { name: 'quiesce', since: '6.16', use: 'unused', why: 'a server that leaves closes its queues, on every kernel' },
  { name: 'a daemon for each I/O', since: '6.16', use: 'unused', why: 'a queue has one thread here' },
  { name: 'buffers off the daemon', since: '6.17', use: 'unused', why: 'goes with zero copy' },
  { name: 'batched I/O', since: '7.0', use: 'unused', why: 'a batch is one system call already' },
  { name: 'integrity', since: '7.0', use: 'unused', why: 'layers have checksums of their own' },
  { name: 'safe stop', since: '7.0', use: 'unused', why: 'who uses a device is looked at before, on every kernel' },
  { name: 'no partition scan', since: '7.0', use: 'unused', why: 'threads without CAP_SYS_ADMIN do the same' },
  { name: 'shared memory', since: '7.1', use: 'unused', why: 'goes with programs that know of it' },
];

export function featureNames(bits: bigint): string[] {
  return UBLK_FEATURES.filter((_, bit) => ((bits >> BigInt(bit)) & 1n) === 1n).map(({ name }) => name);
}
