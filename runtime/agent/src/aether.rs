//! `dsec-agent agent FD LIFETIME`: aether, the first process of a sandbox that stays. It runs commands for the host, at the other end of
//! descriptor FD, and reaps whatever is left to it; the host decides everything and keeps all output.
//!
//! - Nothing in the sandbox leads to it: no socket file, no log, no path; it cannot be traced or read (not dumpable), and as the first
//!   process of its pid namespace it gets no signal from inside.
//! - It keeps no more than it is allowed to send: of each stream the host takes a window of bytes, and says when it may have more. A command
//!   that writes on without being read waits, as at any pipe.
//! - How a command ended is told with how much it has written: what still lies in its pipes is counted, so whoever waits for all of it
//!   does not wait for children that hold the pipes open.
//! - The host gone, or what cannot be understood: it ends, and with it the sandbox.

mod commands;

use std::collections::HashMap;

use crate::container::Stage;
use crate::exec;
use crate::files;
use crate::ports::Ports;
use crate::sys::{self, Fd, PollFd, WinSize, POLLIN, POLLOUT};
use crate::watches::Watches;
use crate::wire::{self, Channel, Frame, Reader, Received};

/// Of one read.
const PART: usize = 32 << 10;
/// What may wait to be sent before no more is read from commands.
pub const BACKLOG: usize = 128 << 10;
/// A terminal says late what was written to it.
const TERMINAL_GRACE_MS: u64 = 50;
const TERMINAL_LAST_MS: u64 = 2_000;
/// How the host knows that its time was up.
const LIFETIME_OVER: i32 = 99;

pub const STDOUT: u8 = 1;
pub const STDERR: u8 = 2;

struct Output {
    fd: Fd,
    number: u8,
    sent: u64,
    /// The host takes bytes before this offset.
    limit: u64,
}

impl Output {
    fn credit(&self) -> u64 {
        self.limit.saturating_sub(self.sent)
    }
}

/// Bytes on their way into a command.
struct Input {
    fd: Fd,
    waiting: Vec<u8>,
    closing: bool,
}

struct Command {
    pid: i32,
    status: Option<Fd>,
    outputs: Vec<Output>,
    stdin: Option<Input>,
    script: Option<Input>,
    marks: Option<Fd>,
    terminal: bool,
    /// As waitpid has it; not told yet: a terminal may have more to say until then.
    ended: Option<Ended>,
    is_over: bool,
}

struct Ended {
    status: i32,
    /// When to tell it, should a terminal say nothing more until then.
    at: u64,
    /// And whatever it says: what was left behind may write to it for ever.
    last: u64,
}

struct Agent {
    channel: Channel,
    commands: HashMap<u32, Command>,
    ports: Ports,
    watches: Watches,
    /// What commands enter beside their own control group: those that have the sandbox's limits. This process is in none of them.
    groups: Vec<(Vec<u8>, Fd)>,
    deadline: Option<u64>,
}

pub fn main(args: &[Vec<u8>]) -> i32 {
    let _ = sys::prctl1(sys::PR_SET_DUMPABLE, 0);
    sys::name_process(b"dsec-agent\0");
    sys::return_large_memory();
    let number = |text: &[u8]| std::str::from_utf8(text).ok().and_then(|text| text.parse::<u64>().ok());
    let (fd, lifetime) = match (number(&args[2]), number(&args[3])) {
        (Some(fd), Some(lifetime)) => (fd as i32, lifetime),
        _ => return 2,
    };
    sys::default_signals();
    let signals = sys::every_signal();
    sys::block_signals(&signals);
    let signal_fd = match sys::signal_fd(&sys::sig_set(&[sys::SIGCHLD])) {
        Ok(fd) => fd,
        Err(_) => return 1,
    };
    sys::close_range(3, u32::MAX, true);
    let deadline = deadline_in(lifetime);
    let mut agent = Agent { channel: Channel::held(Fd(fd), 64), commands: HashMap::new(), ports: Ports::new(), watches: Watches::new(), groups: Vec::new(), deadline };
    let mut hello = wire::VERSION.to_le_bytes().to_vec();
    wire::put_bytes(&mut hello, crate::BUILD.as_bytes());
    agent.channel.send(wire::HELLO, 0, &hello);
    let status = agent.serve(signal_fd.0);
    // Without closing the channel first: whoever sees it closed kills us, and how we ended would not be known.
    unsafe { sys::_exit(status) }
}

/// 0: without end.
fn deadline_in(lifetime_ms: u64) -> Option<u64> {
    if lifetime_ms == 0 {
        None
    } else {
        Some(sys::now_ms().saturating_add(lifetime_ms))
    }
}

