//! Files of the sandbox, for the host: one small operation a frame, so that none holds up the commands. Paths are resolved by the kernel in
//! one step (openat2 with RESOLVE_IN_ROOT, magic links refused) in the agent's own root: there is nothing outside it that a link,
//! swapped at whatever moment, could lead to.
//!
//! Whole trees are the host's business: it lists, reads and writes piece by piece.

use std::os::raw::{c_char, c_int, c_long, c_uint};

use crate::sys::{self, c, Fd, Result, Statx, EINVAL};
use crate::wire::{self, Reader};

extern "C" {
    fn pread(fd: c_int, b: *mut u8, n: usize, at: i64) -> isize;
    fn pwrite(fd: c_int, b: *const u8, n: usize, at: i64) -> isize;
    fn lseek(fd: c_int, at: i64, whence: c_int) -> i64;
    fn ftruncate(fd: c_int, size: i64) -> c_int;
    fn fchmod(fd: c_int, mode: c_uint) -> c_int;
    fn fsync(fd: c_int) -> c_int;
    fn mkdirat(fd: c_int, p: *const c_char, mode: c_uint) -> c_int;
    fn unlinkat(fd: c_int, p: *const c_char, flags: c_int) -> c_int;
    fn symlinkat(target: *const c_char, fd: c_int, p: *const c_char) -> c_int;
    fn linkat(from: c_int, a: *const c_char, to: c_int, b: *const c_char, flags: c_int) -> c_int;
    fn readlinkat(fd: c_int, p: *const c_char, b: *mut u8, n: usize) -> isize;
    fn fchownat(fd: c_int, p: *const c_char, u: c_uint, g: c_uint, flags: c_int) -> c_int;
    fn fchmodat(fd: c_int, p: *const c_char, mode: c_uint, flags: c_int) -> c_int;
    fn utimensat(fd: c_int, p: *const c_char, times: *const [i64; 4], flags: c_int) -> c_int;
}

#[cfg(target_arch = "x86_64")]
mod numbers {
    pub const GETDENTS64: i64 = 217;
    pub const RENAMEAT2: i64 = 316;
}
#[cfg(target_arch = "aarch64")]
mod numbers {
    pub const GETDENTS64: i64 = 61;
    pub const RENAMEAT2: i64 = 276;
}

const O_PATH: i32 = 0o10000000;
const O_EXCL: i32 = 0o200;
const AT_EMPTY_PATH: i32 = 0x1000;
const AT_SYMLINK_NOFOLLOW: i32 = 0x100;
const AT_REMOVEDIR: i32 = 0x200;
const S_IFREG: u32 = 0o100000;
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
const ENXIO: i32 = 6;
const EISDIR: i32 = 21;
const MAX_READ: u32 = 256 << 10;
const MAX_ENTRIES: usize = 500;
const MAX_TRIES: u32 = 100;
const PROC_SUPER: i64 = 0x9fa0;

