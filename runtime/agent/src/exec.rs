//! A command in a sandbox: its process from the clone to the exec, and the descriptors that the agent keeps of it. The child tells of a
//! failure over a pipe (stage, errno); the end of that pipe alone is the exec.
//!
//! The agent has dropped what no command may have before it ran: the bounding set, the filter of system calls and no_new_privs are
//! inherited. What a child does is no more than a change of user, group and place.

use crate::container::{candidates, Stage};
use crate::sys::{self, c, Fd, Result, WinSize};
use crate::wire::Reader;

pub struct Request {
    pub terminal: bool,
    pub stdin: bool,
    /// A descriptor of its control group came with it.
    pub group: bool,
    /// Descriptors 3 and 4: what a shell session is fed and answers through.
    pub script: bool,
    /// A terminal that does not show what is typed.
    pub silent: bool,
    pub rows: u16,
    pub columns: u16,
    pub cwd: Vec<u8>,
    pub args: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub umask: u32,
    /// How much of each stream may be sent before the host says more.
    pub window: u32,
}

pub fn parse(payload: &[u8]) -> Option<Request> {
    let mut r = Reader::new(payload);
    let flags = r.u8()?;
    let request = Request {
        terminal: flags & 1 != 0,
        stdin: flags & 2 != 0,
        group: flags & 4 != 0,
        script: flags & 8 != 0,
        silent: flags & 16 != 0,
        rows: r.u16()?,
        columns: r.u16()?,
        cwd: r.text()?,
        args: r.list(|r| r.text())?,
        env: r.list(|r| r.text())?,
        uid: r.u32()?,
        gid: r.u32()?,
        groups: r.list(|r| r.u32())?,
        umask: r.u32()?,
        window: r.u32()?,
    };
    if r.is_at_end() && !request.args.is_empty() && request.cwd.starts_with(b"/") && flags < 32 {
        Some(request)
    } else {
        None
    }
}

pub struct Started {
    pub pid: i32,
    /// Until the exec.
    pub status: Fd,
    /// The terminal, or standard output.
    pub stdout: Fd,
    pub stderr: Option<Fd>,
    pub stdin: Option<Fd>,
    pub script: Option<Fd>,
    pub marks: Option<Fd>,
}

struct Ends {
    stdin: Fd,
    stdout: Fd,
    stderr: Fd,
    script: Option<(Fd, Fd)>,
}

/// `groups`: those with limits, which it enters beside its own.
pub fn start(request: &Request, group: Option<Fd>, groups: &[(Vec<u8>, Fd)]) -> std::result::Result<Started, (Stage, i32)> {
    let at_pipe = |errno: i32| (Stage::Stdio, errno);
    let (status, child_status) = sys::make_pipe().map_err(at_pipe)?;
    let (script, marks, script_ends) = if request.script {
        let (script_end, script) = sys::make_pipe().map_err(at_pipe)?;
        let (marks, marks_end) = sys::make_pipe().map_err(at_pipe)?;
        (Some(script), Some(marks), Some((script_end, marks_end)))
    } else {
        (None, None, None)
    };
    let (stdout, stderr, stdin, ends) = if request.terminal {
        let (master, slave) = make_terminal(request).map_err(|errno| (Stage::Terminal, errno))?;
        let input = sys::dup_high(master.0).map_err(at_pipe)?;
        let again = sys::dup_high(slave.0).map_err(at_pipe)?;
        let third = sys::dup_high(slave.0).map_err(at_pipe)?;
        (master, None, Some(input), Ends { stdin: slave, stdout: again, stderr: third, script: script_ends })
    } else {
        // Without input: a pipe that has its end already, whatever the sandbox has made of its /dev/null.
        let (stdin_end, stdin) = sys::make_pipe().map_err(at_pipe)?;
        let (stdout, stdout_end) = sys::make_pipe().map_err(at_pipe)?;
        let (stderr, stderr_end) = sys::make_pipe().map_err(at_pipe)?;
        // It may open its own /dev/stdout again.
        for end in [&stdin_end, &stdout_end, &stderr_end] {
            let _ = sys::change_owner(end.0, request.uid, request.gid);
        }
        let stdin = if request.stdin { Some(stdin) } else { None };
        (stdout, Some(stderr), stdin, Ends { stdin: stdin_end, stdout: stdout_end, stderr: stderr_end, script: script_ends })
    };
    match sys::clone_process(0).map_err(|errno| (Stage::Clone, errno))? {
        0 => become_command(request, &ends, child_status, group, groups),
        pid => {
            for fd in [Some(&stdout), stderr.as_ref(), stdin.as_ref(), script.as_ref(), marks.as_ref(), Some(&status)] {
                if let Some(fd) = fd {
                    sys::set_nonblocking(fd.0);
                }
            }
            Ok(Started { pid, status, stdout, stderr, stdin, script, marks })
        }
    }
}

