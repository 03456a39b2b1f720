//! One program of a task (a compiler, what was compiled, an interpreter): started, fed, listened to, held to its limits, and ended with all
//! that it started. Runs in the first process of the task's namespaces, which is nobody's to signal.

use super::groups::{self, Groups, Write};
use super::zygote::Fork;
use super::Plan;
use crate::container::{candidates, Stage};
use crate::sys::{self, c, Fd, PollFd, RLimit, SockFprog, POLLIN, POLLOUT};
use crate::wire::Reader;

pub struct Step {
    /// By the interpreter that stays: `args` are its script and its arguments.
    pub forked: bool,
    pub args: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    pub cwd: Vec<u8>,
    pub stdin: Vec<u8>,
    pub wall_us: u64,
    /// 0: without end.
    pub cpu_us: u64,
    /// Of each stream: what is kept.
    pub output_bytes: u64,
    /// Of each stream: what it may write at all.
    pub written_bytes: u64,
    pub limits: Vec<(u32, u64, u64)>,
    pub writes: Vec<Write>,
}

pub fn parse(r: &mut Reader) -> Option<Step> {
    Some(Step {
        forked: r.u8()? != 0,
        args: r.list(|r| r.text())?,
        env: r.list(|r| r.text())?,
        cwd: r.text()?,
        stdin: r.bytes()?,
        wall_us: r.u64()?,
        cpu_us: r.u64()?,
        output_bytes: r.u64()?,
        written_bytes: r.u64()?,
        limits: r.list(|r| Some((r.u32()?, r.u64()?, r.u64()?)))?,
        writes: groups::parse_writes(r)?,
    })
}

/// Why it was ended, if it did not end by itself.
#[derive(Clone, Copy, PartialEq)]
#[repr(u8)]
pub enum Reason {
    None = 0,
    Wall = 1,
    Cpu = 2,
    Memory = 3,
    Output = 4,
}

pub struct Outcome {
    pub status: i32,
    pub reason: Reason,
    pub wall_us: u64,
    pub cpu_us: u64,
    pub peak_bytes: u64,
    pub stdout: Stream,
    pub stderr: Stream,
}

impl Outcome {
    fn too_large() -> Outcome {
        let (stdout, stderr) = (Stream::default(), Stream::default());
        let reason = Reason::Memory;
        Outcome { status: sys::SIGKILL, reason, wall_us: 0, cpu_us: 0, peak_bytes: 0, stdout, stderr }
    }
}

#[derive(Default)]
pub struct Stream {
    pub kept: Vec<u8>,
    pub total: u64,
}

/// The step as FAILED tells it, and errno.
pub type Failed = (u8, i32);
const EXEC: u8 = Stage::Exec as u8;

fn at(stage: Stage) -> impl Fn(i32) -> Failed {
    move |errno| (stage as u8, errno)
}

/// Processor time of a group is asked for that often, where it is limited.
const CPU_ROUND_MS: i32 = 20;

