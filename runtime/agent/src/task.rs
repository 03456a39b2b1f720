//! `dsec-agent task DIRS`: the first process of a container of a FnCall pool (runtime/fncall). It takes one task at a time from the host, over
//! the socket that is its standard output.
//!
//! For each task there is a process of its own in fresh namespaces (task/place.rs), made before the task comes, which speaks with the host itself
//! while this one waits. When it ends, the kernel has ended all that was in its pid namespace; then is looked at what could be left (`trace`),
//! and the host is told. Nothing of one task is in the next one's: not its mounts, not its memory, no process, no group.
//!
//! DIRS are descriptors of the container's own control groups, below which it makes one for each task. No task ever has one of them, nor
//! the socket; and none has a capability, or could name this process.

mod fetch;
mod groups;
mod place;
mod step;
mod work;
mod zygote;

use crate::container::{At, Stage, Step};
use crate::sys::{self, Fd};
use crate::wire::{self, Frame, Reader};

use groups::GroupPlan;

/// What all tasks of this container have in common, as the host says it once.
pub struct Plan {
    pub uid: u32,
    pub gid: u32,
    /// Of all private folders together.
    pub tmpfs_bytes: u64,
    pub inodes: u64,
    pub namespaces: u64,
    /// Path and mode: empty and the task's own each time.
    pub private: Vec<(Vec<u8>, u32)>,
    pub masked: Vec<Vec<u8>>,
    pub read_only: Vec<Vec<u8>>,
    pub groups: GroupPlan,
    pub seccomp: Vec<u8>,
    pub zygote: Option<zygote::Plan>,
}

fn parse_plan(payload: &[u8]) -> Option<Plan> {
    let mut r = Reader::new(payload);
    let plan = Plan {
        uid: r.u32()?,
        gid: r.u32()?,
        tmpfs_bytes: r.u64()?,
        inodes: r.u64()?,
        namespaces: r.u64()?,
        private: r.list(|r| Some((r.text()?, r.u32()?)))?,
        masked: r.list(|r| r.text())?,
        read_only: r.list(|r| r.text())?,
        groups: groups::parse_plan(&mut r)?,
        seccomp: r.bytes()?,
        zygote: match r.u8()? {
            0 => None,
            _ => Some(zygote::parse_plan(&mut r)?),
        },
    };
    let whole = r.is_at_end() && plan.seccomp.len() % 8 == 0 && plan.seccomp.len() / 8 <= 4096;
    if whole {
        Some(plan)
    } else {
        None
    }
}

/// How the process of a task ends when the host has gone.
const HOST_GONE: i32 = 90;

pub fn main(args: &[Vec<u8>]) -> i32 {
    let _ = sys::prctl1(sys::PR_SET_DUMPABLE, 0);
    sys::name_process(b"dsec-task\0");
    sys::default_signals();
    sys::ignore_signal(sys::SIGPIPE);
    sys::close_range(3, u32::MAX, true);
    let channel = match sys::dup_from(1, 3) {
        Ok(fd) => fd,
        Err(_) => return 1,
    };
    let dirs: Vec<i32> = String::from_utf8_lossy(&args[2]).split(',').filter_map(|one| one.parse().ok()).collect();
    let mut hello = wire::VERSION.to_le_bytes().to_vec();
    wire::put_bytes(&mut hello, crate::BUILD.as_bytes());
    let mut link = Link { fd: channel, held: Vec::new() };
    if link.send(wire::HELLO, &hello).is_err() {
        return 1;
    }
    let plan = match link.receive() {
        Some(Frame { kind: wire::CONFIGURE, payload, .. }) => match parse_plan(&payload) {
            Some(plan) => plan,
            None => return 1,
        },
        _ => return 1,
    };
    match serve(&mut link, &plan, &dirs) {
        Ok(()) => 0,
        Err(failure) => {
            let _ = link.send(wire::TASK_FAILED, &crate::container::failure_payload(&failure));
            1
        }
    }
}