/// None for what is no request; else what to answer.
pub fn serve(payload: &[u8]) -> Option<Result<Vec<u8>>> {
    let mut r = Reader::new(payload);
    let operation = r.u8()?;
    let path = r.text()?;
    let answer = match operation {
        1 => {
            let follow = r.u8()? != 0;
            end(&r)?;
            status(&path, follow)
        }
        2 => {
            let (at, length) = (r.u64()?, r.u32()?);
            end(&r)?;
            read(&path, at, length)
        }
        3 => {
            let (at, flags, mode, uid, gid, bytes) = (r.u64()?, r.u8()?, r.u32()?, r.u32()?, r.u32()?, r.bytes()?);
            end(&r)?;
            write(&path, at, flags, mode, uid, gid, &bytes)
        }
        4 => {
            let cookie = r.u64()?;
            end(&r)?;
            list(&path, cookie)
        }
        5 => {
            let folder = r.u8()? != 0;
            end(&r)?;
            at_parent(&path, |parent, name| unsafe {
                unlinkat(parent, name, if folder { AT_REMOVEDIR } else { 0 })
            })
        }
        6 => {
            let (to, flags) = (r.text()?, r.u32()?);
            end(&r)?;
            rename(&path, &to, flags)
        }
        7 => {
            let mode = r.u32()?;
            end(&r)?;
            at_parent(&path, |parent, name| unsafe { mkdirat(parent, name, mode) })
        }
        8 => {
            let target = r.text()?;
            end(&r)?;
            let target = c(&target);
            at_parent(&path, |parent, name| unsafe { symlinkat(target.as_ptr() as *const c_char, parent, name) })
        }
        9 => {
            let to = r.text()?;
            end(&r)?;
            link(&path, &to)
        }
        10 => {
            let change = Change {
                flags: r.u8()?,
                mode: r.u32()?,
                uid: r.u32()?,
                gid: r.u32()?,
                seconds: r.u64()? as i64,
                nanoseconds: r.u32()?,
                size: r.u64()?,
            };
            end(&r)?;
            change_attributes(&path, &change)
        }
        11 => {
            end(&r)?;
            read_link(&path)
        }
        12 => {
            end(&r)?;
            sync(&path)
        }
        _ => return None,
    };
    Some(answer)
}

fn end(r: &Reader) -> Option<()> {
    if r.is_at_end() {
        Some(())
    } else {
        None
    }
}

fn check(value: c_int) -> Result<()> {
    if value < 0 {
        Err(sys::errno())
    } else {
        Ok(())
    }
}

/// `struct open_how`; the root is this process's own.
fn open_in(path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
    const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
    const RESOLVE_IN_ROOT: u64 = 0x10;
    let root = sys::open_at(b"/", O_PATH | sys::O_DIRECTORY, 0)?;
    let how: [u64; 3] = [(flags | sys::O_CLOEXEC) as u32 as u64, mode as u64, RESOLVE_NO_MAGICLINKS | RESOLVE_IN_ROOT];
    let path = c(path);
    // A name on the way was changed meanwhile. Not for ever: who holds a lease on the file makes it so for a minute.
    for _ in 0..MAX_TRIES {
        let fd = unsafe { sys::syscall(sys::OPENAT2 as c_long, root.0, path.as_ptr(), how.as_ptr(), 24usize) };
        if fd >= 0 {
            return Ok(Fd(fd as i32));
        }
        match sys::errno() {
            sys::EAGAIN | sys::EINTR => {}
            errno => return Err(errno),
        }
    }
    Err(sys::EAGAIN)
}

/// Not to /proc, whither a link may lead: /proc/self is this process there, its memory among it.
fn open_to_change(path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
    let fd = open_in(path, flags | sys::O_WRONLY | sys::O_NONBLOCK | sys::O_NOCTTY, mode)?;
    match sys::file_system_of(fd.0)? {
        PROC_SUPER => Err(sys::EACCES),
        _ => Ok(fd),
    }
}

pub fn open_path(path: &[u8], follow: bool) -> Result<Fd> {
    open_in(path, O_PATH | if follow { 0 } else { sys::O_NOFOLLOW }, 0)
}

/// `work` with the open folder and the last name of a path.
fn at_parent(path: &[u8], work: impl FnOnce(c_int, *const c_char) -> c_int) -> Result<Vec<u8>> {
    let (parent, name) = split(path)?;
    let folder = open_in(parent, O_PATH | sys::O_DIRECTORY, 0)?;
    let name = c(name);
    check(work(folder.0, name.as_ptr() as *const c_char)).map(|_| Vec::new())
}

/// "/a/b/" is "/a/b". Neither "." nor ".." can be made or removed.
fn split(path: &[u8]) -> Result<(&[u8], &[u8])> {
    let end = path.iter().rposition(|byte| *byte != b'/').ok_or(sys::EBUSY)? + 1;
    let start = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let name = &path[start..end];
    if name == b"." || name == b".." {
        return Err(EINVAL);
    }
    Ok((if start == 0 { b"/" } else { &path[..start] }, name))
}

