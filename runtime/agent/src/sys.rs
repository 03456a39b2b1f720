//! The C library and the kernel, as far as this program needs them: declarations, constants, and thin wrappers that turn -1
//! into an errno. Everything here works between clone and exec: nothing takes a lock that another thread could hold, for there
//! is no other thread.

use std::os::raw::{c_char, c_int, c_long, c_short, c_uint, c_ulong, c_void};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct PollFd {
    pub fd: c_int,
    pub events: c_short,
    pub revents: c_short,
}

/// struct epoll_event, which x86 packs.
#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(not(target_arch = "x86_64"), repr(C))]
#[derive(Clone, Copy)]
pub struct EpollEvent {
    pub events: u32,
    pub token: u64,
}

#[repr(C)]
pub struct IoVec {
    pub base: *mut c_void,
    pub len: usize,
}

#[repr(C)]
pub struct MsgHdr {
    pub name: *mut c_void,
    pub namelen: c_uint,
    pub iov: *mut IoVec,
    pub iovlen: usize,
    pub control: *mut c_void,
    pub controllen: usize,
    pub flags: c_int,
}

#[repr(C)]
pub struct RLimit {
    pub soft: u64,
    pub hard: u64,
}

#[repr(C)]
pub struct SockFprog {
    pub len: u16,
    pub filter: *const u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct WinSize {
    pub rows: u16,
    pub columns: u16,
    pub x: u16,
    pub y: u16,
}

/// glibc's and musl's: four flag words, the line, control characters, two speeds; with room to spare.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Termios {
    pub iflag: c_uint,
    pub oflag: c_uint,
    pub cflag: c_uint,
    pub lflag: c_uint,
    pub rest: [u8; 64],
}

#[repr(C)]
pub struct SockAddrUn {
    pub family: u16,
    pub path: [u8; 108],
}