/// `begin` is called before anything of the step runs, after all that can fail before that.
pub fn run(
    step: &Step,
    plan: &Plan,
    groups: &Groups,
    signals: i32,
    fork: Option<&Fork>,
    begin: impl FnOnce() -> sys::Result<()>,
) -> std::result::Result<Outcome, Failed> {
    // Before the limits are written: a v2 group that holds more already (a fork of the interpreter) is ended by that.
    let killed_before = groups.killed();
    match groups.write(&step.writes) {
        Ok(()) => {}
        // What a step before has left takes more than this one may have.
        Err(sys::EBUSY) => return Ok(Outcome::too_large()),
        Err(errno) => return Err((Stage::Cgroup as u8, errno)),
    }
    groups.forget_peak();
    let pipe = || sys::make_pipe().map_err(at(Stage::Stdio));
    let ((in_end, input), (output, out_end), (errors, err_end)) = (pipe()?, pipe()?, pipe()?);
    for end in [&in_end, &out_end, &err_end] {
        let _ = sys::change_owner(end.0, plan.uid, plan.gid);
    }
    begin().map_err(at(Stage::Stdio))?;
    let cpu_before = groups.cpu_us();
    let used_before = children_us();
    let began = now_us();
    let pid = match fork {
        // Nobody's child here.
        Some(fork) => {
            if let Err(errno) = fork.go(step, [in_end.0, out_end.0, err_end.0]) {
                if groups.killed() > killed_before {
                    return Ok(Outcome::too_large());
                }
                return Err((Stage::Exec as u8, errno));
            }
            0
        }
        None => start(step, plan, groups, [in_end.0, out_end.0, err_end.0])?,
    };
    drop((in_end, out_end, err_end));
    for fd in [&input, &output, &errors] {
        sys::set_nonblocking(fd.0);
    }
    let mut run = Run {
        step,
        input: if step.stdin.is_empty() { None } else { Some(input) },
        written: 0,
        streams: [(Some(output), Stream::default()), (Some(errors), Stream::default())],
        reason: Reason::None,
        cpu_asked_at: began,
    };
    let mut status = None;
    let mut forked_us = 0;
    let mut ended = |fork: &Fork| -> std::result::Result<i32, Failed> {
        let exit = fork.wait().map_err(at(Stage::Exec))?;
        forked_us = exit.cpu_us;
        Ok(exit.status)
    };
    while status.is_none() {
        let is_told = run.wait(signals, fork.map_or(-1, Fork::told_at), began, || match (cpu_before, groups.cpu_us()) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => 0,
        });
        while sys::next_signal(signals).is_some() {}
        while let Some(ended) = wait_one(-1, 1) {
            if ended.pid == pid {
                status = Some(ended.status);
            }
        }
        if let (Some(fork), true) = (fork, is_told) {
            status = Some(ended(fork)?);
        }
        if run.reason != Reason::None && status.is_none() {
            end_all();
            if let Some(fork) = fork {
                status = Some(ended(fork)?);
            }
            while let Some(ended) = wait_one(-1, 0) {
                if ended.pid == pid {
                    status = Some(ended.status);
                }
            }
            break;
        }
    }
    let wall_us = now_us() - began;
    // With it goes whatever it has left running.
    end_all();
    while wait_one(-1, 0).is_some() {}
    run.drain();
    if groups.killed() > killed_before {
        run.reason = Reason::Memory;
    }
    let [(_, stdout), (_, stderr)] = run.streams;
    let reaped_us = children_us() - used_before;
    let cpu_us = match (cpu_before, groups.cpu_us()) {
        (Some(before), Some(now)) => reaped_us.max(now.saturating_sub(before)),
        // With what a fork used before there was a task: nothing else counts it.
        _ => reaped_us + forked_us,
    };
    const SIGXCPU: i32 = 24;
    let status = status.unwrap_or(sys::SIGKILL);
    if run.reason == Reason::None && step.cpu_us > 0 && (status & 0x7f == SIGXCPU || cpu_us > step.cpu_us) {
        run.reason = Reason::Cpu;
    }
    Ok(Outcome { status, reason: run.reason, wall_us, cpu_us, peak_bytes: groups.peak_bytes(), stdout, stderr })
}

struct Run<'a> {
    step: &'a Step,
    input: Option<Fd>,
    written: usize,
    streams: [(Option<Fd>, Stream); 2],
    reason: Reason,
    cpu_asked_at: u64,
}