fn statx_of(folder: c_int, name: &[u8], flags: c_int) -> Result<Statx> {
    let mut found: Statx = unsafe { std::mem::zeroed() };
    let name = c(name);
    if unsafe { sys::syscall(sys::STATX, folder, name.as_ptr(), flags, 0x7ff as c_uint, &mut found as *mut Statx) } < 0 {
        return Err(sys::errno());
    }
    Ok(found)
}

fn statx_fd(fd: &Fd) -> Result<Statx> {
    statx_of(fd.0, b"", AT_EMPTY_PATH)
}

fn size_of(found: &Statx) -> u64 {
    found.rest[1]
}

fn put_status(out: &mut Vec<u8>, found: &Statx) {
    let (inode, size, blocks) = (found.rest[0], found.rest[1], found.rest[2]);
    for value in [found.mode as u32, found.uid, found.gid, found.nlink] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    for value in [size, blocks, inode, found.rest[10]] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.extend_from_slice(&(found.rest[11] as u32).to_le_bytes());
    // Major and minor number of a device.
    out.extend_from_slice(&found.rest[12].to_le_bytes());
}

fn status(path: &[u8], follow: bool) -> Result<Vec<u8>> {
    let fd = open_path(path, follow)?;
    let mut out = Vec::new();
    put_status(&mut out, &statx_fd(&fd)?);
    Ok(out)
}

/// From the first byte of data at or behind `at`: holes are passed over.
fn read(path: &[u8], at: u64, length: u32) -> Result<Vec<u8>> {
    let fd = open_in(path, sys::O_RDONLY | sys::O_NONBLOCK | sys::O_NOCTTY, 0)?;
    let found = statx_fd(&fd)?;
    match found.mode as u32 & sys::S_IFMT {
        S_IFREG => {}
        sys::S_IFDIR => return Err(EISDIR),
        _ => return Err(EINVAL),
    }
    let size = size_of(&found);
    if at > i64::MAX as u64 {
        return Err(EINVAL);
    }
    let mut length = length.min(MAX_READ) as usize;
    let mut from = at as i64;
    let data = unsafe { lseek(fd.0, at as i64, SEEK_DATA) };
    if data >= 0 {
        from = data;
        let hole = unsafe { lseek(fd.0, from, SEEK_HOLE) };
        if hole > from {
            length = length.min((hole - from) as usize);
        }
    } else if sys::errno() == ENXIO && at < size {
        from = size as i64;
        length = 0;
    }
    let mut out = Vec::new();
    put_status(&mut out, &found);
    out.extend_from_slice(&(from as u64).to_le_bytes());
    let head = out.len();
    out.resize(head + length, 0);
    let n = unsafe { pread(fd.0, out.as_mut_ptr().add(head), length, from) };
    if n < 0 {
        return Err(sys::errno());
    }
    out.truncate(head + n as usize);
    Ok(out)
}

/// Flags: 1 make it, 2 empty it first, 4 it must be new, 8 at its end, 16 no link at the last name.
fn write(path: &[u8], at: u64, flags: u8, mode: u32, uid: u32, gid: u32, bytes: &[u8]) -> Result<Vec<u8>> {
    const O_TRUNC: i32 = 0o1000;
    let mut open = 0;
    if flags & 1 != 0 {
        open |= sys::O_CREAT;
    }
    if flags & 4 != 0 {
        open |= O_EXCL;
    }
    if flags & 16 != 0 {
        open |= sys::O_NOFOLLOW;
    }
    let is_new = flags & 1 != 0 && open_path(path, true).is_err();
    if flags & 2 != 0 {
        open |= O_TRUNC;
    }
    let fd = open_to_change(path, open, if flags & 1 != 0 { mode & 0o7777 } else { 0 })?;
    let found = statx_fd(&fd)?;
    if found.mode as u32 & sys::S_IFMT != S_IFREG {
        return Err(EINVAL);
    }
    if is_new {
        if uid != u32::MAX || gid != u32::MAX {
            sys::change_owner(fd.0, uid, gid)?;
        }
        // The umask has had no say, and a change of owner takes special bits away.
        check(unsafe { fchmod(fd.0, mode & 0o7777) })?;
    }
    let mut from = if flags & 8 != 0 { size_of(&found) as i64 } else { at as i64 };
    if from < 0 {
        return Err(EINVAL);
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = unsafe { pwrite(fd.0, rest.as_ptr(), rest.len(), from) };
        if n <= 0 {
            return Err(sys::errno());
        }
        rest = &rest[n as usize..];
        from += n as i64;
    }
    let mut out = Vec::new();
    put_status(&mut out, &statx_fd(&fd)?);
    Ok(out)
}

