//! The interpreter that stays: it has started, and imported what it was told to; a task gets a fork of it. The program inside is
//! runtime/fncall/zygote.py. It is the container's, no task ever speaks with it; each fork enters the task's namespaces while these are made, drops what
//! it may not have, does once what every script's start does, and waits there for what it is to run. None is used twice. It is the interpreter's
//! child, which tells how it ended, though it belongs to the task's pid namespace: forked twice it could be that of the namespace's first process, at the
//! price of one more copy of the interpreter's memory map for each task.

use std::cell::Cell;

use super::groups::Groups;
use super::step::Step;
use crate::sys::{self, c, Fd, Result, POLLIN};
use crate::wire::{self, Reader};

pub struct Plan {
    /// The interpreter, by its path in the image, and its arguments.
    pub args: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    /// What it reads from descriptor 4: its own program's affair.
    pub setup: Vec<u8>,
}

pub fn parse_plan(r: &mut Reader) -> Option<Plan> {
    let plan = Plan { args: r.list(|r| r.text())?, env: r.list(|r| r.text())?, setup: r.bytes()? };
    if plan.args.is_empty() {
        None
    } else {
        Some(plan)
    }
}

pub struct Zygote {
    socket: Fd,
}

/// Importing takes its time.
const START_MS: i32 = 120_000;
const FORK_MS: i32 = 30_000;

pub fn start(plan: &Plan, all: &super::Plan) -> Result<Zygote> {
    let (socket, theirs) = sys::socket_pair(sys::SOCK_STREAM)?;
    let setup = sys::memfd(b"setup", 1)?;
    sys::write_all(setup.0, &whole_setup(plan, all))?;
    match sys::clone_process(0)? {
        0 => {
            let _ = sys::prctl1(sys::PR_SET_PDEATHSIG, sys::SIGKILL as u64);
            // Above what is given out, so that neither lies on the other.
            let numbers = (sys::dup_from(theirs.0, 20), sys::dup_from(setup.0, 20));
            if let (Ok(channel), Ok(setup)) = numbers {
                let _ = sys::dup_to(channel.0, 3);
                let _ = sys::dup_to(setup.0, 4);
                sys::close_range(5, u32::MAX, false);
                let args: Vec<_> = plan.args.iter().map(|arg| c(arg)).collect();
                let env: Vec<_> = plan.env.iter().map(|entry| c(entry)).collect();
                for path in crate::container::candidates(&plan.args[0], &plan.env) {
                    sys::exec(&path, &args, &env);
                }
            }
            unsafe { sys::_exit(127) }
        }
        _ => {
            drop(theirs);
            expect(socket.0, b'r', START_MS)?;
            Ok(Zygote { socket })
        }
    }
}

/// u32 uid, u32 gid, then what the host has for it.
fn whole_setup(plan: &Plan, all: &super::Plan) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&all.uid.to_le_bytes());
    out.extend_from_slice(&all.gid.to_le_bytes());
    out.extend_from_slice(&plan.setup);
    out
}

fn expect(fd: i32, wanted: u8, ms: i32) -> Result<()> {
    let mut one = [sys::PollFd { fd, events: POLLIN, revents: 0 }];
    let mut byte = [0u8; 1];
    if sys::poll_fds(&mut one, ms) != 1 || sys::read_fd(fd, &mut byte)? != 1 || byte[0] != wanted {
        return Err(EPROTO);
    }
    Ok(())
}
const EPROTO: i32 = 71;

/// One that waits in the namespaces of this process for what it is to run.
pub struct Fork {
    pid: i32,
    socket: Fd,
    /// Of the interpreter, whose child it is: that one tells how it ended.
    control: i32,
    is_over: Cell<bool>,
}

pub struct Exit {
    /// As waitpid has it.
    pub status: i32,
    /// Of it and of those that it waited for.
    pub cpu_us: u64,
}

impl Zygote {
    /// By the first process of a task's namespaces.
    pub fn fork(&self, groups: &Groups) -> Result<Fork> {
        const PIDFD_OPEN: i64 = 434;
        let own = unsafe { sys::syscall(PIDFD_OPEN, sys::own_pid(), 0) };
        if own < 0 {
            return Err(sys::errno());
        }
        let own = Fd(own as i32);
        let (socket, theirs) = sys::socket_pair(sys::SOCK_STREAM)?;
        sys::send_with_fds(self.socket.0, b"f", &[own.0, theirs.0])?;
        drop(theirs);
        expect(socket.0, b'p', FORK_MS)?;
        let mut number = [0u8; 4];
        if sys::read_fd(socket.0, &mut number)? != 4 {
            return Err(EPROTO);
        }
        let pid = i32::from_le_bytes(number);
        groups.put(pid.to_string().as_bytes())?;
        sys::write_all(socket.0, b"k")?;
        expect(socket.0, b'd', FORK_MS)?;
        Ok(Fork { pid, socket, control: self.socket.0, is_over: Cell::new(false) })
    }
}

impl Fork {
    /// By the first process of the task's namespaces. Twice is nothing more.
    pub fn end(&self) -> Result<()> {
        if !self.is_over.get() {
            let _ = sys::send_signal(self.pid, sys::SIGKILL);
            self.wait()?;
        }
        Ok(())
    }

    /// Readable when it has ended.
    pub fn told_at(&self) -> i32 {
        self.control
    }

    /// Once. What it had started and left belongs to the first process of the namespaces then.
    pub fn wait(&self) -> Result<Exit> {
        expect(self.control, b'x', FORK_MS)?;
        self.is_over.set(true);
        let mut told = [0u8; 12];
        if sys::read_fd(self.control, &mut told)? != told.len() {
            return Err(EPROTO);
        }
        let (status, cpu) = told.split_at(4);
        Ok(Exit {
            status: i32::from_le_bytes(status.try_into().unwrap_or_default()),
            cpu_us: u64::from_le_bytes(cpu.try_into().unwrap_or_default()),
        })
    }

    pub fn go(&self, step: &Step, ends: [i32; 3]) -> Result<()> {
        let mut out = vec![0u8; 4];
        for list in [&step.args, &step.env] {
            out.extend_from_slice(&(list.len() as u32).to_le_bytes());
            for one in list {
                wire::put_bytes(&mut out, one);
            }
        }
        wire::put_bytes(&mut out, &step.cwd);
        out.extend_from_slice(&(step.limits.len() as u32).to_le_bytes());
        for (resource, soft, hard) in &step.limits {
            out.extend_from_slice(&resource.to_le_bytes());
            out.extend_from_slice(&soft.to_le_bytes());
            out.extend_from_slice(&hard.to_le_bytes());
        }
        let length = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&length.to_le_bytes());
        let sent = sys::send_with_fds(self.socket.0, &out, &ends)?;
        sys::write_all(self.socket.0, &out[sent..])
    }
}
