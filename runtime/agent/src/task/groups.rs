//! The control group of one task in each hierarchy that counts something of it, made below the container's own, and removed with it.

use std::cell::Cell;

use crate::sys::{self, c, Fd, Result};
use crate::wire::Reader;

/// Into a file of a task's group: hierarchy (an index of `GroupPlan::dirs`), name, value.
#[derive(PartialEq)]
pub struct Write {
    pub dir: u32,
    pub file: Vec<u8>,
    pub value: Vec<u8>,
}

/// Which of the container's groups count.
pub struct GroupPlan {
    /// Numbers of the container's hierarchies that a task gets a group in.
    pub dirs: Vec<u32>,
    /// Hierarchy and file: where the peak is read (and reset), how often memory ran out, and how much processor time was used.
    pub peak: Option<(u32, Vec<u8>)>,
    pub killed: Option<(u32, Vec<u8>)>,
    pub cpu: Option<(u32, Vec<u8>)>,
    /// What most tasks are limited to: written before one comes.
    pub usual: Vec<Write>,
}

pub fn parse_plan(r: &mut Reader) -> Option<GroupPlan> {
    let dirs = r.list(|r| r.u32())?;
    let mut place = || -> Option<Option<(u32, Vec<u8>)>> {
        let (dir, file) = (r.u32()?, r.text()?);
        Some(if file.is_empty() { None } else { Some((dir, file)) })
    };
    let (peak, killed, cpu) = (place()?, place()?, place()?);
    Some(GroupPlan { dirs, peak, killed, cpu, usual: parse_writes(r)? })
}

pub fn parse_writes(r: &mut Reader) -> Option<Vec<Write>> {
    r.list(|r| Some(Write { dir: r.u32()?, file: r.text()?, value: r.bytes()? }))
}

pub struct Groups<'a> {
    made: Vec<Made>,
    /// Open for as long as the group is there: a peak that a v2 kernel forgets it forgets for whoever reads by the same descriptor.
    peak: Option<Fd>,
    killed: Option<Fd>,
    cpu: Option<Fd>,
    plan: &'a GroupPlan,
    /// The limits are other ones than the usual.
    is_changed: Cell<bool>,
}

struct Made {
    dir: u32,
    above: i32,
    name: Vec<u8>,
    folder: Fd,
    /// What "0" is written into to be in it.
    entry: Fd,
}

pub fn make<'a>(plan: &'a GroupPlan, dirs: &[i32], number: u64) -> Result<Groups<'a>> {
    let mut made = Vec::new();
    for dir in &plan.dirs {
        let above = *dirs.get(*dir as usize).ok_or(sys::EINVAL)?;
        let name = format!("t{}", number).into_bytes();
        make_folder(above, &name)?;
        let folder = open_below(above, &name, sys::O_RDONLY | sys::O_DIRECTORY)?;
        let entry = match open_below(folder.0, b"tasks", sys::O_WRONLY) {
            Err(sys::ENOENT) => open_below(folder.0, b"cgroup.procs", sys::O_WRONLY)?,
            opened => opened?,
        };
        made.push(Made { dir: *dir, above, name, folder, entry });
    }
    let open = |place: &Option<(u32, Vec<u8>)>, flags: i32| {
        let (dir, file) = place.as_ref()?;
        let one = made.iter().find(|one| one.dir == *dir)?;
        open_below(one.folder.0, file, flags).ok()
    };
    let (peak, killed, cpu) = (
        open(&plan.peak, sys::O_RDWR).or_else(|| open(&plan.peak, sys::O_RDONLY)),
        open(&plan.killed, sys::O_RDONLY),
        open(&plan.cpu, sys::O_RDONLY),
    );
    let groups = Groups { made, peak, killed, cpu, plan, is_changed: Cell::new(false) };
    groups.write_all(&plan.usual)?;
    Ok(groups)
}