#[repr(C)]
pub struct UCred {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// Room for every architecture's struct stat; only what is asked through statx is read.
#[repr(C)]
pub struct Statx {
    pub mask: u32,
    pub blksize: u32,
    pub attributes: u64,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub pad: u16,
    pub rest: [u64; 32],
}

pub type SigSet = [u64; 16];

extern "C" {
    pub fn syscall(n: c_long, ...) -> c_long;
    pub fn _exit(code: c_int) -> !;
    fn __errno_location() -> *mut c_int;
    fn read(fd: c_int, b: *mut c_void, n: usize) -> isize;
    fn write(fd: c_int, b: *const c_void, n: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    fn open(p: *const c_char, flags: c_int, ...) -> c_int;
    fn dup2(a: c_int, b: c_int) -> c_int;
    fn fcntl(fd: c_int, c: c_int, ...) -> c_int;
    fn ioctl(fd: c_int, r: c_ulong, ...) -> c_int;
    fn poll(f: *mut PollFd, n: c_ulong, ms: c_int) -> c_int;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn signalfd(fd: c_int, m: *const SigSet, fl: c_int) -> c_int;
    fn sigprocmask(how: c_int, s: *const SigSet, o: *mut SigSet) -> c_int;
    fn signal(s: c_int, h: usize) -> usize;
    fn waitpid(p: c_int, st: *mut c_int, o: c_int) -> c_int;
    fn kill(p: c_int, s: c_int) -> c_int;
    fn prctl(o: c_int, ...) -> c_int;
    fn mkdir(p: *const c_char, mode: c_uint) -> c_int;
    fn rmdir(p: *const c_char) -> c_int;
    fn unlink(p: *const c_char) -> c_int;
    fn symlink(target: *const c_char, p: *const c_char) -> c_int;
    fn mknod(p: *const c_char, mode: c_uint, dev: u64) -> c_int;
    fn fchown(fd: c_int, u: u32, g: u32) -> c_int;
    fn fchmod(fd: c_int, mode: c_uint) -> c_int;
    fn mount(src: *const c_char, dst: *const c_char, ty: *const c_char, fl: c_ulong, data: *const c_void) -> c_int;
    fn umount2(p: *const c_char, fl: c_int) -> c_int;
    fn chdir(p: *const c_char) -> c_int;
    fn fchdir(fd: c_int) -> c_int;
    fn umask(m: c_uint) -> c_uint;
    fn setsid() -> c_int;
    #[link_name = "unshare"]
    fn libc_unshare(flags: c_int) -> c_int;
    fn sethostname(name: *const c_char, len: usize) -> c_int;
    fn execve(p: *const c_char, a: *const *const c_char, e: *const *const c_char) -> c_int;
    fn execvp(p: *const c_char, a: *const *const c_char) -> c_int;
    fn socketpair(d: c_int, t: c_int, p: c_int, sv: *mut c_int) -> c_int;
    fn socket(d: c_int, t: c_int, p: c_int) -> c_int;
    fn bind(fd: c_int, a: *const c_void, len: c_uint) -> c_int;
    fn listen(fd: c_int, n: c_int) -> c_int;
    fn accept4(fd: c_int, a: *mut c_void, l: *mut c_uint, fl: c_int) -> c_int;
    fn connect(fd: c_int, a: *const c_void, len: c_uint) -> c_int;
    fn getsockopt(fd: c_int, l: c_int, o: c_int, v: *mut c_void, n: *mut c_uint) -> c_int;
    fn setsockopt(fd: c_int, l: c_int, o: c_int, v: *const c_void, n: c_uint) -> c_int;
    fn recvmsg(fd: c_int, m: *mut MsgHdr, f: c_int) -> isize;
    fn sendmsg(fd: c_int, m: *const MsgHdr, f: c_int) -> isize;
    fn getcwd(b: *mut c_char, n: usize) -> *mut c_char;
    fn isatty(fd: c_int) -> c_int;
    fn tcgetattr(fd: c_int, t: *mut Termios) -> c_int;
    fn tcsetattr(fd: c_int, how: c_int, t: *const Termios) -> c_int;
    fn cfmakeraw(t: *mut Termios);
    fn getpid() -> c_int;
    fn fstatfs(fd: c_int, b: *mut i64) -> c_int;
    fn pipe2(ends: *mut c_int, flags: c_int) -> c_int;
    fn flock(fd: c_int, operation: c_int) -> c_int;
    fn clock_settime(clock: c_int, t: *const [i64; 2]) -> c_int;
    fn reboot(how: c_int) -> c_int;
    fn sync();
    fn chroot(p: *const c_char) -> c_int;
    fn clock_gettime(clock: c_int, t: *mut [i64; 2]) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut EpollEvent) -> c_int;
    fn epoll_wait(epoll: c_int, events: *mut EpollEvent, n: c_int, ms: c_int) -> c_int;
    #[cfg(target_env = "gnu")]
    fn mallopt(parameter: c_int, value: c_int) -> c_int;
    #[cfg(target_env = "gnu")]
    fn malloc_trim(pad: usize) -> c_int;
}

#[cfg(target_arch = "x86_64")]
mod numbers {
    pub const CLONE: i64 = 56;
    pub const SETRESUID: i64 = 117;
    pub const SETRESGID: i64 = 119;
    pub const SETGROUPS: i64 = 116;
    pub const PIVOT_ROOT: i64 = 155;
    pub const PRLIMIT64: i64 = 302;
    pub const CAPSET: i64 = 126;
    pub const KEYCTL: i64 = 250;
    pub const MEMFD_CREATE: i64 = 319;
    pub const EXECVEAT: i64 = 322;
    pub const STATX: i64 = 332;
    pub const BPF: i64 = 321;
    pub const FINIT_MODULE: i64 = 313;
}
#[cfg(target_arch = "aarch64")]
mod numbers {
    pub const CLONE: i64 = 220;
    pub const SETRESUID: i64 = 147;
    pub const SETRESGID: i64 = 149;
    pub const SETGROUPS: i64 = 159;
    pub const PIVOT_ROOT: i64 = 41;
    pub const PRLIMIT64: i64 = 261;
    pub const CAPSET: i64 = 91;
    pub const KEYCTL: i64 = 219;
    pub const MEMFD_CREATE: i64 = 279;
    pub const EXECVEAT: i64 = 281;
    pub const STATX: i64 = 291;
    pub const BPF: i64 = 280;
    pub const FINIT_MODULE: i64 = 273;
}
pub use numbers::*;
pub const CLOSE_RANGE: i64 = 436;
pub const OPENAT2: i64 = 437;

pub const ENOENT: i32 = 2;
pub const EINTR: i32 = 4;
pub const EAGAIN: i32 = 11;
pub const EPIPE: i32 = 32;
pub const EACCES: i32 = 13;
pub const EBUSY: i32 = 16;
pub const EEXIST: i32 = 17;
pub const ENODEV: i32 = 19;
pub const ENOTDIR: i32 = 20;
pub const EMFILE: i32 = 24;
pub const EINVAL: i32 = 22;
pub const EOPNOTSUPP: i32 = 95;

pub const O_RDONLY: i32 = 0;
pub const O_WRONLY: i32 = 1;
pub const O_RDWR: i32 = 2;
pub const O_CREAT: i32 = 0o100;
pub const O_NOCTTY: i32 = 0o400;
pub const O_NONBLOCK: i32 = 0o4000;
pub const O_CLOEXEC: i32 = 0o2000000;
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: i32 = 0o200000;
#[cfg(target_arch = "x86_64")]
pub const O_NOFOLLOW: i32 = 0o400000;
#[cfg(target_arch = "aarch64")]
pub const O_DIRECTORY: i32 = 0o40000;
#[cfg(target_arch = "aarch64")]
pub const O_NOFOLLOW: i32 = 0o100000;

pub const MS_RDONLY: u64 = 1;
pub const MS_REMOUNT: u64 = 32;
pub const MS_BIND: u64 = 4096;
pub const MS_REC: u64 = 16384;
pub const MS_PRIVATE: u64 = 1 << 18;
pub const MNT_DETACH: i32 = 2;

pub const SIGINT: i32 = 2;
pub const SIGHUP: i32 = 1;
pub const SIGQUIT: i32 = 3;
pub const SIGKILL: i32 = 9;
pub const SIGUSR1: i32 = 10;
pub const SIGUSR2: i32 = 12;
pub const SIGPIPE: i32 = 13;
pub const SIGALRM: i32 = 14;
pub const SIGTERM: i32 = 15;
pub const SIGCHLD: i32 = 17;
pub const SIGCONT: i32 = 18;
pub const SIGWINCH: i32 = 28;

pub const POLLIN: i16 = 1;
pub const POLLOUT: i16 = 4;
pub const POLLERR: i16 = 8;
pub const POLLHUP: i16 = 16;

pub const PR_SET_PDEATHSIG: i32 = 1;
pub const PR_SET_CHILD_SUBREAPER: i32 = 36;
pub const PR_SET_DUMPABLE: i32 = 4;
pub const PR_SET_KEEPCAPS: i32 = 8;
pub const PR_SET_SECCOMP: i32 = 22;
pub const PR_CAPBSET_DROP: i32 = 24;
pub const PR_SET_NO_NEW_PRIVS: i32 = 38;
pub const PR_CAP_AMBIENT: i32 = 47;

pub const TIOCSCTTY: u64 = 0x540e;
pub const TIOCGWINSZ: u64 = 0x5413;
pub const TIOCSWINSZ: u64 = 0x5414;
pub const TIOCGPTN: u64 = 0x80045430;
pub const TIOCSPTLCK: u64 = 0x40045431;
pub const TIOCGPTPEER: u64 = 0x5441;
pub const FIONREAD: u64 = 0x541b;
pub const SIOCGIFFLAGS: u64 = 0x8913;
pub const SIOCSIFFLAGS: u64 = 0x8914;

pub const S_IFMT: u32 = 0o170000;
pub const S_IFDIR: u32 = 0o040000;
pub const S_IFCHR: u32 = 0o020000;

pub const PIPEFS: i64 = 0x50495045;
pub const SOCKFS: i64 = 0x534f434b;

pub type Errno = i32;
pub type Result<T> = std::result::Result<T, Errno>;

pub fn errno() -> Errno {
    unsafe { *__errno_location() }
}

fn check(value: c_int) -> Result<i32> {
    if value < 0 {
        Err(errno())
    } else {
        Ok(value)
    }
}

/// A NUL-terminated copy. A NUL inside would cut it short: refused with EINVAL where it is made.
pub type CStr = Vec<u8>;
pub fn c(bytes: &[u8]) -> CStr {
    let mut out = Vec::with_capacity(bytes.len() + 1);
    out.extend_from_slice(bytes);
    out.push(0);
    out
}
fn p(bytes: &CStr) -> *const c_char {
    bytes.as_ptr() as *const c_char
}

/// An owned descriptor.
pub struct Fd(pub i32);
impl Drop for Fd {
    fn drop(&mut self) {
        if self.0 >= 0 {
            unsafe { close(self.0) };
        }
    }
}
impl Fd {
    pub fn take(mut self) -> i32 {
        let fd = self.0;
        self.0 = -1;
        fd
    }
}

pub fn close_fd(fd: i32) {
    unsafe { close(fd) };
}

pub fn read_fd(fd: i32, buffer: &mut [u8]) -> Result<usize> {
    loop {
        let n = unsafe { read(fd, buffer.as_mut_ptr() as *mut c_void, buffer.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        if errno() != EINTR {
            return Err(errno());
        }
    }
}

pub fn write_fd(fd: i32, bytes: &[u8]) -> Result<usize> {
    loop {
        let n = unsafe { write(fd, bytes.as_ptr() as *const c_void, bytes.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        if errno() != EINTR {
            return Err(errno());
        }
    }
}

/// All of it, also to a descriptor that is non-blocking: then it waits.
pub fn write_all(fd: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match write_fd(fd, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(EAGAIN) => {
                let mut one = [PollFd { fd, events: POLLOUT, revents: 0 }];
                poll_fds(&mut one, -1);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

pub fn open_at(path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
    let path = c(path);
    check(unsafe { open(p(&path), flags | O_CLOEXEC, mode) }).map(Fd)
}

pub fn write_file(path: &[u8], bytes: &[u8]) -> Result<()> {
    let fd = open_at(path, O_WRONLY, 0)?;
    write_fd(fd.0, bytes).map(|_| ())
}

pub fn read_file(path: &[u8], limit: usize) -> Result<Vec<u8>> {
    let fd = open_at(path, O_RDONLY, 0)?;
    let mut out = Vec::new();
    let mut part = [0u8; 4096];
    while out.len() < limit {
        let n = read_fd(fd.0, &mut part)?;
        if n == 0 {
            break;
        }
        out.extend_from_slice(&part[..n]);
    }
    Ok(out)
}

/// Its reading end, then its writing end; both close-on-exec.
pub fn make_pipe() -> Result<(Fd, Fd)> {
    let mut ends = [0i32; 2];
    check(unsafe { pipe2(ends.as_mut_ptr(), O_CLOEXEC) })?;
    Ok((Fd(ends[0]), Fd(ends[1])))
}

/// Bytes that wait to be read.
pub fn readable_bytes(fd: i32) -> u64 {
    let mut n = 0i32;
    match ioctl_ptr(fd, FIONREAD, &mut n) {
        Ok(_) if n > 0 => n as u64,
        _ => 0,
    }
}

/// At once, or EAGAIN.
pub fn lock_file(fd: i32) -> Result<()> {
    check(unsafe { flock(fd, 2 | 4) }).map(|_| ())
}

/// Since the machine started, suspended or not.
pub fn now_ms() -> u64 {
    let mut t = [0i64; 2];
    const CLOCK_BOOTTIME: c_int = 7;
    unsafe { clock_gettime(CLOCK_BOOTTIME, &mut t) };
    t[0] as u64 * 1000 + t[1] as u64 / 1_000_000
}

pub fn dup_to(from: i32, to: i32) -> Result<()> {
    check(unsafe { dup2(from, to) }).map(|_| ())
}

/// A copy with a number from 3 on, close-on-exec.
pub fn dup_high(fd: i32) -> Result<Fd> {
    dup_from(fd, 3)
}
pub fn dup_from(fd: i32, lowest: i32) -> Result<Fd> {
    const F_DUPFD_CLOEXEC: i32 = 1030;
    check(unsafe { fcntl(fd, F_DUPFD_CLOEXEC, lowest) }).map(Fd)
}

pub fn seals_of(fd: i32) -> Result<i32> {
    const F_GET_SEALS: i32 = 1034;
    check(unsafe { fcntl(fd, F_GET_SEALS) })
}
pub fn add_seals(fd: i32, seals: i32) -> Result<()> {
    const F_ADD_SEALS: i32 = 1033;
    check(unsafe { fcntl(fd, F_ADD_SEALS, seals) }).map(|_| ())
}

pub fn set_nonblocking(fd: i32) {
    unsafe { fcntl(fd, 4, fcntl(fd, 3) | O_NONBLOCK) };
}
pub fn keep_on_exec(fd: i32) {
    unsafe { fcntl(fd, 2, 0) };
}
pub fn is_open(fd: i32) -> bool {
    unsafe { fcntl(fd, 1) >= 0 }
}

pub fn poll_fds(fds: &mut [PollFd], ms: i32) -> i32 {
    unsafe { poll(fds.as_mut_ptr(), fds.len() as c_ulong, ms) }
}

pub fn new_epoll() -> Result<Fd> {
    check(unsafe { epoll_create1(O_CLOEXEC) }).map(Fd)
}
/// `events` are poll's bits. What was watched for `was` (0: not at all) is from now on for `now`.
pub fn change_watch(epoll: i32, fd: i32, token: u64, was: i16, now: i16) -> Result<()> {
    const ADD: c_int = 1;
    const REMOVE: c_int = 2;
    const MODIFY: c_int = 3;
    let operation = match (was, now) {
        (_, 0) => REMOVE,
        (0, _) => ADD,
        _ => MODIFY,
    };
    let mut event = EpollEvent { events: now as u32, token };
    check(unsafe { epoll_ctl(epoll, operation, fd, &mut event) }).map(|_| ())
}
/// How many of `events` are told; waits until there is one.
pub fn wait_for_events(epoll: i32, events: &mut [EpollEvent]) -> usize {
    let n = unsafe { epoll_wait(epoll, events.as_mut_ptr(), events.len() as c_int, -1) };
    n.max(0) as usize
}

/// Memory of more than a few pages is the kernel's again as soon as it is freed, for a process that mostly waits. musl's does so by itself.
pub fn return_large_memory() {
    #[cfg(target_env = "gnu")]
    {
        const M_TOP_PAD: c_int = -2;
        const M_MMAP_THRESHOLD: c_int = -3;
        unsafe {
            mallopt(M_MMAP_THRESHOLD, 16 << 10);
            // What lies in stock at the end of the heap would be given out first, whatever the size.
            mallopt(M_TOP_PAD, 0);
            malloc_trim(0);
        }
    }
}

pub fn sig_set(signals: &[i32]) -> SigSet {
    let mut set: SigSet = [0; 16];
    for signal in signals {
        set[0] |= 1 << (signal - 1);
    }
    set
}
pub fn every_signal() -> SigSet {
    let mut set: SigSet = [0; 16];
    set[0] = u64::MAX;
    set
}
pub fn block_signals(set: &SigSet) {
    unsafe { sigprocmask(0, set, std::ptr::null_mut()) };
}
pub fn unblock_all_signals() {
    let none: SigSet = [0; 16];
    unsafe { sigprocmask(2, &none, std::ptr::null_mut()) };
}
pub fn signal_fd(set: &SigSet) -> Result<Fd> {
    check(unsafe { signalfd(-1, set, O_CLOEXEC | O_NONBLOCK) }).map(Fd)
}
/// Number of the next signal that waits.
pub fn next_signal(fd: i32) -> Option<i32> {
    let mut info = [0u8; 128];
    match read_fd(fd, &mut info) {
        Ok(128) => Some(u32::from_le_bytes([info[0], info[1], info[2], info[3]]) as i32),
        _ => None,
    }
}
/// Every disposition as a fresh program expects it.
pub fn default_signals() {
    for number in 1..65 {
        unsafe { signal(number, 0) };
    }
}
pub fn ignore_signal(number: i32) {
    unsafe { signal(number, 1) };
}
pub fn default_signal(number: i32) {
    unsafe { signal(number, 0) };
}

/// `Some((pid, status))` of one child that has ended.
pub fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    let pid = unsafe { waitpid(-1, &mut status, 1) };
    if pid > 0 {
        Some((pid, status))
    } else {
        None
    }
}
/// One that has ended is reaped, and is none any more.
pub fn is_own_child(pid: i32) -> bool {
    let mut status = 0;
    pid > 0 && unsafe { waitpid(pid, &mut status, 1) } == 0
}
pub fn send_signal(pid: i32, number: i32) -> Result<()> {
    check(unsafe { kill(pid, number) }).map(|_| ())
}
pub fn own_pid() -> i32 {
    unsafe { getpid() }
}

pub fn prctl1(option: i32, a: u64) -> Result<i32> {
    check(unsafe { prctl(option, a as c_ulong, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) })
}
/// `name`: ends with a NUL byte.
pub fn name_process(name: &[u8]) {
    const PR_SET_NAME: i32 = 15;
    let _ = prctl1(PR_SET_NAME, name.as_ptr() as u64);
}
pub fn set_seccomp(program: &SockFprog) -> Result<i32> {
    check(unsafe { prctl(PR_SET_SECCOMP, 2 as c_ulong, program as *const SockFprog, 0 as c_ulong, 0 as c_ulong) })
}
pub fn clear_ambient() -> Result<i32> {
    check(unsafe { prctl(PR_CAP_AMBIENT, 4 as c_ulong, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) })
}

pub fn make_dir(path: &[u8], mode: u32) -> Result<()> {
    let path = c(path);
    check(unsafe { mkdir(p(&path), mode) }).map(|_| ())
}
pub fn remove_dir(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { rmdir(p(&path)) }).map(|_| ())
}
pub fn unlink_file(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { unlink(p(&path)) }).map(|_| ())
}
pub fn make_symlink(target: &[u8], path: &[u8]) -> Result<()> {
    let (target, path) = (c(target), c(path));
    check(unsafe { symlink(p(&target), p(&path)) }).map(|_| ())
}
pub fn make_node(path: &[u8], mode: u32, major: u32, minor: u32) -> Result<()> {
    let path = c(path);
    let (ma, mi) = (major as u64, minor as u64);
    let dev = (mi & 0xff) | ((ma & 0xfff) << 8) | ((mi & !0xff) << 12) | ((ma & !0xfff) << 32);
    check(unsafe { mknod(p(&path), mode, dev) }).map(|_| ())
}
pub fn change_owner(fd: i32, uid: u32, gid: u32) -> Result<()> {
    check(unsafe { fchown(fd, uid, gid) }).map(|_| ())
}

pub fn change_mode(fd: i32, mode: u32) -> Result<()> {
    check(unsafe { fchmod(fd, mode) }).map(|_| ())
}

/// Empty `source`, `kind` or `data`: NULL.
pub fn mount_at(source: &[u8], target: &[u8], kind: &[u8], flags: u64, data: &[u8]) -> Result<()> {
    let (source_c, target_c, kind_c, data_c) = (c(source), c(target), c(kind), c(data));
    let or_null = |empty: bool, s: &CStr| if empty { std::ptr::null() } else { p(s) };
    check(unsafe {
        mount(
            or_null(source.is_empty(), &source_c),
            p(&target_c),
            or_null(kind.is_empty(), &kind_c),
            flags as c_ulong,
            or_null(data.is_empty(), &data_c) as *const c_void,
        )
    })
    .map(|_| ())
}
pub fn detach_mount(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { umount2(p(&path), MNT_DETACH) }).map(|_| ())
}
pub fn pivot_root(new: &[u8], old: &[u8]) -> Result<()> {
    let (new, old) = (c(new), c(old));
    if unsafe { syscall(PIVOT_ROOT, p(&new), p(&old)) } < 0 {
        return Err(errno());
    }
    Ok(())
}
pub fn change_dir(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { chdir(p(&path)) }).map(|_| ())
}
/// The working directory as the kernel names it: not absolute when it lies outside the root.
pub fn change_dir_fd(fd: i32) -> Result<()> {
    check(unsafe { fchdir(fd) }).map(|_| ())
}
pub fn working_dir() -> Result<Vec<u8>> {
    let mut buffer = [0u8; 4096];
    if unsafe { getcwd(buffer.as_mut_ptr() as *mut c_char, buffer.len()) }.is_null() {
        return Err(errno());
    }
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
    Ok(buffer[..end].to_vec())
}
pub fn unshare(flags: i32) -> Result<()> {
    check(unsafe { libc_unshare(flags) }).map(|_| ())
}
pub fn set_umask(mask: u32) {
    unsafe { umask(mask) };
}
pub fn new_session() -> Result<()> {
    check(unsafe { setsid() }).map(|_| ())
}
pub fn set_host_name(name: &[u8]) -> Result<()> {
    check(unsafe { sethostname(name.as_ptr() as *const c_char, name.len()) }).map(|_| ())
}

/// Mode, uid and gid of an open file.
pub fn stat_fd(fd: i32) -> Result<(u32, u32, u32)> {
    let mut found: Statx = unsafe { std::mem::zeroed() };
    const AT_EMPTY_PATH: c_int = 0x1000;
    let empty = [0u8; 1];
    if unsafe { syscall(STATX, fd, empty.as_ptr(), AT_EMPTY_PATH, 0x7ff as c_uint, &mut found as *mut Statx) } < 0 {
        return Err(errno());
    }
    Ok((found.mode as u32, found.uid, found.gid))
}
/// /dev/null, under whatever name.
pub fn is_null_device(fd: i32) -> bool {
    let mut found: Statx = unsafe { std::mem::zeroed() };
    let empty = [0u8; 1];
    if unsafe { syscall(STATX, fd, empty.as_ptr(), 0x1000, 0x7ff as c_uint, &mut found as *mut Statx) } < 0 {
        return false;
    }
    // A character device of major number 1, minor number 3.
    found.mode & 0o170000 == 0o020000 && found.rest[12] == 1 | 3 << 32
}
/// Device and inode.
pub fn identity_of_fd(fd: i32) -> Result<(u64, u64)> {
    identity(fd, b"", 0x1000)
}
pub fn identity_of(path: &[u8]) -> Result<(u64, u64)> {
    identity(-100, path, 0)
}
fn identity(folder: c_int, name: &[u8], flags: c_int) -> Result<(u64, u64)> {
    let mut found: Statx = unsafe { std::mem::zeroed() };
    let name = c(name);
    if unsafe { syscall(STATX, folder, p(&name), flags, 0x7ff as c_uint, &mut found as *mut Statx) } < 0 {
        return Err(errno());
    }
    Ok((found.rest[0], found.rest[13]))
}
/// Magic number of the file system that an open file is on.
pub fn file_system_of(fd: i32) -> Result<i64> {
    // struct statfs begins with it, and is 120 bytes long.
    let mut found = [0i64; 32];
    check(unsafe { fstatfs(fd, found.as_mut_ptr()) })?;
    Ok(found[0])
}
/// Mode of what a path leads to; `follow` the last name when it is a link.
pub fn mode_of(path: &[u8], follow: bool) -> Result<u32> {
    let mut found: Statx = unsafe { std::mem::zeroed() };
    let path = c(path);
    const AT_FDCWD: c_int = -100;
    let flags: c_int = if follow { 0 } else { 0x100 };
    if unsafe { syscall(STATX, AT_FDCWD, path.as_ptr(), flags, 0x7ff as c_uint, &mut found as *mut Statx) } < 0 {
        return Err(errno());
    }
    Ok(found.mode as u32)
}

fn pointers(list: &[CStr]) -> Vec<*const c_char> {
    list.iter().map(|one| one.as_ptr() as *const c_char).chain(std::iter::once(std::ptr::null())).collect()
}
/// Comes back only when it fails.
pub fn exec(path: &[u8], args: &[CStr], env: &[CStr]) -> Errno {
    let path = c(path);
    let (args, env) = (pointers(args), pointers(env));
    unsafe { execve(p(&path), args.as_ptr(), env.as_ptr()) };
    errno()
}
/// Along PATH, with this process's environment.
pub fn exec_search(name: &[u8], args: &[CStr]) -> Errno {
    let name = c(name);
    let args = pointers(args);
    unsafe { execvp(p(&name), args.as_ptr()) };
    errno()
}
/// The file behind `fd`.
pub fn exec_fd(fd: i32, args: &[CStr], env: &[CStr]) -> Errno {
    let (args, env) = (pointers(args), pointers(env));
    let empty = [0u8; 1];
    unsafe { syscall(EXECVEAT, fd, empty.as_ptr(), args.as_ptr(), env.as_ptr(), 0x1000 as c_int) };
    errno()
}

/// A new process with these namespaces, a copy of this one. 0 in the child.
pub fn clone_process(flags: u64) -> Result<i32> {
    let zero: *const c_void = std::ptr::null();
    #[cfg(target_arch = "x86_64")]
    let pid = unsafe { syscall(CLONE, flags as c_ulong | SIGCHLD as c_ulong, zero, zero, zero, zero) };
    #[cfg(target_arch = "aarch64")]
    let pid = unsafe { syscall(CLONE, flags as c_ulong | SIGCHLD as c_ulong, zero, zero, zero, zero) };
    if pid < 0 {
        Err(errno())
    } else {
        Ok(pid as i32)
    }
}

pub fn set_ids(uid: u32, gid: u32, groups: &[u32]) -> Result<()> {
    unsafe {
        if syscall(SETGROUPS, groups.len(), groups.as_ptr()) < 0
            || syscall(SETRESGID, gid, gid, gid) < 0
            || syscall(SETRESUID, uid, uid, uid) < 0
        {
            return Err(errno());
        }
    }
    Ok(())
}
pub fn set_capabilities(effective: u64, permitted: u64, inheritable: u64) -> Result<()> {
    let header: [u32; 2] = [0x20080522, 0];
    let half = |value: u64, high: bool| if high { (value >> 32) as u32 } else { value as u32 };
    let data: [u32; 6] = [
        half(effective, false),
        half(permitted, false),
        half(inheritable, false),
        half(effective, true),
        half(permitted, true),
        half(inheritable, true),
    ];
    if unsafe { syscall(CAPSET, header.as_ptr(), data.as_ptr()) } < 0 {
        return Err(errno());
    }
    Ok(())
}
pub fn set_limit(resource: u32, limit: &RLimit) -> Result<()> {
    if unsafe { syscall(PRLIMIT64, 0 as c_int, resource, limit as *const RLimit, 0 as c_ulong) } < 0 {
        return Err(errno());
    }
    Ok(())
}
/// Root's keys are not for the sandbox.
pub fn new_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
    unsafe { syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, std::ptr::null::<c_char>()) };
}
pub fn memfd(name: &[u8], flags: u32) -> Result<Fd> {
    let name = c(name);
    let fd = unsafe { syscall(MEMFD_CREATE, p(&name), flags) };
    if fd < 0 {
        Err(errno())
    } else {
        Ok(Fd(fd as i32))
    }
}

/// Closes (or marks close-on-exec) every descriptor in a range.
pub fn close_range(from: u32, to: u32, mark_only: bool) {
    if from > to {
        return;
    }
    let flags: c_uint = if mark_only { 4 } else { 0 };
    if unsafe { syscall(CLOSE_RANGE, from, to, flags) } >= 0 {
        return;
    }
    // Before Linux 5.9 (marking: 5.11).
    let last = if to > 65535 { 65535 } else { to };
    for fd in from..=last {
        if mark_only {
            unsafe { fcntl(fd as c_int, 2, 1) };
        } else {
            close_fd(fd as i32);
        }
    }
}

pub fn ioctl_ptr<T>(fd: i32, request: u64, value: *mut T) -> Result<i32> {
    check(unsafe { ioctl(fd, request as c_ulong, value) })
}
pub fn ioctl_int(fd: i32, request: u64, value: u64) -> Result<i32> {
    check(unsafe { ioctl(fd, request as c_ulong, value as c_ulong) })
}

pub fn bpf(command: i32, attributes: &mut [u8]) -> Result<i32> {
    let value = unsafe { syscall(BPF, command, attributes.as_mut_ptr(), attributes.len() as c_uint) };
    if value < 0 {
        Err(errno())
    } else {
        Ok(value as i32)
    }
}

pub const AF_UNIX: i32 = 1;
pub const AF_INET: i32 = 2;
pub const SOCK_STREAM: i32 = 1;
pub const SOCK_DGRAM: i32 = 2;

pub fn socket_pair(kind: i32) -> Result<(Fd, Fd)> {
    let mut ends = [0i32; 2];
    check(unsafe { socketpair(AF_UNIX, kind | O_CLOEXEC, 0, ends.as_mut_ptr()) })?;
    Ok((Fd(ends[0]), Fd(ends[1])))
}
pub fn new_socket(domain: i32, kind: i32) -> Result<Fd> {
    check(unsafe { socket(domain, kind | O_CLOEXEC, 0) }).map(Fd)
}
fn address(path: &[u8]) -> Result<(SockAddrUn, c_uint)> {
    let mut address = SockAddrUn { family: AF_UNIX as u16, path: [0; 108] };
    if path.len() >= address.path.len() {
        return Err(EINVAL);
    }
    address.path[..path.len()].copy_from_slice(path);
    Ok((address, 2 + path.len() as c_uint + 1))
}
pub fn listen_at(path: &[u8]) -> Result<Fd> {
    let (address, length) = address(path)?;
    let fd = new_socket(AF_UNIX, SOCK_STREAM | O_NONBLOCK)?;
    // Nobody else may connect, not even between bind and chmod.
    let before = unsafe { umask(0o177) };
    let bound = check(unsafe { bind(fd.0, &address as *const SockAddrUn as *const c_void, length) });
    unsafe { umask(before) };
    bound?;
    check(unsafe { listen(fd.0, 512) })?;
    Ok(fd)
}
pub fn accept_one(fd: i32) -> Result<Fd> {
    check(unsafe { accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), O_CLOEXEC) }).map(Fd)
}
/// `address`: a struct sockaddr of its family.
pub fn bind_socket(fd: i32, address: &[u8]) -> Result<()> {
    check(unsafe { bind(fd, address.as_ptr() as *const c_void, address.len() as c_uint) }).map(|_| ())
}
pub fn listen_on(fd: i32, waiting: i32) -> Result<()> {
    check(unsafe { listen(fd, waiting) }).map(|_| ())
}
/// Who it is comes into `address`.
pub fn accept_from(fd: i32, address: &mut [u8]) -> Result<Fd> {
    let mut length = address.len() as c_uint;
    check(unsafe { accept4(fd, address.as_mut_ptr() as *mut c_void, &mut length, O_CLOEXEC) }).map(Fd)
}
/// Connecting, and sending over it, fail when the other end takes nothing for so long.
pub fn connect_to(path: &[u8], seconds: u64) -> Result<Fd> {
    let (address, length) = address(path)?;
    let fd = new_socket(AF_UNIX, SOCK_STREAM)?;
    const SO_SNDTIMEO: c_int = 21;
    let timeout = [seconds, 0u64];
    check(unsafe { setsockopt(fd.0, 1, SO_SNDTIMEO, timeout.as_ptr() as *const c_void, 16) })?;
    check(unsafe { connect(fd.0, &address as *const SockAddrUn as *const c_void, length) })?;
    Ok(fd)
}
/// `address`: a struct sockaddr_in or sockaddr_in6.
pub fn connect_socket(fd: i32, address: &[u8]) -> Result<()> {
    check(unsafe { connect(fd, address.as_ptr() as *const c_void, address.len() as c_uint) }).map(|_| ())
}
/// The other end can send no more from here on; what it sent is still to be read.
pub fn shut(fd: i32) {
    unsafe { shutdown(fd, 2) };
}
/// The other end of a socket has gone, or was shut.
pub fn is_hung_up(fd: i32) -> bool {
    let mut one = [PollFd { fd, events: 0, revents: 0 }];
    poll_fds(&mut one, 0) > 0 && one[0].revents & (POLLHUP | POLLERR) != 0
}
pub fn peer_of(fd: i32) -> Result<UCred> {
    let mut found = UCred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = std::mem::size_of::<UCred>() as c_uint;
    check(unsafe { getsockopt(fd, 1, 17, &mut found as *mut UCred as *mut c_void, &mut length) })?;
    Ok(found)
}