#[derive(Clone, Copy)]
enum Source {
    Channel,
    Signals,
    Status(u32),
    Output(u32, usize),
    Stdin(u32),
    Script(u32),
    Marks(u32),
    Port(u32),
    Watch(u32),
}

impl Agent {
    fn serve(&mut self, signal_fd: i32) -> i32 {
        loop {
            self.channel.flush();
            let (mut polls, sources) = self.poll_set(signal_fd);
            sys::poll_fds(&mut polls, self.patience());
            if self.deadline.map_or(false, |at| sys::now_ms() >= at) {
                return LIFETIME_OVER;
            }
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents == 0 {
                    continue;
                }
                match *source {
                    Source::Channel => {
                        if !self.read_channel(poll.revents) {
                            return 0;
                        }
                    }
                    Source::Signals => {
                        while sys::next_signal(signal_fd).is_some() {}
                        while let Some((pid, status)) = sys::reap() {
                            self.reaped(pid, status);
                        }
                    }
                    Source::Status(id) => self.read_status(id),
                    Source::Output(id, index) => self.read_output(id, index),
                    Source::Stdin(id) => self.write_input(id, false),
                    Source::Script(id) => self.write_input(id, true),
                    Source::Marks(id) => self.read_marks(id),
                    Source::Port(id) => self.ports.ready(id, poll.revents, &mut self.channel),
                    Source::Watch(id) => self.watches.ready(id, &mut self.channel),
                }
            }
            self.watches.walk(&mut self.channel);
            self.tell_ends();
        }
    }

    fn poll_set(&self, signal_fd: i32) -> (Vec<PollFd>, Vec<Source>) {
        let mut polls = Vec::new();
        let mut sources = Vec::new();
        let mut add = |fd: i32, events: i16, source: Source| {
            polls.push(PollFd { fd, events, revents: 0 });
            sources.push(source);
        };
        add(self.channel.fd.0, if self.channel.is_sending() { POLLIN | POLLOUT } else { POLLIN }, Source::Channel);
        let may_read = self.channel.waiting_bytes() < BACKLOG;
        for (id, command) in &self.commands {
            if let Some(status) = &command.status {
                add(status.0, POLLIN, Source::Status(*id));
            }
            for (index, output) in command.outputs.iter().enumerate() {
                if may_read && output.credit() > 0 {
                    add(output.fd.0, POLLIN, Source::Output(*id, index));
                }
            }
            match &command.stdin {
                Some(input) if !input.waiting.is_empty() => add(input.fd.0, POLLOUT, Source::Stdin(*id)),
                _ => {}
            }
            match &command.script {
                Some(input) if !input.waiting.is_empty() => add(input.fd.0, POLLOUT, Source::Script(*id)),
                _ => {}
            }
            if let Some(marks) = &command.marks {
                if may_read {
                    add(marks.0, POLLIN, Source::Marks(*id));
                }
            }
        }
        for (id, fd, events) in self.ports.polls(may_read) {
            add(fd, events, Source::Port(id));
        }
        for (id, fd) in self.watches.polls(may_read) {
            add(fd, POLLIN, Source::Watch(id));
        }
        // After what commands wrote before they ended.
        add(signal_fd, POLLIN, Source::Signals);
        (polls, sources)
    }

    fn patience(&self) -> i32 {
        if self.watches.is_busy(self.channel.waiting_bytes() < BACKLOG) {
            return 0;
        }
        let now = sys::now_ms();
        let mut wait: Option<u64> = self.deadline.map(|at| at.saturating_sub(now));
        for command in self.commands.values() {
            if let (Some(Ended { at, .. }), true) = (&command.ended, command.terminal) {
                // Without credit it is read from later, and that wakes us.
                if command.outputs.iter().all(|output| output.credit() > 0) {
                    let left = at.saturating_sub(now);
                    wait = Some(wait.map_or(left, |other| other.min(left)));
                }
            }
        }
        match wait {
            None => -1,
            Some(ms) => ms.min(1 << 30) as i32,
        }
    }

    fn read_channel(&mut self, ready: i16) -> bool {
        let Received { frames, open } = match self.channel.exchange(ready, wire::MAX_PAYLOAD) {
            Some(received) => received,
            None => return true,
        };
        open && frames.iter().all(|frame| self.handle(frame).is_some())
    }

    /// None for what cannot be understood. A command that has ended meanwhile is no error.
    fn handle(&mut self, frame: &Frame) -> Option<()> {
        let id = frame.id;
        let mut r = Reader::new(&frame.payload);
        match frame.kind {
            wire::EXEC => return self.exec(id, exec::parse(&frame.payload)?),
            wire::FILE => {
                match files::serve(&frame.payload)? {
                    Ok(answer) => self.channel.send(wire::FILE_DONE, id, &answer),
                    Err(errno) => self.channel.send(wire::FILE_FAILED, id, &errno.to_le_bytes()),
                }
                return Some(());
            }
            wire::CONNECT | wire::SEND | wire::SEND_END => return self.ports.handle(frame, &mut self.channel),
            wire::WATCH => return self.watches.start(id, &frame.payload, &mut self.channel),
            wire::TAKE => {
                let limit = r.u64()?;
                self.ports.take(id, limit);
                self.watches.take(id, limit);
            }
            wire::CLOSE => {
                self.ports.close(id);
                self.watches.close(id);
            }
            wire::STDIN | wire::SCRIPT => {
                let is_script = frame.kind == wire::SCRIPT;
                if let Some(input) = self.input(id, is_script) {
                    input.waiting.extend_from_slice(&frame.payload);
                }
                self.write_input(id, is_script);
                return Some(());
            }
            wire::STDIN_CLOSE => {
                if let Some(input) = self.input(id, false) {
                    input.closing = true;
                }
                self.write_input(id, false);
            }
            wire::KILL => {
                let (number, all) = (r.u32()? as i32, r.u8()? != 0);
                if all {
                    // Of everything but this process.
                    let _ = sys::send_signal(-1, number);
                } else if let Some(Command { pid, ended: None, .. }) = self.commands.get(&id) {
                    let _ = sys::send_signal(-*pid, number);
                }
            }
            wire::RESIZE => {
                let mut size = WinSize { rows: r.u16()?, columns: r.u16()?, x: 0, y: 0 };
                if let Some(Command { terminal: true, outputs, .. }) = self.commands.get(&id) {
                    if let Some(output) = outputs.first() {
                        let _ = sys::ioctl_ptr(output.fd.0, sys::TIOCSWINSZ, &mut size);
                    }
                }
            }
            wire::CREDIT => {
                let (number, limit) = (r.u8()?, r.u64()?);
                if let Some(command) = self.commands.get_mut(&id) {
                    for output in command.outputs.iter_mut().filter(|output| output.number == number) {
                        output.limit = output.limit.max(limit);
                    }
                }
            }
            wire::WHICH => {
                let mut ids = (self.commands.len() as u32).to_le_bytes().to_vec();
                for id in self.commands.keys() {
                    ids.extend_from_slice(&id.to_le_bytes());
                }
                self.channel.send(wire::THESE, id, &ids);
            }
            wire::GROUP => {
                let key = r.text()?;
                // Without it commands would run without limits.
                if self.channel.fds.is_empty() {
                    return None;
                }
                let entry = self.channel.fds.remove(0);
                self.groups.retain(|(one, _)| *one != key);
                self.groups.push((key, entry));
            }
            wire::DROP => {
                self.commands.remove(&id);
            }
            wire::LIFETIME => {
                self.deadline = deadline_in(r.u64()?);
            }
            _ => return None,
        }
        if r.is_at_end() {
            Some(())
        } else {
            None
        }
    }

    fn input(&mut self, id: u32, script: bool) -> Option<&mut Input> {
        let command = self.commands.get_mut(&id)?;
        if script {
            command.script.as_mut()
        } else {
            command.stdin.as_mut()
        }
    }

    fn exec(&mut self, id: u32, request: exec::Request) -> Option<()> {
        let group = if request.group {
            if self.channel.fds.is_empty() {
                // It came, and this process may have no more of them.
                self.refuse(id, Stage::Cgroup as u8, sys::EMFILE);
                return Some(());
            }
            Some(self.channel.fds.remove(0))
        } else {
            None
        };
        if self.commands.contains_key(&id) {
            return None;
        }
        match exec::start(&request, group, &self.groups) {
            Err((stage, errno)) => self.refuse(id, stage as u8, errno),
            Ok(started) => {
                let output = |fd: Fd, number: u8| Output { fd, number, sent: 0, limit: request.window as u64 };
                let mut outputs = vec![output(started.stdout, STDOUT)];
                outputs.extend(started.stderr.map(|fd| output(fd, STDERR)));
                let input = |fd: Fd| Input { fd, waiting: Vec::new(), closing: false };
                let command = Command {
                    pid: started.pid,
                    status: Some(started.status),
                    outputs,
                    stdin: started.stdin.map(input),
                    script: started.script.map(input),
                    marks: started.marks,
                    terminal: request.terminal,
                    ended: None,
                    is_over: false,
                };
                self.commands.insert(id, command);
            }
        }
        Some(())
    }

    fn refuse(&mut self, id: u32, stage: u8, errno: i32) {
        let mut payload = vec![stage];
        payload.extend_from_slice(&errno.to_le_bytes());
        self.channel.send(wire::REFUSED, id, &payload);
    }
}
