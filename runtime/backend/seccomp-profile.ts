/**
 * The default system call filter: what programs use is allowed; what administers the machine (mounts, modules, keys,
 * clocks, other processes' memory, namespaces, BPF, io_uring) is refused with EPERM even where a capability would allow it.
 *
 * Whatever is in neither list, newer system calls above all, answers ENOSYS, so that libraries fall back to the older
 * call. clone3 is among those: its flags lie in memory, where a filter cannot see CLONE_NEWUSER.
 */

import { ioctlRules } from './ioctl-rules.ts';
import { othersThan } from './seccomp-patterns.ts';

export interface SeccompRule {
  readonly names: readonly string[];
  readonly action: 'SCMP_ACT_ALLOW' | 'SCMP_ACT_ERRNO';
  readonly errnoRet?: number;
  readonly args?: readonly { index: number; value: number; valueTwo?: number; op: string }[];
}

export interface SeccompProfile {
  readonly defaultAction: 'SCMP_ACT_ALLOW' | 'SCMP_ACT_ERRNO';
  readonly defaultErrnoRet: number;
  readonly architectures: readonly string[];
  readonly syscalls: readonly SeccompRule[];
}

const words = (text: string): string[] => text.trim().split(/\s+/);

const FILES = words(`
  access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
  fadvise64_64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr
  flistxattr flock fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futimesat
  getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lchown lchown32
  lgetxattr link linkat listxattr llistxattr lremovexattr lseek _llseek lsetxattr lstat lstat64 mkdir mkdirat mknod
  mknodat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
  readlinkat readv removexattr rename renameat renameat2 rmdir sendfile sendfile64 setxattr splice stat stat64 statfs
  statfs64 statx symlink symlinkat sync sync_file_range syncfs tee truncate truncate64 umask unlink unlinkat utime
  utimensat utimensat_time64 utimes vmsplice write writev chroot getxattrat setxattrat listxattrat removexattrat cachestat
`);
const MEMORY = words(`
  brk madvise membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap mmap2 mprotect mremap msync munlock
  munlockall munmap pkey_alloc pkey_free pkey_mprotect process_mrelease remap_file_pages shmat shmctl shmdt shmget
  get_mempolicy set_mempolicy mbind map_shadow_stack mseal
`);
const PROCESSES = words(`
  alarm arch_prctl capget capset execve execveat exit exit_group fork futex futex_time64 futex_waitv futex_wake
  futex_wait futex_requeue get_robust_list get_thread_area getcpu getegid getegid32 geteuid geteuid32 getgid getgid32
  getgroups getgroups32 getitimer getpgid getpgrp getpid getppid getpriority getresgid getresgid32 getresuid getresuid32
  getrlimit getrusage getsid gettid getuid getuid32 ioprio_get kill landlock_add_rule
  landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl restart_syscall rseq
  rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
  rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
  sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid
  setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setregid setregid32
  setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setuid setuid32 sigaltstack signal
  signalfd signalfd4 sigaction sigpending sigprocmask sigreturn sigsuspend sysinfo tgkill times tkill ugetrlimit uname
  vfork wait4 waitid waitpid modify_ldt ptrace
`);
/** Of 32-bit ARM: without set_tls no program of it starts. */
const ARM = words(`arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls`);
const TIME_AND_WAITING = words(`
  adjtimex clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
  clock_nanosleep_time64 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
  epoll_wait_old eventfd eventfd2 getrandom gettimeofday io_cancel io_destroy io_getevents io_pgetevents
  io_pgetevents_time64 io_setup io_submit nanosleep _newselect poll ppoll ppoll_time64 pselect6 pselect6_time64 select
  time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64
  timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
`);
const COMMUNICATION = words(`
  accept accept4 bind connect getpeername getsockname getsockopt ipc listen mq_getsetattr mq_notify mq_open
  mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink msgctl msgget msgrcv msgsnd pipe
  pipe2 recv recvfrom recvmmsg recvmmsg_time64 recvmsg semctl semget semop semtimedop semtimedop_time64 send sendmmsg
  sendmsg sendto setsockopt shutdown socketpair
`);

/** Refused as "not permitted" rather than "not there": programs that ask for them expect that answer in a container. */
const REFUSED = words(`
  acct add_key bpf clock_settime clock_settime64 create_module delete_module fanotify_init fanotify_mark finit_module
  fsconfig fsmount fsopen fspick get_kernel_syms init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl
  kcmp kexec_file_load kexec_load keyctl lookup_dcookie migrate_pages mount mount_setattr move_mount move_pages
  name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_madvise
  process_vm_readv process_vm_writev query_module quotactl quotactl_fd reboot request_key set_mempolicy_home_node setns
  settimeofday setdomainname sethostname stime swapoff swapon _sysctl sysfs syslog umount umount2 unshare uselib
  userfaultfd ustat vhangup vm86 vm86old statmount listmount
`);

/** NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. */
const NAMESPACE_FLAGS = 0x7e020080;
const AF_ALG = 38;
const AF_VSOCK = 40;
/** Linux has 46 address families. */
const FAMILY_BITS = 6;
const ABOVE_FAMILIES = ~(2 ** FAMILY_BITS - 1);
const EPERM = 1;
const EAFNOSUPPORT = 97;
const ENOSYS = 38;

/** Of socketcall. */
const SYS_SOCKET = 1;

