//! Watches of files and folders, for the host: inotify, with every folder below when that is asked for. What cannot be told is said to be missing
//! (OVERFLOW), never left out silently.
//!
//! - Paths are resolved as in files.rs, in the agent's own root; what lies below a watched folder is opened from there, without any link
//!   and without leaving the mount.
//! - The host takes a window of bytes, and says when it may have more; what happens meanwhile waits in the kernel, up to its limit.
//! - A tree is walked some folders at a time, so that it holds up nothing else. What is found in a folder that has just come is told as made.

use std::collections::{HashMap, VecDeque};
use std::os::raw::{c_char, c_int, c_long, c_uint};

use crate::aether::BACKLOG;
use crate::files;
use crate::sys::{self, c, Fd, Result};
use crate::wire::{self, Channel, Reader};

extern "C" {
    fn inotify_init1(flags: c_int) -> c_int;
    fn inotify_add_watch(fd: c_int, path: *const c_char, mask: c_uint) -> c_int;
    fn inotify_rm_watch(fd: c_int, watch: c_int) -> c_int;
}

const IN_MODIFY: u32 = 0x2;
const IN_ATTRIB: u32 = 0x4;
const IN_CLOSE_WRITE: u32 = 0x8;
const IN_MOVED_FROM: u32 = 0x40;
const IN_MOVED_TO: u32 = 0x80;
const IN_CREATE: u32 = 0x100;
const IN_DELETE: u32 = 0x200;
const IN_DELETE_SELF: u32 = 0x400;
const IN_MOVE_SELF: u32 = 0x800;
const IN_UNMOUNT: u32 = 0x2000;
const IN_Q_OVERFLOW: u32 = 0x4000;
const IN_IGNORED: u32 = 0x8000;
const IN_EXCL_UNLINK: u32 = 0x0400_0000;
const IN_ISDIR: u32 = 0x4000_0000;
const WANTED: u32 = IN_MODIFY
    | IN_ATTRIB
    | IN_CLOSE_WRITE
    | IN_MOVED_FROM
    | IN_MOVED_TO
    | IN_CREATE
    | IN_DELETE
    | IN_DELETE_SELF
    | IN_MOVE_SELF
    | IN_EXCL_UNLINK;
const ENOSPC: i32 = 28;

const MADE: u8 = 1;
const CHANGED: u8 = 2;
const WRITTEN: u8 = 3;
const REMOVED: u8 = 4;
const MOVED_FROM: u8 = 5;
const MOVED_TO: u8 = 6;
const ATTRIBUTES: u8 = 7;
const OVERFLOW: u8 = 8;
/// What was watched is not there any more, and the watch ends.
const GONE: u8 = 9;

const MAX_WATCHES: usize = 32;
const MAX_FOLDERS: usize = 8192;
/// Before something else has its turn.
const FOLDERS_AT_ONCE: usize = 32;
/// Of one read from the kernel: 4 KiB are at least 15 events.
const READ: usize = 4096;
/// A frame for the host is no longer, but for one last event.
const PART: usize = 32 << 10;
/// Of what a walk finds in one folder.
const MAX_EVENTS: usize = 256 << 10;

struct Watch {
    inotify: Fd,
    /// Where it was found, and which one. Not held open: what is open is not told to be removed.
    path: Vec<u8>,
    identity: (u64, u64),
    recursive: bool,
    /// Below the root; the root itself is "".
    paths: HashMap<i32, Vec<u8>>,
    /// To be walked; told: what is in them is told as made.
    pending: VecDeque<(Vec<u8>, bool)>,
    /// The host has been told that it watches.
    begun: bool,
    /// More is there than is told.
    overflow: bool,
    sent: u64,
    /// The host takes events before this offset.
    limit: u64,
    events: Vec<u8>,
}

pub struct Watches {
    watches: HashMap<u32, Watch>,
}

impl Watches {
    pub fn new() -> Watches {
        Watches { watches: HashMap::new() }
    }