/// Up to this many descriptors come with one message.
pub const MAX_FDS: usize = 4;
const CONTROL: usize = 16 + MAX_FDS * 4;

pub fn send_with_fds(fd: i32, bytes: &[u8], fds: &[i32]) -> Result<usize> {
    let mut iov = IoVec { base: bytes.as_ptr() as *mut c_void, len: bytes.len() };
    let mut control = [0u64; (CONTROL + 7) / 8];
    let length = 16 + fds.len() * 4;
    unsafe {
        let raw = control.as_mut_ptr() as *mut u8;
        *(raw as *mut usize) = length;
        *(raw.add(8) as *mut i32) = 1; // SOL_SOCKET
        *(raw.add(12) as *mut i32) = 1; // SCM_RIGHTS
        for (i, one) in fds.iter().enumerate() {
            *(raw.add(16 + i * 4) as *mut i32) = *one;
        }
    }
    let message = MsgHdr {
        name: std::ptr::null_mut(),
        namelen: 0,
        iov: &mut iov,
        iovlen: 1,
        control: if fds.is_empty() { std::ptr::null_mut() } else { control.as_mut_ptr() as *mut c_void },
        controllen: if fds.is_empty() { 0 } else { (length + 7) / 8 * 8 },
        flags: 0,
    };
    const MSG_NOSIGNAL: c_int = 0x4000;
    loop {
        let n = unsafe { sendmsg(fd, &message, MSG_NOSIGNAL) };
        if n >= 0 {
            return Ok(n as usize);
        }
        if errno() != EINTR {
            return Err(errno());
        }
    }
}