/// `visit` has the name, its type as readdir has it, and where to go on behind it; false ends it. True: those were all. Without "." and "..".
fn each_raw(folder: &Fd, visit: &mut dyn FnMut(&[u8], u8, u64) -> bool) -> Result<bool> {
    let mut buffer = [0u64; 1024];
    loop {
        let n = unsafe {
            sys::syscall(numbers::GETDENTS64, folder.0, buffer.as_mut_ptr() as *mut u8, std::mem::size_of_val(&buffer))
        };
        if n < 0 {
            return Err(sys::errno());
        }
        if n == 0 {
            return Ok(true);
        }
        let raw = unsafe { std::slice::from_raw_parts(buffer.as_ptr() as *const u8, n as usize) };
        let mut at = 0;
        // ino u64, cookie u64, length u16, type u8, the name with its NUL byte.
        while at + 19 <= raw.len() {
            let length = u16::from_le_bytes([raw[at + 16], raw[at + 17]]) as usize;
            if length < 20 || at + length > raw.len() {
                return Err(EINVAL);
            }
            let name = &raw[at + 19..at + length];
            let name = &name[..name.iter().position(|byte| *byte == 0).unwrap_or(name.len())];
            let mut off = [0u8; 8];
            off.copy_from_slice(&raw[at + 8..at + 16]);
            if name != b"." && name != b".." && !visit(name, raw[at + 18], u64::from_le_bytes(off)) {
                return Ok(false);
            }
            at += length;
        }
    }
}

/// Each name in an open folder, and whether it is one itself.
pub fn each_entry(folder: &Fd, visit: &mut dyn FnMut(&[u8], bool) -> bool) -> Result<bool> {
    const DT_UNKNOWN: u8 = 0;
    const DT_DIR: u8 = 4;
    each_raw(folder, &mut |name, kind, _| {
        let mode = || statx_of(folder.0, name, AT_SYMLINK_NOFOLLOW).map_or(0, |found| found.mode as u32 & sys::S_IFMT);
        visit(name, kind == DT_DIR || (kind == DT_UNKNOWN && mode() == sys::S_IFDIR))
    })
}

/// Where to go on (0: that was all), then names and what they are.
fn list(path: &[u8], cookie: u64) -> Result<Vec<u8>> {
    let fd = open_in(path, sys::O_RDONLY | sys::O_DIRECTORY | sys::O_NONBLOCK, 0)?;
    if cookie != 0 && unsafe { lseek(fd.0, cookie as i64, 0) } < 0 {
        return Err(sys::errno());
    }
    let mut next = 0;
    let mut entries: Vec<(Vec<u8>, Statx)> = Vec::new();
    let whole = each_raw(&fd, &mut |name, _, off| {
        // One that has gone meanwhile is left out.
        if let Ok(found) = statx_of(fd.0, name, AT_SYMLINK_NOFOLLOW) {
            entries.push((name.to_vec(), found));
        }
        next = off;
        entries.len() < MAX_ENTRIES
    })?;
    if whole {
        next = 0;
    }
    let mut out = next.to_le_bytes().to_vec();
    out.extend_from_slice(&(entries.len() as u32).to_le_bytes());
    for (name, found) in &entries {
        wire::put_bytes(&mut out, name);
        put_status(&mut out, found);
    }
    Ok(out)
}