    pub fn polls(&self, may_read: bool) -> impl Iterator<Item = (u32, i32)> + '_ {
        let ready = move |one: &Watch| may_read && one.begun && one.pending.is_empty() && one.sent < one.limit;
        self.watches.iter().filter(move |(_, one)| ready(one)).map(|(id, one)| (*id, one.inotify.0))
    }

    /// There is a tree to be walked.
    pub fn is_busy(&self, may_read: bool) -> bool {
        may_read && self.watches.values().any(|one| !one.pending.is_empty() && (!one.begun || one.sent < one.limit))
    }

    /// None for what cannot be understood.
    pub fn start(&mut self, id: u32, payload: &[u8], channel: &mut Channel) -> Option<()> {
        let mut r = Reader::new(payload);
        let (path, recursive, window) = (r.text()?, r.u8()?, r.u32()?);
        if !r.is_at_end() || id == 0 || recursive > 1 || self.watches.contains_key(&id) {
            return None;
        }
        let opened = if self.watches.len() >= MAX_WATCHES { Err(sys::EMFILE) } else { open(&path, recursive != 0, window) };
        match opened {
            Err(errno) => channel.send(wire::CLOSED, id, &errno.to_le_bytes()),
            Ok(watch) => {
                self.watches.insert(id, watch);
            }
        }
        Some(())
    }

    pub fn take(&mut self, id: u32, limit: u64) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.limit = watch.limit.max(limit);
        }
    }

    pub fn close(&mut self, id: u32) {
        if id == 0 {
            self.watches.clear();
        } else {
            self.watches.remove(&id);
        }
    }

    /// Some folders of each tree that is still to be walked.
    pub fn walk(&mut self, channel: &mut Channel) {
        let busy: Vec<u32> = self.watches.iter().filter(|(_, one)| !one.pending.is_empty()).map(|(id, _)| *id).collect();
        for id in busy {
            let outcome = match self.watches.get_mut(&id) {
                Some(watch) if channel.waiting_bytes() < BACKLOG && (!watch.begun || watch.sent < watch.limit) => {
                    watch.walk_some()
                }
                _ => continue,
            };
            match (outcome, self.watches.get_mut(&id)) {
                (Err(errno), _) => self.end(id, errno, channel),
                (Ok(()), Some(watch)) => {
                    if watch.pending.is_empty() && !watch.begun {
                        watch.begun = true;
                        channel.send(wire::WATCHES, id, &[]);
                    }
                    watch.flush(id, channel);
                }
                _ => {}
            }
        }
    }

    pub fn ready(&mut self, id: u32, channel: &mut Channel) {
        let watch = match self.watches.get_mut(&id) {
            Some(watch) if watch.sent < watch.limit && channel.waiting_bytes() < BACKLOG => watch,
            _ => return,
        };
        let gone = watch.read();
        watch.flush(id, channel);
        if gone {
            self.end(id, 0, channel);
        }
    }

    fn end(&mut self, id: u32, errno: i32, channel: &mut Channel) {
        self.watches.remove(&id);
        channel.send(wire::CLOSED, id, &errno.to_le_bytes());
    }
}

fn open(path: &[u8], recursive: bool, window: u32) -> Result<Watch> {
    let root = files::open_path(path, true)?;
    let fd = unsafe { inotify_init1(sys::O_NONBLOCK | sys::O_CLOEXEC) };
    if fd < 0 {
        return Err(sys::errno());
    }
    let mut watch = Watch {
        inotify: Fd(fd),
        path: path.to_vec(),
        identity: sys::identity_of_fd(root.0)?,
        recursive,
        paths: HashMap::new(),
        pending: VecDeque::new(),
        begun: false,
        overflow: false,
        sent: 0,
        limit: window as u64,
        events: Vec::new(),
    };
    watch.add(root.0, Vec::new())?;
    watch.pending.push_back((Vec::new(), false));
    Ok(watch)
}