const BY_PID = words('prlimit64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler');
const REACHES_OTHERS = [...BY_PID, 'setpriority', 'ioprio_set'];
const notFirst = (index: number) => ({ index, value: 1, op: 'SCMP_CMP_NE' });
const which = (value: number) => ({ index: 0, value, op: 'SCMP_CMP_EQ' });

/**
 * What reaches any process of the same user: not the first one, and not "all of the user's", to whom that belongs. The numbers are
 * PRIO_PROCESS, PRIO_PGRP, IOPRIO_WHO_PROCESS and IOPRIO_WHO_PGRP.
 */
const AGENT_SPARED: readonly SeccompRule[] = [
  {
    names: BY_PID,
    action: 'SCMP_ACT_ALLOW',
    args: [notFirst(0)],
  },
  ...[0, 1].map(
    (value): SeccompRule => ({ names: ['setpriority'], action: 'SCMP_ACT_ALLOW', args: [which(value), notFirst(1)] }),
  ),
  ...[1, 2].map(
    (value): SeccompRule => ({ names: ['ioprio_set'], action: 'SCMP_ACT_ALLOW', args: [which(value), notFirst(1)] }),
  ),
];

/** Rather than "not there". */
const AGENT_REFUSED: readonly SeccompRule[] = BY_PID.map((name) => ({
  names: [name],
  action: 'SCMP_ACT_ERRNO',
  errnoRet: EPERM,
  args: [{ index: 0, value: 0xffffffff, valueTwo: 1, op: 'SCMP_CMP_MASKED_EQ' }],
}));

/** Linux's own personality, 32-bit addresses, and "tell me". */
const PERSONALITIES = [0x0, 0x8, 0x20000, 0x20008, 0xffffffff];

const ARCHITECTURES: Readonly<Record<string, readonly string[]>> = {
  x64: ['SCMP_ARCH_X86_64', 'SCMP_ARCH_X86', 'SCMP_ARCH_X32'],
  arm64: ['SCMP_ARCH_AARCH64', 'SCMP_ARCH_ARM'],
};

const made = new Map<string, SeccompProfile>();

/**
 * The same object each time.
 * @param firstProcess `agent`: it has that of every command, and none may change its limits or how it is scheduled.
 */
export function defaultSeccompProfile(
  firstProcess: 'command' | 'agent' = 'command',
  arch: string = process.arch,
): SeccompProfile {
  const key = `${firstProcess} ${arch}`;
  const profile = made.get(key) ?? makeProfile(firstProcess, arch);
  made.set(key, profile);
  return profile;
}

function makeProfile(firstProcess: 'command' | 'agent', arch: string): SeccompProfile {
  const compare = (index: number, op: string, value: number, valueTwo?: number) => [{ index, op, value, valueTwo }];
  return {
    defaultAction: 'SCMP_ACT_ERRNO',
    defaultErrnoRet: ENOSYS,
    architectures: ARCHITECTURES[arch] ?? [],
    syscalls: [
      {
        names: [...FILES, ...MEMORY, ...PROCESSES, ...ARM, ...TIME_AND_WAITING, ...COMMUNICATION],
        action: 'SCMP_ACT_ALLOW',
      },
      ...ioctlRules(),
      ...(firstProcess === 'agent'
        ? [...AGENT_SPARED, ...AGENT_REFUSED]
        : [{ names: REACHES_OTHERS, action: 'SCMP_ACT_ALLOW' } as const]),
      // AF_ALG and AF_VSOCK: kernel interfaces with a history of holes, and a way to the hypervisor's host. By socketcall a 32-bit program
      // says in memory which family it wants, where no filter sees it: it gets no socket that way. musl does not need it; a 32-bit glibc does.
      { names: ['socketcall'], action: 'SCMP_ACT_ALLOW', args: compare(0, 'SCMP_CMP_NE', SYS_SOCKET) },
      {
        names: ['socketcall'],
        action: 'SCMP_ACT_ERRNO',
        errnoRet: EAFNOSUPPORT,
        args: compare(0, 'SCMP_CMP_EQ', SYS_SOCKET),
      },
      ...othersThan([AF_ALG, AF_VSOCK], FAMILY_BITS).map(
        ({ mask, value }): SeccompRule => ({
          names: ['socket'],
          action: 'SCMP_ACT_ALLOW',
          args: compare(0, 'SCMP_CMP_MASKED_EQ', (ABOVE_FAMILIES | mask) >>> 0, value),
        }),
      ),
      ...[AF_ALG, AF_VSOCK].map(
        (family): SeccompRule => ({
          names: ['socket'],
          action: 'SCMP_ACT_ERRNO',
          errnoRet: EAFNOSUPPORT,
          args: compare(0, 'SCMP_CMP_MASKED_EQ', 0xffffffff, family),
        }),
      ),
      // A thread or process without namespaces of its own.
      { names: ['clone'], action: 'SCMP_ACT_ALLOW', args: compare(0, 'SCMP_CMP_MASKED_EQ', NAMESPACE_FLAGS, 0) },
      ...PERSONALITIES.map(
        (value): SeccompRule => ({
          names: ['personality'],
          action: 'SCMP_ACT_ALLOW',
          args: compare(0, 'SCMP_CMP_EQ', value),
        }),
      ),
      { names: REFUSED, action: 'SCMP_ACT_ERRNO', errnoRet: EPERM },
    ],
  };
}
