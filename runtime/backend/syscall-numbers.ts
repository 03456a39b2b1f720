/**
 * Numbers of the system calls that the filter names, by the calling convention: `name:number` where all five have the same one,
 * else `name:x64,x86,x32,arm64,arm`; `-` where there is none. x32 without its bit (0x40000000). They are the kernel's ABI and never
 * change; a new name in seccomp-profile.ts needs its row here (a test says so).
 */
export type CallConvention = 'x64' | 'x86' | 'x32' | 'arm64' | 'arm';

const COLUMNS: readonly CallConvention[] = ['x64', 'x86', 'x32', 'arm64', 'arm'];

const TABLE = `
  _llseek:-,140,-,-,140 _newselect:-,142,-,-,142 _sysctl:156,149,-,-,149 accept:43,-,43,202,285
  accept4:288,364,288,242,366 access:21,33,21,-,33 acct:163,51,163,89,51 add_key:248,286,248,217,309
  adjtimex:159,124,159,171,124 alarm:37,27,37,-,- arch_prctl:158,384,158,-,- arm_fadvise64_64:-,-,-,-,270 arm_sync_file_range:-,-,-,-,341 bind:49,361,49,200,282
  bpf:321,357,321,280,386 brk:12,45,12,214,45 cachestat:451 breakpoint:-,-,-,-,983041 cacheflush:-,-,-,-,983042 capget:125,184,125,90,184 capset:126,185,126,91,185
  chdir:80,12,80,49,12 chmod:90,15,90,-,15 chown:92,182,92,-,182 chown32:-,212,-,-,212 chroot:161,61,161,51,61
  clock_adjtime:305,343,305,266,372 clock_adjtime64:-,405,-,-,405 clock_getres:229,266,229,114,264 clock_getres_time64:-,406,-,-,406
  clock_gettime:228,265,228,113,263 clock_gettime64:-,403,-,-,403 clock_nanosleep:230,267,230,115,265
  clock_nanosleep_time64:-,407,-,-,407 clock_settime:227,264,227,112,262 clock_settime64:-,404,-,-,404
  clone:56,120,56,220,120 close:3,6,3,57,6 close_range:436 connect:42,362,42,203,283 copy_file_range:326,377,326,285,391
  creat:85,8,85,-,8 create_module:174,127,-,-,- delete_module:176,129,176,106,129 dup:32,41,32,23,41
  dup2:33,63,33,-,63 dup3:292,330,292,24,358 epoll_create:213,254,213,-,250 epoll_create1:291,329,291,20,357
  epoll_ctl:233,255,233,21,251 epoll_ctl_old:214,-,-,-,- epoll_pwait:281,319,281,22,346 epoll_pwait2:441
  epoll_wait:232,256,232,-,252 epoll_wait_old:215,-,-,-,- eventfd:284,323,284,-,351 eventfd2:290,328,290,19,356
  execve:59,11,520,221,11 execveat:322,358,545,281,387 exit:60,1,60,93,1 exit_group:231,252,231,94,248
  faccessat:269,307,269,48,334 faccessat2:439 fadvise64:221,250,221,223,- fadvise64_64:-,272,-,-,-
  fallocate:285,324,285,47,352 fanotify_init:300,338,300,262,367 fanotify_mark:301,339,301,263,368
  fchdir:81,133,81,50,133 fchmod:91,94,91,52,94 fchmodat:268,306,268,53,333 fchmodat2:452 fchown:93,95,93,55,95
  fchown32:-,207,-,-,207 fchownat:260,298,260,54,325 fcntl:72,55,72,25,55 fcntl64:-,221,-,-,221
  fdatasync:75,148,75,83,148 fgetxattr:193,231,193,10,231 finit_module:313,350,313,273,379
  flistxattr:196,234,196,13,234 flock:73,143,73,32,143 fork:57,2,57,-,2 fremovexattr:199,237,199,16,237 fsconfig:431
  fsetxattr:190,228,190,7,228 fsmount:432 fsopen:430 fspick:433 fstat:5,108,5,80,108 fstat64:-,197,-,-,197
  fstatat64:-,300,-,-,327 fstatfs:138,100,138,44,100 fstatfs64:-,269,-,-,267 fsync:74,118,74,82,118
  ftruncate:77,93,77,46,93 ftruncate64:-,194,-,-,194 futex:202,240,202,98,240 futex_requeue:456
  futex_time64:-,422,-,-,422 futex_wait:455 futex_waitv:449 futex_wake:454 futimesat:261,299,261,-,326
  get_kernel_syms:177,130,-,-,- get_mempolicy:239,275,239,236,320 get_robust_list:274,312,531,100,339
  get_thread_area:211,244,-,-,- getcpu:309,318,309,168,345 getcwd:79,183,79,17,183 getdents:78,141,78,-,141
  getdents64:217,220,217,61,217 getegid:108,50,108,177,50 getegid32:-,202,-,-,202 geteuid:107,49,107,175,49
  geteuid32:-,201,-,-,201 getgid:104,47,104,176,47 getgid32:-,200,-,-,200 getgroups:115,80,115,158,80
  getgroups32:-,205,-,-,205 getitimer:36,105,36,102,105 getpeername:52,368,52,205,287 getpgid:121,132,121,155,132
  getpgrp:111,65,111,-,65 getpid:39,20,39,172,20 getppid:110,64,110,173,64 getpriority:140,96,140,141,96
  getrandom:318,355,318,278,384 getresgid:120,171,120,150,171 getresgid32:-,211,-,-,211 getresuid:118,165,118,148,165
  getresuid32:-,209,-,-,209 getrlimit:97,76,97,163,- getrusage:98,77,98,165,77 getsid:124,147,124,156,147
  getsockname:51,367,51,204,286 getsockopt:55,365,542,209,295 gettid:186,224,186,178,224 gettimeofday:96,78,96,169,78
  getuid:102,24,102,174,24 getuid32:-,199,-,-,199 getxattr:191,229,191,8,229 getxattrat:464
  init_module:175,128,175,105,128 inotify_add_watch:254,292,254,27,317 inotify_init:253,291,253,-,316
  inotify_init1:294,332,294,26,360 inotify_rm_watch:255,293,255,28,318 io_cancel:210,249,210,3,247
  io_destroy:207,246,207,1,244 io_getevents:208,247,208,4,245 io_pgetevents:333,385,333,292,399
  io_pgetevents_time64:-,416,-,-,416 io_setup:206,245,543,0,243 io_submit:209,248,544,2,246 io_uring_enter:426
  io_uring_register:427 io_uring_setup:425 ioctl:16,54,514,29,54 ioperm:173,101,173,-,- iopl:172,110,172,-,-
  ioprio_get:252,290,252,31,315 ioprio_set:251,289,251,30,314 ipc:-,117,-,-,- kcmp:312,349,312,272,378
  kexec_file_load:320,-,320,294,401 kexec_load:246,283,528,104,347 keyctl:250,288,250,219,311 kill:62,37,62,129,37
  landlock_add_rule:445 landlock_create_ruleset:444 landlock_restrict_self:446 lchown:94,16,94,-,16
  lchown32:-,198,-,-,198 lgetxattr:192,230,192,9,230 link:86,9,86,-,9 linkat:265,303,265,37,330 listen:50,363,50,201,284
  listmount:458 listxattr:194,232,194,11,232 listxattrat:465 llistxattr:195,233,195,12,233
  lookup_dcookie:212,253,212,18,249 lremovexattr:198,236,198,15,236 lseek:8,19,8,62,19 lsetxattr:189,227,189,6,227
  lstat:6,107,6,-,107 lstat64:-,196,-,-,196 madvise:28,219,28,233,220 map_shadow_stack:453 mbind:237,274,237,235,319
  membarrier:324,375,324,283,389 memfd_create:319,356,319,279,385 memfd_secret:447,447,447,447,-
  migrate_pages:256,294,256,238,400 mincore:27,218,27,232,219 mkdir:83,39,83,-,39 mkdirat:258,296,258,34,323
  mknod:133,14,133,-,14 mknodat:259,297,259,33,324 mlock:149,150,149,228,150 mlock2:325,376,325,284,390
  mlockall:151,152,151,230,152 mmap:9,90,9,222,- mmap2:-,192,-,-,192 modify_ldt:154,123,154,-,- mount:165,21,165,40,21
  mount_setattr:442 move_mount:429 move_pages:279,317,533,239,344 mprotect:10,125,10,226,125
  mq_getsetattr:245,282,245,185,279 mq_notify:244,281,527,184,278 mq_open:240,277,240,180,274
  mq_timedreceive:243,280,243,183,277 mq_timedreceive_time64:-,419,-,-,419 mq_timedsend:242,279,242,182,276
  mq_timedsend_time64:-,418,-,-,418 mq_unlink:241,278,241,181,275 mremap:25,163,25,216,163 mseal:462
  msgctl:71,402,71,187,304 msgget:68,399,68,186,303 msgrcv:70,401,70,188,302 msgsnd:69,400,69,189,301 msync:26,144,26,227,144
  munlock:150,151,150,229,151 munlockall:152,153,152,231,153 munmap:11,91,11,215,91
  name_to_handle_at:303,341,303,264,370 nanosleep:35,162,35,101,162 newfstatat:262,-,262,79,-
  nfsservctl:180,169,-,42,169 open:2,5,2,-,5 open_by_handle_at:304,342,304,265,371 open_tree:428
  openat:257,295,257,56,322 openat2:437 pause:34,29,34,-,29 perf_event_open:298,336,298,241,364
  personality:135,136,135,92,136 pidfd_getfd:438 pidfd_open:434 pidfd_send_signal:424 pipe:22,42,22,-,42
  pipe2:293,331,293,59,359 pivot_root:155,217,155,41,218 pkey_alloc:330,381,330,289,395 pkey_free:331,382,331,290,396
  pkey_mprotect:329,380,329,288,394 poll:7,168,7,-,168 ppoll:271,309,271,73,336 ppoll_time64:-,414,-,-,414
  prctl:157,172,157,167,172 pread64:17,180,17,67,180 preadv:295,333,534,69,361 preadv2:327,378,546,286,392
  prlimit64:302,340,302,261,369 process_madvise:440 process_mrelease:448 process_vm_readv:310,347,539,270,376
  process_vm_writev:311,348,540,271,377 pselect6:270,308,270,72,335 pselect6_time64:-,413,-,-,413
  ptrace:101,26,521,117,26 pwrite64:18,181,18,68,181 pwritev:296,334,535,70,362 pwritev2:328,379,547,287,393
  query_module:178,167,-,-,- quotactl:179,131,179,60,131 quotactl_fd:443 read:0,3,0,63,3 readahead:187,225,187,213,225
  readlink:89,85,89,-,85 readlinkat:267,305,267,78,332 readv:19,145,515,65,145 reboot:169,88,169,142,88
  recv:-,-,-,-,291 recvfrom:45,371,517,207,292 recvmmsg:299,337,537,243,365 recvmmsg_time64:-,417,-,-,417
  recvmsg:47,372,519,212,297 remap_file_pages:216,257,216,234,253 removexattr:197,235,197,14,235 removexattrat:466
  rename:82,38,82,-,38 renameat:264,302,264,38,329 renameat2:316,353,316,276,382 request_key:249,287,249,218,310
  restart_syscall:219,0,219,128,0 rmdir:84,40,84,-,40 rseq:334,386,334,293,398 rt_sigaction:13,174,512,134,174
  rt_sigpending:127,176,522,136,176 rt_sigprocmask:14,175,14,135,175 rt_sigqueueinfo:129,178,524,138,178
  rt_sigreturn:15,173,513,139,173 rt_sigsuspend:130,179,130,133,179 rt_sigtimedwait:128,177,523,137,177
  rt_sigtimedwait_time64:-,421,-,-,421 rt_tgsigqueueinfo:297,335,536,240,363
  sched_get_priority_max:146,159,146,125,159 sched_get_priority_min:147,160,147,126,160
  sched_getaffinity:204,242,204,123,242 sched_getattr:315,352,315,275,381 sched_getparam:143,155,143,121,155
  sched_getscheduler:145,157,145,120,157 sched_rr_get_interval:148,161,148,127,161
  sched_rr_get_interval_time64:-,423,-,-,423 sched_setaffinity:203,241,203,122,241 sched_setattr:314,351,314,274,380
  sched_setparam:142,154,142,118,154 sched_setscheduler:144,156,144,119,156 sched_yield:24,158,24,124,158
  seccomp:317,354,317,277,383 select:23,82,23,-,- semctl:66,394,66,191,300 semget:64,393,64,190,299 semop:65,-,65,193,298
  semtimedop:220,-,220,192,312 semtimedop_time64:-,420,-,-,420 send:-,-,-,-,289 sendfile:40,187,40,71,187
  sendfile64:-,239,-,-,239 sendmmsg:307,345,538,269,374 sendmsg:46,370,518,211,296 sendto:44,369,44,206,290
  set_mempolicy:238,276,238,237,321 set_mempolicy_home_node:450 set_robust_list:273,311,530,99,338
  set_thread_area:205,243,-,-,- set_tls:-,-,-,-,983045 set_tid_address:218,258,218,96,256 setdomainname:171,121,171,162,121
  setfsgid:123,139,123,152,139 setfsgid32:-,216,-,-,216 setfsuid:122,138,122,151,138 setfsuid32:-,215,-,-,215
  setgid:106,46,106,144,46 setgid32:-,214,-,-,214 setgroups:116,81,116,159,81 setgroups32:-,206,-,-,206
  sethostname:170,74,170,161,74 setitimer:38,104,38,103,104 setns:308,346,308,268,375 setpgid:109,57,109,154,57
  setpriority:141,97,141,140,97 setregid:114,71,114,143,71 setregid32:-,204,-,-,204 setresgid:119,170,119,149,170
  setresgid32:-,210,-,-,210 setresuid:117,164,117,147,164 setresuid32:-,208,-,-,208 setreuid:113,70,113,145,70
  setreuid32:-,203,-,-,203 setrlimit:160,75,160,164,75 setsid:112,66,112,157,66 setsockopt:54,366,541,208,294
  settimeofday:164,79,164,170,79 setuid:105,23,105,146,23 setuid32:-,213,-,-,213 setxattr:188,226,188,5,226
  setxattrat:463 shmat:30,397,30,196,305 shmctl:31,396,31,195,308 shmdt:67,398,67,197,306 shmget:29,395,29,194,307
  shutdown:48,373,48,210,293 sigaction:-,67,-,-,67 sigaltstack:131,186,525,132,186 signal:-,48,-,-,-
  signalfd:282,321,282,-,349 signalfd4:289,327,289,74,355 sigpending:-,73,-,-,73 sigprocmask:-,126,-,-,126
  sigreturn:-,119,-,-,119 sigsuspend:-,72,-,-,72 socket:41,359,41,198,281 socketcall:-,102,-,-,-
  socketpair:53,360,53,199,288 splice:275,313,275,76,340 stat:4,106,4,-,106 stat64:-,195,-,-,195 statfs:137,99,137,43,99
  statfs64:-,268,-,-,266 statmount:457 statx:332,383,332,291,397 stime:-,25,-,-,- swapoff:168,115,168,225,115
  swapon:167,87,167,224,87 symlink:88,83,88,-,83 symlinkat:266,304,266,36,331 sync:162,36,162,81,36
  sync_file_range:277,314,277,84,- syncfs:306,344,306,267,373 sysfs:139,135,139,-,135 sysinfo:99,116,99,179,116
  syslog:103,103,103,116,103 tee:276,315,276,77,342 tgkill:234,270,234,131,268 time:201,13,201,-,-
  timer_create:222,259,526,107,257 timer_delete:226,263,226,111,261 timer_getoverrun:225,262,225,109,260
  timer_gettime:224,261,224,108,259 timer_gettime64:-,408,-,-,408 timer_settime:223,260,223,110,258
  timer_settime64:-,409,-,-,409 timerfd_create:283,322,283,85,350 timerfd_gettime:287,326,287,87,354
  timerfd_gettime64:-,410,-,-,410 timerfd_settime:286,325,286,86,353 timerfd_settime64:-,411,-,-,411
  times:100,43,100,153,43 tkill:200,238,200,130,238 truncate:76,92,76,45,92 truncate64:-,193,-,-,193
  ugetrlimit:-,191,-,-,191 umask:95,60,95,166,60 umount:-,22,-,-,- umount2:166,52,166,39,52 uname:63,122,63,160,122
  unlink:87,10,87,-,10 unlinkat:263,301,263,35,328 unshare:272,310,272,97,337 uselib:134,86,-,-,86
  userfaultfd:323,374,323,282,388 ustat:136,62,136,-,62 utime:132,30,132,-,- utimensat:280,320,280,88,348
  utimensat_time64:-,412,-,-,412 utimes:235,271,235,-,269 vfork:58,190,58,-,190 vhangup:153,111,153,58,111
  vm86:-,166,-,-,- vm86old:-,113,-,-,- vmsplice:278,316,532,75,343 wait4:61,114,61,260,114 waitid:247,284,529,95,280
  waitpid:-,7,-,-,- write:1,4,1,64,4 writev:20,146,516,66,146
`;

export type CallNumbers = ReadonlyMap<string, number>;

const parsed = new Map<CallConvention, CallNumbers>();

/** Name -> number of those calls that there are. */
export function callNumbers(convention: CallConvention): CallNumbers {
  let numbers = parsed.get(convention);
  if (numbers === undefined) {
    numbers = parse(convention);
    parsed.set(convention, numbers);
  }
  return numbers;
}

/** Whether any convention has it. */
export function isKnownCall(name: string): boolean {
  return COLUMNS.some((convention) => callNumbers(convention).has(name));
}

function parse(convention: CallConvention): CallNumbers {
  const column = COLUMNS.indexOf(convention);
  const numbers = new Map<string, number>();
  for (const row of TABLE.trim().split(/\s+/)) {
    const [name, list] = row.split(':') as [string, string];
    const cells = list.split(',');
    const cell = cells.length === 1 ? cells[0]! : cells[column]!;
    if (cell !== '-') numbers.set(name, Number(cell) + (convention === 'x32' ? X32_BIT : 0));
  }
  return numbers;
}

const X32_BIT = 0x40000000;