/// Descriptors come close-on-exec; any beyond MAX_FDS the kernel drops.
pub fn receive_with_fds(fd: i32, buffer: &mut [u8], flags: i32) -> Result<(usize, Vec<Fd>)> {
    let mut iov = IoVec { base: buffer.as_mut_ptr() as *mut c_void, len: buffer.len() };
    let mut control = [0u64; (CONTROL + 7) / 8];
    let mut message = MsgHdr {
        name: std::ptr::null_mut(),
        namelen: 0,
        iov: &mut iov,
        iovlen: 1,
        control: control.as_mut_ptr() as *mut c_void,
        controllen: (CONTROL + 7) / 8 * 8,
        flags: 0,
    };
    const MSG_CMSG_CLOEXEC: c_int = 0x40000000;
    let n = loop {
        let n = unsafe { recvmsg(fd, &mut message, MSG_CMSG_CLOEXEC | flags) };
        if n >= 0 {
            break n as usize;
        }
        if errno() != EINTR {
            return Err(errno());
        }
    };
    let mut fds = Vec::new();
    unsafe {
        let raw = control.as_ptr() as *const u8;
        if message.controllen >= 16 {
            let length = *(raw as *const usize);
            let is_rights = *(raw.add(8) as *const i32) == 1 && *(raw.add(12) as *const i32) == 1;
            if is_rights && length >= 16 && length <= CONTROL {
                for i in 0..(length - 16) / 4 {
                    fds.push(Fd(*(raw.add(16 + i * 4) as *const i32)));
                }
            }
        }
    }
    Ok((n, fds))
}

