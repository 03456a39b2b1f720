//! Files that a task has made, for whoever asked for it: those that patterns name, up to a number and a size. Read with the rights of the task's
//! user, so a link or a path leads no further than the task itself could have read.

use std::collections::BTreeSet;

use super::{Link, Plan};
use crate::sys::{self, Result};
use crate::wire::{self, Reader};

pub struct Wanted {
    /// Where relative patterns begin.
    pub cwd: Vec<u8>,
    /// `*` and `?` within a name, `**` across folders.
    pub patterns: Vec<Vec<u8>>,
    pub max_files: u32,
    pub max_bytes: u64,
}

pub fn parse(r: &mut Reader) -> Option<Wanted> {
    let wanted = Wanted { cwd: r.text()?, patterns: r.list(|r| r.text())?, max_files: r.u32()?, max_bytes: r.u64()? };
    Some(wanted)
}

const MAX_VISITED: usize = 20_000;
const MAX_DEPTH: usize = 32;
const PART: usize = 1 << 20;

/// What went wrong, in words.
pub fn give(link: &mut Link, plan: &Plan, wanted: &Wanted) -> String {
    if wanted.patterns.is_empty() {
        return String::new();
    }
    let mut left = wanted.max_bytes;
    let mut files = 0;
    let mut visited = 0;
    let mut seen = BTreeSet::new();
    for pattern in &wanted.patterns {
        let whole = if pattern.starts_with(b"/") { pattern.clone() } else { [&wanted.cwd[..], b"/", pattern].concat() };
        let mut found = Vec::new();
        let _ = as_user(plan, || {
            find(b"", &parts(&whole), &mut found, &mut visited, 0);
            Ok(())
        });
        found.sort();
        found.dedup();
        for path in found {
            // Another pattern had it.
            if !seen.insert(path.clone()) {
                continue;
            }
            if files == wanted.max_files {
                return format!("more than {} files match", wanted.max_files);
            }
            match give_one(link, plan, &path, &mut left) {
                Ok(true) => files += 1,
                Ok(false) => return format!("they are larger than {} bytes together", wanted.max_bytes),
                Err(_) => {}
            }
        }
    }
    if visited >= MAX_VISITED {
        return format!("only the first {} names were looked at", MAX_VISITED);
    }
    String::new()
}

fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    let named = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let mut parts: Vec<Vec<u8>> = named.map(|part| part.to_vec()).collect();
    // Twice is not more, and would be gone through as often as there are ways to share the folders between them.
    parts.dedup_by(|one, before| &one[..] == b"**" && &before[..] == b"**");
    parts
}

fn find(at: &[u8], rest: &[Vec<u8>], found: &mut Vec<Vec<u8>>, visited: &mut usize, depth: usize) {
    let head = match rest.first() {
        None => return,
        Some(head) => head,
    };
    if depth > MAX_DEPTH || *visited >= MAX_VISITED || *head == b".." {
        return;
    }
    if &head[..] == b"**" {
        find(at, &rest[1..], found, visited, depth);
        for name in names_in(if at.is_empty() { b"/" } else { at }) {
            *visited += 1;
            let path = [at, b"/", &name].concat();
            if kind_of(&path) == sys::S_IFDIR {
                find(&path, rest, found, visited, depth + 1);
            } else if rest.len() == 1 && kind_of(&path) == S_IFREG {
                found.push(path);
            }
        }
        return;
    }
    let names = if head.iter().any(|byte| matches!(byte, b'*' | b'?')) {
        names_in(if at.is_empty() { b"/" } else { at })
    } else {
        vec![head.clone()]
    };
    for name in names {
        *visited += 1;
        if !matches(head, &name) {
            continue;
        }
        let path = [at, b"/", &name].concat();
        let kind = kind_of(&path);
        if rest.len() == 1 && kind == S_IFREG {
            found.push(path);
        } else if rest.len() > 1 && kind == sys::S_IFDIR {
            find(&path, &rest[1..], found, visited, depth + 1);
        }
    }
}

const S_IFREG: u32 = 0o100000;