fn rename(from: &[u8], to: &[u8], flags: u32) -> Result<Vec<u8>> {
    let (from_parent, from_name) = split(from)?;
    let from_folder = open_in(from_parent, O_PATH | sys::O_DIRECTORY, 0)?;
    let from_name = c(from_name);
    at_parent(to, |to_folder, to_name| unsafe {
        sys::syscall(numbers::RENAMEAT2, from_folder.0, from_name.as_ptr(), to_folder, to_name, flags) as c_int
    })
}

fn link(from: &[u8], to: &[u8]) -> Result<Vec<u8>> {
    let (from_parent, from_name) = split(from)?;
    let from_folder = open_in(from_parent, O_PATH | sys::O_DIRECTORY, 0)?;
    let from_name = c(from_name);
    at_parent(to, |to_folder, to_name| unsafe {
        linkat(from_folder.0, from_name.as_ptr() as *const c_char, to_folder, to_name, 0)
    })
}

struct Change {
    /// 1 mode, 2 owner, 4 time, 8 size.
    flags: u8,
    mode: u32,
    uid: u32,
    gid: u32,
    seconds: i64,
    nanoseconds: u32,
    size: u64,
}

/// Of the last name itself, should it be a link: then mode and size are none of its own.
fn change_attributes(path: &[u8], change: &Change) -> Result<Vec<u8>> {
    if change.flags & 8 != 0 {
        let fd = open_to_change(path, 0, 0)?;
        check(unsafe { ftruncate(fd.0, change.size as i64) })?;
    }
    let (parent, name) = match split(path) {
        Ok((parent, name)) => (open_in(parent, O_PATH | sys::O_DIRECTORY, 0)?, c(name)),
        // The root itself.
        Err(sys::EBUSY) => (sys::open_at(b"/", O_PATH | sys::O_DIRECTORY, 0)?, c(b".")),
        Err(errno) => return Err(errno),
    };
    let name = name.as_ptr() as *const c_char;
    if change.flags & 2 != 0 {
        check(unsafe { fchownat(parent.0, name, change.uid, change.gid, AT_SYMLINK_NOFOLLOW) })?;
    }
    if change.flags & 1 != 0 {
        // Of just what was opened: a link in its place might lead to this program's own file, which all sandboxes share.
        let opened = open_path(path, false)?;
        if statx_fd(&opened)?.mode as u32 & sys::S_IFMT == 0o120000 {
            return Err(sys::EOPNOTSUPP);
        }
        let own = c(format!("/proc/self/fd/{}", opened.0).as_bytes());
        check(unsafe { fchmodat(parent.0, own.as_ptr() as *const c_char, change.mode & 0o7777, 0) })?;
    }
    if change.flags & 4 != 0 {
        const UTIME_OMIT: i64 = (1 << 30) - 2;
        let times = [0, UTIME_OMIT, change.seconds, change.nanoseconds as i64];
        check(unsafe { utimensat(parent.0, name, &times, AT_SYMLINK_NOFOLLOW) })?;
    }
    let mut out = Vec::new();
    put_status(&mut out, &status_or(&parent, name)?);
    Ok(out)
}

fn status_or(parent: &Fd, name: *const c_char) -> Result<Statx> {
    let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_bytes();
    statx_of(parent.0, name, AT_SYMLINK_NOFOLLOW)
}

/// Of a file or a folder: what was written to it outlives the machine.
fn sync(path: &[u8]) -> Result<Vec<u8>> {
    let fd = open_in(path, sys::O_RDONLY | sys::O_NONBLOCK | sys::O_NOCTTY, 0)?;
    check(unsafe { fsync(fd.0) }).map(|_| Vec::new())
}

fn read_link(path: &[u8]) -> Result<Vec<u8>> {
    let fd = open_path(path, false)?;
    let mut target = vec![0u8; 4096];
    let empty = [0 as c_char; 1];
    let n = unsafe { readlinkat(fd.0, empty.as_ptr(), target.as_mut_ptr(), target.len()) };
    if n < 0 {
        return Err(sys::errno());
    }
    target.truncate(n as usize);
    Ok(target)
}