pub fn is_terminal(fd: i32) -> bool {
    unsafe { isatty(fd) == 1 }
}
pub fn terminal_state(fd: i32) -> Result<Termios> {
    let mut state: Termios = unsafe { std::mem::zeroed() };
    check(unsafe { tcgetattr(fd, &mut state) })?;
    Ok(state)
}
pub fn set_terminal_state(fd: i32, state: &Termios) -> Result<()> {
    check(unsafe { tcsetattr(fd, 1, state) }).map(|_| ())
}
pub fn raw(mut state: Termios) -> Termios {
    unsafe { cfmakeraw(&mut state) };
    state
}
pub fn without_echo(mut state: Termios) -> Termios {
    const ECHO: c_uint = 0o10;
    state.lflag &= !ECHO;
    state
}
pub fn terminal_size(fd: i32) -> Option<WinSize> {
    let mut size = WinSize { rows: 0, columns: 0, x: 0, y: 0 };
    ioctl_ptr(fd, TIOCGWINSZ, &mut size).ok()?;
    if size.rows == 0 || size.columns == 0 {
        None
    } else {
        Some(size)
    }
}

// For the first process of a guest.

pub fn load_module(fd: i32) -> Result<()> {
    let none = [0u8; 1];
    if unsafe { syscall(FINIT_MODULE, fd, none.as_ptr(), 0 as c_int) } < 0 {
        return Err(errno());
    }
    Ok(())
}
/// Nanoseconds since 1970.
pub fn set_clock(ns: u64) -> Result<()> {
    let t = [(ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64];
    check(unsafe { clock_settime(0, &t) }).map(|_| ())
}
/// Bytes that nobody can know, each counted as such; what is given out from now on is made with them.
pub fn add_entropy(bytes: &[u8]) -> Result<()> {
    const RNDADDENTROPY: u64 = 0x40085203;
    const RNDRESEEDCRNG: u64 = 0x5207;
    let random = open_at(b"/dev/urandom", O_WRONLY, 0)?;
    let mut given = ((bytes.len() * 8) as u32).to_le_bytes().to_vec();
    given.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    given.extend_from_slice(bytes);
    ioctl_ptr(random.0, RNDADDENTROPY, given.as_mut_ptr())?;
    ioctl_int(random.0, RNDRESEEDCRNG, 0).map(|_| ())
}
pub fn change_root(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { chroot(p(&path)) }).map(|_| ())
}
pub fn unmount(path: &[u8]) -> Result<()> {
    let path = c(path);
    check(unsafe { umount2(p(&path), 0) }).map(|_| ())
}
pub fn sync_all() {
    unsafe { sync() };
}
/// Where there is nothing that could be switched off, a reset ends the machine as well: whoever started it has said so.
pub fn power_off() {
    let how: u32 = if read_file(b"/proc/cmdline", 4096).map_or(false, |line| line.windows(12).any(|w| w == b"dsec.end=off")) {
        0x4321fedc
    } else {
        0x01234567
    };
    unsafe { reboot(how as c_int) };
}
/// In no order; none where it cannot be read.
pub fn names_in(folder: &str) -> Vec<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt;
    match std::fs::read_dir(folder) {
        Err(_) => Vec::new(),
        Ok(entries) => entries.flatten().map(|entry| entry.file_name().into_vec()).collect(),
    }
}
