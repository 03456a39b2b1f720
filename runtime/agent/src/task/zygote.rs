//! The interpreter that stays: it has started, and imported what it was told to; a task gets a fork of it. The program inside is
//! runtime/fncall/zygote.py. It is the container's, no task ever speaks with it; each fork enters the task's namespaces while these are made, drops what
//! it may not have, and waits there for what it is to run. None is used twice.

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

/// u32 uid, u32 gid, the filter, then what the host has for it.
fn whole_setup(plan: &Plan, all: &super::Plan) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&all.uid.to_le_bytes());
    out.extend_from_slice(&all.gid.to_le_bytes());
    wire::put_bytes(&mut out, &all.seccomp);
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
    pub pid: i32,
    socket: Fd,
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
        // What was between it and that fork is nowhere to be seen any more.
        expect(self.socket.0, b'w', FORK_MS)?;
        Ok(Fork { pid, socket })
    }
}

impl Fork {
    /// By the first process of the task's namespaces, whose child it is.
    pub fn end(&self) {
        let _ = sys::send_signal(self.pid, sys::SIGKILL);
        super::step::wait_one(self.pid, 0);
    }

    pub fn go(&self, step: &Step, ends: [i32; 3]) -> Result<()> {
        let mut out = Vec::new();
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
        sys::send_with_fds(self.socket.0, &(out.len() as u32).to_le_bytes(), &ends)?;
        sys::write_all(self.socket.0, &out)
    }
}