impl Watch {
    /// Of just what was opened: whatever lies at its path by now.
    fn add(&mut self, fd: c_int, path: Vec<u8>) -> Result<()> {
        let own = c(format!("/proc/self/fd/{}", fd).as_bytes());
        let number = unsafe { inotify_add_watch(self.inotify.0, own.as_ptr() as *const c_char, WANTED) };
        if number < 0 {
            return Err(sys::errno());
        }
        self.paths.insert(number, path);
        Ok(())
    }

    fn walk_some(&mut self) -> Result<()> {
        for _ in 0..FOLDERS_AT_ONCE {
            let (path, told) = match self.pending.pop_front() {
                Some(next) => next,
                None => break,
            };
            if !self.recursive {
                continue;
            }
            match self.walk(&path, told) {
                Ok(()) => {}
                // At the beginning it fails; later what is missing is said to be.
                Err(errno) if !self.begun => return Err(errno),
                Err(_) => self.overflow = true,
            }
            if self.events.len() >= PART {
                break;
            }
        }
        Ok(())
    }

    /// The folders in one: each is watched, and walked later.
    fn walk(&mut self, path: &[u8], told: bool) -> Result<()> {
        let root = match files::open_path(&self.path, true) {
            Ok(root) if sys::identity_of_fd(root.0)? == self.identity => root,
            // That it has gone is told by itself.
            _ => return Ok(()),
        };
        let folder = match open_below(&root, path) {
            Ok(folder) => folder,
            // It has gone, or is none, or another file system.
            Err(sys::ENOENT) | Err(sys::ENOTDIR) | Err(sys::EACCES) | Err(ELOOP) | Err(EXDEV) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        if !path.is_empty() {
            if self.paths.len() >= MAX_FOLDERS {
                return Err(ENOSPC);
            }
            self.add(folder.0, path.to_vec())?;
        }
        let mut full = false;
        files::each_entry(&folder, &mut |name, is_folder| {
            let below = join(path, name);
            if told {
                self.tell(MADE, is_folder, 0, &below);
            }
            if is_folder && self.pending.len() < MAX_FOLDERS {
                self.pending.push_back((below, told));
            } else {
                full |= is_folder;
            }
            true
        })?;
        if full {
            return Err(ENOSPC);
        }
        Ok(())
    }

    /// True: the watch is over.
    fn read(&mut self) -> bool {
        let mut buffer = [0u64; READ / 8];
        let raw = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr() as *mut u8, READ) };
        let length = match sys::read_fd(self.inotify.0, raw) {
            Ok(n) => n,
            Err(_) => return false,
        };
        let mut at = 0;
        let mut gone = false;
        // wd i32, mask u32, cookie u32, length u32, the name with NUL bytes.
        while at + 16 <= length {
            let number = |from: usize| u32::from_ne_bytes([raw[from], raw[from + 1], raw[from + 2], raw[from + 3]]);
            let (wd, mask, cookie, size) = (number(at) as i32, number(at + 4), number(at + 8), number(at + 12) as usize);
            let end = (at + 16 + size).min(length);
            let name = &raw[at + 16..end];
            let name = name[..name.iter().position(|byte| *byte == 0).unwrap_or(name.len())].to_vec();
            at = end;
            gone |= self.event(wd, mask, cookie, &name);
        }
        if gone {
            self.tell(GONE, false, 0, b"");
        }
        gone
    }

    fn event(&mut self, wd: i32, mask: u32, cookie: u32, name: &[u8]) -> bool {
        if mask & IN_Q_OVERFLOW != 0 {
            self.overflow = true;
            // Folders that came meanwhile are not known.
            if self.recursive && !self.pending.iter().any(|(path, _)| path.is_empty()) {
                self.pending.push_back((Vec::new(), false));
            }
            return false;
        }
        let path = match self.paths.get(&wd) {
            Some(path) => path.clone(),
            None => return false,
        };
        let is_root = path.is_empty();
        if mask & (IN_IGNORED | IN_UNMOUNT) != 0 {
            self.paths.remove(&wd);
            return is_root;
        }
        if mask & (IN_DELETE_SELF | IN_MOVE_SELF) != 0 {
            // Of those below it is told by the folder that they were in.
            return is_root;
        }
        let is_folder = mask & IN_ISDIR != 0;
        let below = join(&path, name);
        let kinds = [
            (IN_CREATE, MADE),
            (IN_MODIFY, CHANGED),
            (IN_CLOSE_WRITE, WRITTEN),
            (IN_DELETE, REMOVED),
            (IN_MOVED_FROM, MOVED_FROM),
            (IN_MOVED_TO, MOVED_TO),
            (IN_ATTRIB, ATTRIBUTES),
        ];
        // A watched folder below tells of its own attributes, as the one that it is in does.
        let twice = name.is_empty() && !is_root;
        for (bit, kind) in kinds {
            if mask & bit != 0 && !twice {
                self.tell(kind, is_folder, cookie, &below);
            }
        }
        if is_folder && self.recursive {
            if mask & IN_MOVED_FROM != 0 {
                self.forget(&below);
            }
            if mask & (IN_CREATE | IN_MOVED_TO) != 0 {
                self.pending.push_back((below, mask & IN_CREATE != 0));
            }
        }
        false
    }

    /// It is elsewhere now, with all that is in it.
    fn forget(&mut self, path: &[u8]) {
        let inside = |one: &[u8]| one == path || (one.starts_with(path) && one.get(path.len()) == Some(&b'/'));
        let numbers: Vec<i32> = self.paths.iter().filter(|(_, one)| inside(one)).map(|(number, _)| *number).collect();
        for number in numbers {
            self.paths.remove(&number);
            unsafe { inotify_rm_watch(self.inotify.0, number) };
        }
    }

    fn tell(&mut self, kind: u8, is_folder: bool, cookie: u32, path: &[u8]) {
        if self.events.len() > MAX_EVENTS && kind < OVERFLOW {
            self.overflow = true;
            return;
        }
        self.events.push(kind);
        self.events.push(is_folder as u8);
        self.events.extend_from_slice(&cookie.to_le_bytes());
        wire::put_bytes(&mut self.events, path);
    }

    fn flush(&mut self, id: u32, channel: &mut Channel) {
        if self.overflow && self.begun {
            self.overflow = false;
            self.tell(OVERFLOW, false, 0, b"");
        }
        if self.events.is_empty() || !self.begun {
            return;
        }
        self.sent += self.events.len() as u64;
        channel.send(wire::EVENTS, id, &self.events);
        self.events = Vec::new();
    }
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match (path.is_empty(), name.is_empty()) {
        (_, true) => path.to_vec(),
        (true, _) => name.to_vec(),
        _ => [path, b"/", name].concat(),
    }
}

const ELOOP: i32 = 40;
const EXDEV: i32 = 18;

/// A folder below another, without any link and in the same mount.
fn open_below(root: &Fd, path: &[u8]) -> Result<Fd> {
    const RESOLVE_NO_XDEV: u64 = 0x01;
    const RESOLVE_NO_SYMLINKS: u64 = 0x04;
    const RESOLVE_BENEATH: u64 = 0x08;
    let flags = sys::O_RDONLY | sys::O_DIRECTORY | sys::O_NOFOLLOW | sys::O_NONBLOCK | sys::O_CLOEXEC;
    let how: [u64; 3] = [flags as u32 as u64, 0, RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH];
    let path = c(if path.is_empty() { b"." } else { path });
    let fd = unsafe { sys::syscall(sys::OPENAT2 as c_long, root.0, path.as_ptr(), how.as_ptr(), 24usize) };
    if fd < 0 {
        return Err(sys::errno());
    }
    Ok(Fd(fd as i32))
}