impl Groups<'_> {
    /// By the process itself, of one thread.
    pub fn enter(&self) -> Result<()> {
        self.put(b"0")
    }

    pub fn put(&self, pid: &[u8]) -> Result<()> {
        for one in &self.made {
            sys::write_fd(one.entry.0, pid)?;
        }
        Ok(())
    }

    fn folder(&self, dir: u32) -> Option<i32> {
        self.made.iter().find(|one| one.dir == dir).map(|one| one.folder.0)
    }

    pub fn write(&self, writes: &[Write]) -> Result<()> {
        if !self.is_changed.get() && writes == &self.plan.usual[..] {
            return Ok(());
        }
        self.is_changed.set(true);
        self.write_all(writes)
    }

    fn write_all(&self, writes: &[Write]) -> Result<()> {
        for one in writes {
            let folder = self.folder(one.dir).ok_or(sys::EINVAL)?;
            let file = open_below(folder, &one.file, sys::O_WRONLY)?;
            sys::write_fd(file.0, &one.value)?;
        }
        Ok(())
    }

    /// From here on the peak is that of what comes, where the kernel can forget one.
    pub fn forget_peak(&self) {
        if let Some(file) = &self.peak {
            let _ = sys::write_fd(file.0, b"0");
        }
    }

    pub fn peak_bytes(&self) -> u64 {
        number_in(&self.peak, b"")
    }
    /// How often the kernel ended a process for want of memory.
    pub fn killed(&self) -> u64 {
        number_in(&self.killed, b"oom_kill ")
    }
    /// Of all that ran in it; None where nothing counts it.
    pub fn cpu_us(&self) -> Option<u64> {
        match &self.plan.cpu {
            None => None,
            // Nanoseconds, in v1.
            Some((_, file)) if &file[..] == b"cpuacct.usage" => Some(number_in(&self.cpu, b"") / 1000),
            Some(_) => Some(number_in(&self.cpu, b"usage_usec ")),
        }
    }

    /// When nobody is in them. What is wrong, in words.
    pub fn remove(self) -> Option<String> {
        for one in self.made {
            let name = c(&one.name);
            const AT_REMOVEDIR: i32 = 0x200;
            let mut tries = 0;
            // Those that were killed leave it a moment after they are reaped.
            while unsafe { sys::syscall(UNLINKAT, one.above, name.as_ptr(), AT_REMOVEDIR) } < 0 {
                let errno = sys::errno();
                if errno != sys::EBUSY || tries == 2000 {
                    return Some(format!("its control group stays: errno {}", errno));
                }
                tries += 1;
                sys::poll_fds(&mut [], 1);
            }
        }
        None
    }
}

#[cfg(target_arch = "x86_64")]
const UNLINKAT: i64 = 263;
#[cfg(target_arch = "aarch64")]
const UNLINKAT: i64 = 35;
#[cfg(target_arch = "x86_64")]
const MKDIRAT: i64 = 258;
#[cfg(target_arch = "aarch64")]
const MKDIRAT: i64 = 34;
#[cfg(target_arch = "x86_64")]
const PREAD64: i64 = 17;
#[cfg(target_arch = "aarch64")]
const PREAD64: i64 = 67;
#[cfg(target_arch = "x86_64")]
const OPENAT: i64 = 257;
#[cfg(target_arch = "aarch64")]
const OPENAT: i64 = 56;

fn make_folder(above: i32, name: &[u8]) -> Result<()> {
    let name = c(name);
    match unsafe { sys::syscall(MKDIRAT, above, name.as_ptr(), 0o755) } {
        0 => Ok(()),
        _ => Err(sys::errno()),
    }
}

pub fn open_below(folder: i32, name: &[u8], flags: i32) -> Result<Fd> {
    let name = c(name);
    let fd = unsafe { sys::syscall(OPENAT, folder, name.as_ptr(), flags | sys::O_CLOEXEC, 0) };
    if fd < 0 {
        Err(sys::errno())
    } else {
        Ok(Fd(fd as i32))
    }
}

/// Of the line that begins with `key`; 0 where it cannot be read.
fn number_in(file: &Option<Fd>, key: &[u8]) -> u64 {
    let mut part = [0u8; 4096];
    let n = match file {
        None => return 0,
        Some(file) => unsafe { sys::syscall(PREAD64, file.0, part.as_mut_ptr(), part.len(), 0u64) },
    };
    let line = part[..n.max(0) as usize].split(|byte| *byte == b'\n').find(|line| line.starts_with(key)).unwrap_or(b"");
    std::str::from_utf8(&line[key.len().min(line.len())..]).ok().and_then(|one| one.trim().parse().ok()).unwrap_or(0)
}