fn kind_of(path: &[u8]) -> u32 {
    sys::mode_of(path, false).map_or(0, |mode| mode & sys::S_IFMT)
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    // Back to the last star when something does not fit.
    let (mut p, mut n, mut star, mut from) = (0, 0, None, 0);
    while n < name.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            star = Some(p);
            from = n;
            p += 1;
        } else if p < pattern.len() && (pattern[p] == b'?' || pattern[p] == name[n]) {
            p += 1;
            n += 1;
        } else if let Some(at) = star {
            p = at + 1;
            from += 1;
            n = from;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// How a part of a file lies to those before.
const FIRST: u8 = 0;
const MORE: u8 = 1;
/// It could not be given whole: what was given is none.
const TAKEN_BACK: u8 = 2;

/// False: there is no room for it.
fn give_one(link: &mut Link, plan: &Plan, path: &[u8], left: &mut u64) -> Result<bool> {
    let done = give_parts(link, plan, path, left);
    if !matches!(done, Ok(true)) {
        let mut payload = vec![TAKEN_BACK];
        wire::put_bytes(&mut payload, path);
        wire::put_bytes(&mut payload, b"");
        link.send(wire::TASK_FETCHED, &payload)?;
    }
    done
}

fn give_parts(link: &mut Link, plan: &Plan, path: &[u8], left: &mut u64) -> Result<bool> {
    let file = as_user(plan, || sys::open_at(path, sys::O_RDONLY | sys::O_NOFOLLOW | sys::O_NONBLOCK, 0))?;
    let mut buffer = vec![0u8; PART];
    let mut first = true;
    loop {
        let n = sys::read_fd(file.0, &mut buffer)?;
        if n as u64 > *left {
            return Ok(false);
        }
        *left -= n as u64;
        if n == 0 && !first {
            return Ok(true);
        }
        let mut payload = vec![if first { FIRST } else { MORE }];
        wire::put_bytes(&mut payload, path);
        wire::put_bytes(&mut payload, &buffer[..n]);
        link.send(wire::TASK_FETCHED, &payload)?;
        first = false;
        if n == 0 {
            return Ok(true);
        }
    }
}

#[cfg(target_arch = "x86_64")]
const SETFSUID: i64 = 122;
#[cfg(target_arch = "x86_64")]
const SETFSGID: i64 = 123;
#[cfg(target_arch = "aarch64")]
const SETFSUID: i64 = 151;
#[cfg(target_arch = "aarch64")]
const SETFSGID: i64 = 152;
#[cfg(target_arch = "x86_64")]
const GETDENTS64: i64 = 217;
#[cfg(target_arch = "aarch64")]
const GETDENTS64: i64 = 61;

/// Files are reached with the task's user's rights: capabilities over files go with the change.
pub fn as_user<T>(plan: &Plan, work: impl FnOnce() -> Result<T>) -> Result<T> {
    unsafe {
        sys::syscall(SETFSGID, plan.gid);
        sys::syscall(SETFSUID, plan.uid);
    }
    let done = work();
    unsafe {
        sys::syscall(SETFSUID, 0);
        sys::syscall(SETFSGID, 0);
    }
    done
}

/// Without `.` and `..`; nothing where it cannot be read.
pub fn names_in(folder: &[u8]) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let fd = match sys::open_at(folder, sys::O_RDONLY | sys::O_DIRECTORY | sys::O_NOFOLLOW, 0) {
        Err(_) => return names,
        Ok(fd) => fd,
    };
    let mut buffer = vec![0u8; 32 << 10];
    loop {
        let n = unsafe { sys::syscall(GETDENTS64, fd.0, buffer.as_mut_ptr(), buffer.len()) };
        if n <= 0 {
            return names;
        }
        let mut at = 0;
        while at + 19 <= n as usize {
            let length = u16::from_le_bytes([buffer[at + 16], buffer[at + 17]]) as usize;
            let name: Vec<u8> = buffer[at + 19..at + length].iter().copied().take_while(|byte| *byte != 0).collect();
            if name != b"." && name != b".." {
                names.push(name);
            }
            at += length;
            if names.len() > MAX_VISITED {
                return names;
            }
        }
    }
}