fn serve(link: &mut Link, plan: &Plan, dirs: &[i32]) -> Step {
    streams_to_nothing().at(Stage::Stdio, b"/dev/null")?;
    place::seal_root().at(Stage::Mount, b"/")?;
    let zygote = match &plan.zygote {
        None => None,
        Some(zygote) => Some(zygote::start(zygote, plan).at(Stage::Exec, b"the interpreter that stays")?),
    };
    let own = Own { mounts: mounts(), processes: processes().len() };
    for number in 0u64.. {
        let groups = groups::make(&plan.groups, dirs, number).at(Stage::Cgroup, b"of a task")?;
        match sys::clone_process(plan.namespaces).at(Stage::Clone, b"of a task")? {
            0 => {
                let code = match work::run(link, plan, &groups, zygote.as_ref()) {
                    Ok(true) => 0,
                    Ok(false) => HOST_GONE,
                    Err(failure) => {
                        let _ = link.send(wire::TASK_FAILED, &crate::container::failure_payload(&failure));
                        1
                    }
                };
                unsafe { sys::_exit(code) }
            }
            pid => {
                let status = wait_for(pid);
                if status == HOST_GONE << 8 {
                    return Ok(());
                }
                let mut problem = groups.remove();
                if status != 0 {
                    problem = Some(format!("the process of the task ended with status {}", status));
                }
                if problem.is_none() {
                    problem = own.trace();
                }
                let mut payload = Vec::new();
                wire::put_bytes(&mut payload, problem.as_deref().unwrap_or("").as_bytes());
                link.send(wire::TASK_CLEANED, &payload).at(Stage::Stdio, b"the host")?;
                if problem.is_some() {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// What is here when no task is.
struct Own {
    mounts: Vec<u8>,
    processes: usize,
}

impl Own {
    /// What a task has left, in words.
    fn trace(&self) -> Option<String> {
        let mut found = processes();
        // What forked for the interpreter that stays is reaped by that one, in its time.
        for _ in 0..2000 {
            if found.len() <= self.processes {
                break;
            }
            sys::poll_fds(&mut [], 1);
            found = processes();
        }
        if found.len() > self.processes {
            return Some(format!("{} processes are left", found.len() - self.processes));
        }
        if found.len() < self.processes {
            return Some("the interpreter that stays has ended".to_string());
        }
        if mounts() != self.mounts {
            return Some("mounts have changed".to_string());
        }
        None
    }
}

fn mounts() -> Vec<u8> {
    sys::read_file(b"/proc/self/mountinfo", 1 << 20).unwrap_or_default()
}

/// Of the whole container, whatever pid namespace below they are in.
fn processes() -> Vec<u64> {
    let mut found = Vec::new();
    for name in fetch::names_in(b"/proc") {
        if let Some(number) = std::str::from_utf8(&name).ok().and_then(|text| text.parse().ok()) {
            found.push(number);
        }
    }
    found
}

/// Whatever else ends meanwhile is reaped.
fn wait_for(pid: i32) -> i32 {
    loop {
        match step::wait_one(-1, 0) {
            Some(ended) if ended.pid == pid => return ended.status,
            Some(_) => {}
            None => return -1,
        }
    }
}

fn streams_to_nothing() -> sys::Result<()> {
    let nothing = sys::open_at(b"/dev/null", sys::O_RDWR, 0)?;
    // What the interpreter that stays says when it cannot start goes to whoever started the container.
    for number in 0..2 {
        sys::dup_to(nothing.0, number)?;
    }
    Ok(())
}

/// Frames over a socket that only one process at a time works with: it waits.
pub struct Link {
    pub fd: Fd,
    /// Goes with the next one, in one write.
    held: Vec<u8>,
}

impl Link {
    pub fn send(&mut self, kind: u8, payload: &[u8]) -> sys::Result<()> {
        self.hold(kind, payload);
        let all = std::mem::take(&mut self.held);
        sys::write_all(self.fd.0, &all)
    }

    pub fn hold(&mut self, kind: u8, payload: &[u8]) {
        wire::put_frame(&mut self.held, kind, 0, payload);
    }

    /// None: the host has gone, or sent what no frame can be.
    pub fn receive(&mut self) -> Option<Frame> {
        let mut head = [0u8; wire::HEADER];
        read_whole(self.fd.0, &mut head)?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if length > wire::MAX_PAYLOAD {
            return None;
        }
        let mut payload = vec![0u8; length];
        read_whole(self.fd.0, &mut payload)?;
        Some(Frame { kind: head[4], id: 0, payload })
    }
}

fn read_whole(fd: i32, mut buffer: &mut [u8]) -> Option<()> {
    while !buffer.is_empty() {
        match sys::read_fd(fd, buffer) {
            Ok(n) if n > 0 => buffer = &mut buffer[n..],
            _ => return None,
        }
    }
    Some(())
}