impl<'a> Run<'a> {
    /// Whether `told` can be read.
    fn wait(&mut self, signals: i32, told: i32, began: u64, cpu_us: impl Fn() -> u64) -> bool {
        let used = now_us() - began;
        if used >= self.step.wall_us {
            self.reason = Reason::Wall;
            return false;
        }
        let left_ms = ((self.step.wall_us - used) / 1000 + 1).min(60_000) as i32;
        let round_ms = if self.step.cpu_us > 0 { left_ms.min(CPU_ROUND_MS) } else { left_ms };
        let number = |fd: &Option<Fd>| fd.as_ref().map_or(-1, |fd| fd.0);
        let mut fds = [
            PollFd { fd: signals, events: POLLIN, revents: 0 },
            PollFd { fd: number(&self.streams[0].0), events: POLLIN, revents: 0 },
            PollFd { fd: number(&self.streams[1].0), events: POLLIN, revents: 0 },
            PollFd { fd: number(&self.input), events: POLLOUT, revents: 0 },
            PollFd { fd: told, events: POLLIN, revents: 0 },
        ];
        sys::poll_fds(&mut fds, round_ms);
        // By the clock: one that writes all the time never lets the wait run out.
        let now = now_us();
        if self.step.cpu_us > 0 && now - self.cpu_asked_at >= CPU_ROUND_MS as u64 * 1000 {
            self.cpu_asked_at = now;
            if cpu_us() > self.step.cpu_us {
                self.reason = Reason::Cpu;
            }
        }
        for i in 0..2 {
            if fds[i + 1].revents != 0 && !self.read(i, 16) {
                self.streams[i].0 = None;
            }
        }
        if fds[3].revents != 0 {
            self.feed();
        }
        fds[4].revents != 0
    }