/// Its other end is asked of the kernel, not of a path: what lies in /dev is the sandbox's to change.
fn make_terminal(request: &Request) -> Result<(Fd, Fd)> {
    let master = sys::open_at(b"/dev/ptmx", sys::O_RDWR | sys::O_NOCTTY | sys::O_NONBLOCK, 0)?;
    let mut unlocked = 0i32;
    sys::ioctl_ptr(master.0, sys::TIOCSPTLCK, &mut unlocked)?;
    let flags = sys::O_RDWR | sys::O_NOCTTY | sys::O_CLOEXEC;
    let slave = Fd(sys::ioctl_int(master.0, sys::TIOCGPTPEER, flags as u64)?);
    let mut size = WinSize { rows: request.rows, columns: request.columns, x: 0, y: 0 };
    if size.rows > 0 && size.columns > 0 {
        sys::ioctl_ptr(master.0, sys::TIOCSWINSZ, &mut size)?;
    }
    if request.silent {
        let state = sys::terminal_state(slave.0)?;
        sys::set_terminal_state(slave.0, &sys::without_echo(state))?;
    }
    let (_, _, group) = sys::stat_fd(slave.0)?;
    let _ = sys::change_owner(slave.0, request.uid, group);
    Ok((master, slave))
}

fn become_command(request: &Request, ends: &Ends, status: Fd, group: Option<Fd>, groups: &[(Vec<u8>, Fd)]) -> ! {
    // Above all numbers that are given out here.
    let status = sys::dup_from(status.0, 10).unwrap_or(status);
    let (stage, errno) = match prepare(request, ends, &group, groups) {
        Ok(()) => (Stage::Exec, run(request)),
        Err(failure) => failure,
    };
    let mut failure = vec![stage as u8];
    failure.extend_from_slice(&errno.to_le_bytes());
    let _ = sys::write_all(status.0, &failure);
    unsafe { sys::_exit(127) }
}

fn prepare(
    request: &Request,
    ends: &Ends,
    group: &Option<Fd>,
    groups: &[(Vec<u8>, Fd)],
) -> std::result::Result<(), (Stage, i32)> {
    for entry in groups.iter().map(|(_, entry)| entry).chain(group) {
        sys::write_fd(entry.0, b"0").map_err(|errno| (Stage::Cgroup, errno))?;
    }
    // The agent is the last to go when memory is short.
    let _ = sys::write_file(b"/proc/self/oom_score_adj", b"300");
    take_streams(request, ends).map_err(|errno| (Stage::Stdio, errno))?;
    let place = |errno: i32| (Stage::WorkingDir, errno);
    // As root first: the folder may be one that the user may be in but not get to.
    let as_root = sys::change_dir(&request.cwd);
    sys::set_ids(request.uid, request.gid, &request.groups).map_err(|errno| (Stage::Identity, errno))?;
    if as_root.is_err() {
        sys::change_dir(&request.cwd).map_err(place)?;
    }
    match sys::working_dir() {
        Ok(path) if path.starts_with(b"/") => {}
        _ => return Err(place(sys::ENOENT)),
    }
    sys::set_umask(request.umask);
    sys::default_signals();
    sys::unblock_all_signals();
    Ok(())
}

/// Everything else this process has open is closed by the exec.
fn take_streams(request: &Request, ends: &Ends) -> Result<()> {
    sys::new_session()?;
    if request.terminal {
        sys::ioctl_int(ends.stdin.0, sys::TIOCSCTTY, 0)?;
    }
    let script = match &ends.script {
        None => None,
        Some((input, marks)) => Some((sys::dup_from(input.0, 10)?, sys::dup_from(marks.0, 10)?)),
    };
    for (number, fd) in [&ends.stdin, &ends.stdout, &ends.stderr].iter().enumerate() {
        sys::dup_to(fd.0, number as i32)?;
    }
    if let Some((input, marks)) = script {
        sys::dup_to(input.0, 3)?;
        sys::dup_to(marks.0, 4)?;
    }
    Ok(())
}

/// As execvp: what may not be executed is passed over, and told of when nothing else is found.
fn run(request: &Request) -> i32 {
    let args: Vec<_> = request.args.iter().map(|arg| c(arg)).collect();
    let env: Vec<_> = request.env.iter().map(|entry| c(entry)).collect();
    let mut refused = sys::ENOENT;
    for path in candidates(&request.args[0], &request.env) {
        match sys::exec(&path, &args, &env) {
            sys::ENOENT | sys::ENOTDIR => {}
            sys::EACCES => refused = sys::EACCES,
            errno => return errno,
        }
    }
    refused
}