    /// False: nobody has it open any more. `rounds`: one that never stops writing must not keep us.
    fn read(&mut self, i: usize, rounds: usize) -> bool {
        let (fd, stream) = &mut self.streams[i];
        let fd = match fd {
            None => return false,
            Some(fd) => fd.0,
        };
        let mut part = [0u8; 16 << 10];
        for _ in 0..rounds {
            match sys::read_fd(fd, &mut part) {
                Ok(0) => return false,
                Ok(n) => {
                    let room = (self.step.output_bytes as usize).saturating_sub(stream.kept.len());
                    stream.kept.extend_from_slice(&part[..n.min(room)]);
                    stream.total += n as u64;
                    if stream.total > self.step.written_bytes {
                        self.reason = Reason::Output;
                        return true;
                    }
                }
                Err(sys::EAGAIN) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// All that is in the pipes: nobody writes any more.
    fn drain(&mut self) {
        for i in 0..2 {
            self.read(i, 256);
        }
    }

    fn feed(&mut self) {
        let done = match &self.input {
            None => true,
            Some(fd) => match sys::write_fd(fd.0, &self.step.stdin[self.written..]) {
                Ok(n) => {
                    self.written += n;
                    self.written == self.step.stdin.len()
                }
                Err(sys::EAGAIN) => false,
                // It does not want any more.
                Err(_) => true,
            },
        };
        if done {
            self.input = None;
        }
    }
}

/// Every process of the namespace but this one.
pub fn end_all() {
    let _ = sys::send_signal(-1, sys::SIGKILL);
}

fn start(step: &Step, plan: &Plan, groups: &Groups, ends: [i32; 3]) -> std::result::Result<i32, Failed> {
    let (status, child_status) = sys::make_pipe().map_err(at(Stage::Stdio))?;
    match sys::clone_process(0).map_err(at(Stage::Clone))? {
        0 => {
            let (stage, errno) = match prepare(step, plan, groups, ends) {
                Ok(()) => (EXEC, execute(step)),
                Err(failure) => failure,
            };
            let mut failure = vec![stage];
            failure.extend_from_slice(&errno.to_le_bytes());
            let _ = sys::write_all(child_status.0, &failure);
            unsafe { sys::_exit(127) }
        }
        pid => {
            drop(child_status);
            let mut failure = [0u8; 5];
            // The end of the pipe alone is the exec.
            match sys::read_fd(status.0, &mut failure) {
                Ok(5) => {
                    wait_one(pid, 0);
                    Err((failure[0], i32::from_le_bytes([failure[1], failure[2], failure[3], failure[4]])))
                }
                _ => Ok(pid),
            }
        }
    }
}

fn prepare(step: &Step, plan: &Plan, groups: &Groups, ends: [i32; 3]) -> std::result::Result<(), Failed> {
    groups.enter().map_err(at(Stage::Cgroup))?;
    let _ = sys::write_file(b"/proc/self/oom_score_adj", b"500");
    sys::new_session().map_err(at(Stage::Stdio))?;
    for (number, fd) in ends.iter().enumerate() {
        sys::dup_to(*fd, number as i32).map_err(at(Stage::Stdio))?;
    }
    for (resource, soft, hard) in &step.limits {
        // Never more than there is.
        let most = limit_of(*resource).map_err(at(Stage::Limit))?;
        let hard = most.min(*hard);
        sys::set_limit(*resource, &RLimit { soft: hard.min(*soft), hard }).map_err(at(Stage::Limit))?;
    }
    let identity = at(Stage::Identity);
    sys::set_ids(plan.uid, plan.gid, &[]).map_err(&identity)?;
    sys::set_capabilities(0, 0, 0).map_err(&identity)?;
    sys::prctl1(sys::PR_SET_NO_NEW_PRIVS, 1).map_err(&identity)?;
    sys::change_dir(&step.cwd).map_err(at(Stage::WorkingDir))?;
    sys::set_umask(0o022);
    sys::default_signals();
    sys::unblock_all_signals();
    let program = SockFprog { len: (plan.seccomp.len() / 8) as u16, filter: plan.seccomp.as_ptr() };
    sys::set_seccomp(&program).map_err(at(Stage::Seccomp))?;
    Ok(())
}

fn limit_of(resource: u32) -> sys::Result<u64> {
    let mut found = RLimit { soft: 0, hard: 0 };
    let nothing = std::ptr::null::<RLimit>();
    if unsafe { sys::syscall(sys::PRLIMIT64, 0, resource, nothing, &mut found as *mut RLimit) } < 0 {
        return Err(sys::errno());
    }
    Ok(found.hard)
}

fn execute(step: &Step) -> i32 {
    let args: Vec<_> = step.args.iter().map(|arg| c(arg)).collect();
    let env: Vec<_> = step.env.iter().map(|entry| c(entry)).collect();
    let mut refused = sys::ENOENT;
    for path in candidates(&step.args[0], &step.env) {
        match sys::exec(&path, &args, &env) {
            sys::ENOENT | sys::ENOTDIR => {}
            sys::EACCES => refused = sys::EACCES,
            errno => return errno,
        }
    }
    refused
}

pub struct Ended {
    pub pid: i32,
    pub status: i32,
}

extern "C" {
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn getrusage(who: i32, usage: *mut [i64; 18]) -> i32;
    fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
}

/// None: nothing has ended (with WNOHANG, 1), or there is nothing that could.
pub fn wait_one(pid: i32, options: i32) -> Option<Ended> {
    let mut status = 0;
    loop {
        let found = unsafe { waitpid(pid, &mut status, options) };
        if found > 0 {
            return Some(Ended { pid: found, status });
        }
        if found == 0 || sys::errno() != sys::EINTR {
            return None;
        }
    }
}

/// Processor time of all that has ended and was reaped.
fn children_us() -> u64 {
    let mut usage = [0i64; 18];
    const RUSAGE_CHILDREN: i32 = -1;
    unsafe { getrusage(RUSAGE_CHILDREN, &mut usage) };
    (usage[0] + usage[2]) as u64 * 1_000_000 + (usage[1] + usage[3]) as u64
}

pub fn now_us() -> u64 {
    let mut time = [0i64; 2];
    const CLOCK_MONOTONIC: i32 = 1;
    unsafe { clock_gettime(CLOCK_MONOTONIC, &mut time) };
    time[0] as u64 * 1_000_000 + time[1] as u64 / 1000
}
